"""Targets about the position of the training data, run inside groups of processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ds_ldt
from ds_ldt.data.sampling import TrainingData
from tests.engine.cases import initialize, weights_of
from tests.engine.checkpoints import site_directory
from tests.engine.dropout import dropping_module
from tests.toy import Points, domain_batches


class Watched(Points):
    """Points that write down which of them were read."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.append(index)
        return super().__getitem__(index)


class Counting:
    """An iterator of the user's own, with a position that can be saved."""

    def __init__(self, size: int) -> None:
        self.batches = [batch for batch, _ in zip(domain_batches(Points(size), 0, 1, 2), range(200), strict=False)]
        self.drawn = 0

    def __iter__(self) -> Counting:
        return self

    def __next__(self) -> Any:
        self.drawn += 1
        return self.batches[self.drawn - 1]

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]


def engine_on(settings: dict[str, Any], data: Any) -> ds_ldt.LDTPipelineEngine:
    """An engine for layers with dropout and a data set."""
    return initialize(model=dropping_module(settings), training_data=data, shuffle_seed=3)


def resume(settings: dict[str, Any], root: str, steps: int, size: int, own_iterator: bool) -> dict[str, Any]:
    """Train 2n steps; then n steps, save, load into a new engine, n more: what was read, and what came of it."""
    on_edge = dist.get_rank() == 0
    read, losses, weights, positions = [], [], [], []
    for kind in ("whole", "first", "second"):
        data = Watched(size) if on_edge else None
        engine = engine_on(settings, None if own_iterator else data)
        if own_iterator and on_edge:
            engine.set_dataiterator(Counting(size))
        if kind == "second":
            engine.load_checkpoint(site_directory(root))
        torch.manual_seed(len(read))
        losses.append([engine.train_batch().item() for _ in range(2 * steps if kind == "whole" else steps)])
        if kind == "first":
            engine.save_checkpoint(site_directory(root))
        read.append(data.read if data is not None else [])
        weights.append(weights_of(engine))
        source = engine.data_iterator if isinstance(engine.data_iterator, TrainingData | Counting) else None
        positions.append(source.state_dict() if source is not None else None)
    return {"read": read, "losses": losses, "weights": weights, "positions": positions}
