"""The control stream: carries the announcement that opens a step from the edge to the cloud."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ldt.comm.groups import StreamGroups
from ds_ldt.comm.send_queue import close_posted, has_timed_out, kept, silent_or_gone, wait_within
from ds_ldt.comm.step_header import (
    ANNOUNCEMENT_SIZE,
    Announcement,
    StepId,
    check_same_step,
    decode,
    decode_header,
    encode,
    malformed,
)
from ds_ldt.comm.waits import Wait
from ds_ldt.comm.wire import WireGuard
from ds_ldt.errors import LinkError

_HEAD_TAG, _OVERFLOW_TAG = 0, 1


class ControlLink:
    """Carries announcements from an edge replica to the cloud ranks of its domains.

    Args:
        rank: This rank.
        groups: Holds the group for control messages.
        timeout_s: Longest wait for an announcement (`ldt.timeout_s`).
        guard: Checks announced signatures against the wire schema, on both ends.
        boundaries: The boundaries over which the edge sends, in order.
    """

    def __init__(
        self,
        *,
        rank: int,
        groups: StreamGroups,
        timeout_s: float,
        guard: WireGuard,
        boundaries: tuple[int, ...] = (0,),
    ) -> None:
        self._rank = rank
        self._group = groups.control
        self._timeout_s = timeout_s
        self._guard = guard
        self._boundaries = boundaries
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
        self._check(announcement)
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
        if announcement.signatures and len(announcement.signatures[0]) != len(self._boundaries):
            raise malformed(
                source,
                f"it describes {len(announcement.signatures[0])} boundaries, the edge sends over "
                f"{len(self._boundaries)} in this layout",
            )
        self._check(announcement)
        return announcement

    def _check(self, announcement: Announcement) -> None:
        """Hold every announced signature to the wire schema of its boundary."""
        for signatures in dict.fromkeys(announcement.signatures):
            for boundary, signature in zip(self._boundaries, signatures, strict=True):
                self._guard.check_announced(boundary, signature)

    def close(self) -> None:
        """Waits until every announcement has been received: a send whose handle is dropped early is lost.

        Raises:
            LinkError: A peer is gone, or has not taken its last announcement within `timeout_s`.
        """
        for destination in list(self._sent):
            self._finish_sends(destination)

    def abandon(self) -> None:
        """Closes the connections on which announcements are awaited or under way. Raises nothing."""
        sending = [work for _, sends in self._sent.values() for work, _ in sends]
        close_posted([*sending, *(work for work, _ in self._posted.values())])
        self._sent, self._posted = {}, {}

    def _finish_sends(self, destination: int) -> None:
        if destination in self._sent:
            step, sends = self._sent.pop(destination)
            begin = time.monotonic()
            with self._explained("to announce it to", destination, step):
                for work, _ in sends:
                    self._wait(work, begin)

    def _wait(self, work: dist.Work, begin: float) -> None:
        wait_within(work, begin, self._timeout_s)

    @contextmanager
    def _explained(self, doing: str, peer: int, step: StepId) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        except LinkError:
            raise
        except RuntimeError as error:
            what, hint = silent_or_gone(peer, error)
            waited_s = time.monotonic() - begin
            wait = Wait(
                rank=self._rank,
                peers=(peer,),
                doing=f"announcement of step {step.step}, {step.kind.call}",
                seconds=waited_s,
                closed=not has_timed_out(error),
            )
            text = (
                f"rank {self._rank}: {what}. This rank is in {step.kind.call}, step {step.step}, domain "
                f"{step.domain}, and waited {waited_s:.1f} s {doing} rank {peer} (ldt.timeout_s = "
                f"{self._timeout_s:g}). Every rank of both sites has to make the same calls in the same order. {hint} "
                f"Cause: {error}"
            )
            raise LinkError.of(wait, text) from error
