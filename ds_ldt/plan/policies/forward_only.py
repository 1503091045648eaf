"""`forward_only`: evaluation. Forwards only, results are used before new samples enter.

    edge              tail forward > middle forward > head forward, at most K_0 micro-batches of a domain in flight
    cloud stage p     the later virtual stage first

K_p = 1 + ceil(rt_p / tau), here with rt_p the unloaded time between the end of a micro-batch's first forward and the
start of its last forward on the stage, and tau the time that the busiest cloud stage works on one micro-batch. The
order is found by list scheduling with nominal costs, see `ds_ldt.plan.list_schedule`. For V = 2 the edge order is

    step 0: min(M, P+1) x head; step 1: (tail, head) until head runs out; step 2: the remaining tails
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
