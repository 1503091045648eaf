"""The receives of one channel that are posted, and those posted before their step has begun.

A message over gloo leaves when its sender knows that its receive is posted, so a receive posted late costs a round
trip. Within a step receives are posted ahead. The first messages of a step are a case of their own: what they will be
is announced in the same moment, so without more they would come a round trip late in every step. Therefore the
receives of the next step's first messages are posted behind the last of a step, *standing*, as large as its first.
Gloo takes a shorter message into a longer buffer. Where the new ones do not fit, the sender spends the standing
receives on messages of one byte, and receives of the right size are posted. Both ends know both steps' sizes, so both
come to the same conclusion without a word.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ldt.comm.send_queue import Message, Route, kept
from ds_ldt.comm.wire import Signature, TensorSignature
from ds_ldt.plan import Channel

STANDING = -1
"""Stands for the micro-batch of a message that belongs to none."""

Sizes = tuple[tuple[int, ...], ...]
"""Bytes of each tensor of each message that standing receives can take."""


def standing_sizes(opening: Sequence[Signature]) -> Sizes:
    """The sizes of standing receives for messages like these; at least the one byte that spends a receive."""
    return tuple(tuple(max(1, one.nbytes) for one in signature) for signature in opening)


def fits(opening: Sequence[Signature], standing: Sizes) -> bool:
    """Whether standing receives can take the first messages of a step, one each, none left over."""
    return len(standing) <= len(opening) and all(
        len(signature) == len(sizes) and all(one.nbytes <= size for one, size in zip(signature, sizes, strict=True))
        for signature, sizes in zip(opening, standing, strict=False)
    )


@dataclass(slots=True, kw_only=True)
class Inbox:
    """Receives of one inbound channel, in the sender's order.

    Attributes:
        channel: The channel.
        route: How its messages travel.
        device: Where the buffers are.
        expected: Messages of the step whose receives are not yet posted.
        posted: Messages of the step whose receives are posted, and which are not yet taken.
        opening: Sizes of the standing receives to be posted in this step.
        standing: Receives posted for the first messages of the next step.
        spent: Standing receives that messages of one byte are coming for.
    """

    channel: Channel
    route: Route
    device: torch.device
    expected: deque[tuple[int, Signature]] = field(default_factory=deque)
    posted: deque[Message] = field(default_factory=deque)
    opening: Sizes = ()
    standing: deque[Message] = field(default_factory=deque)
    spent: list[Message] = field(default_factory=list)

    def expect(self, messages: Iterable[tuple[int, Signature]], *, window: int, opening: Sequence[Signature]) -> None:
        """Begins a step.

        Args:
            messages: (micro-batch, signature) of each message.
            window: How many receives to keep posted.
            opening: Signatures of the first messages, as both ends of the channel know them.

        Raises:
            RuntimeError: The peer is gone.
        """
        self.expected = deque(messages)
        self.opening = standing_sizes(opening)
        if not fits(opening, self._standing_sizes()):
            self.spent += self.standing
            self.standing.clear()
        for _ in range(window):
            self.post_next()

    def post_next(self) -> None:
        """Posts the receive of the next expected message; after the last one those for the step to come.

        Raises:
            RuntimeError: The peer is gone.
        """
        if not self.expected:
            sizes, self.opening = self.opening, ()
            for one in sizes:
                self.standing.append(self._post(STANDING, [((size,), torch.uint8) for size in one]))
            return
        micro_batch, signature = self.expected[0]
        if self.standing:
            message = self.standing.popleft()
            buffers = zip(message.tensors, signature, strict=True)
            message = Message(
                micro_batch=micro_batch,
                tensors=tuple(_as(buffer, one) for buffer, one in buffers),
                works=message.works,
            )
        else:
            message = self._post(micro_batch, [(one.shape, one.dtype) for one in signature])
        self.expected.popleft()
        self.posted.append(message)

    def under_way(self) -> list[dist.Work]:
        """The handles of all receives that are posted."""
        return [work for message in (*self.posted, *self.standing, *self.spent) for work in message.works]

    def _standing_sizes(self) -> Sizes:
        return tuple(tuple(buffer.numel() for buffer in message.tensors) for message in self.standing)

    def _post(self, micro_batch: int, buffers: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> Message:
        tensors = tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in buffers)
        message = Message(micro_batch=micro_batch, tensors=tensors)
        for buffer in tensors:
            work = dist.irecv(buffer, self.channel.source, group=self.route.group, tag=self.route.tag)
            message.works.append(kept(work))
        return message


def _as(buffer: Tensor, one: TensorSignature) -> Tensor:
    """The front of a buffer of bytes, seen as a tensor."""
    return buffer[: one.nbytes].view(one.dtype).view(one.shape)
