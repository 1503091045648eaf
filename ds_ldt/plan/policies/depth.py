"""How many micro-batches a stage keeps in flight so that it never waits for the far end of the pipeline."""

from __future__ import annotations

import math

from ds_ldt.plan.costs import Costs
from ds_ldt.plan.dependencies import incoming_boundary, journey
from ds_ldt.plan.shape import EDGE_STAGE, PipelineShape

_NOMINAL_RATIO = 4


def nominal_costs(shape: PipelineShape) -> Costs:
    """Return the costs assumed when none are known: the cloud is the bottleneck, backward is twice forward.

    An edge pass takes a quarter of a cloud pass, or less where a replica serves several domains, so that the edge
    keeps up. All are whole numbers, so that a played run is the same on every machine.
    """
    return Costs.uniform(shape, edge=1, cloud=_NOMINAL_RATIO * shape.slice_size, backward_ratio=2)


def round_trip_caps(
    shape: PipelineShape, costs: Costs, *, training: bool, max_in_flight: int | None = None
) -> tuple[int, ...]:
    """Return the cap K_p = 1 + ceil(rt_p / tau) of each physical stage, at most `max_in_flight`.

    Args:
        shape: The shape.
        costs: Seconds of computes and hops.
        training: Whether micro-batches come back as gradients.
        max_in_flight: An upper limit for every stage; None means no limit.
    """
    tau = _longest_visit(shape, costs, training=training)
    caps = [
        1 + math.ceil(_round_trip(shape, costs, stage, training=training) / tau) for stage in range(shape.num_stages)
    ]
    return tuple(cap if max_in_flight is None else min(cap, max_in_flight) for cap in caps)


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
