"""Which compute needs which: the one place that knows how a micro-batch travels through the virtual stages.

    F0 -> F1 -> ... -> F(S-1) -> B(S-1) -> ... -> B1 -> B0

An arrow between two virtual stages is a message. The gradient arrows are missing over boundaries that carry none;
a backward there only lets go of what its forward kept. Where the backward is split, W follows B on its own rank, and
nothing follows W.
"""

from __future__ import annotations

from collections.abc import Iterator

from ds_ldt.plan.instructions import Compute, Op
from ds_ldt.plan.shape import PipelineShape

NEEDED_BY = {Op.BACKWARD: Op.FORWARD, Op.WEIGHT: Op.BACKWARD}
"""Op -> the op of the same virtual stage and micro-batch whose kept values it uses."""


def passes_of(shape: PipelineShape, *, training: bool) -> Iterator[tuple[Op, int]]:
    """Yield op and virtual stage of everything that is done to a micro-batch."""
    everywhere = range(shape.num_virtual_stages)
    yield from ((Op.FORWARD, virtual_stage) for virtual_stage in everywhere)
    if training:
        yield from ((Op.BACKWARD, virtual_stage) for virtual_stage in everywhere)
        yield from ((Op.WEIGHT, virtual_stage) for virtual_stage in shape.split_stages)


def computes_of(shape: PipelineShape, *, training: bool) -> Iterator[Compute]:
    """Yield every compute that a plan of this shape must run, each once."""
    for op, virtual_stage in passes_of(shape, training=training):
        for micro_batch in range(shape.num_micro_batches):
            for domain in range(shape.num_domains):
                yield Compute(op=op, virtual_stage=virtual_stage, micro_batch=micro_batch, domain=domain)


def journey(shape: PipelineShape, *, training: bool, domain: int = 0) -> Iterator[Compute]:
    """Yield the computes of one micro-batch that wait for one another, first to last.

    Backwards that no gradient reaches and weight gradients are not among them: nothing waits for those.
    """

    def one(op: Op, virtual_stage: int) -> Compute:
        return Compute(op=op, virtual_stage=virtual_stage, micro_batch=0, domain=domain)

    yield from (one(Op.FORWARD, virtual_stage) for virtual_stage in range(shape.num_virtual_stages))
    if training:
        backward = reversed(range(shape.num_virtual_stages))
        yield from (one(Op.BACKWARD, virtual_stage) for virtual_stage in backward if shape.has_gradient(virtual_stage))


def incoming_boundary(compute: Compute, shape: PipelineShape) -> int | None:
    """Return the boundary over which the message that a compute waits for arrives; None if it waits for none."""
    stage = compute.virtual_stage
    if compute.op is Op.FORWARD:
        return stage - 1 if stage > 0 else None
    if compute.op is Op.WEIGHT:
        return None
    return stage if stage < shape.num_boundaries and shape.carries_gradient(stage) else None


def outgoing_boundary(compute: Compute, shape: PipelineShape) -> int | None:
    """Return the boundary over which the result of a compute is sent; None if it stays where it is."""
    stage = compute.virtual_stage
    if compute.op is Op.FORWARD:
        return stage if stage < shape.num_boundaries else None
    if compute.op is Op.WEIGHT:
        return None
    return stage - 1 if stage > 0 and shape.carries_gradient(stage - 1) else None


def receiver(compute: Compute, shape: PipelineShape) -> Compute | None:
    """Return the compute that waits for the message of the given one; None if it sends none."""
    boundary = outgoing_boundary(compute, shape)
    if boundary is None:
        return None
    stage = boundary + 1 if compute.op is Op.FORWARD else boundary
    return _moved(compute, op=compute.op, virtual_stage=stage)


def local_predecessor(compute: Compute) -> Compute | None:
    """Return the compute on the same rank whose kept values a compute uses; None for a forward."""
    op = NEEDED_BY.get(compute.op)
    return None if op is None else _moved(compute, op=op, virtual_stage=compute.virtual_stage)


def _moved(compute: Compute, *, op: Op, virtual_stage: int) -> Compute:
    return Compute(op=op, virtual_stage=virtual_stage, micro_batch=compute.micro_batch, domain=compute.domain)
