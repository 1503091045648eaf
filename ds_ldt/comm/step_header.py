"""The announcement that opens a step: the edge tells every cloud rank of a domain what it will send.

The edge sends over one boundary for each of its virtual stages but the tail: boundary 0, and with more than two chunks
others, whose shapes the cloud cannot derive (they may follow from data that stays on the edge).

A receiver must know the size of a message before it can post a buffer for it, and a mismatch would end its process
inside gloo. So the shapes of all micro-batches travel ahead, in one message of fixed size, together with what both
ends must agree on: which call they are in, the step, the number of micro-batches, the plan. Where the shapes do not
fit, the message says how long a second one is. `encode` and `decode` are pure; `decode` believes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from ds_ldt.comm.wire import MAX_DIMENSIONS, WIRE_DTYPES, Signature, TensorSignature
from ds_ldt.errors import LinkError

ANNOUNCEMENT_SIZE = 1024
"""int64 numbers in the fixed-size message."""

MAX_TENSORS = 64
"""Most tensors in one message over a boundary that an announcement can describe."""

MAX_ANNOUNCED = 64
"""Most boundaries over which the edge may send one micro-batch."""

_MAGIC = 0x6C6474_0002  # "ldt" and the version of this format
_HEADER_SIZE = 10
_INLINE_SIZE = ANNOUNCEMENT_SIZE - _HEADER_SIZE


class Status(IntEnum):
    """What the edge says about the step."""

    OK = 1
    END_OF_DATA = 2
    ERROR = 3


class StepKind(IntEnum):
    """Which call the step belongs to."""

    TRAIN = 1
    EVAL = 2
    GENERATE = 3

    @property
    def call(self) -> str:
        """The method that the user called."""
        return {StepKind.TRAIN: "train_batch", StepKind.EVAL: "eval_batch", StepKind.GENERATE: "generate"}[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepId:
    """What both ends of an announcement have to agree on.

    Attributes:
        kind: Which call it belongs to.
        step: Number of steps of this kind of counting that both ends have opened; the engine defines it.
        domain: The domain that the announcement is for.
        num_micro_batches: Micro-batches of that domain in the step (M).
        fingerprint: `short_fingerprint` of the plan.
    """

    kind: StepKind
    step: int
    domain: int
    num_micro_batches: int
    fingerprint: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What the edge announces of one step to one domain.

    Attributes:
        step: Which step it opens.
        status: Whether there will be one. `ERROR` carries no text on purpose: the text may quote a sample.
        signatures: For each micro-batch 0..M-1 the signature at every boundary over which the edge sends, in order;
            empty unless the status is `OK`.
    """

    step: StepId
    status: Status = Status.OK
    signatures: tuple[tuple[Signature, ...], ...] = ()


def short_fingerprint(fingerprint: str) -> int:
    """The first 62 bits of a plan's hexadecimal fingerprint, as a number that fits an int64."""
    return int(fingerprint[:16], 16) >> 2


