"""Channels between real processes: order, dtypes, failures, and that nobody waits longer than allowed."""

from __future__ import annotations

import pytest

from tests.harness import Failure, GroupPool

CASES = "tests.transport.cases"
MODES = ("tags", "group per channel", "device order")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", [1, 16])
def test_two_channels_of_one_pair_and_direction_never_mix(groups: GroupPool, mode: str, window: int) -> None:
    groups.run(3, f"{CASES}:deep_and_interleaved", mode, window, 12, 2)


def test_S10_every_handle_is_waited_for_over_a_hundred_steps(groups: GroupPool) -> None:
    groups.run(3, f"{CASES}:deep_and_interleaved", "tags", 3, 3, 100, deadline_s=120)


def test_S05_receives_posted_before_their_step_take_what_comes_whatever_its_size(groups: GroupPool) -> None:
    lengths = [(5, 5, 5, 5), (5, 5, 5, 5), (4, 3, 0, 9), (6, 1, 1, 1), (6, 1), (7, 2, 2), (1, 1, 1, 1, 1)]
    _, found = groups.run(2, f"{CASES}:steps_that_open_at_once", lengths)
    # Three stand at the end of a step of three messages or more; two of them are in use as soon as the next begins.
    assert found == [(0, 0), (1, 0), (1, 0), (0, 3), (0, 3), (0, 2), (1, 0)]


def test_S52_the_gradients_of_each_stream_are_those_of_its_own_activations(groups: GroupPool) -> None:
    groups.run(4, f"{CASES}:streams_of_constants", 12)


def test_S01_S04_messages_of_several_dtypes_arrive_as_they_were_sent(groups: GroupPool) -> None:
    groups.run(2, f"{CASES}:mixed_messages")


def test_S53_sends_do_not_wait_for_a_slow_peer_and_keep_their_data(groups: GroupPool) -> None:
    took, _ = groups.run(2, f"{CASES}:sends_do_not_wait", 2.0)
    assert took < 1.5


def test_refused_messages_are_never_posted(groups: GroupPool) -> None:
    (undeclared, not_a_gradient, not_mine, edge_sent), (cloud, cloud_sent) = groups.run(2, f"{CASES}:refused_sends")
    assert undeclared.startswith("PrivacyError: Send refused on the edge")
    assert "boundary 0, tensor 2 of 2" in undeclared
    assert not_a_gradient.startswith("PrivacyError: Gradient refused on the edge")
    assert not_mine.startswith("ScheduleError: rank 0 cannot send")
    assert cloud.startswith("LinkError: Send refused on the cloud")
    assert [(sent[0].boundary, *sent[1:]) for sent in edge_sent] == [(0, 0, 2)]
    assert cloud_sent == []


def test_receives_out_of_order_or_left_over_are_caught(groups: GroupPool) -> None:
    _, said = groups.run(2, f"{CASES}:wrong_order")
    patterns = [
        "ScheduleError: rank 1 cannot receive: not an inbound channel",
        "ScheduleError: rank 1 asked for micro_batch 1 of activation over boundary 0 of domain 0",
        "ScheduleError: rank 1 asked for micro_batch 0 of activation over boundary 2 of domain 0",
        "ScheduleError: rank 1 left messages of the step unreceived",
        "ScheduleError: rank 1 left messages of the step unreceived",
        "next message of that channel is: none",
        "LinkError: rank 1: the connections of this engine are closed",
    ]
    for text, pattern in zip(said, patterns, strict=True):
        assert pattern in text


@pytest.mark.parametrize("who_waits, micro_batch, flow", [("receiver", 0, 1), ("sender", 3, 0)])
def test_S53_a_silent_peer_ends_in_an_error_that_names_everything(
    groups: GroupPool, who_waits: str, micro_batch: int, flow: int
) -> None:
    said, took = groups.run(2, f"{CASES}:silent_peer", who_waits)[0]
    assert 1.4 < took < 3.5
    for words in (
        "LinkError: rank 0: rank 1 was silent while this rank waited 1.5 s",
        f"micro_batch {micro_batch} of the activation over boundary {flow} of domain 0",
        "ldt.timeout_s = 1.5",
    ):
        assert words in said


def test_a_dead_peer_is_noticed_at_once(groups: GroupPool) -> None:
    (texts, took), dead = groups.run(2, f"{CASES}:dead_peer", check=False)
    assert isinstance(dead, Failure)
    assert took < 5
    for said in texts:
        assert "LinkError: rank 0: rank 1 is gone or closed the connection" in said
    assert "to receive from it micro_batch 0 of the activation over boundary 1 of domain 0" in texts[0]
    assert "for it to take micro_batch 0 of the activation over boundary 0 of domain 0" in texts[1]


def test_an_abort_ends_the_waits_of_the_peers(groups: GroupPool) -> None:
    (closed, abort_took), (said, took) = groups.run(2, f"{CASES}:abort_while_others_wait")
    assert "the connections of this engine are closed" in closed
    assert "LinkError: rank 1: rank 0 is gone or closed the connection" in said
    assert abort_took < 3
    assert took < 5
