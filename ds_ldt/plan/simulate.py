"""Play a plan in time: when does each compute run, how long does a step take, where are the bubbles?"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass, field

from ds_ldt.plan.costs import Costs, touches_edge
from ds_ldt.plan.instructions import Channel, Instruction
from ds_ldt.plan.plan import Plan
from ds_ldt.plan.render import schedule_error
from ds_ldt.plan.replay import describe_stall
from ds_ldt.plan.shape import EDGE_STAGE
from ds_ldt.plan.timeline import Span, Timeline


def simulate(plan: Plan, costs: Costs) -> Timeline:
    """Return the timeline of a plan.

    Each rank runs its instructions in sequence. Computes take their seconds; loads, sends and reductions take none;
    a receive waits for its message. Sends wait for nobody: messages travel while ranks compute.

    Args:
        plan: The plan; it need not have been validated.
        costs: Seconds of computes and messages.

    Raises:
        ScheduleError: The ranks wait for one another; the text says who for whom.
    """
    run = _Run(plan=plan, costs=costs)
    run.play()
    return Timeline(num_ranks=len(plan.instructions), spans=tuple(run.spans))


@dataclass(slots=True, kw_only=True)
class _Run:
    """One simulated run. Instructions run in the order of time, so that shared links serve whoever comes first.

    Attributes:
        clocks: Heap of (seconds, rank) of the ranks that can go on.
        arrivals: For each channel the arrival times of the messages on their way.
        waiting: For each channel the (seconds, rank) that waits for its next message.
        link_free: (edge rank, outbound?) -> seconds from which the link is free for the next message.
    """

    plan: Plan
    costs: Costs
    spans: list[Span] = field(default_factory=list)
    positions: list[int] = field(init=False)
    clocks: list[tuple[float, int]] = field(init=False)
    arrivals: dict[Channel, deque[float]] = field(default_factory=lambda: defaultdict(deque))
    waiting: dict[Channel, tuple[float, int]] = field(default_factory=dict)
    link_free: dict[tuple[int, bool], float] = field(default_factory=lambda: defaultdict(float))

    def __post_init__(self) -> None:
        ranks = range(len(self.plan.instructions))
        self.positions = [0 for _ in ranks]
        self.clocks = [(0.0, rank) for rank in ranks]

    def play(self) -> None:
        """Play until every rank has come to its end."""
        while self.clocks:
            now, rank = heapq.heappop(self.clocks)
            row = self.plan.instructions[rank]
            if self.positions[rank] < len(row):
                self._run(row[self.positions[rank]], rank, now)
        rows = self.plan.instructions
        stuck = {rank: at for rank, at in enumerate(self.positions) if at < len(rows[rank])}
        if stuck:
            rank = min(stuck)
            raise schedule_error(self.plan, describe_stall(self.plan, stuck), rank=rank, position=stuck[rank])

    def _run(self, instruction: Instruction, rank: int, now: float) -> None:
        channel, compute = instruction.channel, instruction.compute
        if channel is not None and instruction.kind.is_receive:
            if not self.arrivals[channel]:
                self.waiting[channel] = (now, rank)
                return
            now = max(now, self.arrivals[channel].popleft())
        elif channel is not None:
            self._send(channel, now)
        elif compute is not None:
            end = now + self.costs.seconds(compute, self.plan.shape)
            self.spans.append(Span(rank=rank, compute=compute, start=now, end=end))
            now = end
        self._advance(rank, now)

    def _advance(self, rank: int, now: float) -> None:
        self.positions[rank] += 1
        heapq.heappush(self.clocks, (now, rank))

    def _send(self, channel: Channel, now: float) -> None:
        self.arrivals[channel].append(self._arrival(channel, now))
        waiter = self.waiting.pop(channel, None)
        if waiter is not None:
            since, rank = waiter
            self._advance(rank, max(since, self.arrivals[channel].popleft()))

    def _arrival(self, channel: Channel, now: float) -> float:
        shape = self.plan.shape
        latency = self.costs.latency_seconds(channel.boundary, shape)
        if not touches_edge(channel.boundary, shape):
            return now + latency
        outbound = shape.stage_of(channel.source) == EDGE_STAGE
        link = (channel.source if outbound else channel.destination, outbound)
        self.link_free[link] = max(now, self.link_free[link]) + self.costs.transfer_seconds(channel.boundary)
        return self.link_free[link] + latency
