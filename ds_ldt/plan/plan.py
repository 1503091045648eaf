"""The plan: the instructions of all ranks for one step, an immutable value with a fingerprint."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ds_ldt.plan.instructions import Channel, Compute, Instruction, Orders
from ds_ldt.plan.shape import PipelineShape

_FORMAT = "ds_ldt plan 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What every rank does in one step.

    Attributes:
        shape: What the plan was made for.
        policy: Name of the policy that made it.
        training: Whether it runs backwards and an optimizer step, else forwards only.
        instructions: One row of instructions for each rank.
        fingerprint: 64 hexadecimal digits over the plan's whole text. Equal on all ranks, or they would hang.
    """

    shape: PipelineShape
    policy: str
    training: bool
    instructions: tuple[tuple[Instruction, ...], ...]
    fingerprint: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Take the fingerprint once."""
        digest = hashlib.sha256("\n".join(_lines(self)).encode("utf-8")).hexdigest()
        object.__setattr__(self, "fingerprint", digest)

    def for_rank(self, rank: int) -> tuple[Instruction, ...]:
        """Return the instructions of a rank, in sequence."""
        return self.instructions[rank]

    def orders(self) -> Orders:
        """Return the order of every rank: its instructions without loads, messages and reductions."""
        return {
            rank: tuple(compute for instruction in row if (compute := instruction.compute) is not None)
            for rank, row in enumerate(self.instructions)
        }

    def channels(self) -> tuple[Channel, ...]:
        """Return every channel that a send or a receive names, sorted by domain, boundary and flow."""
        return tuple(
            sorted({instruction.channel for row in self.instructions for instruction in row if instruction.channel})
        )

    def send_order(self, channel: Channel) -> tuple[int, ...]:
        """Return the micro-batches of a channel in the order in which its source sends them."""
        return tuple(
            instruction.micro_batch
            for instruction in self.instructions[channel.source]
            if instruction.kind.is_send and instruction.channel == channel and instruction.micro_batch is not None
        )

    def receive_order(self, channel: Channel) -> tuple[int, ...]:
        """Return the micro-batches of a channel in the order in which its destination posts their receives."""
        return tuple(
            instruction.micro_batch
            for instruction in self.instructions[channel.destination]
            if instruction.kind.is_receive and instruction.channel == channel and instruction.micro_batch is not None
        )

    def peak_in_flight(self, rank: int) -> int:
        """Return the most micro-batches of one domain that a rank has in flight at once; see `peak_in_flight`."""
        return peak_in_flight(compute for instruction in self.instructions[rank] if (compute := instruction.compute))


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


def _lines(plan: Plan) -> Iterable[str]:
    """The canonical text that the fingerprint is taken over."""
    shape = plan.shape
    gradients = tuple(shape.has_gradient(virtual_stage) for virtual_stage in range(shape.num_virtual_stages))
    yield f"{_FORMAT} policy={plan.policy} training={plan.training}"
    yield f"stages={shape.stages} chunks={shape.chunks} num_stages={shape.num_stages} gradients={gradients}"
    yield f"M={shape.num_micro_batches} D={shape.num_domains} E={shape.num_replicas}"
    if plan.training and shape.split_stages:
        yield f"split={shape.split_stages}"
    for rank, row in enumerate(plan.instructions):
        yield f"{rank}: " + " ".join(map(str, row))
