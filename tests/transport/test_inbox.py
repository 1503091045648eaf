"""Inboxes with handles of straw: which receives are posted when, how large, and what becomes of standing ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_ldt.comm.receive_queue import STANDING, Inbox, fits, standing_sizes
from ds_ldt.comm.send_queue import Route
from ds_ldt.comm.wire import Signature, TensorSignature
from ds_ldt.errors import LinkError
from ds_ldt.plan import Channel, Flow

CHANNEL = Channel(domain=0, boundary=0, flow=Flow.ACTIVATION, source=3, destination=1)
CPU = torch.device("cpu")


def message(*lengths: int, dtype: torch.dtype = torch.float32) -> Signature:
    return tuple(TensorSignature(dtype, (length,), False) for length in lengths)


def test_a_standing_receive_is_as_large_as_its_message_and_never_empty() -> None:
    two = TensorSignature(torch.bfloat16, (2, 3), True)
    assert standing_sizes([(two, *message(5)), message(0), ()]) == ((12, 20), (1,), ())


@pytest.mark.parametrize(
    "opening, standing, expected",
    [
        ([], (), True),
        ([message(2)], (), True),
        ([message(2, 3)], ((8, 12),), True),
        ([message(2, 3), message(9)], ((9, 12),), True),
        ([message(2, 3)], ((8, 11),), False),
        ([message(3, 2)], ((8, 12),), False),
        ([message(2), message(3)], ((8,), (11,)), False),
        ([message(2)], ((8, 12),), False),
        ([message(2, 3)], ((8,),), False),
        ([message(2)], ((8,), (8,)), False),
        ([], ((1,),), False),
    ],
)
def test_standing_receives_fit_if_each_takes_its_message_and_none_is_left(
    opening: list[Signature], standing: tuple[tuple[int, ...], ...], expected: bool
) -> None:
    assert fits(opening, standing) is expected


class Posts:
    """Stands for `dist.irecv`: remembers the buffers, and gives each its own handle."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []

    def __call__(self, buffer: Tensor, source: int, *, group: object, tag: int) -> Any:
        assert (source, group, tag) == (3, "group", 7)
        self.buffers.append(buffer)
        return f"handle {len(self.buffers)}"

    def sizes(self) -> list[int]:
        return [buffer.numel() * buffer.dtype.itemsize for buffer in self.buffers]


@pytest.fixture
def posts(monkeypatch: pytest.MonkeyPatch) -> Posts:
    found = Posts()
    monkeypatch.setattr(dist, "irecv", found)
    return found


def inbox() -> Inbox:
    return Inbox(channel=CHANNEL, route=Route(group="group", tag=7), device=CPU)  # type: ignore[arg-type]


def step_of(one: Inbox, lengths: list[int], *, window: int, opening: int = 2) -> None:
    """Begins a step with a message of each length, the first ones announced as its opening."""
    signatures = [message(length) for length in lengths]
    one.expect(enumerate(signatures), window=window, opening=signatures[:opening])


def test_receives_are_posted_in_order_and_no_more_than_the_window(posts: Posts) -> None:
    one = inbox()
    step_of(one, [2, 3, 4], window=2)
    assert posts.sizes() == [8, 12]
    assert [(each.micro_batch, each.works) for each in one.posted] == [(0, ["handle 1"]), (1, ["handle 2"])]
    assert [micro_batch for micro_batch, _ in one.expected] == [2]
    assert not one.standing


def test_after_the_last_receive_come_the_standing_ones_once(posts: Posts) -> None:
    one = inbox()
    step_of(one, [2, 3, 4], window=3)
    one.post_next()
    one.post_next()
    assert posts.sizes() == [8, 12, 16, 8, 12]
    assert [each.micro_batch for each in one.standing] == [STANDING] * 2
    assert one.under_way() == [f"handle {number}" for number in range(1, 6)]


def test_a_window_beyond_the_step_reaches_the_next_one_at_once(posts: Posts) -> None:
    one = inbox()
    step_of(one, [2], window=4)
    assert (len(one.posted), len(one.standing)) == (1, 1)


def test_messages_that_fit_come_into_the_front_of_standing_receives(posts: Posts) -> None:
    one = inbox()
    step_of(one, [4, 4], window=3)
    one.posted.clear()
    posts.buffers[2][:8] = torch.tensor([1.5, 2.5]).view(torch.uint8)
    step_of(one, [2, 4, 5], window=2)
    assert posts.sizes() == [16] * 4, "nothing had to be posted"
    assert [(each.micro_batch, each.works) for each in one.posted] == [(0, ["handle 3"]), (1, ["handle 4"])]
    assert torch.equal(one.posted[0].tensors[0], torch.tensor([1.5, 2.5]))
    assert (len(one.standing), one.spent) == (0, [])
    one.post_next()
    assert posts.sizes()[4:] == [20]


def test_standing_receives_that_do_not_fit_are_spent_and_stay_under_way(posts: Posts) -> None:
    one = inbox()
    step_of(one, [4, 4], window=3)
    one.posted.clear()
    step_of(one, [4, 5], window=1)
    assert posts.sizes()[4:] == [16]
    assert [each.works for each in one.spent] == [["handle 3"], ["handle 4"]]
    assert not one.standing
    assert one.under_way() == ["handle 5", "handle 3", "handle 4"]


def test_a_receive_without_a_handle_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "irecv", lambda *_, **__: None)
    with pytest.raises(LinkError, match="not a member"):
        step_of(inbox(), [1], window=1)
