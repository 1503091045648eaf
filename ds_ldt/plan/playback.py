"""Play one replica forward in time, in whole ticks: either along given orders, or finding them as it goes.

Both follow the rules of `ds_ldt.plan.simulate`: a worker does one job at a time, a message occupies its direction of
the replica's link, then travels, and nothing else takes time. They are what a planner calls hundreds of times, so
they know jobs by number only.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ds_ldt.plan.instructions import Op
from ds_ldt.plan.machine import NO_LINK, NOWHERE, JobOrders, Machine

_JOB_BITS = 28
_CODE_BITS = 48
_JOB_MASK = (1 << _JOB_BITS) - 1


class _Playback:
    """What both ways of playing share: the clock, the link and the workers.

    An event is one whole number, so that the heap compares fast: from the highest bits down the time, the worker, the
    job, and 1 if the job ends or 0 if it becomes ready. Of simultaneous messages that of the earlier worker goes
    first, as in `simulate`.
    """

    __slots__ = (
        "busy", "domains", "events", "kinds", "link_free", "now", "places", "started", "ticks", "touched",
        "worker_table",
    )  # fmt: skip

    def __init__(self, machine: Machine) -> None:
        self.kinds = machine.kinds
        self.ticks = [kind.ticks for kind in machine.kinds]
        self.domains = machine.num_domains
        self.places = machine.shape.num_micro_batches * machine.num_domains
        self.worker_table = [
            [machine.worker_of(kind.stage, domain) for domain in range(self.domains)] for kind in machine.kinds
        ]
        self.busy = [False] * machine.num_workers
        self.started: JobOrders = [[] for _ in range(machine.num_workers)]
        self.link_free = [0, 0]
        self.events: list[int] = []
        self.touched: set[int] = set()
        self.now = 0

    def play(self) -> int:
        """Play until nothing is left to do; return the ticks at which the last job ended."""
        events, touched, pop = self.events, self.touched, heapq.heappop
        self.touched.update(range(len(self.busy)))
        for job in range(self.places):  # the forwards of the head
            self.ready(job)
        self._start_touched()
        last = 0
        while events:
            now = self.now = events[0] >> _CODE_BITS
            while events and events[0] >> _CODE_BITS == now:
                code = pop(events) & _JOB_MASK
                if code & 1:
                    self._finish(code >> 1)
                    last = now
                else:
                    self.ready(code >> 1)
            if touched:
                self._start_touched()
        return last

    def _start_touched(self) -> None:
        busy, touched = self.busy, self.touched
        for worker in sorted(touched) if len(touched) > 1 else touched:
            if not busy[worker]:
                job = self.choose(worker)
                if job != NOWHERE:
                    busy[worker] = True
                    self.started[worker].append(job)
                    end = self.now + self.ticks[job // self.places]
                    heapq.heappush(self.events, end << _CODE_BITS | worker << _JOB_BITS | job << 1 | 1)
        touched.clear()

    def _finish(self, job: int) -> None:
        number, place = divmod(job, self.places)
        kind = self.kinds[number]
        worker = self.worker_table[number][place % self.domains]
        self.busy[worker] = False
        self.touched.add(worker)
        self.done(worker, number, place)
        if kind.feeds != NOWHERE:
            at = self.now
            if kind.link != NO_LINK:
                at = max(at, self.link_free[kind.link]) + kind.transfer
                self.link_free[kind.link] = at
            heapq.heappush(self.events, (at + kind.latency) << _CODE_BITS | (kind.feeds * self.places + place) << 1)
        if kind.releases != NOWHERE:
            self.ready(kind.releases * self.places + place)

    def ready(self, job: int) -> None:
        """Take note that a job has what it needs."""
        raise NotImplementedError

    def done(self, worker: int, number: int, place: int) -> None:
        """Take note that a job has ended."""

    def choose(self, worker: int) -> int:
        """Return the job that an idle worker starts now; NOWHERE if it starts none."""
        raise NotImplementedError


class Follow(_Playback):
    """Each worker runs the jobs of its row in sequence."""

    __slots__ = ("at", "is_ready", "rows")

    def __init__(self, machine: Machine, rows: JobOrders) -> None:
        super().__init__(machine)
        self.rows = rows
        self.at = [0] * len(rows)
        self.is_ready = bytearray(machine.num_jobs)

    def ready(self, job: int) -> None:
        """Take note that a job has what it needs."""
        self.is_ready[job] = 1
        number, place = divmod(job, self.places)
        self.touched.add(self.worker_table[number][place % self.domains])

    def choose(self, worker: int) -> int:
        """Return the next job of the row if it is ready."""
        at, row = self.at[worker], self.rows[worker]
        if at == len(row) or not self.is_ready[row[at]]:
            return NOWHERE
        self.at[worker] = at + 1
        return row[at]

    @property
    def stuck(self) -> bool:
        """Whether the rows were not played to their end: they wait for one another."""
        return any(at < len(row) for at, row in zip(self.at, self.rows, strict=True))


class Choose(_Playback):
    """Each worker that is free starts the best job that is ready, and never waits on purpose.

    Weight gradients are for what would be a bubble otherwise: they start only if nothing else may.

    A job is queued under a key that says how good it is (the least goes first) and which job it is:

        key = ((rank of its kind * turns + turn) * kinds + (S-1 - virtual stage, op)) * M*K + (micro-batch, domain)

    Args:
        machine: What to play.
        ranks: Rank of each kind, by number.
        turns: For each place, micro_batch * K + domain, when its turn comes among jobs of one rank, from 0 on.
        caps: For each physical stage, the most micro-batches of a domain in flight; entering jobs wait for room. One
            is in flight as long as its weight gradients are owed, so what is owed is bounded too.
    """

    __slots__ = (
        "caps", "entering", "entry_kind", "in_flight", "keys", "least_entering", "owed", "remaining", "turns",
        "waiting",
    )  # fmt: skip

    def __init__(self, machine: Machine, *, ranks: Sequence[int], turns: Sequence[int], caps: Sequence[int]) -> None:
        super().__init__(machine)
        order = sorted(machine.kinds, key=lambda kind: (-kind.virtual_stage, kind.number))
        self.entry_kind = [kind.number for kind in order]
        step, num_turns = len(order) * self.places, 1 + max(turns)
        self.turns = [turn * step for turn in turns]
        self.keys = [0] * len(order)
        for at, kind in enumerate(order):
            self.keys[kind.number] = ranks[kind.number] * num_turns * step + at * self.places
        workers = range(machine.num_workers)
        self.waiting: list[list[int]] = [[] for _ in workers]
        self.owed: list[list[int]] = [[] for _ in workers]
        self.entering: list[dict[int, list[int]]] = [{} for _ in workers]
        self.least_entering = [0 for _ in workers]
        for kind in machine.kinds:
            for domain, worker in enumerate(self.worker_table[kind.number]):
                if kind.enters:
                    self.entering[worker][domain] = []
                    self.least_entering[worker] = self.keys[kind.number]
        self.in_flight = [[0] * self.domains for _ in workers]
        self.caps = [caps[machine.stage_of(worker)] for worker in workers]
        per_stage = [0] * machine.shape.num_stages
        for kind in machine.kinds:
            per_stage[kind.stage] += 1
        self.remaining = [[per_stage[machine.stage_of(worker)]] * self.places for worker in workers]

    def ready(self, job: int) -> None:
        """Queue the job on its worker."""
        number, place = divmod(job, self.places)
        domain = place % self.domains
        worker = self.worker_table[number][domain]
        kind = self.kinds[number]
        if kind.op is Op.WEIGHT:
            queue = self.owed[worker]
        else:
            queue = self.entering[worker][domain] if kind.enters else self.waiting[worker]
        heapq.heappush(queue, self.keys[number] + self.turns[place] + place)
        self.touched.add(worker)

    def choose(self, worker: int) -> int:
        """Return the job with the least key, of those that the cap does not hold back; else what is owed."""
        best = self.waiting[worker]
        key = best[0] if best else -1
        in_flight = self.in_flight[worker]
        if not 0 <= key < self.least_entering[worker]:
            cap = self.caps[worker]
            for domain, queue in self.entering[worker].items():
                if queue and in_flight[domain] < cap and (key < 0 or queue[0] < key):
                    best, key = queue, queue[0]
            if key < 0:
                if not self.owed[worker]:
                    return NOWHERE
                best = self.owed[worker]
                key = best[0]
        heapq.heappop(best)
        rest, place = divmod(key, self.places)
        number = self.entry_kind[rest % len(self.keys)]
        if self.kinds[number].enters:
            in_flight[place % self.domains] += 1
        return number * self.places + place

    def done(self, worker: int, number: int, place: int) -> None:
        """Make room for another micro-batch when the last job of one has ended."""
        remaining = self.remaining[worker]
        remaining[place] -= 1
        if not remaining[place]:
            self.in_flight[worker][place % self.domains] -= 1
