"""Latency and bandwidth of the link, measured with messages: at leisure for `ds-ldt check`, briefly for a running job.

Both send small messages back and forth for the latency, and several large ones without a pause, in one direction and
then in the other, for the bandwidth, by the clock of the receiver. `probe` is between two processes that have met for
it, over gloo and on CPUs: it repeats small messages for seconds, and lets large ones grow until a round takes long.
`time_leaders` is between the leaders of the sites of a job, between two of its steps: its messages are fixed in number
and size, and those of any backend.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_ldt.comm.grid import LDTPipelineGrid
from ds_ldt.comm.send_queue import kept
from ds_ldt.comm.site_report import MeasuredLink
from ds_ldt.plan.measured_costs import LinkTimes

_WARM_UP, _FEWEST, _MOST = 5, 20, 200
"""Round trips: not counted, counted at least, counted at most."""

_PINGS_S = 3.0
"""Seconds after which no further round trip is begun, once there are enough."""

_STREAM = 8
"""Messages of a round, sent without a pause."""

_SMALLEST, _LARGEST, _GROWTH = 2**16, 2**24, 4
"""Bytes of a message: in the first round, in the last one, and how it grows."""

_ROUND_S = 1.0
"""Seconds of a round from which on it is long enough to tell the bandwidth."""

_PINGS, _PING_BYTES = 10, 8
_TRAIN, _WAGON_BYTES = 10, 512 * 1024
"""Of `time_leaders`: round trips that count and bytes of each message; messages of a train and bytes of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Messages to and from the other site.

    gloo sends a message once it knows that its receive is posted: so each side posts the receive of an answer before
    it sends what is to be answered, and a round trip is one round trip.
    """

    peer: int
    timeout: timedelta

    def expect(self, tensor: Tensor) -> dist.Work:
        """Post the receive of a message."""
        work = dist.irecv(tensor, src=self.peer)
        assert work is not None
        return work

    def take(self, work: dist.Work) -> None:
        """Wait for a message."""
        work.wait(self.timeout)

    def send(self, tensor: Tensor, *, times: int = 1) -> None:
        """Send a message, or the same one several times without a pause."""
        works = [dist.isend(tensor, dst=self.peer) for _ in range(times)]
        for work in works:
            assert work is not None
            work.wait(self.timeout)


def probe(line: Line) -> MeasuredLink:
    """Measure the link, from the edge.

    Args:
        line: To the cloud, where `answer_probe` runs.

    Raises:
        RuntimeError: torch's own, if the other site goes away or is silent for too long.
    """
    round_trips = _ping(line)
    to_cloud, sent = _stream_out(line)
    to_edge, received = _stream_in(line)
    return MeasuredLink(
        latency_s=statistics.median(round_trips) / 2,
        latency_p90_s=statistics.quantiles(round_trips, n=10, method="inclusive")[-1] / 2,
        round_trips=len(round_trips),
        to_cloud=to_cloud,
        to_edge=to_edge,
        message_bytes=min(sent, received),
    )


def answer_probe(line: Line) -> None:
    """Do the cloud's part in `probe`.

    Args:
        line: To the edge.

    Raises:
        RuntimeError: As for `probe`.
    """
    _answer_pings(line)
    _stream_in(line)
    _stream_out(line)


def _ping(line: Line) -> list[float]:
    """Return the seconds of each round trip. A message carries whether it is the last one."""
    seconds: list[float] = []
    begun, answer = time.perf_counter(), torch.zeros(1, dtype=torch.int64)
    while True:
        count = len(seconds) + 1 - _WARM_UP
        last = count >= _MOST or (count >= _FEWEST and time.perf_counter() - begun > _PINGS_S)
        expected = line.expect(answer)
        sent_at = time.perf_counter()
        line.send(torch.tensor([int(last)]))
        line.take(expected)
        seconds.append(time.perf_counter() - sent_at)
        if last:
            return seconds[_WARM_UP:]


def _answer_pings(line: Line) -> None:
    question = torch.zeros(1, dtype=torch.int64)
    expected = line.expect(question)
    while True:
        line.take(expected)
        last = bool(question.item())
        if not last:
            question = torch.zeros(1, dtype=torch.int64)
            expected = line.expect(question)
        line.send(torch.zeros(1, dtype=torch.int64))
        if last:
            return


def _stream_in(line: Line) -> tuple[float, int]:
    """Receive rounds of larger and larger messages until one is long enough; see `_stream_out`.

    The time between two messages of a stream is what the link needs for one: no latency is in it, nor is the first
    message, with which TCP has to find its speed.
    """
    size = _SMALLEST
    while True:
        messages = [torch.empty(size, dtype=torch.uint8) for _ in range(_STREAM)]
        works = [line.expect(message) for message in messages]
        line.send(torch.zeros(2, dtype=torch.float64))
        stamps = []
        for work in works:
            line.take(work)
            stamps.append(time.perf_counter())
        between = [later - earlier for earlier, later in zip(stamps, stamps[1:], strict=False)]
        rate, elapsed = size / max(statistics.median(between), 1e-9), stamps[-1] - stamps[0]
        line.send(torch.tensor([rate, elapsed], dtype=torch.float64))
        if size >= _LARGEST or elapsed >= _ROUND_S:
            return rate, size
        size *= _GROWTH


def _stream_out(line: Line) -> tuple[float, int]:
    """Send rounds of messages; return the bytes per second that the receiver has seen, and the size of a message."""
    size = _SMALLEST
    while True:
        ready, seen = (torch.zeros(2, dtype=torch.float64) for _ in range(2))
        expected = [line.expect(tensor) for tensor in (ready, seen)]
        line.take(expected[0])
        line.send(torch.zeros(size, dtype=torch.uint8), times=_STREAM)
        line.take(expected[1])
        rate, elapsed = seen.tolist()
        if size >= _LARGEST or elapsed >= _ROUND_S:
            return rate, size
        size *= _GROWTH


# --- between the steps of a job -------------------------------------------------------------------------------------


def time_leaders(grid: LDTPipelineGrid, device: torch.device | str) -> LinkTimes:
    """Time messages between the leaders of the sites; both call it, and other ranks may.

    Args:
        grid: The groups.
        device: Where the groups want their tensors.

    Returns:
        What this rank has timed: the edge's leader the round trips, each leader what it received; all else is zeros.
    """
    round_trips, arrivals = [0] * _PINGS, ([0] * _TRAIN, [0] * _TRAIN)
    if grid.is_site_leader:
        round_trips = _round_trips(grid, device)
        arrivals = (_train(grid, device, source="edge"), _train(grid, device, source="cloud"))
    return LinkTimes(round_trips=round_trips, arrivals=arrivals, num_bytes=_WAGON_BYTES)


def _round_trips(grid: LDTPipelineGrid, device: torch.device | str) -> list[int]:
    """Nanoseconds of round trips of a small message between the leaders, on the edge; zeros in the cloud.

    Both have their next receive posted by the time a message comes for it, which is what gloo asks for, and both send
    and receive in turn, as backends ask that serialise a group: a receive posted before the question, as a `Line` has
    it, would wait there for ever. The first round trip opens the way and is not counted.
    """
    peer = grid.other_site_leader
    there, back = (torch.zeros(_PING_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    times = []
    for _ in range(_PINGS + 1):
        begin = time.perf_counter_ns()
        if grid.site == "edge":
            sending = kept(dist.isend(there, peer, group=grid.leader_group))
            dist.recv(back, peer, group=grid.leader_group)
            sending.wait()
        else:
            dist.recv(there, peer, group=grid.leader_group)
            dist.send(back, peer, group=grid.leader_group)
        get_accelerator().synchronize()
        times.append(time.perf_counter_ns() - begin)
    return times[1:] if grid.site == "edge" else [0] * _PINGS


def _train(grid: LDTPipelineGrid, device: torch.device | str, *, source: str) -> list[int]:
    """Send large messages one behind the other; nanoseconds at which each has arrived, at the receiver, else zeros.

    Twice, and the second time counts: TCP sends slowly at first on a long way.
    """
    sends, peer = grid.site == source, grid.other_site_leader
    transfer = dist.isend if sends else dist.irecv
    times: list[int] = []
    begin = time.perf_counter_ns()
    for _ in range(2):
        buffers = [torch.zeros(_WAGON_BYTES, dtype=torch.uint8, device=device) for _ in range(_TRAIN)]
        works = [kept(transfer(buffer, peer, group=grid.leader_group)) for buffer in buffers]
        times.clear()
        for work in works:
            work.wait()
            get_accelerator().synchronize()
            times.append(time.perf_counter_ns() - begin)
    return [0] * _TRAIN if sends else times
