"""From orders to a plan: add the loads, the sends, the receives and the closing reductions."""

from __future__ import annotations

from collections.abc import Iterator

from ds_ldt.plan.dependencies import incoming_boundary, outgoing_boundary
from ds_ldt.plan.instructions import Compute, Flow, Instruction, Kind, Op, Order, Orders
from ds_ldt.plan.plan import Plan
from ds_ldt.plan.shape import PipelineShape


def lower(orders: Orders, shape: PipelineShape, *, policy: str, training: bool = True) -> Plan:
    """Return the plan of the given orders. Nothing is checked here; `ds_ldt.plan.validate.validate` does that.

    A receive (or the load of the head) sits right before the compute that needs it, a send right after the compute
    that produced the message, so the orders decide everything.

    Args:
        orders: The order of every rank.
        shape: The shape that the orders are for.
        policy: Name of the policy that made the orders, for messages and for the fingerprint.
        training: Whether the plan ends with the gradient reduction and the optimizer step.
    """
    closing = (Instruction(kind=Kind.REDUCE_GRADS), Instruction(kind=Kind.OPTIMIZER_STEP)) if training else ()
    rows = tuple((*_lower_order(orders.get(rank, ()), shape), *closing) for rank in range(shape.num_ranks))
    return Plan(shape=shape, policy=policy, training=training, instructions=rows)


def _lower_order(order: Order, shape: PipelineShape) -> Iterator[Instruction]:
    for compute in order:
        is_forward = compute.op is Op.FORWARD
        if is_forward and compute.virtual_stage == 0:
            yield _instruction(Kind.LOAD_MICRO_BATCH, compute, shape)
        incoming = incoming_boundary(compute, shape)
        if incoming is not None:
            receive = Kind.RECV_ACTIVATION if is_forward else Kind.RECV_GRAD
            yield _instruction(receive, compute, shape, boundary=incoming)
        yield _instruction(Kind.FORWARD_PASS if is_forward else Kind.BACKWARD_PASS, compute, shape)
        outgoing = outgoing_boundary(compute, shape)
        if outgoing is not None:
            send = Kind.SEND_ACTIVATION if is_forward else Kind.SEND_GRAD
            yield _instruction(send, compute, shape, boundary=outgoing)


def _instruction(kind: Kind, compute: Compute, shape: PipelineShape, *, boundary: int | None = None) -> Instruction:
    """Return an instruction that serves a compute; one over a boundary moves what the compute's direction moves."""
    channel = None
    if boundary is not None:
        flow = Flow.ACTIVATION if compute.op is Op.FORWARD else Flow.GRADIENT
        channel = shape.channel(boundary=boundary, domain=compute.domain, flow=flow)
    return Instruction(
        kind=kind,
        chunk=shape.chunks[compute.virtual_stage],
        virtual_stage=compute.virtual_stage,
        micro_batch=compute.micro_batch,
        domain=compute.domain,
        channel=channel,
    )
