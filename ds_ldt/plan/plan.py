"""The plan: the instructions of all ranks for one step, an immutable value with a fingerprint.

The replicas of the edge share nothing within a step. So a plan holds the instructions of one slice (an edge replica
and the cloud ranks of its domains), and all other slices do the same for their own domains. The instructions of a rank
of another slice are derived when they are asked for.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from ds_ldt.plan.instructions import Channel, Compute, Flow, Instruction, Order, Orders
from ds_ldt.plan.shape import PipelineShape

_FORMAT = "ds_ldt plan 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What every rank does in one step.

    Attributes:
        shape: What the plan was made for.
        policy: Name of the policy that made it.
        training: Whether it runs backwards and an optimizer step, else forwards only.
        rows: One row of instructions for each rank of a slice. Ranks and domains are numbered as in `shape.one_slice`,
            which are those of the job if there is one edge replica.
        fingerprint: 64 hexadecimal digits over the plan's whole text. Equal on all ranks, or they would hang.
    """

    shape: PipelineShape
    policy: str
    training: bool
    rows: tuple[tuple[Instruction, ...], ...]
    fingerprint: str = field(init=False, compare=False)
    _peaks: dict[int, int] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Take the fingerprint once."""
        digest = hashlib.sha256("\n".join(_lines(self)).encode("utf-8")).hexdigest()
        object.__setattr__(self, "fingerprint", digest)
        object.__setattr__(self, "_peaks", {})

    def for_rank(self, rank: int) -> tuple[Instruction, ...]:
        """Return the instructions of a rank, in sequence."""
        row = self.row_of(rank)
        if self.shape.num_replicas == 1:
            return row
        moved = _Moved(self.shape, self.shape.replica_of(rank))
        return tuple(map(moved.instruction, row))

    def row_of(self, rank: int) -> tuple[Instruction, ...]:
        """Return the instructions of a rank with ranks and domains as in `shape.one_slice`, which takes no time."""
        return self.rows[self.shape.rank_in_slice(rank)]

    @property
    def instructions(self) -> tuple[tuple[Instruction, ...], ...]:
        """The instructions of all ranks. With many edge replicas that is very much more than `rows`."""
        return tuple(map(self.for_rank, range(self.shape.num_ranks)))

    def orders(self) -> Orders:
        """Return the order of every rank: its instructions without loads, messages and reductions."""
        if self.shape.num_replicas == 1:
            return self.slice_orders()
        return {rank: order_of(self.for_rank(rank)) for rank in range(self.shape.num_ranks)}

    def slice_orders(self) -> Orders:
        """Return the orders of one slice, with ranks and domains as in `shape.one_slice`."""
        return {rank: order_of(row) for rank, row in enumerate(self.rows)}

    def channels(self) -> tuple[Channel, ...]:
        """Return every channel that a send or a receive names, sorted by domain, boundary and flow."""
        named = {
            instruction.channel: None for row in self.rows for instruction in row if instruction.channel is not None
        }
        own = sorted(named)
        if self.shape.num_replicas == 1:
            return tuple(own)
        replicas = (_Moved(self.shape, replica) for replica in range(self.shape.num_replicas))
        return tuple(moved.channel(channel) for moved in replicas for channel in own)

    def received_by(self, rank: int) -> dict[Channel, tuple[int, ...]]:
        """Return the channels that end on a rank, and of each the micro-batches in the order of their receives."""
        found: defaultdict[Channel, list[int]] = defaultdict(list)
        for instruction in self.row_of(rank):
            if instruction.channel is not None and instruction.kind.is_receive:
                assert instruction.micro_batch is not None
                found[instruction.channel].append(instruction.micro_batch)
        moved = _Moved(self.shape, self.shape.replica_of(rank))
        return {moved.channel(channel): tuple(micro_batches) for channel, micro_batches in sorted(found.items())}

    def first_messages(self, rank: int) -> dict[Channel, tuple[int, ...]]:
        """Return the channels of a rank over which a step opens, and of each the first micro-batches.

        They lead from the head to the next virtual stage. Of each there are as many as its destination has in flight.
        """
        found = {}
        for domain in self.shape.domains_of(rank):
            channel = self.shape.channel(boundary=0, domain=domain, flow=Flow.ACTIVATION)
            if rank in (channel.source, channel.destination):
                found[channel] = self.receive_order(channel)[: self.peak_in_flight(channel.destination)]
        return found

    def send_order(self, channel: Channel) -> tuple[int, ...]:
        """Return the micro-batches of a channel in the order in which its source sends them."""
        return tuple(
            instruction.micro_batch
            for instruction in self.for_rank(channel.source)
            if instruction.kind.is_send and instruction.channel == channel and instruction.micro_batch is not None
        )

    def receive_order(self, channel: Channel) -> tuple[int, ...]:
        """Return the micro-batches of a channel in the order in which its destination posts their receives."""
        return self.received_by(channel.destination).get(channel, ())

    def peak_in_flight(self, rank: int) -> int:
        """Return the most micro-batches of one domain that a rank has in flight at once; see `peak_in_flight`."""
        number = self.shape.rank_in_slice(rank)
        if number not in self._peaks:
            self._peaks[number] = peak_in_flight(order_of(self.rows[number]))
        return self._peaks[number]


class _Moved:
    """Renames what is of the first slice for that of another edge replica.

    Args:
        shape: The shape of the whole job.
        replica: The replica.
    """

    def __init__(self, shape: PipelineShape, replica: int) -> None:
        self._by = replica * shape.slice_size
        self._ranks = shape.ranks_of_slice(replica)
        self._channels: dict[Channel, Channel] = {}

    def channel(self, channel: Channel) -> Channel:
        """Return the channel of the replica."""
        found = self._channels.get(channel)
        if found is None:
            found = self._channels[channel] = replace(
                channel,
                domain=channel.domain + self._by,
                source=self._ranks[channel.source],
                destination=self._ranks[channel.destination],
            )
        return found

    def instruction(self, instruction: Instruction) -> Instruction:
        """Return the instruction of the replica."""
        serves = instruction.serves
        if serves is None:
            return instruction
        return Instruction.serving(
            instruction.kind,
            Compute(
                op=serves.op,
                virtual_stage=serves.virtual_stage,
                micro_batch=serves.micro_batch,
                domain=serves.domain + self._by,
            ),
            chunk=instruction.chunk,
            channel=None if instruction.channel is None else self.channel(instruction.channel),
        )


def order_of(row: Iterable[Instruction]) -> Order:
    """Return the computes of a row of instructions."""
    return tuple(compute for instruction in row if (compute := instruction.compute) is not None)


def peak_in_flight(order: Iterable[Compute]) -> int:
    """Return the most micro-batches of one domain that an order has in flight at once.

    A micro-batch is in flight on a rank from its first compute there to the end of its last one: between them the
    rank keeps its activations, or what its weight gradients are made from. A rank that serves K domains holds up to K
    times as many micro-batches.
    """
    return max(in_flight_counts(order), default=0)


def in_flight_counts(order: Iterable[Compute]) -> list[int]:
    """Return for each compute how many micro-batches of its domain are in flight while it runs, its own included."""
    order = tuple(order)
    remaining = Counter((compute.domain, compute.micro_batch) for compute in order)
    begun: set[tuple[int, int]] = set()
    in_flight: Counter[int] = Counter()
    counts = []
    for compute in order:
        key = (compute.domain, compute.micro_batch)
        if key not in begun:
            begun.add(key)
            in_flight[compute.domain] += 1
        counts.append(in_flight[compute.domain])
        remaining[key] -= 1
        if not remaining[key]:
            in_flight[compute.domain] -= 1
    return counts


def _lines(plan: Plan) -> Iterator[str]:
    """The canonical text that the fingerprint is taken over, of one slice: the head says how many there are."""
    shape = plan.shape
    gradients = tuple(shape.has_gradient(virtual_stage) for virtual_stage in range(shape.num_virtual_stages))
    yield f"{_FORMAT} policy={plan.policy} training={plan.training}"
    yield f"stages={shape.stages} chunks={shape.chunks} num_stages={shape.num_stages} gradients={gradients}"
    yield f"M={shape.num_micro_batches} D={shape.num_domains} E={shape.num_replicas}"
    if plan.training and shape.split_stages:
        yield f"split={shape.split_stages}"
    for rank, row in enumerate(plan.rows):
        yield f"{rank}: " + " ".join(map(str, row))
