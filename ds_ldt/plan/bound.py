"""The lower bound on a step: the yardstick of every efficiency figure.

No plan of a shape can be faster than any of these:

- a rank must do its work. For any part of it: nothing of the part can begin before the unloaded travel time to it (the
  *head*, the least over the part), and after its last compute there is at least the unloaded travel time to the end of
  the step (the *tail*). The best part consists of the computes with head >= h and tail >= q, for some h and q.
- one micro-batch must travel from its first compute to its last: a bound of any rank, with one compute as the part.
- an edge replica that serves K domains enters them one after another, and lets them leave one after another. The i-th
  domain to enter waits for i-1 first computes, and in the best case leaves as the (K+1-i)-th from the end:
  max over i of i*f + (K+1-i)*b, less the one f and b that the travel times contain already. This is added to the
  bounds of the cloud ranks.

For V = 2, backward twice forward and a cloud stage of t seconds as the bottleneck it is
3t(M+P-2) + e + 2eK + 2L, with e one edge forward and L the one-way latency.

A weight gradient of a backward that is split begins no earlier than its backward ends, and nothing comes after it: its
tail is 0, and it does not wait for a turn to leave. Backwards in the journey are then those of the inputs alone. With
two equal halves the same pipeline, where the last stage is busy to the end, has the bound 3tM + t(P-2) + eK + L.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_ldt.plan.costs import Costs
from ds_ldt.plan.dependencies import incoming_boundary, journey
from ds_ldt.plan.instructions import Op
from ds_ldt.plan.shape import EDGE_STAGE, PipelineShape


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leg:
    """One compute of a micro-batch, unloaded: seconds before it, in it and after it; whether it is of the journey."""

    stage: int
    head: float
    seconds: float
    tail: float
    travels: bool


def lower_bound(shape: PipelineShape, costs: Costs, *, training: bool = True) -> float:
    """Return seconds that no plan of the shape can undercut.

    Args:
        shape: The shape.
        costs: Seconds of computes and messages.
        training: Whether backwards run.
    """
    legs = _legs(shape, costs, training=training)
    return max(_rank_bound(shape, legs, stage) for stage in range(shape.num_stages))


def _legs(shape: PipelineShape, costs: Costs, *, training: bool) -> tuple[_Leg, ...]:
    """The computes of the journey, first to last, then the weight gradients."""
    now, begun, owed = 0.0, [], []
    for compute in journey(shape, training=training):
        boundary = incoming_boundary(compute, shape)
        now += 0.0 if boundary is None else costs.hop_seconds(boundary, shape)
        seconds, stage = costs.seconds(compute, shape), shape.stages[compute.virtual_stage]
        begun.append((stage, now, seconds))
        now += seconds
        if compute.op is Op.BACKWARD and shape.splits(compute.virtual_stage):
            owed.append((stage, now, costs.seconds(replace(compute, op=Op.WEIGHT), shape)))
    travelling = [
        _Leg(stage=stage, head=head, seconds=seconds, tail=now - head - seconds, travels=True)
        for stage, head, seconds in begun
    ]
    staying = [_Leg(stage=stage, head=head, seconds=seconds, tail=0.0, travels=False) for stage, head, seconds in owed]
    return (*travelling, *staying)


def _rank_bound(shape: PipelineShape, legs: Sequence[_Leg], stage: int) -> float:
    """The one-machine bound of a rank of a stage, over all parts of its work."""
    is_edge = stage == EDGE_STAGE
    own = [leg for leg in legs if leg.stage == stage]
    repeats = shape.num_micro_batches * (shape.slice_size if is_edge else 1)
    best = 0.0
    for head in {leg.head for leg in own}:
        for tail in {leg.tail for leg in own}:
            part = [leg for leg in own if leg.head >= head and leg.tail >= tail]
            if part:
                work = sum(leg.seconds for leg in part)
                travels = all(leg.travels for leg in part)
                turns = 0.0 if is_edge else _stagger(shape, legs, leaves=travels)
                best = max(best, head + repeats * work + tail + turns)
    return best


def _stagger(shape: PipelineShape, legs: Sequence[_Leg], *, leaves: bool) -> float:
    """Extra seconds, since the domains of a replica enter, and if they do leave, one after another."""
    last = [leg for leg in legs if leg.travels][-1]
    enter, slice_size = legs[0].seconds, shape.slice_size
    leave = last.seconds if leaves and last.stage == EDGE_STAGE else 0.0
    return max(i * enter + (slice_size + 1 - i) * leave for i in range(1, slice_size + 1)) - enter - leave
