"""The announcement that opens a step: the edge tells every cloud rank of a domain what will come over boundary 0.

A receiver must know the size of a message before it can post a buffer for it, and a mismatch would end its process
inside gloo. So the shapes of all micro-batches travel ahead, in one message of fixed size, together with what both
ends must agree on: which call they are in, the step, the number of micro-batches, the plan. Where the shapes do not
fit, the message says how long a second one is. `encode` and `decode` are pure; `decode` believes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ldt.errors import LinkError
from ds_ldt.outbox import kept, silent_or_gone
from ds_ldt.transport import StreamGroups
from ds_ldt.wire import MAX_DIMENSIONS, WIRE_DTYPES, Signature, TensorSignature, WireGuard

ANNOUNCEMENT_SIZE = 1024
"""int64 numbers in the fixed-size message."""

MAX_TENSORS = 64
"""Most tensors in one message over a boundary that an announcement can describe."""

_MAGIC = 0x6C6474_0001  # "ldt" and the version of this format
_HEADER_SIZE = 9
_INLINE_SIZE = ANNOUNCEMENT_SIZE - _HEADER_SIZE
_HEAD_TAG, _OVERFLOW_TAG = 0, 1


class Status(IntEnum):
    """What the edge says about the step."""

    OK = 1
    END_OF_DATA = 2
    ERROR = 3


class StepKind(IntEnum):
    """Which call the step belongs to."""

    TRAIN = 1
    EVAL = 2

    @property
    def call(self) -> str:
        """The method that the user called."""
        return "train_batch" if self is StepKind.TRAIN else "eval_batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepId:
    """What both ends of an announcement have to agree on.

    Attributes:
        kind: Training or evaluation.
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
        signatures: Signature at boundary 0 of each micro-batch 0..M-1; empty unless the status is `OK`.
    """

    step: StepId
    status: Status = Status.OK
    signatures: tuple[Signature, ...] = ()


def short_fingerprint(fingerprint: str) -> int:
    """The first 62 bits of a plan's hexadecimal fingerprint, as a number that fits an int64."""
    return int(fingerprint[:16], 16) >> 2


