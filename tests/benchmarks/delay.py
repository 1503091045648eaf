"""A link within the processes: every message between the sites arrives as late as it would over gloo and a real link.

It sits under every row alike, in the two methods of `ProcessGroup` through which all point-to-point messages of
DeepSpeed, torch.distributed.pipelining and ds_ldt pass, and works where no namespaces or devices can be made.

Over gloo a message leaves when the sender has posted it *and* knows that its receive is posted. With a latency L:

    leave  = max(posted by the sender, posted by the receiver + L)
    arrive = leave + size / rate + L

so who posts a receive late pays a round trip here too. The sender's wait ends at `leave`, the receiver's at `arrive`.
Each side notes when it posted its n-th message of a channel in a small file that both map; the clock is the machine's.

What it does not do: messages that travel at the same time do not share the rate, and a collective over both sites is
charged one latency, whatever it does inside. Both favour whoever sends more.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

_SLOTS = 4096
_STAMP = struct.Struct("d")
_SENT, _WANTED = 0, 1
_BITS_PER_MEGABYTE = 8e-6
_COLLECTIVES = ("allreduce", "broadcast", "reduce", "allgather", "_allgather_base", "barrier")


class DelayedWork:
    """Wraps the handle of a transfer: it ends no earlier than the link lets it.

    Args:
        work: the handle.
        due: called once the transfer itself is through; the clock's time at which it may end.
    """

    def __init__(self, work: Any, due: Callable[[], float]) -> None:
        self._work = work
        self._due = due
        self._done = False

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        """Wait for the transfer and for the link."""
        self._work.wait(*args, **kwargs)
        if not self._done:
            time.sleep(max(0.0, self._due() - time.monotonic()))
            self._done = True
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@dataclass(slots=True, kw_only=True)
class InProcessLink:
    """The link of this process.

    Attributes:
        edge_ranks: ranks on the edge; the others are in the cloud.
        directory: where the ranks note when they posted what.
        latency_s: one way.
        mbps: rate of each message; 0: unlimited.
    """

    edge_ranks: tuple[int, ...]
    directory: Path
    latency_s: float = 0.0
    mbps: float = 0.0
    _maps: dict[str, mmap.mmap] = field(default_factory=dict)
    _counts: Counter[tuple[str, int]] = field(default_factory=Counter)

    def crosses(self, ranks: list[int]) -> bool:
        """Whether some of these global ranks are on the edge and some in the cloud."""
        return len({rank in self.edge_ranks for rank in ranks}) > 1

    def post(self, channel: str, side: int) -> tuple[mmap.mmap, int]:
        """Note that this side has posted its next message of a channel; where to find the times of both sides."""
        stamps = self._maps.get(channel) or self._map(channel)
        slot = self._counts[channel, side] % _SLOTS
        self._counts[channel, side] += 1
        _STAMP.pack_into(stamps, _at(slot, side), time.monotonic())
        return stamps, slot

    def leaves(self, stamps: mmap.mmap, slot: int) -> float:
        """When a message leaves; both sides have posted it."""
        (sent,), (wanted,) = (_STAMP.unpack_from(stamps, _at(slot, side)) for side in (_SENT, _WANTED))
        return max(sent, wanted + self.latency_s)

    def transfer_s(self, tensors: list[Any]) -> float:
        """Seconds that a message takes at the set rate, and to arrive."""
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return self.latency_s + (num_bytes * _BITS_PER_MEGABYTE / self.mbps if self.mbps else 0.0)

    def _map(self, channel: str) -> mmap.mmap:
        size = 2 * _SLOTS * _STAMP.size
        descriptor = os.open(self.directory / channel, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, size)
            self._maps[channel] = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        return self._maps[channel]


def _at(slot: int, side: int) -> int:
    return (2 * slot + side) * _STAMP.size


def install(edge_ranks: tuple[int, ...], directory: str) -> InProcessLink:
    """Put the link under torch.distributed in this process, for good.

    Args:
        edge_ranks: global ranks on the edge.
        directory: an empty directory that all ranks of the group share.
    """
    link = InProcessLink(edge_ranks=edge_ranks, directory=Path(directory))
    plain_send, plain_receive = dist.ProcessGroup.send, dist.ProcessGroup.recv

    def send(group: Any, tensors: list[Any], destination: int, tag: int) -> Any:
        source, target = dist.get_rank(), dist.get_global_rank(group, destination)
        if not link.crosses([source, target]):
            return plain_send(group, tensors, destination, tag)
        place = link.post(f"{group.group_name}_{tag}_{source}_{target}", _SENT)
        return DelayedWork(plain_send(group, tensors, destination, tag), lambda: link.leaves(*place))

    def receive(group: Any, tensors: list[Any], source: int, tag: int) -> Any:
        origin, target = dist.get_global_rank(group, source), dist.get_rank()
        if not link.crosses([origin, target]):
            return plain_receive(group, tensors, source, tag)
        place = link.post(f"{group.group_name}_{tag}_{origin}_{target}", _WANTED)
        seconds = link.transfer_s(tensors)
        return DelayedWork(plain_receive(group, tensors, source, tag), lambda: link.leaves(*place) + seconds)

    dist.ProcessGroup.send, dist.ProcessGroup.recv = send, receive
    for name in _COLLECTIVES:
        setattr(dist.ProcessGroup, name, _delayed_collective(link, getattr(dist.ProcessGroup, name)))
    return link


def _delayed_collective(link: InProcessLink, plain: Callable[..., Any]) -> Callable[..., Any]:
    """A collective that takes at least one latency where its group is on both sites."""

    def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
        due = time.monotonic() + link.latency_s
        work = plain(group, *args, **kwargs)
        if work is None or not link.crosses(dist.get_process_group_ranks(group)):
            return work
        return DelayedWork(work, lambda: due)

    return collective
