"""The form that `ldt_1f1b` and `closed_form` share where a micro-batch meets each cloud stage once (V = 2).

    edge              step 0: min(M, W) x FS
                      step 1: min(M, k) x (FE BS)
                      step 2: until FE runs out: FS (while any is left), FE BS, BE
                      step 3: the remaining BE
    cloud stage p     step 0: min(M, P-p+x) x F
                      step 1: until F runs out: F, B
                      step 2: the remaining B

On the edge FS = F0 and FE = F(S-1) are the forwards of the first and the last layers, BS = B(S-1) and BE = B0 their
backwards in the order in which they come. An edge replica runs each entry for every domain of its slice in turn;
(FE BS) is one entry, so that a domain's gradient leaves before the next domain's FE.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_ldt.config.rules import EDGE_STAGE
from ds_ldt.plan.instructions import Compute, Op, Order, Orders
from ds_ldt.plan.shape import PipelineShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """The three numbers that the form leaves open.

    Attributes:
        warm_up: W, forwards of the head before anything else.
        ahead: k, micro-batches that the tail handles before the first backward of the head; at most W.
        extra: x, forwards of cloud stage p before its first backward, beyond P-p.
    """

    warm_up: int
    ahead: int
    extra: int


def unit_orders(shape: PipelineShape, depth: Depth) -> Orders:
    """Return the orders of all ranks.

    Args:
        shape: A single-pass shape.
        depth: The depth. The orders run only if W >= P-1+x and W >= k, or W >= M.
    """
    return {
        rank: _edge_order(shape, rank, depth)
        if shape.stage_of(rank) == EDGE_STAGE
        else _cloud_order(shape, rank, depth.extra)
        for rank in range(shape.num_ranks)
    }


def _edge_order(shape: PipelineShape, rank: int, depth: Depth) -> Order:
    num_micro_batches, tail = shape.num_micro_batches, shape.num_boundaries
    domains = shape.domains_of(rank)

    def entry(micro_batch: int, *passes: tuple[Op, int]) -> Order:
        return tuple(
            Compute(op=op, virtual_stage=virtual_stage, micro_batch=micro_batch, domain=domain)
            for domain in domains
            for op, virtual_stage in passes
        )

    head_forward, head_backward = (Op.FORWARD, 0), (Op.BACKWARD, 0)
    tail_both = ((Op.FORWARD, tail), (Op.BACKWARD, tail))
    num_warm_up, num_ahead = min(num_micro_batches, depth.warm_up), min(num_micro_batches, depth.ahead)
    order: list[Compute] = []
    # Step 0: min(M, W) x FS.
    for micro_batch in range(num_warm_up):
        order += entry(micro_batch, head_forward)
    # Step 1: min(M, k) x (FE BS).
    for micro_batch in range(num_ahead):
        order += entry(micro_batch, *tail_both)
    # Step 2: M - k units; FS runs out first, since k <= W.
    for unit in range(num_micro_batches - num_ahead):
        if num_warm_up + unit < num_micro_batches:
            order += entry(num_warm_up + unit, head_forward)
        order += entry(num_ahead + unit, *tail_both)
        order += entry(unit, head_backward)
    # Step 3: the last k BE.
    for micro_batch in range(num_micro_batches - num_ahead, num_micro_batches):
        order += entry(micro_batch, head_backward)
    return tuple(order)


def _cloud_order(shape: PipelineShape, rank: int, extra: int) -> Order:
    stage, num_micro_batches = shape.stage_of(rank), shape.num_micro_batches
    (virtual_stage,), (domain,) = shape.virtual_stages_of(stage), shape.domains_of(rank)

    def one(op: Op, micro_batch: int) -> Compute:
        return Compute(op=op, virtual_stage=virtual_stage, micro_batch=micro_batch, domain=domain)

    num_warm_up = min(num_micro_batches, shape.num_stages - stage + extra)
    # Step 0: P-p+x x F, at most M.
    order = [one(Op.FORWARD, micro_batch) for micro_batch in range(num_warm_up)]
    # Step 1: F and B in turn.
    for micro_batch in range(num_micro_batches - num_warm_up):
        order += [one(Op.FORWARD, num_warm_up + micro_batch), one(Op.BACKWARD, micro_batch)]
    # Step 2: the last B.
    order += [one(Op.BACKWARD, m) for m in range(num_micro_batches - num_warm_up, num_micro_batches)]
    return tuple(order)
