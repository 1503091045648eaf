"""The one public way to a plan: policy, lowering and proof in one call."""

from __future__ import annotations

from functools import lru_cache

from ds_ldt.errors import ConfigError
from ds_ldt.plan.lower import lower
from ds_ldt.plan.plan import Plan
from ds_ldt.plan.policies import AUTO, EVALUATION, TRAINING
from ds_ldt.plan.shape import PipelineShape, is_count
from ds_ldt.plan.validate import validate

_CACHED_PLANS = 64


def available_policies() -> tuple[str, ...]:
    """Return the values that the setting `ldt.schedule.policy` may take."""
    return (*TRAINING, AUTO)


def build_plan(
    shape: PipelineShape, *, policy: str = "ldt_1f1b", training: bool = True, max_in_flight: int | None = None
) -> Plan:
    """Return the plan of a shape, validated. Equal arguments give the same plan on every rank; it is made only once.

    Args:
        shape: What to plan for.
        policy: One of `available_policies()`. An evaluation is always planned by `forward_only`.
        training: Plan a training step, else an evaluation.
        max_in_flight: The most micro-batches of one domain that any rank may have in flight; None means no limit.

    Raises:
        ConfigError: The policy is unknown or the limit is below 1.
        ScheduleError: The policy made a plan that cannot be run: a fault of ds_ldt, not of the caller.
    """
    if policy not in available_policies():
        raise ConfigError.of(
            "ldt.schedule.policy",
            found=policy,
            expected="one of " + ", ".join(available_policies()),
            fix=f'set it to "{AUTO}", or remove it',
        )
    if max_in_flight is not None and not is_count(max_in_flight, minimum=1):
        raise ConfigError.of(
            "ldt.schedule.max_in_flight",
            found=max_in_flight,
            expected="null or a whole number of at least 1",
            fix="remove it to let the policy choose the depth",
        )
    policies = TRAINING if training else EVALUATION
    name = policy if policy in policies else next(iter(policies))
    return _build(shape, name, training, max_in_flight)


@lru_cache(maxsize=_CACHED_PLANS)
def _build(shape: PipelineShape, name: str, training: bool, max_in_flight: int | None) -> Plan:
    policies = TRAINING if training else EVALUATION
    orders = policies[name](shape, max_in_flight=max_in_flight)
    plan = lower(orders, shape, policy=name, training=training)
    validate(plan, max_in_flight=max_in_flight)
    return plan
