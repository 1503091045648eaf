"""The measurement of the link, against a far side that answers by a clock of its own: no process, no waiting."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_ldt.comm import link_probe
from ds_ldt.comm.link_probe import Line, answer_probe, probe

SIZES = [2**16, 2**18, 2**20, 2**22, 2**24]


class Far:
    """A line to a far side that is played: what comes of it, and how long each message is waited for.

    `pings` holds the seconds of each round trip (the last one repeats), `gaps` the seconds before each of 8 messages
    of a size, `seen` what the far side has seen of a stream of a size: its rate and the seconds of a round.
    """

    def __init__(
        self,
        *,
        pings: list[float] | None = None,
        gaps: Callable[[int], list[float]] = lambda size: [0.0] * 8,
        seen: Callable[[int], list[float]] = lambda size: [1.0, 0.0],
        last_ping: int = 0,
    ) -> None:
        self.now, self.taken, self.sent = 0.0, 0, 0
        self.log: list[Any] = []
        self.pings, self.gaps, self.seen, self.last_ping = pings or [0.0], gaps, seen, last_ping

    def expect(self, tensor: Tensor) -> Tensor:
        self.log.append(("expect", tensor.numel()))
        return tensor

    def take(self, tensor: Tensor) -> None:
        self.log.append(("take", tensor.numel()))
        if tensor.dtype is torch.uint8:
            self.now += self.gaps(tensor.numel())[self.taken % 8]
            self.taken += 1
        elif tensor.dtype is torch.float64:
            tensor.copy_(torch.tensor(self.seen(self.sent), dtype=torch.float64))
        else:
            self.now += self.pings[min(self.taken, len(self.pings) - 1)]
            self.taken += 1
            tensor.fill_(int(self.taken == self.last_ping))

    def send(self, tensor: Tensor, *, times: int = 1) -> None:
        if tensor.dtype is torch.uint8:
            self.sent = tensor.numel()
            self.log.append(("stream", tensor.numel(), times))
        else:
            self.log.append(("send", *tensor.tolist()))


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[[Far], Far]:
    """Lets the module read the clock of a far side."""

    def play(far: Far) -> Far:
        monkeypatch.setattr(link_probe, "time", SimpleNamespace(perf_counter=lambda: far.now))
        return far

    return play


@pytest.mark.parametrize("seconds, counted", [(0.001, 200), (0.0625, 45), (1.0, 20)])
def test_round_trips_go_on_for_three_seconds_but_there_are_20_to_200(
    played: Callable[[Far], Far], seconds: float, counted: int
) -> None:
    far = played(Far(pings=[seconds]))
    assert link_probe._ping(far) == pytest.approx([seconds] * counted)  # type: ignore[arg-type]
    trips = 5 + counted
    one = [("expect", 1), ("send", 0), ("take", 1)]
    assert far.log == [*one * (trips - 1), ("expect", 1), ("send", 1), ("take", 1)]


def test_pings_are_answered_up_to_the_last_with_the_next_receive_posted_before() -> None:
    far = Far(last_ping=3)
    link_probe._answer_pings(far)  # type: ignore[arg-type]
    one = [("take", 1), ("expect", 1), ("send", 0)]
    assert far.log == [("expect", 1), *one * 2, ("take", 1), ("send", 0)]


def test_the_rate_is_that_of_the_median_message_in_the_first_round_of_a_second(played: Callable[[Far], Far]) -> None:
    gaps = {SIZES[0]: [5.0, *[1 / 32] * 7], SIZES[1]: [5.0, *[1 / 8] * 6, 1 / 4]}
    far = played(Far(gaps=gaps.__getitem__))
    assert link_probe._stream_in(far) == (SIZES[1] * 8.0, SIZES[1])  # type: ignore[arg-type]
    assert [entry[1:] for entry in far.log if entry[0] == "send"] == [
        (0.0, 0.0),
        (SIZES[0] * 32.0, 7 / 32),
        (0.0, 0.0),
        (SIZES[1] * 8.0, 1.0),
    ]
    ready = far.log.index(("send", 0.0, 0.0))
    assert far.log[:ready] == [("expect", SIZES[0])] * 8, "all receives are posted before the far side is told so"


def test_messages_that_come_together_end_the_rounds_at_the_largest_size(played: Callable[[Far], Far]) -> None:
    far = played(Far())
    rate, size = link_probe._stream_in(far)  # type: ignore[arg-type]
    assert (rate, size) == (pytest.approx(SIZES[-1] / 1e-9), SIZES[-1])
    assert [size for what, size, *_ in far.log if what == "expect"] == [size for size in SIZES for _ in range(8)]


@pytest.mark.parametrize("slow, last", [(None, SIZES[-1]), (SIZES[2], SIZES[2])])
def test_a_stream_is_sent_in_rounds_until_the_receiver_has_seen_a_second(slow: int | None, last: int) -> None:
    far = Far(seen=lambda size: [3.0 * size, 1.0 if size == slow else 0.99])
    assert link_probe._stream_out(far) == (3.0 * last, last)  # type: ignore[arg-type]
    rounds = [size for size in SIZES if size <= last]
    one = [("expect", 2), ("expect", 2), ("take", 2)]
    assert far.log == [entry for size in rounds for entry in [*one, ("stream", size, 8), ("take", 2)]]


@pytest.mark.parametrize("to_cloud_s, to_edge_s", [(2.0, 0.0), (0.0, 0.5)])
def test_the_edge_reports_half_round_trips_without_the_first_and_both_directions(
    played: Callable[[Far], Far], to_cloud_s: float, to_edge_s: float
) -> None:
    trips = [9.0] * 5 + [number / 64 for number in range(1, 21)]
    far = played(Far(pings=trips, gaps=lambda size: [to_edge_s] * 8, seen=lambda size: [7.0, to_cloud_s]))
    found = probe(far)  # type: ignore[arg-type]
    assert (found.latency_s, found.latency_p90_s) == (pytest.approx(10.5 / 64 / 2), pytest.approx(18.1 / 64 / 2))
    assert (found.round_trips, found.to_cloud) == (20, 7.0)
    assert found.to_edge == pytest.approx(SIZES[0] / 0.5 if to_edge_s else SIZES[-1] / 1e-9)
    assert found.message_bytes == SIZES[0], "of the direction with the smaller ones"


def test_the_cloud_answers_in_the_same_sequence(played: Callable[[Far], Far]) -> None:
    far = played(Far(last_ping=1, gaps=lambda size: [1.0] * 8, seen=lambda size: [1.0, 1.0]))
    answer_probe(far)  # type: ignore[arg-type]
    assert [what for what, *_ in far.log if what != "expect"] == [
        *("take", "send"),
        *("send", *["take"] * 8, "send"),
        *("take", "stream", "take"),
    ]


def test_a_line_waits_for_each_of_its_messages_as_long_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[Any] = []

    def post(tensor: Tensor, **peer: int) -> Any:
        return SimpleNamespace(wait=lambda timeout: waits.append((peer, timeout)))

    monkeypatch.setattr(dist, "isend", post)
    monkeypatch.setattr(dist, "irecv", post)
    line, limit = Line(peer=1, timeout=timedelta(seconds=5)), timedelta(seconds=5)
    line.send(torch.zeros(1))
    line.send(torch.zeros(1), times=2)
    assert waits == [({"dst": 1}, limit)] * 3
    line.take(line.expect(torch.zeros(1)))
    assert waits[3:] == [({"src": 1}, limit)]
