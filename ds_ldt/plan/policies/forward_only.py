"""`forward_only`: evaluation. Forwards only, results are used before new samples enter.

    edge              tail forward > middle forward > head forward, at most K_0 micro-batches of a domain in flight
    cloud stage p     the later virtual stage first, at most K_p

The caps are K_p = 1 + ceil(rt_p / tau) as those of `ldt_1f1b`, with forwards only and with the costs that are known,
and the order is found in the same way. For V = 2 without latency this is K_0 = P, and the edge runs

    step 0: min(M, P) x FS
    step 1: until FS runs out: FE, FS
    step 2: the remaining FE
"""

from __future__ import annotations

from ds_ldt.plan.costs import Costs
from ds_ldt.plan.instructions import Orders
from ds_ldt.plan.list_schedule import list_orders
from ds_ldt.plan.policies.in_flight import Limits, nominal_costs, round_trip_caps
from ds_ldt.plan.shape import PipelineShape


def orders(shape: PipelineShape, *, costs: Costs | None = None, limits: Limits | None = None) -> Orders:
    """Return the orders of an evaluation.

    Args:
        shape: Any shape.
        costs: Seconds of computes and messages; None takes nominal ones.
        limits: The most micro-batches of one domain in flight, by stage; None leaves it to the rule.
    """
    costs = nominal_costs(shape) if costs is None else costs
    caps = round_trip_caps(shape, costs, training=False, limits=limits)
    return list_orders(shape, costs, training=False, caps=caps)
