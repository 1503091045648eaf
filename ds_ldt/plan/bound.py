"""The lower bound on a step, the yardstick of every efficiency figure, and what it is that bounds a step.

A *resource* does one thing at a time: a rank its computes, each direction of the link of an edge replica its messages.
No plan of a shape can be faster than any of these:

- a resource must do its work. For any part of it: nothing of the part can begin before the unloaded travel time to it
  (the *head*, the least over the part), and after the last of it there is at least the unloaded travel time to the end
  of the step (the *tail*). The best part consists of the work with head >= h and tail >= q, for some h and q.
- one micro-batch must travel from its first compute to its last: a bound of any rank, with one compute as the part.
- an edge replica that serves K domains lets them in one after another, and out one after another: a domain that is the
  last to enter waits for K-1 first computes on the edge, and for K-1 first messages on the link, whichever takes
  longer. One that is the first to leave is followed by K-1 last messages and last computes likewise. The larger of the
  two is added to the bounds of the cloud ranks.

For V = 2, backward twice forward and a cloud stage of t seconds as the bottleneck it is
3t(M+P-2) + e + 2eK + 2L, with e one edge forward and L the one-way latency. Where the rate of the link is the
bottleneck, x seconds for each message, it is 2xMK, and what precedes the first message and follows the last.

A weight gradient of a backward that is split begins no earlier than its backward ends, and nothing comes after it: its
tail is 0, and it does not wait for a turn to leave. Backwards in the journey are then those of the inputs alone. With
two equal halves the same pipeline, where the last stage is busy to the end, has the bound 3tM + t(P-2) + eK + L.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ds_ldt.config.rules import EDGE_STAGE
from ds_ldt.plan.costs import Costs, touches_edge
from ds_ldt.plan.dependencies import incoming_boundary, journey
from ds_ldt.plan.instructions import Op
from ds_ldt.plan.shape import PipelineShape

TO_CLOUD, TO_EDGE = "edge_to_cloud", "cloud_to_edge"
"""The directions of the link."""

_AS_LONG = 1e-9
"""Bounds that differ by a smaller part than this are equal: they are sums of the same seconds in another sequence."""


class Cause(StrEnum):
    """What may bound a step."""

    EDGE_COMPUTE = "edge_compute"
    CLOUD_COMPUTE = "cloud_compute"
    RATE = "rate"
    LATENCY = "latency"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The lower bound on a step, and what makes it so long.

    Attributes:
        seconds: Seconds that no plan can undercut: the largest of the bounds of edge, cloud and rate.
        cause: What takes up most of them: the work of the resource whose bound is the largest, or the latency on the
            way to that work and back.
        edge_compute: The bound of an edge replica, seconds.
        cloud_compute: The largest bound of a cloud rank, seconds.
        rate: The larger bound of the two directions of a link, seconds; 0 if messages take up no time on it.
        latency: Seconds that one micro-batch spends under way on an unloaded link, without the time that its messages
            occupy the link.
    """

    seconds: float
    cause: Cause
    edge_compute: float
    cloud_compute: float
    rate: float
    latency: float

    def figures(self) -> dict[Cause, float]:
        """Return the figure of each cause."""
        return {cause: getattr(self, cause.value) for cause in Cause}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leg:
    """One compute or message of a micro-batch, unloaded.

    Attributes:
        resource: The physical stage that computes, or the direction of the link.
        head: Seconds before it.
        seconds: Seconds that it takes up its resource.
        tail: Seconds after it to the end.
        latency_before: Seconds of the head that are latency.
        latency_after: Seconds of the tail that are latency.
        travels: Whether it is of the journey.
    """

    resource: int | str
    head: float
    seconds: float
    tail: float
    latency_before: float
    latency_after: float
    travels: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """The bound by a part of the work of a resource: all its seconds, those of work, those of latency."""

    seconds: float
    work: float
    latency: float


def lower_bound(shape: PipelineShape, costs: Costs, *, training: bool = True) -> float:
    """Return seconds that no plan of the shape can undercut.

    Args:
        shape: The shape.
        costs: Seconds of computes and messages.
        training: Whether backwards run.
    """
    return bound_of(shape, costs, training=training).seconds


