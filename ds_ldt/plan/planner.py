"""The one public way to a plan: policy, lowering and proof in one call."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

from ds_ldt.config.rules import is_whole
from ds_ldt.errors import ConfigError
from ds_ldt.plan.costs import Costs
from ds_ldt.plan.lower import lower_slice
from ds_ldt.plan.plan import Plan
from ds_ldt.plan.policies import AUTO, EVALUATION, TRAINING
from ds_ldt.plan.policies.auto import Candidate, best_of, tried
from ds_ldt.plan.policies.in_flight import Limits
from ds_ldt.plan.shape import PipelineShape
from ds_ldt.plan.size import check_size
from ds_ldt.plan.validate import validate

_CACHED_PLANS = 64
_CACHED_CANDIDATES = 16


def available_policies() -> tuple[str, ...]:
    """Return the values that the setting `ldt.schedule.policy` may take."""
    return (*TRAINING, AUTO)


def build_plan(
    shape: PipelineShape,
    *,
    policy: str = "ldt_1f1b",
    training: bool = True,
    costs: Costs | None = None,
    max_in_flight: int | Sequence[int] | None = None,
) -> Plan:
    """Return the plan of a shape, validated. Equal arguments give the same plan on every rank; it is made only once.

    Args:
        shape: What to plan for.
        policy: One of `available_policies()`. An evaluation is always planned by `forward_only`.
        training: Plan a training step, else an evaluation.
        costs: Seconds of computes and messages to plan for; None if nothing is known of them, not even the link.
        max_in_flight: The most micro-batches of one domain that any rank may have in flight, or one number for each
            stage; None means no limit.

    Raises:
        ConfigError: The policy is unknown, a limit is below 1, or the step is too large to be planned.
        ScheduleError: The policy made a plan that cannot be run: a fault of ds_ldt, not of the caller.
    """
    if policy not in available_policies():
        raise ConfigError.of(
            "ldt.schedule.policy",
            found=policy,
            expected="one of " + ", ".join(available_policies()),
            fix=f'set it to "{AUTO}", or remove it',
        )
    check_size(shape, training=training)
    name = policy if training else next(iter(EVALUATION))
    return _build(shape, name, training, costs, limits_of(shape, max_in_flight))


def limits_of(shape: PipelineShape, max_in_flight: int | Sequence[int] | None) -> Limits | None:
    """Return a limit for each stage; None if there are none.

    Args:
        shape: The shape.
        max_in_flight: See `build_plan`.

    Raises:
        ConfigError: A limit is below 1, or they are not one for each stage.
    """
    if max_in_flight is None:
        return None
    limits = tuple(max_in_flight) if isinstance(max_in_flight, Sequence) else (max_in_flight,) * shape.num_stages
    if len(limits) != shape.num_stages or not all(is_whole(limit, 1) for limit in limits):
        raise ConfigError.of(
            "ldt.schedule.max_in_flight",
            found=max_in_flight,
            expected="null or a whole number of at least 1",
            fix="remove it to let the policy choose the depth",
        )
    return limits


def candidate_of(shape: PipelineShape, policy: str, costs: Costs | None, limits: Limits | None) -> Candidate:
    """Return what a training policy comes to, before it is lowered and proven: the orders of one slice.

    Args:
        shape: The shape.
        policy: Name of a training policy, not `auto`.
        costs: See `build_plan`.
        limits: What `limits_of` returns.
    """
    return _candidate(shape.one_slice, policy, costs, limits)


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Collect no garbage meanwhile: the many small values of a plan form no cycles, and looking for them is slow."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@lru_cache(maxsize=_CACHED_CANDIDATES)
@_without_collecting()
def _candidate(part: PipelineShape, policy: str, costs: Costs | None, limits: Limits | None) -> Candidate:
    return tried(policy, TRAINING[policy], part, costs=costs, limits=limits)


@lru_cache(maxsize=_CACHED_PLANS)
@_without_collecting()
def _build(shape: PipelineShape, name: str, training: bool, costs: Costs | None, limits: Limits | None) -> Plan:
    if name == AUTO:
        best = best_of([candidate_of(shape, each, costs, limits) for each in TRAINING])
        name, orders = best.policy, best.orders
    elif training:
        orders = candidate_of(shape, name, costs, limits).orders
    else:
        orders = EVALUATION[name](shape.one_slice, costs=costs, limits=limits)
    plan = lower_slice(orders, shape, policy=name, training=training)
    validate(plan, max_in_flight=limits)
    return plan
