"""Targets about several losses in flight, run inside groups of processes."""

from __future__ import annotations

from typing import Any
from unittest import mock

from ds_ldt.plan import Compute, Op, PipelineShape, Plan, lower, validate
from tests.engine.cases import toy_engine, train_steps, weights_of


def all_forwards_first(shape: PipelineShape, **_: Any) -> Plan:
    """A plan that no policy makes: all forwards before all backwards, which begin with micro-batch 1.

    So the tail has every loss of a step in flight, and needs neither the oldest nor the newest first.
    """
    in_order = range(shape.num_micro_batches)
    turned = [*in_order[1:], 0]

    def order(rank: int) -> tuple[Compute, ...]:
        stages = shape.virtual_stages_of(shape.stage_of(rank))
        passes = [(Op.FORWARD, stage, m) for stage in stages for m in in_order]
        passes += [(Op.BACKWARD, stage, m) for stage in reversed(stages) for m in turned]
        return tuple(
            Compute(op=op, virtual_stage=stage, micro_batch=m, domain=domain)
            for op, stage, m in passes
            for domain in shape.domains_of(rank)
        )

    plan = lower({rank: order(rank) for rank in range(shape.num_ranks)}, shape, policy="by hand")
    validate(plan)
    return plan


def train_with_all_losses_in_flight(settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train by that plan; also the most losses that this rank held at once."""
    with mock.patch("ds_ldt.profiling.replanning.build_plan", all_forwards_first):
        engine = toy_engine(settings)
        most, finish = 0, engine.executor._finish_forward

        def finish_and_count(*args: Any) -> None:
            nonlocal most
            finish(*args)
            most = max(most, len(engine.executor.losses))

        engine.executor._finish_forward = finish_and_count  # type: ignore[method-assign]
        seen = train_steps(engine, steps)
        return {**seen, "weights": weights_of(engine), "most": most}