def bound_of(shape: PipelineShape, costs: Costs, *, training: bool = True) -> Bound:
    """Return the lower bound on a step, with what bounds it.

    Args:
        shape: The shape.
        costs: Seconds of computes and messages.
        training: Whether backwards run.
    """
    legs = _legs(shape, costs, training=training)
    parts = {
        Cause.EDGE_COMPUTE: _longest(shape, legs, [EDGE_STAGE]),
        Cause.CLOUD_COMPUTE: _longest(shape, legs, range(1, shape.num_stages)),
        Cause.RATE: _longest(shape, legs, [TO_CLOUD, TO_EDGE]),
    }
    seconds = max(part.seconds for part in parts.values())
    as_long = [cause for cause, part in parts.items() if part.seconds >= seconds * (1 - _AS_LONG)]
    cause = max(as_long, key=lambda one: parts[one].work)
    return Bound(
        seconds=seconds,
        cause=Cause.LATENCY if parts[cause].latency > parts[cause].work else cause,
        edge_compute=parts[Cause.EDGE_COMPUTE].seconds,
        cloud_compute=parts[Cause.CLOUD_COMPUTE].seconds,
        rate=parts[Cause.RATE].seconds,
        latency=legs[0].latency_after,
    )


def _legs(shape: PipelineShape, costs: Costs, *, training: bool) -> tuple[_Leg, ...]:
    """The computes and the messages over the link of the journey, first to last, then the weight gradients."""
    now = waited = 0.0
    begun: list[tuple[int | str, float, float, float]] = []
    pending: list[tuple[int, float, float, float]] = []
    for compute in journey(shape, training=training):
        boundary, stage = incoming_boundary(compute, shape), shape.stages[compute.virtual_stage]
        if boundary is not None:
            if touches_edge(boundary, shape):
                transfer = costs.transfer_seconds(boundary)
                begun.append((TO_EDGE if stage == EDGE_STAGE else TO_CLOUD, now, transfer, waited))
                now += transfer
            latency = costs.latency_seconds(boundary, shape)
            now, waited = now + latency, waited + latency
        seconds = costs.seconds(compute, shape)
        begun.append((stage, now, seconds, waited))
        now += seconds
        if compute.op is Op.BACKWARD and shape.splits(compute.virtual_stage):
            pending.append((stage, now, costs.seconds(replace(compute, op=Op.WEIGHT), shape), waited))
    travelling = [
        _Leg(
            resource=resource,
            head=head,
            seconds=seconds,
            tail=now - head - seconds,
            latency_before=before,
            latency_after=waited - before,
            travels=True,
        )
        for resource, head, seconds, before in begun
    ]
    staying = [
        _Leg(
            resource=stage,
            head=head,
            seconds=seconds,
            tail=0.0,
            latency_before=before,
            latency_after=0.0,
            travels=False,
        )
        for stage, head, seconds, before in pending
    ]
    return (*travelling, *staying)


def _longest(shape: PipelineShape, legs: Sequence[_Leg], resources: Sequence[int | str]) -> _Part:
    """The longest bound by any part of the work of any of some resources."""
    parts = (part for resource in resources for part in _parts(shape, legs, resource))
    return max(parts, key=lambda part: part.seconds, default=_Part(seconds=0.0, work=0.0, latency=0.0))


def _parts(shape: PipelineShape, legs: Sequence[_Leg], resource: int | str) -> Iterator[_Part]:
    """The one-machine bounds of a resource."""
    own = [leg for leg in legs if leg.resource == resource and (leg.seconds or resource not in (TO_CLOUD, TO_EDGE))]
    is_of_the_edge = resource in (EDGE_STAGE, TO_CLOUD, TO_EDGE)
    repeats = shape.num_micro_batches * (shape.slice_size if is_of_the_edge else 1)
    for head in {leg.head for leg in own}:
        for tail in {leg.tail for leg in own}:
            part = [leg for leg in own if leg.head >= head and leg.tail >= tail]
            if part:
                work = repeats * sum(leg.seconds for leg in part)
                turns = 0.0 if is_of_the_edge else _stagger(shape, legs, leaves=all(leg.travels for leg in part))
                first, last = min(part, key=lambda leg: leg.head), min(part, key=lambda leg: leg.tail)
                yield _Part(
                    seconds=first.head + work + last.tail + turns,
                    work=work,
                    latency=first.latency_before + last.latency_after,
                )


def _stagger(shape: PipelineShape, legs: Sequence[_Leg], *, leaves: bool) -> float:
    """Extra seconds, since the domains of a replica enter, and if they do leave, one after another."""
    journey_legs = [leg for leg in legs if leg.travels]
    turns = [leg.seconds for leg in _edge_end(journey_legs)]
    if leaves:
        turns += [leg.seconds for leg in _edge_end(journey_legs[::-1])]
    return (shape.slice_size - 1) * max(turns, default=0.0)


def _edge_end(legs: Sequence[_Leg]) -> Iterator[_Leg]:
    """The legs on the edge and on its link with which a journey begins, or ends if it is given in reverse."""
    if legs[0].resource == EDGE_STAGE:
        yield legs[0]
        if len(legs) > 1 and legs[1].resource in (TO_CLOUD, TO_EDGE):
            yield legs[1]
