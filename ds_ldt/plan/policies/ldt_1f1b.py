"""`ldt_1f1b`: the published LDT rule, one-forward-one-backward around the U.

Where a micro-batch meets each cloud stage once (V = 2), per domain:

    edge              step 0: min(M, P+1) x FS
                      step 1: floor((4P+5)/6) x (FE BS)
                      step 2: until FE runs out: FS (while any is left), FE BS, BE
                      step 3: the remaining BE
    cloud stage p     step 0: P-p x F
                      step 1: until F runs out: F, B
                      step 2: the remaining B

On the edge FS = F0 and FE = F(S-1) are the forwards of the first and the last layers, BS = B(S-1) and BE = B0 their
backwards in the order in which they come. An edge replica runs each entry for every domain of its slice in turn;
(FE BS) is one entry, so that a domain's gradient leaves before the next domain's FE.

Peak in flight per domain: P-p+1 on cloud stage p; P+2 on the edge, as a unit of step 2 begins with FS on top of the
P+1 micro-batches of step 0 and lets one go only at its end.

For any other shape (several virtual stages per cloud stage, middle virtual stages on the edge) and for a cap on the
micro-batches in flight that the rule would break, the depth is kept in mind and the order is found by list scheduling
with nominal costs, in whole numbers so that every machine finds the same one:

    in flight on stage p <= K_p = 1 + ceil(rt_p / tau)

rt_p is the unloaded time between the end of the first compute of a micro-batch on the stage and the start of its last
one there; tau is the longest time that a cloud rank works on one micro-batch of one virtual stage. For V = 2 this is
K_0 = P+1 and K_p = P-p+1, the depth of the published rule.
"""

from __future__ import annotations

from ds_ldt.plan.instructions import Compute, Op, Order, Orders
from ds_ldt.plan.list_schedule import list_orders
from ds_ldt.plan.policies.depth import nominal_costs, round_trip_caps
from ds_ldt.plan.shape import EDGE_STAGE, PipelineShape


def orders(shape: PipelineShape, *, max_in_flight: int | None = None) -> Orders:
    """Return the orders of the rule.

    Args:
        shape: Any shape.
        max_in_flight: The most micro-batches of one domain in flight on any rank; None leaves it to the rule.
    """
    if shape.is_single_pass and (max_in_flight is None or max_in_flight >= _published_depth(shape)):
        return {rank: _published_order(shape, rank) for rank in range(shape.num_ranks)}
    costs = nominal_costs(shape)
    caps = round_trip_caps(shape, costs, training=True, max_in_flight=max_in_flight)
    return list_orders(shape, costs, training=True, caps=caps)


def _published_depth(shape: PipelineShape) -> int:
    """The edge holds P+1 micro-batches and, while a unit runs, one more: it starts with FS and ends with BE."""
    return min(shape.num_micro_batches, shape.num_stages + 2)


def _published_order(shape: PipelineShape, rank: int) -> Order:
    if shape.stage_of(rank) == EDGE_STAGE:
        return _edge_order(shape, rank)
    return _cloud_order(shape, rank)


def _edge_order(shape: PipelineShape, rank: int) -> Order:
    num_micro_batches, num_stages, tail = shape.num_micro_batches, shape.num_stages, shape.num_boundaries
    domains = shape.domains_of(rank)

    def entry(micro_batch: int, *passes: tuple[Op, int]) -> Order:
        return tuple(
            Compute(op=op, virtual_stage=virtual_stage, micro_batch=micro_batch, domain=domain)
            for domain in domains
            for op, virtual_stage in passes
        )

    head_forward, tail_both, head_backward = (
        (Op.FORWARD, 0),
        ((Op.FORWARD, tail), (Op.BACKWARD, tail)),
        (Op.BACKWARD, 0),
    )
    num_warm_up = min(num_micro_batches, num_stages + 1)
    num_ahead = min(num_micro_batches, (4 * num_stages + 5) // 6)
    order: list[Compute] = []
    # Step 0: min(M, P+1) x FS.
    for micro_batch in range(num_warm_up):
        order += entry(micro_batch, head_forward)
    # Step 1: floor((4P+5)/6) x (FE BS), at most M.
    for micro_batch in range(num_ahead):
        order += entry(micro_batch, *tail_both)
    # Step 2: M - k units; FS runs out first, since k <= P+1.
    for unit in range(num_micro_batches - num_ahead):
        if num_warm_up + unit < num_micro_batches:
            order += entry(num_warm_up + unit, head_forward)
        order += entry(num_ahead + unit, *tail_both)
        order += entry(unit, head_backward)
    # Step 3: the last k BE.
    for micro_batch in range(num_micro_batches - num_ahead, num_micro_batches):
        order += entry(micro_batch, head_backward)
    return tuple(order)


def _cloud_order(shape: PipelineShape, rank: int) -> Order:
    stage, num_micro_batches = shape.stage_of(rank), shape.num_micro_batches
    (virtual_stage,), (domain,) = shape.virtual_stages_of(stage), shape.domains_of(rank)

    def one(op: Op, micro_batch: int) -> Compute:
        return Compute(op=op, virtual_stage=virtual_stage, micro_batch=micro_batch, domain=domain)

    num_warm_up = min(num_micro_batches, shape.num_stages - stage)
    # Step 0: P-p x F, at most M.
    order = [one(Op.FORWARD, micro_batch) for micro_batch in range(num_warm_up)]
    # Step 1: F and B in turn.
    for micro_batch in range(num_micro_batches - num_warm_up):
        order += [one(Op.FORWARD, num_warm_up + micro_batch), one(Op.BACKWARD, micro_batch)]
    # Step 2: the last B.
    order += [one(Op.BACKWARD, m) for m in range(num_micro_batches - num_warm_up, num_micro_batches)]
    return tuple(order)
