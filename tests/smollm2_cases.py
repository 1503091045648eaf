"""Target of test_smollm2: a real model over an edge and two domains."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

import ds_ldt
from tests.engine.cases import initialize


def losses_of(directory: str, settings: dict[str, Any], rows: list[list[int]], steps: int) -> list[float]:
    """Train on rows of token ids, in the order in which they come; the loss of each step."""
    import torch

    module = ds_ldt.models.from_pretrained(directory, config=settings)
    samples = [{"input_ids": torch.tensor(row), "labels": torch.tensor(row)} for row in rows]
    data = samples if dist.get_rank() == 0 else None
    engine = initialize(model=module, training_data=data, collate_fn=torch.utils.data.default_collate, config=settings)
    return [float(engine.train_batch()) for _ in range(steps)]
