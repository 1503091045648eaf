"""What a checkpoint needs of the engine that it is saved from or loaded into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from ds_ldt.comm.grid import LDTPipelineGrid
from ds_ldt.comm.identity import ModelFingerprint, RunIdentity
from ds_ldt.config.schema import JobConfig
from ds_ldt.topology.layout import Layout


class TrainedModule(Protocol):
    """The layers of a rank.

    Attributes:
        layout: where the layers of the model are.
        adapters: the plan of the adapters, with their `settings`; None without any.
        fingerprint: the model before its training, if that is known.
        run: this run, and those that it was resumed from.
    """

    layout: Layout
    adapters: Any
    fingerprint: ModelFingerprint | None
    run: RunIdentity

    def owned_layers(self) -> Mapping[int, nn.Module]:
        """The layers of this rank by global pipeline layer index; a tied one once."""


class Trainer(Protocol):
    """An engine; :class:`ds_ldt.LDTPipelineEngine` is one.

    Attributes:
        module: the layers of this rank.
        grid: the groups of processes.
        job: the configuration.
        site: "edge" or "cloud".
        stage_id: the stage of this rank.
        global_rank: this rank.
        device: where the layers are.
        optimizer: the optimizer, or a stand-in for none.
        lr_scheduler: the scheduler, or None.
        using_sharded_optimizer: whether master weights and optimizer states are sharded over the replicas.
        training_dataloader: the loader that the data comes from, or None.
        data_iterator: the iterator that the data comes from, or None.
        global_steps: training steps done.
    """

    module: TrainedModule
    grid: LDTPipelineGrid
    job: JobConfig
    site: str
    stage_id: int
    global_rank: int
    device: torch.device
    optimizer: Any
    lr_scheduler: Any
    using_sharded_optimizer: bool
    training_dataloader: Any
    data_iterator: Any
    global_steps: int

    def bfloat16_enabled(self) -> bool:
        """Whether the model computes in bf16."""

    def set_dataloader(self, loader: Any) -> None:
        """Read from a loader from now on."""
