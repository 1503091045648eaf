"""The pipeline of one edge replica as tables of whole numbers: what makes planning fast and equal on every machine.

Replicas share nothing, so one of them with its K domains stands for all. A *job* is one compute of it, and its number
says what it is:

    job = (kind * M + micro_batch) * K + domain         kind = op * S + virtual_stage, op 0 forward, 1 backward;
                                                        then the weight gradients of the virtual stages that split

Times are whole numbers of ticks, so that equal times are equal, and the same order comes out everywhere.
Workers are numbered like the ranks of a job with E = 1: the edge, then domain by domain of each cloud stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ds_ldt.config.rules import EDGE_STAGE
from ds_ldt.plan.costs import Costs, touches_edge
from ds_ldt.plan.dependencies import incoming_boundary, outgoing_boundary, passes_of, receiver
from ds_ldt.plan.instructions import Compute, Op, Orders
from ds_ldt.plan.shape import PipelineShape

TICKS_PER_SECOND = 10**9
NOWHERE = -1
NO_LINK = -1
OUTBOUND, INBOUND = 0, 1

JobOrders = list[list[int]]
"""Worker -> the jobs it runs, in sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What the jobs of one op and virtual stage have in common.

    Attributes:
        number: See the module's text.
        op: Forward, backward or weight gradient.
        virtual_stage: Index of the virtual stage.
        stage: Physical stage that runs it.
        ticks: How long one takes.
        enters: Whether it is the forward on the first virtual stage of its stage, which the cap may hold back.
        feeds: Number of the kind that waits for its message; NOWHERE if it sends none.
        link: The direction of the link its message takes (OUTBOUND, INBOUND); NO_LINK inside the cloud.
        transfer: Ticks for which the message occupies the link.
        latency: Ticks that the message travels after that.
        releases: Number of the kind that becomes ready on the same worker at its end; NOWHERE if none does.
    """

    number: int
    op: Op
    virtual_stage: int
    stage: int
    ticks: int
    enters: bool
    feeds: int
    link: int
    transfer: int
    latency: int
    releases: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One edge replica with its K domains, for a shape and its costs.

    Attributes:
        shape: The shape, of all replicas.
        training: Whether backwards run.
        kinds: The kinds of jobs, by number.
        num_domains: K.
        num_jobs: Jobs of the replica.
    """

    shape: PipelineShape
    training: bool
    kinds: tuple[Kind, ...]
    num_domains: int = field(init=False)
    num_jobs: int = field(init=False)
    _numbers: dict[tuple[Op, int], int] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Count once."""
        object.__setattr__(self, "num_domains", self.shape.slice_size)
        numbers = {(kind.op, kind.virtual_stage): kind.number for kind in self.kinds}
        object.__setattr__(self, "_numbers", numbers)
        object.__setattr__(self, "num_jobs", len(self.kinds) * self.shape.num_micro_batches * self.shape.slice_size)

    @classmethod
    def build(cls, shape: PipelineShape, costs: Costs, *, training: bool) -> Machine:
        """Return the machine of a shape.

        Args:
            shape: The shape.
            costs: Seconds of computes and messages; they are rounded to ticks.
            training: Whether backwards run.
        """
        passes = tuple(passes_of(shape, training=training))
        numbers = {each: number for number, each in enumerate(passes)}
        kinds = tuple(_kind(shape, costs, op, stage, numbers) for op, stage in passes)
        return cls(shape=shape, training=training, kinds=kinds)

    @property
    def num_workers(self) -> int:
        """The edge and (P-1)*K cloud workers."""
        return 1 + (self.shape.num_stages - 1) * self.num_domains

    def worker_of(self, stage: int, domain: int) -> int:
        """Return the worker that runs a physical stage for a domain 0..K-1."""
        return 0 if stage == EDGE_STAGE else 1 + (stage - 1) * self.num_domains + domain

    def stage_of(self, worker: int) -> int:
        """Return the physical stage of a worker."""
        return 0 if worker == 0 else 1 + (worker - 1) // self.num_domains

    def job(self, compute: Compute) -> int:
        """Return the number of a compute; its domain is taken modulo K."""
        kind = self._numbers[compute.op, compute.virtual_stage]
        index = kind * self.shape.num_micro_batches + compute.micro_batch
        return index * self.num_domains + compute.domain % self.num_domains

    def jobs_of(self, orders: Orders) -> JobOrders:
        """Return the orders of the first replica as jobs."""
        shape = self.shape
        rows: JobOrders = [[] for _ in range(self.num_workers)]
        for rank, order in orders.items():
            if shape.domains_of(rank)[0] < self.num_domains:
                worker = self.worker_of(shape.stage_of(rank), shape.domains_of(rank)[0])
                rows[worker] = [self.job(compute) for compute in order]
        return rows

    def orders_of(self, rows: JobOrders) -> Orders:
        """Return the orders of all ranks: each replica does what the first one does, for its own domains."""
        shape, count = self.shape, self.num_domains
        orders: Orders = {}
        for rank in range(shape.num_ranks):
            first = shape.domains_of(rank)[0]
            base = first - first % count
            worker = self.worker_of(shape.stage_of(rank), first % count)
            orders[rank] = tuple(self._compute(job, base) for job in rows[worker])
        return orders

    def _compute(self, job: int, base: int) -> Compute:
        index, domain = divmod(job, self.num_domains)
        number, micro_batch = divmod(index, self.shape.num_micro_batches)
        kind = self.kinds[number]
        return Compute(op=kind.op, virtual_stage=kind.virtual_stage, micro_batch=micro_batch, domain=base + domain)

    def peaks(self, rows: JobOrders) -> tuple[int, ...]:
        """Return for each physical stage the most micro-batches of one domain in flight on a worker."""
        peaks = [0] * self.shape.num_stages
        for worker, row in enumerate(rows):
            stage = self.stage_of(worker)
            peaks[stage] = max(peaks[stage], self._peak(row))
        return tuple(peaks)

    def _peak(self, row: Sequence[int]) -> int:
        places = self.shape.num_micro_batches * self.num_domains
        last = {job % places: at for at, job in enumerate(row)}
        in_flight, begun, most = [0] * self.num_domains, bytearray(places), 0
        for at, job in enumerate(row):
            place = job % places
            domain = place % self.num_domains
            if not begun[place]:
                begun[place] = 1
                in_flight[domain] += 1
                most = max(most, in_flight[domain])
            if last[place] == at:
                in_flight[domain] -= 1
        return most


def _ticks(seconds: float) -> int:
    return round(seconds * TICKS_PER_SECOND)


def _kind(
    shape: PipelineShape, costs: Costs, op: Op, virtual_stage: int, numbers: Mapping[tuple[Op, int], int]
) -> Kind:
    sample = Compute(op=op, virtual_stage=virtual_stage, micro_batch=0, domain=0)
    stage, waiting, boundary = shape.stages[virtual_stage], receiver(sample, shape), outgoing_boundary(sample, shape)
    feeds = link = NOWHERE
    transfer = latency = 0
    if waiting is not None and boundary is not None:
        feeds = numbers[op, waiting.virtual_stage]
        latency = _ticks(costs.latency_seconds(boundary, shape))
        if touches_edge(boundary, shape):
            link = OUTBOUND if stage == EDGE_STAGE else INBOUND
            transfer = _ticks(costs.transfer_seconds(boundary))
    next_op = {Op.FORWARD: Op.BACKWARD, Op.BACKWARD: Op.WEIGHT}.get(op)
    releases = NOWHERE if next_op is None else numbers.get((next_op, virtual_stage), NOWHERE)
    if next_op is Op.BACKWARD:
        own = Compute(op=Op.BACKWARD, virtual_stage=virtual_stage, micro_batch=0, domain=0)
        releases = releases if incoming_boundary(own, shape) is None else NOWHERE
    return Kind(
        number=numbers[op, virtual_stage],
        op=op,
        virtual_stage=virtual_stage,
        stage=stage,
        ticks=_ticks(costs.seconds(sample, shape)),
        enters=op is Op.FORWARD and virtual_stage == shape.virtual_stages_of(stage)[0],
        feeds=feeds,
        link=link,
        transfer=transfer,
        latency=latency,
        releases=releases,
    )
