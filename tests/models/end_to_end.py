"""Target of `test_end_to_end`, run on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import ds_ldt
from tests.engine.cases import initialize
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