def encode(announcement: Announcement) -> tuple[Tensor, Tensor | None]:
    """Puts an announcement into int64 vectors.

    Returns:
        The message of `ANNOUNCEMENT_SIZE` numbers, and the overflow message if there has to be one.
    """
    body: list[int] = []
    flat = [signature for signatures in announcement.signatures for signature in signatures]
    distinct = {signature: place for place, signature in enumerate(dict.fromkeys(flat))}
    for signature in distinct:
        body.append(len(signature))
        for one in signature:
            body += [WIRE_DTYPES.index(one.dtype), int(one.gradient), len(one.shape), *one.shape]
    body += [distinct[signature] for signature in flat]
    step, num_announced = announcement.step, len(announcement.signatures[0]) if announcement.signatures else 0
    header = [_MAGIC, announcement.status, step.kind, step.step, step.domain, step.num_micro_batches]
    header += [step.fingerprint, num_announced, len(distinct), len(body)]
    message = torch.zeros(ANNOUNCEMENT_SIZE, dtype=torch.int64)
    message[:_HEADER_SIZE] = torch.tensor(header, dtype=torch.int64)
    vector = torch.tensor(body, dtype=torch.int64)
    if len(body) > _INLINE_SIZE:
        return message, vector
    message[_HEADER_SIZE : _HEADER_SIZE + len(body)] = vector
    return message, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The fixed part of a message: enough to refuse the wrong step before anything is allocated for the rest.

    Attributes:
        step: Which step is announced.
        status: Whether there will be one.
        num_announced: Boundaries over which the edge sends, and so signatures of a micro-batch.
        num_distinct: Number of distinct signatures in the body.
        body_size: Numbers in the body.
    """

    step: StepId
    status: Status
    num_announced: int
    num_distinct: int
    body_size: int

    @property
    def overflow_size(self) -> int:
        """Numbers in the overflow message that holds the body; 0: the body is in the fixed-size message."""
        return self.body_size if self.body_size > _INLINE_SIZE else 0


def decode_header(message: Tensor, *, source: int) -> Header:
    """Reads the header of a fixed-size message.

    Args:
        message: `ANNOUNCEMENT_SIZE` numbers.
        source: The rank they came from, for errors.

    Raises:
        LinkError: This is no announcement, or its numbers contradict each other.
    """
    magic, status, kind, step, domain, num_micro_batches, fingerprint, *sizes = message[:_HEADER_SIZE].tolist()
    num_announced, num_distinct, body_size = sizes
    if magic != _MAGIC:
        raise malformed(
            source, f"it starts with {magic:#x}, not with {_MAGIC:#x}: do both sites run the same version of ds_ldt?"
        )
    if status not in tuple(Status) or kind not in tuple(StepKind):
        raise malformed(source, f"status {status} and kind {kind} are not both known")
    most = num_micro_batches * num_announced
    largest = most * (2 + MAX_TENSORS * (3 + MAX_DIMENSIONS))
    least = 1 if status == Status.OK else 0
    if not (least <= num_announced <= MAX_ANNOUNCED and 0 <= num_distinct <= most and 0 <= body_size <= largest):
        raise malformed(
            source,
            f"{num_distinct} signatures in {body_size} numbers cannot be, for {num_micro_batches} micro-batches over "
            f"{num_announced} boundaries",
        )
    step_id = StepId(
        kind=StepKind(kind),
        step=step,
        domain=domain,
        num_micro_batches=num_micro_batches,
        fingerprint=fingerprint,
    )
    return Header(
        step=step_id,
        status=Status(status),
        num_announced=num_announced,
        num_distinct=num_distinct,
        body_size=body_size,
    )


def decode(message: Tensor, overflow: Tensor | None = None, *, source: int) -> Announcement:
    """Reads what `encode` wrote.

    Args:
        message: The fixed-size message.
        overflow: The overflow message, if the header says that there is one.
        source: The rank they came from, for errors.

    Raises:
        LinkError: A number is out of its range, or something is missing or left over.
    """
    header = decode_header(message, source=source)
    overflow_size = 0 if overflow is None else overflow.numel()
    if overflow_size != header.overflow_size:
        raise malformed(source, f"{overflow_size} further numbers came, {header.overflow_size} were announced")
    body = message[_HEADER_SIZE : _HEADER_SIZE + header.body_size] if overflow is None else overflow
    reader = _Reader(body.tolist(), source)
    distinct = [reader.signature() for _ in range(header.num_distinct)]
    signatures = tuple(
        tuple(
            distinct[reader.take(header.num_distinct - 1, "index of a signature")] for _ in range(header.num_announced)
        )
        for _ in range(header.step.num_micro_batches if header.status is Status.OK else 0)
    )
    reader.finish()
    return Announcement(step=header.step, status=header.status, signatures=signatures)


class _Reader:
    """Takes numbers from the body of an announcement, each within its range."""

    def __init__(self, numbers: list[int], source: int) -> None:
        self._numbers = iter(numbers)
        self._source = source

    def take(self, most: int, what: str) -> int:
        value = next(self._numbers, None)
        if value is None or not 0 <= value <= most:
            raise malformed(self._source, f"{what}: {value}, expected is 0 to {most}")
        return value

    def signature(self) -> Signature:
        return tuple(self._tensor() for _ in range(self.take(MAX_TENSORS, "tensors in a message")))

    def _tensor(self) -> TensorSignature:
        dtype = WIRE_DTYPES[self.take(len(WIRE_DTYPES) - 1, "number of a dtype")]
        gradient = bool(self.take(1, "gradient bit"))
        num_dimensions = self.take(MAX_DIMENSIONS, "dimensions")
        shape = tuple(self.take(2**62, "size of a dimension") for _ in range(num_dimensions))
        return TensorSignature(dtype, shape, gradient)

    def finish(self) -> None:
        left = sum(1 for _ in self._numbers)
        if left:
            raise malformed(self._source, f"{left} numbers are left over")


def malformed(source: int, reason: str) -> LinkError:
    """Return the error of a rank that announced something that cannot be."""
    return LinkError(f"malformed announcement from rank {source}: {reason}")


def check_same_step(announced: StepId, expected: StepId, *, source: int, rank: int) -> None:
    """Compares what the edge is doing with what this rank is doing.

    Args:
        announced: What rank `source` is doing.
        expected: What this rank is doing.
        source: The edge rank.
        rank: This rank.

    Raises:
        LinkError: They differ; names both sides' values.
    """
    pairs = [
        ("call", announced.kind.call, expected.kind.call),
        ("step", announced.step, expected.step),
        ("domain", announced.domain, expected.domain),
        ("micro-batches per domain", announced.num_micro_batches, expected.num_micro_batches),
        ("fingerprint of the plan", f"{announced.fingerprint:x}", f"{expected.fingerprint:x}"),
    ]
    different = [
        f"{what}: rank {source} has {theirs}, rank {rank} has {ours}" for what, theirs, ours in pairs if theirs != ours
    ]
    if different:
        raise LinkError(
            f"rank {source} and rank {rank} are not in the same step: {'; '.join(different)}. Every rank of both "
            "sites has to make the same calls (train_batch, eval_batch, generate, save_checkpoint, ...) in the same "
            "order, with the same configuration."
        )
