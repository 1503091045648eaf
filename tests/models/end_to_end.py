"""Target of `test_end_to_end`, run on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ds_ldt
from tests.engine.cases import initialize
from tests.models.tiny import batch_of

KINDS = ("plain", "left", "packed", "ignored")
STEPS = 3


def train(source: str, config: dict[str, Any], save_to: str, options: dict[str, Any]) -> list[float]:
    """Train a model for three steps on the same four micro-batches; save; return the losses."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    module = ds_ldt.models.from_pretrained(source, config=config, **options)
    engine = initialize(model=module, config=config)
    data = batches() if rank == 0 else None
    losses = [float(engine.train_batch(data)) for _ in range(STEPS)]
    engine.save_checkpoint(f"{save_to}/{'edge' if rank == 0 else 'cloud'}")
    return losses


def batches() -> Iterator[dict[str, Tensor]]:
    """The micro-batches of all steps, as a collate function would give them."""
    for _ in range(STEPS):
        yield from (batch_of(kind) for kind in KINDS)
