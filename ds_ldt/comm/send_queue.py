"""The sends of one channel that are under way, and the text of the errors that a link can give.

Nobody who sends waits. On gloo the only way to learn that a send is through is to wait for it, so each outbound
channel has a thread that does, in order, and then drops the handle and the tensor. It shares the interpreter with
whoever sends, and waking it takes longer than sending a small message does: so it sleeps until there is something
worth letting go of. Where completion can be asked for, no thread is needed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from ds_ldt.comm.waits import Wait
from ds_ldt.errors import LinkError
from ds_ldt.plan import Channel

_MARGIN_S = 5.0
"""What a drain allows on top of the timeout of the send it waits for, so that the send's own error comes first."""

_LINGER_BYTES = 2**20
"""How much of a channel's messages may be kept without looking whether they are through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How the messages of a channel travel: the process group and the tag."""

    group: dist.ProcessGroup
    tag: int


@dataclass(slots=True, kw_only=True)
class Message:
    """The tensors of one micro-batch on a channel and the handles of their transfers, in order."""

    micro_batch: int
    tensors: tuple[Tensor, ...]
    works: list[dist.Work] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes of tensor data."""
        return sum(tensor.nbytes for tensor in self.tensors)


def kept(work: dist.Work | None) -> dist.Work:
    """The handle of a transfer.

    Raises:
        LinkError: There is none: torch.distributed quietly does nothing for a rank outside the group.
    """
    if work is None:
        raise LinkError("torch.distributed returned no handle: this rank is not a member of the channel's group")
    return work


def wait_within(work: dist.Work, begin: float, timeout_s: float) -> None:
    """Waits for a transfer for what is left of the seconds that began at `begin` on the clock `time.monotonic`."""
    work.wait(timedelta(seconds=max(0.001, begin + timeout_s - time.monotonic())))


def close_posted(works: Iterable[dist.Work]) -> None:
    """Closes the gloo connections that transfers under way use, so that every wait on them ends, here and there.

    Destroying the group does not: transfers under way keep it alive. A wait that runs out of time does.
    """
    for work in works:
        with contextlib.suppress(RuntimeError):
            work.wait(timedelta(milliseconds=1))


def has_timed_out(error: Exception) -> bool:
    """Whether a wait that failed ran out of time; else the connection was closed."""
    return "timed out" in str(error).lower() or "timeout" in str(error).lower()


def silent_or_gone(peer: int, error: Exception) -> tuple[str, str]:
    """What a failed wait says about the peer, and what the user can do about it."""
    if has_timed_out(error):
        return (
            f"rank {peer} was silent",
            "Raise ldt.timeout_s if the peer is only slow; else look at its log: it may be stuck or in another call.",
        )
    return f"rank {peer} is gone or closed the connection", f"Look for the first error in the log of rank {peer}."


def link_failure(
    *, rank: int, channel: Channel, micro_batch: int, waited_s: float, timeout_s: float, error: Exception
) -> LinkError:
    """The error for a message that did not get through.

    Args:
        rank: This rank.
        channel: The channel; the peer is its other end.
        micro_batch: Whose message it was.
        waited_s: Seconds spent waiting for it.
        timeout_s: The value of `ldt.timeout_s`.
        error: What the backend said.
    """
    sends = channel.source == rank
    peer = channel.destination if sends else channel.source
    what, hint = silent_or_gone(peer, error)
    message = f"micro_batch {micro_batch} of the {channel}"
    wait = Wait(
        rank=rank,
        peers=(peer,),
        doing=f"to {'send' if sends else 'receive'} {message}",
        seconds=waited_s,
        closed=not has_timed_out(error),
    )
    text = (
        f"rank {rank}: {what} while this rank waited {waited_s:.1f} s "
        f"{'for it to take' if sends else 'to receive from it'} {message} "
        f"(ldt.timeout_s = {timeout_s:g}). {hint} Cause: {error}"
    )
    return LinkError.of(wait, text)


class Outbox:
    """Posts the sends of one channel and keeps what has been sent until the peer has it.

    Args:
        channel: The channel.
        post: Starts the send of a tensor to the other end of the channel and returns its handle.
        rank: This rank, its source.
        timeout_s: Longest time the peer may take to accept the oldest message.
        host_wait: True: a thread waits for the sends; False: they are asked, now and then, whether they are through.
    """

    def __init__(
        self,
        *,
        channel: Channel,
        post: Callable[[Tensor], dist.Work | None],
        rank: int,
        timeout_s: float,
        host_wait: bool,
    ) -> None:
        self._channel = channel
        self._post = post
        self._rank = rank
        self._timeout_s = timeout_s
        self._host_wait = host_wait
        self._pending: deque[Message] = deque()
        self._num_bytes = 0
        self._num_bytes_kept = _LINGER_BYTES
        self._changed = threading.Condition()
        self._failure: LinkError | None = None
        self._stopped = False
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._pending)

    def put(self, message: Message) -> None:
        """Posts a message and keeps it until it is through.

        Raises:
            LinkError: It cannot be posted, or an earlier send failed.
        """
        self.check()
        if not self._host_wait:
            while self._pending and all(work.is_completed() for work in self._pending[0].works):
                self._pending.popleft()
        try:
            for tensor in message.tensors:
                message.works.append(kept(self._post(tensor)))
        except Exception as error:  # also what torch says of a group that has been destroyed meanwhile
            self._failure = self._explain(message, 0.0, error)
            self._pending.append(message)  # some of its tensors may be under way
            raise self._failure from error
        with self._changed:
            self._pending.append(message)
            if self._host_wait:
                self._num_bytes += message.num_bytes
                if self._num_bytes > self._num_bytes_kept:
                    self._wake_thread(to_keep=_LINGER_BYTES // 2)

    def check(self) -> None:
        """Raises the `LinkError` of the first send that failed, if one has."""
        if self._failure is not None:
            raise self._failure

    def drain(self) -> None:
        """Waits until every message is through; each may take `timeout_s`.

        Raises:
            LinkError: The peer is gone, or was silent for longer than that.
        """
        if not self._host_wait:
            for message in self._pending:
                for work in message.works:
                    work.wait()  # orders the device's work after the send; the backend's watchdog bounds it
            self._pending.clear()
            return
        with self._changed:
            if self._pending:
                self._wake_thread(to_keep=-1)
            while self._pending and self._failure is None:
                oldest = self._pending[0]
                if not self._changed.wait(self._timeout_s + _MARGIN_S) and self._pending[0] is oldest:
                    error = TimeoutError("timed out in the thread that waits for the sends")
                    self._failure = self._explain(oldest, self._timeout_s + _MARGIN_S, error)
        self.check()

    def give_up(self) -> list[Message]:
        """Lets the thread end as soon as the send it waits for ends; returns what is still under way."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            return list(self._pending)

    def stop(self) -> None:
        """Ends the thread; waits a moment for it."""
        self.give_up()
        if self._thread is not None:
            self._thread.join(timeout=_MARGIN_S)

    def _wake_thread(self, *, to_keep: int) -> None:
        """Lets the thread wait for sends until no more than so many bytes are kept; below 0: for all of them."""
        self._num_bytes_kept = to_keep
        self._changed.notify_all()
        if self._thread is None:
            name = f"ds_ldt sends: {self._channel}"
            self._thread = threading.Thread(target=self._wait_in_order, name=name, daemon=True)
            self._thread.start()

    def _wait_in_order(self) -> None:
        while self._is_to_wait() and self._wait_for_oldest():
            pass

    def _is_to_wait(self) -> bool:
        """Sleeps until there is a send to wait for; False: the thread shall end."""
        with self._changed:
            while not self._stopped and not (self._pending and self._num_bytes > self._num_bytes_kept):
                self._num_bytes_kept = _LINGER_BYTES
                self._changed.wait()
            return not self._stopped

    def _wait_for_oldest(self) -> bool:
        """Lets go of the oldest message when it is through; False: it never will be."""
        oldest, begin = self._pending[0], time.monotonic()
        try:
            for work in oldest.works:
                wait_within(work, begin, self._timeout_s)
        except Exception as error:  # also what torch says of a group that has been destroyed meanwhile
            with self._changed:
                self._failure = self._failure or self._explain(oldest, time.monotonic() - begin, error)
                self._changed.notify_all()
            return False
        with self._changed:
            self._pending.popleft()
            self._num_bytes -= oldest.num_bytes
            self._changed.notify_all()
        return True

    def _explain(self, message: Message, waited_s: float, error: Exception) -> LinkError:
        failure = link_failure(
            rank=self._rank,
            channel=self._channel,
            micro_batch=message.micro_batch,
            waited_s=waited_s,
            timeout_s=self._timeout_s,
            error=error,
        )
        failure.__cause__ = error
        return failure