def encode(announcement: Announcement) -> tuple[Tensor, Tensor | None]:
    """Puts an announcement into int64 vectors.

    Returns:
        The message of `ANNOUNCEMENT_SIZE` numbers, and the overflow message if there has to be one.
    """
    body: list[int] = []
    distinct = {signature: place for place, signature in enumerate(dict.fromkeys(announcement.signatures))}
    for signature in distinct:
        body.append(len(signature))
        for one in signature:
            body += [WIRE_DTYPES.index(one.dtype), int(one.gradient), len(one.shape), *one.shape]
    body += [distinct[signature] for signature in announcement.signatures]
    step = announcement.step
    header = [_MAGIC, announcement.status, step.kind, step.step, step.domain, step.num_micro_batches]
    header += [step.fingerprint, len(distinct), len(body)]
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
        num_distinct: Number of distinct signatures in the body.
        body_size: Numbers in the body.
    """

    step: StepId
    status: Status
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
    magic, status, kind, step, domain, num_micro_batches, fingerprint, num_distinct, body_size = message[
        :_HEADER_SIZE
    ].tolist()
    if magic != _MAGIC:
        raise _malformed(
            source, f"it starts with {magic:#x}, not with {_MAGIC:#x}: do both sites run the same version of ds_ldt?"
        )
    if status not in tuple(Status) or kind not in tuple(StepKind):
        raise _malformed(source, f"status {status} and kind {kind} are not both known")
    largest = num_micro_batches * (2 + MAX_TENSORS * (3 + MAX_DIMENSIONS))
    if not 0 <= num_distinct <= num_micro_batches or not 0 <= body_size <= largest:
        raise _malformed(
            source,
            f"{num_distinct} signatures in {body_size} numbers cannot be, for {num_micro_batches} micro-batches",
        )
    step_id = StepId(
        kind=StepKind(kind),
        step=step,
        domain=domain,
        num_micro_batches=num_micro_batches,
        fingerprint=fingerprint,
    )
    return Header(step=step_id, status=Status(status), num_distinct=num_distinct, body_size=body_size)


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
        raise _malformed(source, f"{overflow_size} further numbers came, {header.overflow_size} were announced")
    body = message[_HEADER_SIZE : _HEADER_SIZE + header.body_size] if overflow is None else overflow
    reader = _Reader(body.tolist(), source)
    distinct = [reader.signature() for _ in range(header.num_distinct)]
    num_indices = header.step.num_micro_batches if header.status is Status.OK else 0
    indices = [reader.take(header.num_distinct - 1, "index of a signature") for _ in range(num_indices)]
    reader.finish()
    return Announcement(step=header.step, status=header.status, signatures=tuple(distinct[index] for index in indices))


class _Reader:
    """Takes numbers from the body of an announcement, each within its range."""

    def __init__(self, numbers: list[int], source: int) -> None:
        self._numbers = iter(numbers)
        self._source = source

    def take(self, most: int, what: str) -> int:
        value = next(self._numbers, None)
        if value is None or not 0 <= value <= most:
            raise _malformed(self._source, f"{what}: {value}, expected is 0 to {most}")
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
            raise _malformed(self._source, f"{left} numbers are left over")


def _malformed(source: int, reason: str) -> LinkError:
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
            "sites has to make the same calls (train_batch, eval_batch, save_checkpoint, ...) in the same order, with "
            "the same configuration."
        )


class ControlLink:
    """Carries announcements from an edge replica to the cloud ranks of its domains.

    Args:
        rank: This rank.
        groups: Holds the group for control messages.
        timeout_s: Longest wait for an announcement (`ldt.timeout_s`).
        guard: Checks announced signatures against the wire schema, on both ends.
    """

    def __init__(self, *, rank: int, groups: StreamGroups, timeout_s: float, guard: WireGuard) -> None:
        self._rank = rank
        self._group = groups.control
        self._timeout_s = timeout_s
        self._guard = guard
        self._sent: dict[int, tuple[StepId, list[tuple[dist.Work, Tensor]]]] = {}
        self._posted: dict[int, tuple[dist.Work, Tensor]] = {}

    def announce(self, destination: int, announcement: Announcement) -> None:
        """Sends an announcement; waits only for the one before it, which the step before has seen received.

        Args:
            destination: A cloud rank.
            announcement: What to announce to it.

        Raises:
            PrivacyError: The wire schema does not declare an announced signature. Nothing is sent.
            LinkError: The peer is gone, or has not taken the last announcement within `timeout_s`.
        """
        for signature in dict.fromkeys(announcement.signatures):
            self._guard.check_announced(0, signature)
        self._finish_sends(destination)
        message, overflow = encode(announcement)
        step = announcement.step
        sends: list[tuple[dist.Work, Tensor]] = []
        self._sent[destination] = (step, sends)
        with self._explained("to announce it to", destination, step):
            for tensor, tag in ((message, _HEAD_TAG), (overflow, _OVERFLOW_TAG)):
                if tensor is not None:
                    work = dist.isend(tensor, destination, group=self._group, tag=tag)
                    sends.append((kept(work), tensor))

    def expect(self, source: int) -> None:
        """Posts the receive of the first announcement of an edge rank; `receive` posts those that follow."""
        if source not in self._posted:
            buffer = torch.empty(ANNOUNCEMENT_SIZE, dtype=torch.int64)
            work = dist.irecv(buffer, source, group=self._group, tag=_HEAD_TAG)
            self._posted[source] = (kept(work), buffer)

    def receive(self, source: int, expected: StepId) -> Announcement:
        """Waits for the next announcement of an edge rank and checks it.

        Args:
            source: The edge rank that serves this rank's domain.
            expected: What this rank is about to do.

        Returns:
            The announcement, whatever its status.

        Raises:
            LinkError: It did not come in `timeout_s`; it is malformed; it is for another step than `expected`; or the
                wire schema does not declare what it announces.
        """
        begin = time.monotonic()
        with self._explained("for its announcement by", source, expected):
            self.expect(source)
            work, message = self._posted.pop(source)
            self._wait(work, begin)
            header = decode_header(message, source=source)
            check_same_step(header.step, expected, source=source, rank=self._rank)
            overflow = None
            if header.overflow_size:
                overflow = torch.empty(header.overflow_size, dtype=torch.int64)
                self._wait(kept(dist.irecv(overflow, source, group=self._group, tag=_OVERFLOW_TAG)), begin)
            self.expect(source)
        announcement = decode(message, overflow, source=source)
        for signature in dict.fromkeys(announcement.signatures):
            self._guard.check_announced(0, signature)
        return announcement

    def close(self) -> None:
        """Waits until every announcement has been received: a send whose handle is dropped early is lost.

        Raises:
            LinkError: A peer is gone, or has not taken its last announcement within `timeout_s`.
        """
        for destination in list(self._sent):
            self._finish_sends(destination)

    def _finish_sends(self, destination: int) -> None:
        if destination in self._sent:
            step, sends = self._sent.pop(destination)
            begin = time.monotonic()
            with self._explained("to announce it to", destination, step):
                for work, _ in sends:
                    self._wait(work, begin)

    def _wait(self, work: dist.Work, begin: float) -> None:
        work.wait(timedelta(seconds=max(0.001, begin + self._timeout_s - time.monotonic())))

    @contextmanager
    def _explained(self, doing: str, peer: int, step: StepId) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        except LinkError:
            raise
        except RuntimeError as error:
            what, hint = silent_or_gone(peer, error)
            raise LinkError(
                f"rank {self._rank}: {what}. This rank is in {step.kind.call}, step {step.step}, domain "
                f"{step.domain}, and waited {time.monotonic() - begin:.1f} s {doing} rank {peer} (ldt.timeout_s = "
                f"{self._timeout_s:g}). Every rank of both sites has to make the same calls in the same order. {hint} "
                f"Cause: {error}"
            ) from error
