"""The most bytes of tensors that a rank holds in a step, measured."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

import ds_ldt
from ds_ldt.models import from_pretrained
from ds_ldt.profiling.activation_memory import LiveBytes
from tests.models.tiny import tiny_config

LENGTH = 64
MODEL = {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 160, "max_position_embeddings": LENGTH}


class Sentences(Dataset[dict[str, Tensor]]):
    """Samples of equal length, without padding."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(3, MODEL["vocab_size"], (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def peaks(cases: list[dict[str, Any]]) -> list[tuple[int, dict[int, int]]]:
    """For each configuration: the peak of the third step on this rank, and the measured bytes by virtual stage."""
    return [_peak(settings) for settings in cases]


def _peak(settings: dict[str, Any]) -> tuple[int, dict[int, int]]:
    layers = sum(map(sum, settings["ldt"]["pipeline_num_layers"]))
    gc.collect()
    others = {id(thing) for thing in gc.get_objects() if isinstance(thing, Tensor)}
    module = from_pretrained(tiny_config("llama", num_hidden_layers=layers, **MODEL), config=settings)
    engine, *_ = ds_ldt.initialize(model=module, training_data=Sentences() if dist.get_rank() == 0 else None)
    engine.train_batch()
    gc.collect()
    with LiveBytes() as live:
        for thing in gc.get_objects():
            if isinstance(thing, Tensor) and id(thing) not in others:
                live.follow(thing)
        engine.train_batch()
        live.restart()
        engine.train_batch()
    held = engine._observer.held
    engine.destroy()
    return live.peak, held
