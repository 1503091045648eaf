"""Targets that train with backwards in two halves, and say what was put off."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch.distributed as dist
from torch import Tensor

import ds_ldt
from ds_ldt.runtime.weight_gradients import WeightLedger
from tests.engine.behaviour import as_bf16, tied_engine
from tests.engine.cases import initialize, toy_engine, toy_module, train_steps, weights_of
from tests.toy import Points


class Counting(WeightLedger):
    """Counts the weight gradients that are made late."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def settle(self, key: Hashable) -> list[Tensor]:
        weights = super().settle(key)
        self.made += len(weights)
        return weights


class Forgetful(Counting):
    """The negative control: the weight gradients of micro-batch 1 are never made."""

    def settle(self, key: Any) -> list[Tensor]:
        if key.micro_batch == 1:
            self._accounts.pop(key, None)
        return super().settle(key)


def frozen_engine(settings: dict[str, Any]) -> ds_ldt.LDTPipelineEngine:
    """Of cloud stage 1 only the biases are trained."""
    module = toy_module(settings)
    if module.stage_id == 1:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))
    data = Points(96) if module.stage_id == 0 else None
    engine = initialize(model=module, training_data=data)
    return engine


ENGINES = {
    "toy": toy_engine,
    "forgetful": toy_engine,
    "bf16": lambda settings: toy_engine(settings, batch_fn=as_bf16),
    "tied": tied_engine,
    "frozen": frozen_engine,
}


def train_all(runs: list[tuple[str, dict[str, Any], int]]) -> list[dict[str, Any]]:
    """Several trainings one after the other in the same processes."""
    return [_train(*run) for run in runs]


def _train(kind: str, settings: dict[str, Any], steps: int) -> dict[str, Any]:
    engine = ENGINES[kind](settings)
    engine.executor.ledger = Forgetful() if kind == "forgetful" else Counting()
    seen = train_steps(engine, steps)
    left = len(engine.executor.ledger)
    order = engine._train_schedule().plan.orders()[dist.get_rank()]
    return {
        **seen,
        "weights": weights_of(engine),
        "made": engine.executor.ledger.made / steps,
        "left": left,
        "stage": engine.stage_id,
        "order": [str(compute) for compute in order],
    }
