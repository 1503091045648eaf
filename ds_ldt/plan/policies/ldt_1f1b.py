"""`ldt_1f1b`: the published LDT rule, one-forward-one-backward around the U.

Its depth is fixed: no link is planned for.

Where a micro-batch meets each cloud stage once (V = 2) it is the form of `ds_ldt.plan.policies.u_pattern` with

    W = P+1, k = floor((4P+5)/6), x = 0

Peak in flight per domain: P-p+1 on cloud stage p; P+2 on the edge, as a unit of step 2 begins with FS on top of the
P+1 micro-batches of step 0 and lets one go only at its end.

For any other shape (several virtual stages per cloud stage, middle virtual stages on the edge) and for a limit on the
micro-batches in flight that the rule would break, the depth is kept in mind and the order is found by list scheduling
with nominal costs, in whole numbers so that every machine finds the same one:

    in flight on stage p <= K_p = 1 + ceil(rt_p / tau)

rt_p is the unloaded time between the end of the first compute of a micro-batch on the stage and the start of its last
one there; tau is the longest time that a cloud rank works on one micro-batch of one virtual stage. For V = 2 this is
K_0 = P+1 and K_p = P-p+1, the depth of the published rule.
"""

from __future__ import annotations

from ds_ldt.config.rules import EDGE_STAGE
from ds_ldt.plan.costs import Costs
from ds_ldt.plan.instructions import Orders
from ds_ldt.plan.list_schedule import list_orders
from ds_ldt.plan.policies.in_flight import Limits, nominal_costs, round_trip_caps
from ds_ldt.plan.policies.u_pattern import Depth, unit_orders
from ds_ldt.plan.shape import PipelineShape


def orders(shape: PipelineShape, *, costs: Costs | None = None, limits: Limits | None = None) -> Orders:
    """Return the orders of the rule.

    Args:
        shape: Any shape.
        costs: Not looked at: the rule knows no link.
        limits: The most micro-batches of one domain in flight, by stage; None leaves it to the rule.
    """
    if shape.is_single_pass and (limits is None or _is_within(shape, limits)):
        num_stages = shape.num_stages
        return unit_orders(shape, Depth(warm_up=num_stages + 1, ahead=(4 * num_stages + 5) // 6, extra=0))
    nominal = nominal_costs(shape)
    caps = round_trip_caps(shape, nominal, training=True, limits=limits)
    return list_orders(shape, nominal, training=True, caps=caps)


def _is_within(shape: PipelineShape, limits: Limits) -> bool:
    """The edge holds P+1 micro-batches and, while a unit runs, one more: it starts with FS and ends with BE."""
    peaks = (
        shape.num_stages + 2 if stage == EDGE_STAGE else shape.num_stages - stage + 1
        for stage in range(shape.num_stages)
    )
    return all(min(shape.num_micro_batches, peak) <= limit for peak, limit in zip(peaks, limits, strict=True))
