"""Weight gradients for policies that plan whole backwards: each right behind its backward.

A step then takes no longer than with whole backwards, and holds no more: every gradient that another rank waits for
leaves earlier, and everything else ends when it would have ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ds_ldt.plan.costs import Costs
from ds_ldt.plan.instructions import Compute, Op, Order, Orders
from ds_ldt.plan.policies.base import Policy
from ds_ldt.plan.policies.in_flight import Limits
from ds_ldt.plan.shape import PipelineShape


def right_after(policy: Policy) -> Policy:
    """Return a policy that also plans backwards that are split, given one that plans whole ones.

    Args:
        policy: The policy for shapes whose backwards are whole.
    """

    def orders(shape: PipelineShape, *, costs: Costs | None = None, limits: Limits | None = None) -> Orders:
        """Return the orders of the policy, each backward that is split with its weight gradients right behind."""
        whole = policy(replace(shape, split_backward=None), costs=costs, limits=limits)
        return {rank: tuple(_with_weights(order, shape)) for rank, order in whole.items()}

    return orders


def _with_weights(order: Order, shape: PipelineShape) -> Iterator[Compute]:
    for compute in order:
        yield compute
        if compute.op is Op.BACKWARD and shape.splits(compute.virtual_stage):
            yield replace(compute, op=Op.WEIGHT)
