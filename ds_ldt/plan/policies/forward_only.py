"""`forward_only`: evaluation. Forwards only, results are used before new samples enter.

    edge              tail forward > middle forward > head forward, at most K_0 micro-batches of a domain in flight
    cloud stage p     the later virtual stage first, at most K_p

The caps are those of `ldt_1f1b`, K_p = 1 + ceil(rt_p / tau), with forwards only, and so is the way in which the order
is found. For V = 2 this is K_0 = P, and the edge runs

    step 0: min(M, P) x FS
    step 1: until FS runs out: FE, FS
    step 2: the remaining FE
"""

from __future__ import annotations

from ds_ldt.plan.instructions import Orders
from ds_ldt.plan.list_schedule import list_orders
from ds_ldt.plan.policies.depth import nominal_costs, round_trip_caps
from ds_ldt.plan.shape import PipelineShape


def orders(shape: PipelineShape, *, max_in_flight: int | None = None) -> Orders:
    """Return the orders of an evaluation.

    Args:
        shape: Any shape.
        max_in_flight: The most micro-batches of one domain in flight on any rank; None leaves it to the rule.
    """
    costs = nominal_costs(shape)
    caps = round_trip_caps(shape, costs, training=False, max_in_flight=max_in_flight)
    return list_orders(shape, costs, training=False, caps=caps)
