"""From orders to a plan: add the loads, the sends, the receives and the closing reductions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ds_ldt.errors import ScheduleError
from ds_ldt.plan.dependencies import incoming_boundary, outgoing_boundary
from ds_ldt.plan.instructions import Channel, Compute, Flow, Instruction, Kind, Op, Order, Orders
from ds_ldt.plan.plan import Plan
from ds_ldt.plan.shape import PipelineShape

_Step = tuple[Kind, int, Channel | None]
"""Kind, chunk and channel of one of the instructions of a compute."""


def lower(orders: Orders, shape: PipelineShape, *, policy: str, training: bool = True) -> Plan:
    """Return the plan of the given orders. Whether it can be run is for `ds_ldt.plan.validate.validate` to say.

    A receive (or the load of the head) sits right before the compute that needs it, a send right after the compute
    that produced the message, so the orders decide everything.

    Args:
        orders: The order of every rank.
        shape: The shape that the orders are for.
        policy: Name of the policy that made the orders, for messages and for the fingerprint.
        training: Whether the plan ends with the gradient reduction and the optimizer step.

    Raises:
        ScheduleError: The slices of two edge replicas differ, which no plan can say.
    """
    return lower_slice(_first_slice(orders, shape), shape, policy=policy, training=training)


def lower_slice(orders: Orders, shape: PipelineShape, *, policy: str, training: bool = True) -> Plan:
    """Return the plan in which every edge replica and its cloud ranks do the same, each for their own domains.

    Args:
        orders: The orders of one slice; its ranks and domains are numbered as in `shape.one_slice`.
        shape: The shape of the whole job.
        policy: See `lower`.
        training: See `lower`.
    """
    part = shape.one_slice
    closing = (Instruction(kind=Kind.REDUCE_GRADS), Instruction(kind=Kind.OPTIMIZER_STEP)) if training else ()
    channels = part.channels()
    rows = tuple((*_lower_order(orders.get(rank, ()), part, channels), *closing) for rank in range(part.num_ranks))
    return Plan(shape=shape, policy=policy, training=training, rows=rows)


def _first_slice(orders: Orders, shape: PipelineShape) -> Orders:
    """The orders of the first slice, if those of all others are the same."""
    if shape.num_replicas == 1:
        return orders
    first = {number: orders.get(rank, ()) for number, rank in enumerate(shape.ranks_of_slice(0))}
    for replica in range(1, shape.num_replicas):
        by = replica * shape.slice_size
        for number, rank in enumerate(shape.ranks_of_slice(replica)):
            moved = tuple(replace(compute, domain=compute.domain + by) for compute in first[number])
            if moved != orders.get(rank, ()):
                raise ScheduleError(
                    f"{shape.describe_rank(rank)} does not do for its domains what rank "
                    f"{shape.ranks_of_slice(0)[number]} does for those of edge replica 0; a plan is the same for all "
                    "edge replicas"
                )
    return first


def _lower_order(
    order: Order, shape: PipelineShape, channels: Mapping[tuple[int, int, Flow], Channel]
) -> Iterator[Instruction]:
    steps: dict[tuple[Op, int, int], tuple[_Step, ...]] = {}
    for compute in order:
        place = compute.op, compute.virtual_stage, compute.domain
        if place not in steps:
            steps[place] = tuple(_steps_of(compute, shape, channels))
        for kind, chunk, channel in steps[place]:
            yield Instruction.serving(kind, compute, chunk=chunk, channel=channel)


def _steps_of(
    compute: Compute, shape: PipelineShape, channels: Mapping[tuple[int, int, Flow], Channel]
) -> Iterator[_Step]:
    """What surrounds a compute, which is the same for every micro-batch."""
    chunk = shape.chunks[compute.virtual_stage]
    if compute.op is Op.WEIGHT:
        yield Kind.WEIGHT_PASS, chunk, None
        return
    is_forward = compute.op is Op.FORWARD
    flow = Flow.ACTIVATION if is_forward else Flow.GRADIENT
    if is_forward and compute.virtual_stage == 0:
        yield Kind.LOAD_MICRO_BATCH, chunk, None
    incoming = incoming_boundary(compute, shape)
    if incoming is not None:
        kind = Kind.RECV_ACTIVATION if is_forward else Kind.RECV_GRAD
        yield kind, chunk, channels[incoming, compute.domain, flow]
    yield Kind.FORWARD_PASS if is_forward else Kind.BACKWARD_PASS, chunk, None
    outgoing = outgoing_boundary(compute, shape)
    if outgoing is not None:
        kind = Kind.SEND_ACTIVATION if is_forward else Kind.SEND_GRAD
        yield kind, chunk, channels[outgoing, compute.domain, flow]
