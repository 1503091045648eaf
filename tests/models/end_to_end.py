"""Target of `test_end_to_end`, run on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ds_ldt
from tests.engine.cases import initialize, weights_of
from tests.models.tiny import batch_of

KINDS = ("plain", "left", "packed", "ignored")
FEW_TARGETS = ("plain", "ignored", "untargeted", "left")
STEPS = 3


def train(
    source: str, config: dict[str, Any], save_to: str, options: dict[str, Any], kinds: tuple[str, ...]
) -> list[float]:
    """Train a model for three steps on the same four micro-batches; save; return the losses."""
    torch.set_num_threads(1)
    module = ds_ldt.models.from_pretrained(source, config=config, **options)
    engine = initialize(model=module, config=config)
    data = batches(kinds[engine.global_rank :: engine.job.num_replicas]) if engine.site == "edge" else None
    losses = [float(engine.train_batch(data)) for _ in range(STEPS)]
    engine.save_checkpoint(f"{save_to}/{engine.site}")
    return losses


def batches(kinds: tuple[str, ...]) -> Iterator[dict[str, Tensor]]:
    """The micro-batches of all steps, as a collate function would give them."""
    for _ in range(STEPS):
        yield from (batch_of(kind) for kind in kinds)


def told_of_another_model(cases: list[tuple[dict[str, str], dict[str, Any], dict[str, Any]]]) -> list[str]:
    """What this rank is told when the sites build (source by site, configuration, options of the cloud)."""
    told = []
    for sources, config, options in cases:
        site = "edge" if dist.get_rank() == 0 else "cloud"
        try:
            module = ds_ldt.models.from_pretrained(
                sources[site], config=config, **(options if site == "cloud" else {})
            )
        except ds_ldt.ConfigError as error:
            told.append(str(error))
        else:
            told.append("accepted")
            module.mpu().close()
    return told


def adapters_on_another_base(
    settings: dict[str, Any], bases: list[str], save_to: str
) -> tuple[str, list[tuple[str, bool]]]:
    """Train adapters on the first base and load them onto each: how it ends, and whether weights are as before."""
    engine = _adapter_engine(bases[0], settings)
    engine.train_batch(batches(KINDS) if engine.site == "edge" else None)
    engine.save_checkpoint(f"{save_to}/{engine.site}")
    trained = weights_of(engine)
    engine.destroy()
    found = []
    for base in bases:
        engine = _adapter_engine(base, settings)
        before, told = weights_of(engine), "accepted"
        try:
            engine.load_checkpoint(f"{save_to}/{engine.site}")
            before = trained
        except ds_ldt.CheckpointError as error:
            told = str(error)
        after = weights_of(engine)
        found.append((told, all(torch.equal(t, after[i][n]) for i, layer in before.items() for n, t in layer.items())))
        engine.destroy()
    return engine.site, found


def _adapter_engine(base: str, settings: dict[str, Any]) -> ds_ldt.LDTPipelineEngine:
    module = ds_ldt.models.from_pretrained(base, config=settings)
    return initialize(model=module, config=settings)
