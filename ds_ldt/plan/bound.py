"""The lower bound on a step: the yardstick of every efficiency figure.

No plan of a shape can be faster than any of these:

- a rank must do its work. For any part of it: nothing of the part can begin before the unloaded travel time to it (the
  *head*, the least over the part), and after its last compute there is at least the unloaded travel time to the end of
  the step (the *tail*). The best part consists of the computes with head >= h and tail >= q, for some h and q.
- one micro-batch must travel from its first compute to its last.
- an edge replica that serves K domains enters them one after another, and lets them leave one after another. The i-th
  domain to enter waits for i-1 first computes, and in the best case leaves as the (K+1-i)-th from the end:
  max over i of i*f + (K+1-i)*b, less the one f and b that the travel times contain already. This is added to the
  bounds of the cloud ranks and of the travelling micro-batch.

For V = 2, backward twice forward and a cloud stage of t seconds as the bottleneck it is
3t(M+P-2) + e + 2eK + 2L, with e one edge forward and L the one-way latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_ldt.plan.costs import Costs
from ds_ldt.plan.dependencies import incoming_boundary, journey
from ds_ldt.plan.shape import EDGE_STAGE, PipelineShape


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leg:
    """One compute of the journey of a micro-batch, unloaded: seconds before it, in it and after it."""

    stage: int
    head: float
    seconds: float
    tail: float


def lower_bound(shape: PipelineShape, costs: Costs, *, training: bool = True) -> float:
    """Return seconds that no plan of the shape can undercut.

    Args:
        shape: The shape.
        costs: Seconds of computes and messages.
        training: Whether backwards run.
    """
    legs = _legs(shape, costs, training=training)
    crossing = legs[-1].head + legs[-1].seconds + _stagger(legs, shape.slice_size)
    return max(crossing, *(_rank_bound(shape, legs, stage) for stage in range(shape.num_stages)))


def _legs(shape: PipelineShape, costs: Costs, *, training: bool) -> tuple[_Leg, ...]:
    now, begun = 0.0, []
    for compute in journey(shape, training=training):
        boundary = incoming_boundary(compute, shape)
        now += 0.0 if boundary is None else costs.hop_seconds(boundary, shape)
        seconds = costs.seconds(compute, shape)
        begun.append((shape.stages[compute.virtual_stage], now, seconds))
        now += seconds
    return tuple(
        _Leg(stage=stage, head=head, seconds=seconds, tail=now - head - seconds) for stage, head, seconds in begun
    )


def _rank_bound(shape: PipelineShape, legs: Sequence[_Leg], stage: int) -> float:
    """The one-machine bound of a rank of a stage, over all parts of its work."""
    is_edge = stage == EDGE_STAGE
    own = [leg for leg in legs if leg.stage == stage]
    repeats = shape.num_micro_batches * (shape.slice_size if is_edge else 1)
    best = 0.0
    for head in {leg.head for leg in own}:
        for tail in {leg.tail for leg in own}:
            work = sum(leg.seconds for leg in own if leg.head >= head and leg.tail >= tail)
            if work:
                best = max(best, head + repeats * work + tail)
    return best if is_edge else best + _stagger(legs, shape.slice_size)


def _stagger(legs: Sequence[_Leg], slice_size: int) -> float:
    """Extra seconds, since the domains of a replica enter and leave one after another."""
    enter = legs[0].seconds
    leave = legs[-1].seconds if legs[-1].stage == EDGE_STAGE else 0.0
    return max(i * enter + (slice_size + 1 - i) * leave for i in range(1, slice_size + 1)) - enter - leave
