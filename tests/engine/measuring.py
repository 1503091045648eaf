"""Targets about steps that are measured."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

import ds_ldt
from tests.engine.cases import initialize, toy_engine, weights_of
from tests.toy import Block, Head, Points, Stem

SLEEP_S = 0.015
"""Of the slow layer on rank 1; on rank 2 it is twice that."""


class SlowBlock(Block):
    """A block whose forward takes longer on one domain than on the other."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not inputs.is_meta:
            time.sleep(SLEEP_S * dist.get_rank())
        return super().forward(inputs)


def train_measured(settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train with the middle layer slow: what each rank saw, and the fingerprint of the plan before each step."""
    layers = [Stem, Block, SlowBlock, Block, Head]
    module = ds_ldt.LDTPipelineModule([LayerSpec(layer) for layer in layers], settings, nn.functional.mse_loss)
    engine = initialize(model=module, training_data=Points(96) if dist.get_rank() == 0 else None)
    losses, norms, plans = [], [], []
    for _ in range(steps):
        plans.append(engine._train_schedule().plan.fingerprint)
        losses.append(engine.train_batch().item())
        norms.append(engine.get_global_grad_norm())
        if len(losses) == 1:
            engine.eval_batch(iter(_samples(engine)) if dist.get_rank() == 0 else None)  # is not measured
    window, peak = engine.transport._receive_window, engine._train_schedule().plan.peak_in_flight(dist.get_rank())
    return {
        "losses": losses,
        "norms": norms,
        "weights": weights_of(engine),
        "plans": plans,
        "costs": asdict(engine._planner.known.costs),
        "kept": engine._planner.known.activation_bytes,
        "window": window,
        "wanted_window": max(engine.num_stages + 1, peak),
    }


def _samples(engine: Any) -> list[Any]:
    inputs, targets = Points(2).inputs, Points(2).targets
    return [(inputs, targets)] * (engine.micro_batches * engine.job.num_domains)


def plans_unmeasured(settings: dict[str, Any], steps: int) -> list[str]:
    """The fingerprint of the plan before each step and after the last."""
    engine = toy_engine(settings)
    plans = [engine._train_schedule().plan.fingerprint]
    for _ in range(steps):
        engine.train_batch()
        plans.append(engine._train_schedule().plan.fingerprint)
    return plans
