"""Channels over torch.distributed: receives posted ahead, sends that never block, bounded waits.

A message is the tensors of one micro-batch; each tensor travels on its own, in order. What gloo asks for (measured):

* Point-to-point on gloo is a rendezvous, so a receive posted late costs a round trip: the first `receive_window`
  receives of each channel are posted when the step begins, and each one taken posts the next. Those of the messages
  that open a step are posted in the step before (:mod:`ds_ldt.comm.receive_queue`).
* A handle that is dropped loses its message, and a send reads the tensor's own memory: both are kept until it is done.
* A handle reports completion only to whoever waits on it (`is_completed` stays False before), so each outbound channel
  has a thread that waits for its sends in order and lets go of their memory (:mod:`ds_ldt.comm.send_queue`).
* A wait that runs out of time closes the pair for good. It is the end of the job and not a poll: `LinkError`.
* A message longer than the posted buffer ends the receiving process inside gloo, so signatures are agreed beforehand.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ldt.comm.groups import StreamGroups
from ds_ldt.comm.receive_queue import STANDING, Inbox, Sizes, fits, standing_sizes
from ds_ldt.comm.send_queue import Message, Outbox, close_posted, link_failure, wait_within
from ds_ldt.comm.wire import Signature, WireGuard
from ds_ldt.errors import ConfigError, LinkError, ScheduleError
from ds_ldt.plan import Channel, Flow


class Transport:
    """Sends and receives the messages of one rank.

    Args:
        rank: This rank.
        groups: The process groups of the channels.
        device: Where received tensors are wanted. Over gloo they travel through host memory.
        timeout_s: Longest wait for one message (`ldt.timeout_s`).
        receive_window: How many receives of each channel are posted ahead, at least 1.
        guard: Checks every message before it is posted.
        on_send: Called with (channel, micro_batch, tensors) for each message that the guard let through.

    Attributes:
        bytes_sent: Channel -> bytes of tensor data handed to it so far.
        waited_ns: Nanoseconds that the host has waited for messages so far.
        on_send: The hook of that name; may be set later.
    """

    def __init__(
        self,
        *,
        rank: int,
        groups: StreamGroups,
        device: torch.device | str,
        timeout_s: float,
        receive_window: int,
        guard: WireGuard,
        on_send: Callable[[Channel, int, tuple[Tensor, ...]], None] | None = None,
    ) -> None:
        if receive_window < 1:
            raise ConfigError.of("receive_window", found=receive_window, expected="at least 1", fix="raise it")
        self.bytes_sent: Counter[Channel] = Counter()
        self.waited_ns = 0
        self._rank = rank
        self._groups = groups
        self._device = torch.device(device)
        self._wire_device = torch.device("cpu") if groups.host_wait else self._device
        self._timeout_s = timeout_s
        self._receive_window = receive_window
        self._guard = guard
        self.on_send = on_send
        self._inboxes: dict[Channel, Inbox] = {}
        self._outboxes: dict[Channel, Outbox] = {}
        self._opening: dict[Channel, Sequence[Signature]] = {}
        self._standing: dict[Channel, Sizes] = {}
        self._closed = False

    def set_receive_window(self, receive_window: int) -> None:
        """Changes how many receives of each channel are posted ahead, at least 1, from the next step on."""
        self._receive_window = receive_window

    def begin_step(
        self,
        receives: Mapping[Channel, Sequence[tuple[int, Signature]]],
        opening: Mapping[Channel, Sequence[Signature]] | None = None,
    ) -> None:
        """Posts the first receives of the step.

        Args:
            receives: Inbound channel -> (micro-batch, signature) of each of its messages, in the sender's order.
            opening: Channel of this rank, inbound or outbound -> signatures of its first messages, as many as shall be
                awaited before the next step begins. Both ends of a channel have to say the same.

        Raises:
            ScheduleError: The last step is not ended, or a channel is not an inbound channel of this rank.
            LinkError: A peer is gone.
        """
        self.refuse_if_closed()
        self._refuse_leftovers()
        for channel in receives:
            if channel.destination != self._rank or channel not in self._groups.routes:
                raise ScheduleError(f"rank {self._rank} cannot receive: not an inbound channel of it: {channel}")
        self._opening = dict(opening or {}) if self._groups.host_wait else {}
        for channel in dict.fromkeys([*receives, *self._inboxes]):
            messages = receives.get(channel, ())
            with self._explained(channel, messages[0][0] if messages else STANDING):
                self._inbox(channel).expect(
                    messages, window=self._receive_window, opening=self._opening.get(channel, ())
                )
        for channel, standing in self._standing.items():
            if channel.source == self._rank:
                self._spend_standing(channel, standing)

    def send(self, channel: Channel, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        """Checks a message and hands it to its channel; returns without waiting for the peer.

        The tensors must keep their values until the peer has them (nothing may be written to them in place):
        contiguous ones are sent from where they lie.

        Args:
            channel: An outbound channel of this rank.
            micro_batch: Named in errors; the receiver counts on the order of the channel.
            tensors: The message. Its signature is the one that the receiver expects; a gradient message holds the
                gradients of the tensors with a gradient, in order.

        Raises:
            PrivacyError: On the edge, the wire schema does not declare such a message. Nothing is sent.
            LinkError: The same in the cloud; or a peer is gone or took no message for `timeout_s`.
            ScheduleError: Not an outbound channel of this rank.
        """
        self.refuse_if_closed()
        if channel.source != self._rank or channel not in self._groups.routes:
            raise ScheduleError(f"rank {self._rank} cannot send: not an outbound channel of it: {channel}")
        self._guard.check_send(channel.boundary, tensors, gradients=channel.flow is Flow.GRADIENT)
        payload = tuple(tensor.detach().to(self._wire_device).contiguous() for tensor in tensors)
        if self.on_send is not None:
            self.on_send(channel, micro_batch, payload)
        message = Message(micro_batch=micro_batch, tensors=payload)
        self._outbox(channel).put(message)
        self.bytes_sent[channel] += message.num_bytes

    def receive(self, channel: Channel, micro_batch: int) -> tuple[Tensor, ...]:
        """Takes the next message of a channel, waiting for it if need be, and posts a further receive.

        Args:
            channel: An inbound channel of this rank.
            micro_batch: The micro-batch of the message; it has to be the channel's next.

        Returns:
            Fresh tensors on the transport's device, with the dtypes and shapes of the signature given to `begin_step`.

        Raises:
            ScheduleError: The next message of the channel is that of another micro-batch, or there is none left.
            LinkError: It did not come within `timeout_s`, or the peer is gone.
        """
        self.refuse_if_closed()
        inbox = self._inboxes.get(channel)
        if inbox is None or not inbox.posted or inbox.posted[0].micro_batch != micro_batch:
            following = "none" if inbox is None or not inbox.posted else f"micro_batch {inbox.posted[0].micro_batch}"
            raise ScheduleError(
                f"rank {self._rank} asked for micro_batch {micro_batch} of {channel}, but the next message of that "
                f"channel is: {following}. The plan's receives must be in the order of the sender's sends."
            )
        message = inbox.posted[0]
        with self._explained(channel, micro_batch):
            self._wait_for(message)
            inbox.posted.popleft()
            inbox.post_next()
        return tuple(tensor.to(self._device) for tensor in message.tensors)

    def end_step(self) -> None:
        """Waits until the peers have every message of the step.

        Raises:
            ScheduleError: A message of the step was never received.
            LinkError: A peer is gone or took no message for `timeout_s`.
        """
        self.refuse_if_closed()
        self._refuse_leftovers()
        for outbox in self._outboxes.values():
            outbox.drain()
        for channel, inbox in self._inboxes.items():
            with self._explained(channel, STANDING):
                for message in inbox.spent:
                    self._wait_for(message)
            inbox.spent.clear()
        self._standing = {channel: standing_sizes(signatures) for channel, signatures in self._opening.items()}

    @property
    def is_closed(self) -> bool:
        """True after `close` or `abort`: nothing is sent or received any more."""
        return self._closed

    def close(self) -> None:
        """Ends the threads of the outbound channels once their messages are through. The groups stay.

        Raises:
            LinkError: As for `end_step`.
        """
        if not self._closed:
            self._closed = True
            for outbox in self._outboxes.values():
                outbox.drain()
                outbox.stop()

    def farewell(self) -> None:
        """Waits until every rank calls it too, for a few seconds at most. Raises nothing.

        Whoever closes a connection first may destroy what is still on its way over it.
        """
        self._groups.wait_for_all()

    def abort(self) -> None:
        """Gives everything up at once and destroys the groups, so that peers fail promptly too. Raises nothing."""
        self._closed = True
        under_way = [work for inbox in self._inboxes.values() for work in inbox.under_way()]
        self._inboxes = {}
        for outbox in self._outboxes.values():
            under_way += [work for message in outbox.give_up() for work in message.works]
        if self._groups.host_wait:
            close_posted(under_way)
        self._groups.close()
        for outbox in self._outboxes.values():
            outbox.stop()
        self._outboxes = {}  # they hold the groups, which close their connections when nobody holds them any more

    def _outbox(self, channel: Channel) -> Outbox:
        if channel not in self._outboxes:
            route = self._groups.routes[channel]
            self._outboxes[channel] = Outbox(
                channel=channel,
                post=partial(dist.isend, dst=channel.destination, group=route.group, tag=route.tag),
                rank=self._rank,
                timeout_s=self._timeout_s,
                host_wait=self._groups.host_wait,
            )
        return self._outboxes[channel]

    def _inbox(self, channel: Channel) -> Inbox:
        if channel not in self._inboxes:
            route = self._groups.routes[channel]
            self._inboxes[channel] = Inbox(channel=channel, route=route, device=self._wire_device)
        return self._inboxes[channel]

    def _spend_standing(self, channel: Channel, standing: Sizes) -> None:
        """Sends what ends the standing receives at the other end, where the messages of this step do not fit them."""
        if not fits(self._opening.get(channel, ()), standing):
            for sizes in standing:
                ends = tuple(torch.zeros(1, dtype=torch.uint8) for _ in sizes)
                self._outbox(channel).put(Message(micro_batch=STANDING, tensors=ends))

    def _wait_for(self, message: Message) -> None:
        begin = time.monotonic()
        for work in message.works:
            if self._groups.host_wait:
                wait_within(work, begin, self._timeout_s)
            else:
                work.wait()
        self.waited_ns += round((time.monotonic() - begin) * 1e9)

    @contextmanager
    def _explained(self, channel: Channel, micro_batch: int) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        except LinkError:
            raise
        except RuntimeError as error:
            self._raise_earlier_failure()
            raise link_failure(
                rank=self._rank,
                channel=channel,
                micro_batch=micro_batch,
                waited_s=time.monotonic() - begin,
                timeout_s=self._timeout_s,
                error=error,
            ) from error

    def _raise_earlier_failure(self) -> None:
        """A send that timed out closes the pair and so fails the receives too: the send's error says more."""
        for outbox in self._outboxes.values():
            outbox.check()

    def _refuse_leftovers(self) -> None:
        left = [
            f"{channel}: micro_batches {[message.micro_batch for message in inbox.posted]}"
            + (f" and {len(inbox.expected)} more" if inbox.expected else "")
            for channel, inbox in self._inboxes.items()
            if inbox.posted or inbox.expected
        ]
        if left:
            raise ScheduleError(f"rank {self._rank} left messages of the step unreceived: {'; '.join(left)}")

    def refuse_if_closed(self) -> None:
        """Raises a `LinkError` after `close` or `abort`."""
        if self._closed:
            raise LinkError(
                f"rank {self._rank}: the connections of this engine are closed: it was destroyed, or a step failed. "
                "After destroy() build a new module and engine; a job that failed has to be started anew."
            )
