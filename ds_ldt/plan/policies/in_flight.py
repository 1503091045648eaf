"""How many micro-batches a stage keeps in flight so that it never waits for the far end of the pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ds_ldt.config.rules import EDGE_STAGE
from ds_ldt.plan.costs import Costs, touches_edge
from ds_ldt.plan.dependencies import incoming_boundary, journey
from ds_ldt.plan.instructions import Compute, Op
from ds_ldt.plan.shape import PipelineShape

Limits = tuple[int, ...]
"""For each physical stage, the most micro-batches of one domain that a rank may have in flight; at least 1 each."""

_NOMINAL_RATIO = 4
_HAIR = 1e-9
"""What a quotient may exceed a whole number by and still count as that number, as 0.3 / 0.1 does."""


def nominal_costs(shape: PipelineShape) -> Costs:
    """Return the costs assumed when none are known: the cloud is the bottleneck, backward is twice forward.

    An edge pass takes a quarter of a cloud pass, or less where a replica serves several domains, so that the edge
    keeps up. All are whole numbers, so that a played run is the same on every machine.
    """
    return Costs.uniform(shape, edge=1, cloud=_NOMINAL_RATIO * shape.slice_size, backward_ratio=2)


def round_trip_caps(
    shape: PipelineShape,
    costs: Costs,
    *,
    training: bool,
    tau: float | None = None,
    slack: int = 0,
    limits: Limits | None = None,
) -> tuple[int, ...]:
    """Return the cap K_p = 1 + ceil(rt_p / tau) + slack of each physical stage.

    Args:
        shape: The shape.
        costs: Seconds of computes and hops.
        training: Whether micro-batches come back as gradients.
        tau: Seconds between two micro-batches; None takes the longest that a cloud rank is busy with one micro-batch
            of one virtual stage.
        slack: Micro-batches to add.
        limits: Upper limits; None means none. M is always one.
    """
    tau = _longest_visit(shape, costs, training=training) if tau is None else tau
    caps = []
    for stage in range(shape.num_stages):
        trip = _round_trip(shape, costs, stage, training=training)
        caps.append(1 + slack + ceil(trip / tau) if tau else shape.num_micro_batches)
    return clamped(caps, shape, limits)


def link_caps(shape: PipelineShape, costs: Costs, *, limits: Limits | None = None) -> tuple[int, ...]:
    """Return the cap K_p = P-p+1 + ceil(2L/t) of each physical stage of a shape with V = 2.

    Args:
        shape: A single-pass shape.
        costs: Seconds of computes and hops.
        limits: Upper limits; None means none. M is always one.
    """
    extra = stage_times(2 * hop_seconds(shape, costs), shape, costs)
    return clamped([shape.num_stages - stage + 1 + extra for stage in range(shape.num_stages)], shape, limits)


def clamped(caps: Sequence[int], shape: PipelineShape, limits: Limits | None) -> tuple[int, ...]:
    """Return caps of at least 1, at most M, and at most the limits."""
    limits = (shape.num_micro_batches,) * shape.num_stages if limits is None else limits
    return tuple(max(1, min(cap, limit, shape.num_micro_batches)) for cap, limit in zip(caps, limits, strict=True))


def slowest_forward(shape: PipelineShape, costs: Costs) -> float:
    """Return t: seconds of the longest forward of one virtual stage in the cloud."""
    return max(
        costs.seconds(Compute(op=Op.FORWARD, virtual_stage=index, micro_batch=0, domain=0), shape)
        for index, stage in enumerate(shape.stages)
        if stage != EDGE_STAGE
    )


def hop_seconds(shape: PipelineShape, costs: Costs) -> float:
    """Return L: seconds of the longest hop between the sites."""
    return max(
        costs.hop_seconds(boundary, shape) for boundary in range(shape.num_boundaries) if touches_edge(boundary, shape)
    )


def stage_times(seconds: float, shape: PipelineShape, costs: Costs) -> int:
    """Return ceil(seconds / t), at most M (more micro-batches cannot be in flight)."""
    slowest = slowest_forward(shape, costs)
    if seconds >= slowest * shape.num_micro_batches:
        return shape.num_micro_batches if seconds else 0
    return ceil(seconds / slowest)


def ceil(quotient: float) -> int:
    """Return the next whole number, not counting rounding errors."""
    return math.ceil(quotient - _HAIR)


def _round_trip(shape: PipelineShape, costs: Costs, stage: int, *, training: bool) -> float:
    """Unloaded time from the end of the first to the start of the last compute of a micro-batch on a stage."""
    now, first_end, last_start = 0.0, None, 0.0
    for compute in journey(shape, training=training):
        boundary = incoming_boundary(compute, shape)
        now += 0.0 if boundary is None else costs.hop_seconds(boundary, shape)
        start, now = now, now + costs.seconds(compute, shape)
        if shape.stages[compute.virtual_stage] == stage:
            first_end = now if first_end is None else first_end
            last_start = start
    return 0.0 if first_end is None else max(0.0, last_start - first_end)


def _longest_visit(shape: PipelineShape, costs: Costs, *, training: bool) -> float:
    """Longest time that a cloud rank is busy with one micro-batch on one virtual stage."""
    seconds = [0.0] * shape.num_virtual_stages
    for compute in journey(shape, training=training):
        seconds[compute.virtual_stage] += costs.seconds(compute, shape)
    return max(seconds[index] for index, stage in enumerate(shape.stages) if stage != EDGE_STAGE)
