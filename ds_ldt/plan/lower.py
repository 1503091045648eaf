"""From orders to a plan: add the loads, the sends, the receives and the closing reductions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ds_ldt.plan.dependencies import incoming_boundary, outgoing_boundary
from ds_ldt.plan.instructions import Channel, Compute, Flow, Instruction, Kind, Op, Order, Orders
from ds_ldt.plan.plan import Plan
from ds_ldt.plan.shape import PipelineShape

Channels = Mapping[tuple[int, int, Flow], Channel]


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
    channels = shape.channels()
    rows = (tuple(_lower_order(orders.get(rank, ()), shape, channels)) for rank in range(shape.num_ranks))
    return Plan(shape=shape, policy=policy, training=training, instructions=tuple((*row, *closing) for row in rows))


def _lower_order(order: Order, shape: PipelineShape, channels: Channels) -> Iterator[Instruction]:
    for compute in order:
        if compute.op is Op.WEIGHT:
            yield _instruction(Kind.WEIGHT_PASS, compute, shape)
            continue
        is_forward = compute.op is Op.FORWARD
        flow = Flow.ACTIVATION if is_forward else Flow.GRADIENT
        if is_forward and compute.virtual_stage == 0:
            yield _instruction(Kind.LOAD_MICRO_BATCH, compute, shape)
        incoming = incoming_boundary(compute, shape)
        if incoming is not None:
            kind = Kind.RECV_ACTIVATION if is_forward else Kind.RECV_GRAD
            yield _instruction(kind, compute, shape, channels[incoming, compute.domain, flow])
        yield _instruction(Kind.FORWARD_PASS if is_forward else Kind.BACKWARD_PASS, compute, shape)
        outgoing = outgoing_boundary(compute, shape)
        if outgoing is not None:
            kind = Kind.SEND_ACTIVATION if is_forward else Kind.SEND_GRAD
            yield _instruction(kind, compute, shape, channels[outgoing, compute.domain, flow])


def _instruction(kind: Kind, compute: Compute, shape: PipelineShape, channel: Channel | None = None) -> Instruction:
    return Instruction(
        kind=kind,
        chunk=shape.chunks[compute.virtual_stage],
        virtual_stage=compute.virtual_stage,
        micro_batch=compute.micro_batch,
        domain=compute.domain,
        channel=channel,
    )
