"""Play a plan in time: when does each compute run, how long does a step take, where are the bubbles?"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ds_ldt.plan.costs import Costs, touches_edge
from ds_ldt.plan.deadlock import describe_stall
from ds_ldt.plan.instructions import Channel, Compute, Instruction, Op
from ds_ldt.plan.plan import Plan
from ds_ldt.plan.shape import PipelineShape
from ds_ldt.plan.text import schedule_error
from ds_ldt.plan.timeline import Span, Timeline

_EDGE_RANK = 0
"""Of every slice, as `shape.one_slice` counts its ranks."""


def simulate(plan: Plan, costs: Costs) -> Timeline:
    """Return the timeline of a plan, of all ranks.

    Each rank runs its instructions in sequence. Computes take their seconds; loads, sends and reductions take none;
    a receive waits for its message. Sends wait for nobody: messages travel while ranks compute.

    Args:
        plan: The plan; it need not have been validated.
        costs: Seconds of computes and messages.

    Raises:
        ScheduleError: The ranks wait for one another; the text says who for whom.
    """
    return for_all_replicas(simulate_slice(plan, costs), plan.shape)


def simulate_slice(plan: Plan, costs: Costs) -> Timeline:
    """Return the timeline of one slice, with ranks and domains as in `shape.one_slice`: see `simulate`.

    Args:
        plan: See `simulate`.
        costs: See `simulate`.

    Raises:
        ScheduleError: See `simulate`.
    """
    run = _Run(plan=plan, costs=costs)
    run.play()
    return Timeline(num_ranks=len(plan.rows), spans=tuple(run.spans))


def for_all_replicas(timeline: Timeline, shape: PipelineShape) -> Timeline:
    """Return the timeline of all ranks in which every slice runs as one does.

    Args:
        timeline: Of one slice.
        shape: The shape of the whole job.
    """
    if shape.num_replicas == 1:
        return timeline
    spans: list[Span] = []
    for replica in range(shape.num_replicas):
        ranks, by = shape.ranks_of_slice(replica), replica * shape.slice_size
        spans += (
            replace(span, rank=ranks[span.rank], compute=replace(span.compute, domain=span.compute.domain + by))
            for span in timeline.spans
        )
    return Timeline(num_ranks=shape.num_ranks, spans=tuple(spans))


class _Hop(NamedTuple):
    """What a message over a channel takes.

    Attributes:
        latency: Seconds under way.
        transfer: Seconds for which it occupies its link.
        link: Direction of the link: 0 to the cloud, 1 to the edge, None if it crosses none.
    """

    latency: float
    transfer: float
    link: int | None


@dataclass(slots=True, kw_only=True)
class _Run:
    """One simulated run of a slice. Instructions run in the order of time: shared links serve whoever comes first.

    Attributes:
        clocks: Heap of (seconds, rank) of the ranks that can go on.
        hops: For each channel what a message takes.
        lengths: (op, virtual stage) -> seconds of a compute.
        arrivals: For each channel the arrival times of the messages on their way.
        waiting: For each channel the (seconds, rank) that waits for its next message.
        link_free: Seconds from which each direction of the link is free for the next message.
    """

    plan: Plan
    costs: Costs
    spans: list[Span] = field(default_factory=list)
    positions: list[int] = field(init=False)
    clocks: list[tuple[float, int]] = field(init=False)
    hops: dict[Channel, _Hop] = field(default_factory=dict)
    lengths: dict[tuple[Op, int], float] = field(default_factory=dict)
    arrivals: dict[Channel, deque[float]] = field(default_factory=lambda: defaultdict(deque))
    waiting: dict[Channel, tuple[float, int]] = field(default_factory=dict)
    link_free: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def __post_init__(self) -> None:
        ranks = range(len(self.plan.rows))
        self.positions = [0 for _ in ranks]
        self.clocks = [(0.0, rank) for rank in ranks]

    def play(self) -> None:
        """Play until every rank has come to its end."""
        rows, positions, clocks = self.plan.rows, self.positions, self.clocks
        while clocks:
            now, rank = heapq.heappop(clocks)
            while positions[rank] < len(rows[rank]):
                end = self._run(rows[rank][positions[rank]], rank, now)
                if end is None:
                    break
                positions[rank] += 1
                now, rank = heapq.heappushpop(clocks, (end, rank))
        stuck = {rank: at for rank, at in enumerate(positions) if at < len(rows[rank])}
        if stuck:
            rank = min(stuck)
            raise schedule_error(self.plan, describe_stall(self.plan, stuck), rank=rank, position=stuck[rank])

    def _run(self, instruction: Instruction, rank: int, now: float) -> float | None:
        """Run an instruction and return when it ends; None if it waits for a message that has not been sent."""
        channel, compute = instruction.channel, instruction.compute
        if compute is not None:
            end = now + self._seconds(compute)
            self.spans.append(Span(rank=rank, compute=compute, start=now, end=end))
            return end
        if channel is None:
            return now
        if not instruction.kind.is_receive:
            self._send(channel, now)
            return now
        if not self.arrivals[channel]:
            self.waiting[channel] = (now, rank)
            return None
        return max(now, self.arrivals[channel].popleft())

    def _send(self, channel: Channel, now: float) -> None:
        self.arrivals[channel].append(self._arrival(channel, now))
        waiter = self.waiting.pop(channel, None)
        if waiter is not None:
            since, rank = waiter
            self.positions[rank] += 1
            heapq.heappush(self.clocks, (max(since, self.arrivals[channel].popleft()), rank))

    def _arrival(self, channel: Channel, now: float) -> float:
        hop = self.hops.get(channel)
        if hop is None:
            hop = self.hops[channel] = self._hop(channel)
        if hop.link is None:
            return now + hop.latency
        self.link_free[hop.link] = max(now, self.link_free[hop.link]) + hop.transfer
        return self.link_free[hop.link] + hop.latency

    def _hop(self, channel: Channel) -> _Hop:
        shape, boundary = self.plan.shape, channel.boundary
        link = int(channel.destination == _EDGE_RANK) if touches_edge(boundary, shape) else None
        return _Hop(self.costs.latency_seconds(boundary, shape), self.costs.transfer_seconds(boundary), link)

    def _seconds(self, compute: Compute) -> float:
        what = compute.op, compute.virtual_stage
        found = self.lengths.get(what)
        if found is None:
            found = self.lengths[what] = self.costs.seconds(compute, self.plan.shape)
        return found
