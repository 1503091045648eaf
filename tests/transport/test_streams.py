"""Process groups as a pure function of the channels, and outboxes with handles of straw: no process is started."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_ldt.comm.groups import GroupSpec, StreamGroups, group_specs
from ds_ldt.comm.send_queue import Message, Outbox, kept
from ds_ldt.errors import LinkError
from ds_ldt.plan import Channel, Flow

CHANNELS = [
    Channel(domain=domain, boundary=boundary, flow=flow, source=source, destination=destination)
    for domain in range(2)
    for boundary, flow, source, destination in (
        (0, Flow.ACTIVATION, 0, domain + 1),
        (0, Flow.GRADIENT, domain + 1, 0),
        (1, Flow.ACTIVATION, domain + 1, 0),
    )
]


def test_gloo_needs_three_groups_whatever_the_channels() -> None:
    specs = group_specs(CHANNELS, backend="gloo", group_per_channel=False)
    assert [spec.name for spec in specs] == ["activation", "gradient", "control"]
    assert all(spec.ranks is None for spec in specs)


def test_a_backend_without_tags_gets_a_pair_of_ranks_for_every_channel_and_control_stays_on_gloo() -> None:
    specs = group_specs(CHANNELS, backend="hccl", group_per_channel=True)
    assert [spec.ranks for spec in specs] == [(0, 1)] * 3 + [(0, 2)] * 3 + [None]
    assert len({spec.name for spec in specs}) == len(specs)
    assert {spec.backend for spec in specs[:-1]} == {"hccl"}
    assert specs[-1] == GroupSpec(name="control", backend="gloo")


@pytest.mark.parametrize("backend", ["gloo", "a backend that nobody knows"])
def test_every_rank_creates_the_same_groups_in_the_same_order(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def new_group(**arguments: Any) -> str:
        calls.append(arguments)
        return f"group {len(calls)}"

    monkeypatch.setattr(dist, "new_group", new_group)
    seen, routes = [], []
    for rank in range(3):
        calls.clear()
        shuffled = random.Random(rank).sample(CHANNELS, len(CHANNELS))
        groups = StreamGroups.create(rank=rank, channels=shuffled, timeout_s=9, backend=backend)
        seen.append(list(calls))
        routes.append(groups.routes)
        assert groups.host_wait == (backend == "gloo")
    assert seen[0] == seen[1] == seen[2]
    assert all(call["timeout"] == timedelta(seconds=9) for call in seen[0])
    assert set(routes[0]) == set(CHANNELS)
    assert set(routes[1]) == {channel for channel in CHANNELS if channel.domain == 0}
    for rank in (1, 2):  # both ends of a channel agree on its route, and no two channels share one
        assert all(routes[rank][channel] == routes[0][channel] for channel in routes[rank])
    assert len({(route.group, route.tag) for route in routes[0].values()}) == len(CHANNELS)


class Straw:
    """A handle that ends when it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.done, self.waits, self._error = threading.Event(), [], error
        self.waits: list[timedelta | None]

    def wait(self, timeout: timedelta | None = None) -> None:
        self.waits.append(timeout)
        if self._error is not None:
            raise self._error
        assert self.done.wait(10)

    def is_completed(self) -> bool:
        return self.done.is_set()


def _outbox(handles: list[Straw], *, host_wait: bool) -> Outbox:
    """An outbox whose sends get these handles, in order."""
    left = iter(handles)
    return Outbox(channel=CHANNELS[0], post=lambda _: next(left), rank=0, timeout_s=5, host_wait=host_wait)


def _message(micro_batch: int, num_tensors: int = 1, num_bytes: int = 1) -> Message:
    return Message(micro_batch=micro_batch, tensors=(torch.zeros(num_bytes, dtype=torch.uint8),) * num_tensors)


def _wait_for_length(outbox: Outbox, length: int) -> None:
    end = time.monotonic() + 10
    while len(outbox) != length and time.monotonic() < end:
        time.sleep(0.001)
    assert len(outbox) == length


def test_an_outbox_lets_go_in_order_as_its_sends_end() -> None:
    first, second = Straw(), Straw()
    outbox = _outbox([first, second], host_wait=True)
    outbox.put(_message(0))
    outbox.put(_message(1))
    second.done.set()
    assert len(outbox) == 2
    first.done.set()
    outbox.drain()
    assert len(outbox) == 0
    assert first.waits[0] is not None
    assert first.waits[0] <= timedelta(seconds=5)
    outbox.stop()


def test_an_outbox_keeps_the_first_failure_and_shows_it_at_the_next_occasion() -> None:
    through = Straw()
    through.done.set()
    outbox = _outbox([through, Straw(RuntimeError("Timed out waiting 5000ms"))], host_wait=True)
    outbox.put(_message(4, num_tensors=2))
    for occasion in (outbox.drain, outbox.check, lambda: outbox.put(_message(5))):
        with pytest.raises(LinkError, match=r"rank 1 was silent.*micro_batch 4 of the activation"):
            occasion()


def test_an_outbox_says_so_when_a_send_cannot_even_be_posted() -> None:
    outbox = _outbox([], host_wait=True)
    for occasion in (lambda: outbox.put(_message(2)), outbox.check, outbox.drain):
        with pytest.raises(LinkError, match=r"rank 1 is gone.*micro_batch 2 of the activation"):
            occasion()


def test_an_outbox_wakes_its_thread_for_large_messages_and_not_for_small_ones() -> None:
    """What has been sent is let go of without any call once it is more than 1 MiB, down to half of that."""
    before = threading.active_count()
    works = [Straw() for _ in range(6)]
    for work in works:
        work.done.set()
    outbox = _outbox(works, host_wait=True)
    for micro_batch in range(4):
        outbox.put(_message(micro_batch, num_bytes=2**18))
    assert (len(outbox), threading.active_count()) == (4, before)
    outbox.put(_message(4))
    _wait_for_length(outbox, 2)
    assert [len(work.waits) for work in works] == [1, 1, 1, 0, 0, 0]
    outbox.put(_message(5, num_bytes=2**21))
    _wait_for_length(outbox, 0)
    outbox.stop()
    assert threading.active_count() == before


def test_an_outbox_whose_device_waits_asks_and_never_starts_a_thread() -> None:
    before = threading.active_count()
    works = [Straw(), Straw(), Straw()]
    outbox = _outbox(works, host_wait=False)
    outbox.put(_message(0))
    outbox.put(_message(1))
    works[0].done.set()
    outbox.put(_message(2))
    assert [message.micro_batch for message in outbox._pending] == [1, 2]
    works[1].done.set()
    works[2].done.set()
    outbox.drain()
    assert works[1].waits == works[2].waits == [None]
    assert len(outbox) == 0
    assert threading.active_count() == before


def test_a_missing_handle_is_an_error() -> None:
    with pytest.raises(LinkError, match="not a member"):
        kept(None)
