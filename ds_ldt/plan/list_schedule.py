"""Deterministic list scheduling: play the pipeline forward in time and write down what each rank starts.

Whenever a rank is free it starts the best compute that is ready, by priority, and never waits on purpose. The
sequence that each rank started is its order. Orders made so are free of deadlock: the played run itself is a
schedule in which every message was sent before it was needed.

Memory is bounded by a cap on the micro-batches that a rank has in flight for a domain. Only the forward on the
rank's *first* virtual stage is held back by it. That cannot block the pipeline: of all unfinished micro-batches of a
domain, the one that has come furthest is held back by nobody, since whoever filled the cap in front of it would have
come further still.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ds_ldt.plan.costs import Costs
from ds_ldt.plan.dependencies import backward_of, incoming_boundary, outgoing_boundary, receiver
from ds_ldt.plan.instructions import Compute, Op, Orders
from ds_ldt.plan.shape import EDGE_STAGE, PipelineShape

Priority = Callable[[Compute, PipelineShape], tuple[int, ...]]
"""A total order on the computes of one rank; the smallest goes first."""


def pipeline_priority(compute: Compute, shape: PipelineShape) -> tuple[int, ...]:
    """Rank a compute as the link-aware rule does.

    Edge: tail backward (it is ready only right after its tail forward) > tail forward > middle forward > other
    backward > head forward; ties by micro-batch, later virtual stage, domain. What the cloud waits for goes first,
    and new micro-batches enter last.
    Cloud: forward > backward, the later virtual stage first in both; ties by micro-batch, domain. A rank that does
    not take backwards first keeps the edge fed while gradients travel; the cap bounds what that costs in memory.
    """
    stage, is_forward = compute.virtual_stage, compute.op is Op.FORWARD
    if shape.stages[stage] != EDGE_STAGE:
        return (0 if is_forward else 1, -stage, compute.micro_batch, compute.domain)
    tail = shape.num_boundaries
    ranked = {(Op.BACKWARD, tail): 0, (Op.FORWARD, tail): 1, (Op.FORWARD, 0): 4}
    return (ranked.get((compute.op, stage), 2 if is_forward else 3), compute.micro_batch, -stage, compute.domain)


def list_orders(
    shape: PipelineShape,
    costs: Costs,
    *,
    training: bool,
    caps: Sequence[int],
    priority: Priority = pipeline_priority,
) -> Orders:
    """Return the orders that list scheduling finds.

    Args:
        shape: The shape to schedule.
        costs: What the played run costs. Use whole numbers where all machines must agree on the result.
        training: Whether to schedule backwards.
        caps: For each physical stage, the most micro-batches of one domain in flight on a rank; at least 1 each.
        priority: Which ready compute goes first.
    """
    run = _Run(shape=shape, costs=costs, training=training, caps=caps, priority=priority)
    run.play()
    return {rank: tuple(started) for rank, started in enumerate(run.started)}


@dataclass(slots=True, kw_only=True)
class _Run:
    """One played run.

    Attributes:
        events: Heap of (time, number, rank, finished, ready): the rank ends `finished`, or `ready` becomes ready.
        ready: For each rank, a heap of (priority, compute) without the forwards that a cap may hold back.
        entering: For each rank and domain, a heap of (priority, compute) of the forwards that a cap may hold back.
    """

    shape: PipelineShape
    costs: Costs
    training: bool
    caps: Sequence[int]
    priority: Priority
    started: list[list[Compute]] = field(init=False)
    busy: list[bool] = field(init=False)
    events: list[tuple[float, int, int, Compute | None, Compute | None]] = field(default_factory=list)
    num_events: int = 0
    ready: list[list[tuple[tuple[int, ...], Compute]]] = field(init=False)
    entering: list[dict[int, list[tuple[tuple[int, ...], Compute]]]] = field(init=False)
    in_flight: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    first_stage: list[int] = field(init=False)
    computes_per_micro_batch: list[int] = field(init=False)
    remaining: dict[tuple[int, int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ranks = range(self.shape.num_ranks)
        owned = [self.shape.virtual_stages_of(self.shape.stage_of(rank)) for rank in ranks]
        self.first_stage = [stages[0] for stages in owned]
        self.computes_per_micro_batch = [len(stages) * (2 if self.training else 1) for stages in owned]
        self.started = [[] for _ in ranks]
        self.busy = [False for _ in ranks]
        self.ready = [[] for _ in ranks]
        self.entering = [{domain: [] for domain in self.shape.domains_of(rank)} for rank in ranks]

    def play(self) -> None:
        """Play until nothing is left to do."""
        for domain in range(self.shape.num_domains):
            for micro_batch in range(self.shape.num_micro_batches):
                self._make_ready(Compute(op=Op.FORWARD, virtual_stage=0, micro_batch=micro_batch, domain=domain))
        for rank in range(self.shape.num_replicas):
            self._start_if_idle(rank, 0.0)
        while self.events:
            now = self.events[0][0]
            touched = set()
            while self.events and self.events[0][0] == now:
                _, _, rank, finished, ready = heapq.heappop(self.events)
                touched.add(rank)
                if finished is not None:
                    self._finish(rank, finished, now)
                if ready is not None:
                    self._make_ready(ready)
            for rank in sorted(touched):
                self._start_if_idle(rank, now)

    def _push(self, time: float, rank: int, *, finished: Compute | None = None, ready: Compute | None = None) -> None:
        heapq.heappush(self.events, (time, self.num_events, rank, finished, ready))
        self.num_events += 1

    def _make_ready(self, compute: Compute) -> None:
        rank = self.shape.rank_of(compute.virtual_stage, compute.domain)
        entry = (self.priority(compute, self.shape), compute)
        capped = compute.op is Op.FORWARD and compute.virtual_stage == self.first_stage[rank]
        heapq.heappush(self.entering[rank][compute.domain] if capped else self.ready[rank], entry)

    def _start_if_idle(self, rank: int, now: float) -> None:
        if self.busy[rank]:
            return
        queue = self._best_queue(rank)
        if queue is None:
            return
        _, compute = heapq.heappop(queue)
        if queue is not self.ready[rank]:
            self.in_flight[rank, compute.domain] += 1
        self.started[rank].append(compute)
        self.busy[rank] = True
        self._push(now + self.costs.seconds(compute, self.shape), rank, finished=compute)

    def _best_queue(self, rank: int) -> list[tuple[tuple[int, ...], Compute]] | None:
        cap = self.caps[self.shape.stage_of(rank)]
        queues = [queue for domain, queue in self.entering[rank].items() if self.in_flight[rank, domain] < cap]
        return min((queue for queue in (self.ready[rank], *queues) if queue), key=lambda queue: queue[0], default=None)

    def _finish(self, rank: int, compute: Compute, now: float) -> None:
        self.busy[rank] = False
        key = (rank, compute.domain, compute.micro_batch)
        self.remaining[key] = self.remaining.get(key, self.computes_per_micro_batch[rank]) - 1
        if not self.remaining[key]:
            self.in_flight[rank, compute.domain] -= 1
        waiting, boundary = receiver(compute, self.shape), outgoing_boundary(compute, self.shape)
        if waiting is not None and boundary is not None:
            peer = self.shape.rank_of(waiting.virtual_stage, waiting.domain)
            self._push(now + self.costs.hop_seconds(boundary, self.shape), peer, ready=waiting)
        if self.training and compute.op is Op.FORWARD:
            backward = backward_of(compute)
            if incoming_boundary(backward, self.shape) is None:
                self._make_ready(backward)
