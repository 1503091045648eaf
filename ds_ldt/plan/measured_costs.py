"""What the ranks measured in the first steps, and the costs that it comes to.

Readings are whole numbers (nanoseconds, bytes), the same ones on every rank once they are summed. All here is
arithmetic on them, so every rank comes to the same costs, and from those to the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ds_ldt.config.rules import EDGE_STAGE
from ds_ldt.plan.bound import lower_bound
from ds_ldt.plan.cost_file import Known
from ds_ldt.plan.costs import Cell, Costs, touches_edge
from ds_ldt.plan.instructions import Op
from ds_ldt.plan.plan import Plan
from ds_ldt.plan.shape import PipelineShape
from ds_ldt.plan.simulate import simulate_slice

LATENCY_MARGIN = 1.5
"""Plans are made for a latency that many times as long as the one measured.

In the simulator (P 2-4, D 1 and 2, M = 32, L 0.5-4 t) plans without a margin fall to 0.92 of the bound on a link 1.5
times as slow, plans with this one stay at 1.00, and at 0.97 or more where each message takes up to half as long again.
They hold 9.2 micro-batches in flight in place of 7.3, and lose nothing on a link that is faster than measured.
"""

_PERCENTILE = 0.9
_IN_A_ROW = 3
_DIGITS = 3
_NANO = 1e-9
_OP_NAMES = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.WEIGHT: "weight gradients"}


class Duration(NamedTuple):
    """Names a reading: nanoseconds of a compute on one rank, the median over its micro-batches and domains."""

    rank: int
    virtual_stage: int
    op: Op


class Size(NamedTuple):
    """Names a reading: bytes of the largest message over a boundary in the domains of one edge replica."""

    rank: int
    boundary: int


@dataclass(frozen=True, slots=True)
class Kept:
    """Names a reading: bytes that a rank keeps of the largest micro-batch in flight on a virtual stage of it."""

    rank: int
    virtual_stage: int


Reading = Duration | Size | Kept

Readings = Mapping[Reading, int]
"""What was measured. Whatever is missing or not above 0 was not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """How long messages took between the leaders of the sites, in nanoseconds. What is not above 0 was not measured.

    Attributes:
        round_trips: Of a message of next to no bytes, there and back.
        arrivals: For each direction, when messages arrived that were sent one behind the other, by the clock of their
            receiver.
        num_bytes: Bytes of each of the latter.
    """

    round_trips: Sequence[int]
    arrivals: tuple[Sequence[int], Sequence[int]]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What the measurement came to.

    Attributes:
        known: What to plan with. Its latency has the margin in it.
        one_way: Seconds of the measured one-way latency, without the margin; None if it was not measured.
        kept: What could not be measured, for which the hints still stand.
    """

    known: Known
    one_way: float | None
    kept: tuple[str, ...]


def asked_of(shape: PipelineShape) -> tuple[Reading, ...]:
    """Return the readings that the ranks of a shape take, in the same sequence everywhere.

    Args:
        shape: The shape.
    """
    ranks = range(shape.num_ranks)
    durations = (
        Duration(rank, virtual_stage, op)
        for rank in ranks
        for virtual_stage in shape.virtual_stages_of(shape.stage_of(rank))
        for op in _ops_of(shape, virtual_stage)
    )
    sizes = (
        Size(rank, boundary)
        for rank in ranks
        if shape.stage_of(rank) == EDGE_STAGE
        for boundary in range(shape.num_boundaries)
        if touches_edge(boundary, shape)
    )
    kept = (Kept(rank, stage) for rank in ranks for stage in shape.virtual_stages_of(shape.stage_of(rank)))
    return *durations, *sizes, *kept


def find(shape: PipelineShape, readings: Readings, times: LinkTimes, *, hints: Known) -> Findings:
    """Return what to plan with. All numbers are rounded to three digits.

    A virtual stage costs what it costs on the slowest of its ranks, for the others wait for that one.

    Args:
        shape: The shape that was measured.
        readings: Of all ranks.
        times: Between the leaders of the sites.
        hints: What was known before.
    """
    kept: list[str] = []
    forward, backward, weight_share = _cells(shape, readings, hints.costs, kept)
    one_way, bandwidth, sizes = _one_way(times.round_trips), _bandwidth(times), _sizes(readings)
    link = {"latency": one_way, "bandwidth": bandwidth, "bytes of a message": sizes or None}
    kept += [name for name, found in link.items() if found is None]
    costs = replace(hints.costs, forward=forward, backward=backward, weight_share=weight_share)
    if one_way is not None:
        costs = replace(costs, latency=_rounded(one_way * LATENCY_MARGIN))
    if bandwidth is not None:
        costs = replace(costs, bandwidth=bandwidth)
    if costs.hop_bytes or len(set(sizes.values())) > 1:
        by_boundary = {**costs.hop_bytes, **sizes}
        costs = replace(costs, hop_bytes=by_boundary, message_bytes=max(by_boundary.values()))
    elif sizes:
        costs = replace(costs, message_bytes=max(sizes.values()))
    held = _held(shape, readings)
    if held is None:
        kept.append("bytes kept of a micro-batch")
    known = replace(hints, costs=costs, measured=True, activation_bytes=held or hints.activation_bytes)
    return Findings(known=known, one_way=one_way, kept=tuple(kept))


def describe(findings: Findings, *, before: Plan, after: Plan) -> str:
    """Return what was measured and what came of it, in one line.

    Args:
        findings: What was measured.
        before: The plan of the measured steps.
        after: The plan of those that follow.
    """
    costs, shape = findings.known.costs, after.shape
    forward = ", ".join(f"{chunk}.{stage} {costs.forward[chunk, stage] * 1e3:.3g}" for chunk, stage in costs.forward)
    backward = ", ".join(f"{chunk}.{stage} {costs.backward[chunk, stage] * 1e3:.3g}" for chunk, stage in costs.forward)
    link = "" if findings.one_way is None else f"{findings.one_way * 1e3:.3g} ms one way, "
    rate = "unlimited" if costs.bandwidth is None else f"{costs.bandwidth * 8e-6:.3g} Mbit/s"
    held = findings.known.activation_bytes or {}
    sizes = ", ".join(f"{chunk}.{stage} {size * 1e-6:.3g}" for (chunk, stage), size in held.items())
    keeps = f"; of a micro-batch in flight {sizes} MB are kept" if held else ""
    kept = f"; not measured, as configured: {', '.join(findings.kept)}" if findings.kept else ""
    return (
        f"measured: forward {forward} ms, backward {backward} ms (by chunk.stage); {link}planned for "
        f"{costs.latency * 1e3:.3g} ms; {rate}, messages of at most {costs.message_bytes / 1e6:.3g} MB{keeps}{kept}. "
        f"Schedule {before.policy} -> {after.policy}: simulated {_efficiency(before, costs):.3f} -> "
        f"{_efficiency(after, costs):.3f} of the bound, at most {_peak(before, shape)} -> {_peak(after, shape)} "
        "micro-batches of a domain in flight on a rank"
    )


def _ops_of(shape: PipelineShape, virtual_stage: int) -> Iterator[Op]:
    """What is done for a virtual stage and takes time."""
    yield Op.FORWARD
    if shape.has_gradient(virtual_stage):
        yield Op.BACKWARD
    if shape.splits(virtual_stage):
        yield Op.WEIGHT


def _cells(
    shape: PipelineShape, readings: Readings, hints: Costs, kept: list[str]
) -> tuple[dict[Cell, float], dict[Cell, float], float]:
    """Seconds of a forward and of a whole backward of each virtual stage; the part of split ones for the weights."""
    forward: dict[Cell, float] = {}
    backward: dict[Cell, float] = {}
    split = {Op.BACKWARD: 0.0, Op.WEIGHT: 0.0}
    for virtual_stage, cell in enumerate(zip(shape.chunks, shape.stages, strict=True)):
        found = {op: _slowest(shape, readings, virtual_stage, op) for op in _ops_of(shape, virtual_stage)}
        kept += [f"{_OP_NAMES[op]} of {cell[0]}.{cell[1]}" for op, seconds in found.items() if seconds is None]
        forward[cell] = found.pop(Op.FORWARD) or hints.forward[cell]
        halves = {op: seconds for op, seconds in found.items() if seconds is not None}
        known = halves and len(halves) == len(found)
        backward[cell] = _rounded(sum(halves.values()) if known else forward[cell] * hints.backward_ratio)
        if known and Op.WEIGHT in halves:
            split = {op: total + halves[op] for op, total in split.items()}
    whole = sum(split.values())
    return forward, backward, _rounded(split[Op.WEIGHT] / whole) if whole else hints.weight_share


def _slowest(shape: PipelineShape, readings: Readings, virtual_stage: int, op: Op) -> float | None:
    nanoseconds = max(readings.get(Duration(rank, virtual_stage, op), 0) for rank in range(shape.num_ranks))
    return _rounded(nanoseconds * _NANO) if nanoseconds > 0 else None


def _sizes(readings: Readings) -> dict[int, int]:
    """Boundary -> bytes of its largest message, of those over the link."""
    sizes: dict[int, int] = {}
    for name, num_bytes in readings.items():
        if isinstance(name, Size) and num_bytes > 0:
            sizes[name.boundary] = max(num_bytes, sizes.get(name.boundary, 0))
    return sizes


def _held(shape: PipelineShape, readings: Readings) -> dict[Cell, float] | None:
    """Bytes kept of a micro-batch on each virtual stage, on the rank that keeps most; None if one is not known."""
    found: dict[Cell, float] = {}
    for virtual_stage, cell in enumerate(zip(shape.chunks, shape.stages, strict=True)):
        sizes = [
            size for name, size in readings.items() if isinstance(name, Kept) and name.virtual_stage == virtual_stage
        ]
        found[cell] = _rounded(max(sizes, default=0))
    return found if all(size > 0 for size in found.values()) else None


def _one_way(round_trips: Sequence[int]) -> float | None:
    """Half of a high percentile: too high a latency costs memory only, too low a one costs time."""
    times = sorted(time for time in round_trips if time > 0)
    if not times:
        return None
    return _rounded(times[math.ceil(_PERCENTILE * len(times)) - 1] * _NANO / 2)


def _bandwidth(times: LinkTimes) -> float | None:
    """Of the slower direction, from the fastest messages in a row.

    That is what one connection carries, which on a long way may be less than the link has. One gap alone would say too
    much: a receiver that comes late finds two messages at once.
    """
    fastest = [
        min((later - sooner for sooner, later in zip(row, row[_IN_A_ROW:], strict=False) if sooner > 0), default=0)
        for row in times.arrivals
    ]
    if min(fastest) <= 0:
        return None
    return _rounded(_IN_A_ROW * times.num_bytes / (max(fastest) * _NANO))


def _rounded(number: float) -> float:
    return float(f"{number:.{_DIGITS}g}")


def _efficiency(plan: Plan, costs: Costs) -> float:
    makespan = simulate_slice(plan, costs).makespan
    return lower_bound(plan.shape, costs) / makespan if makespan else 1.0


def _peak(plan: Plan, shape: PipelineShape) -> int:
    return max(map(plan.peak_in_flight, shape.ranks_of_slice(0)))
