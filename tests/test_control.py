"""Announcements: the format, and what is refused of a peer that differs, errs or makes things up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ds_ldt.comm.step_header import (
    ANNOUNCEMENT_SIZE,
    MAX_TENSORS,
    Announcement,
    Status,
    StepId,
    StepKind,
    check_same_step,
    decode,
    decode_header,
    encode,
    short_fingerprint,
)
from ds_ldt.comm.wire import MAX_DIMENSIONS, WIRE_DTYPES, Signature, TensorSignature
from ds_ldt.errors import LinkError
from tests.harness import GroupPool

CASES = "tests.transport.control_cases"
STEP = StepId(kind=StepKind.TRAIN, step=7, domain=1, num_micro_batches=3, fingerprint=short_fingerprint("ab" * 32))

BODY_SIZE = 9
"""Place in a message of the number that says how many the body has."""

sizes = st.integers(0, 2**40)
tensors = st.builds(
    TensorSignature,
    st.sampled_from(WIRE_DTYPES),
    st.lists(sizes, max_size=MAX_DIMENSIONS).map(tuple),
    st.booleans(),
)
signatures = st.lists(tensors, max_size=5).map(tuple)
steps = st.builds(
    StepId,
    kind=st.sampled_from(StepKind),
    step=st.integers(0, 2**60),
    domain=st.integers(0, 10_000),
    num_micro_batches=st.just(1),
    fingerprint=st.text("0123456789abcdef", min_size=64, max_size=64).map(short_fingerprint),
)


micro_batches = st.integers(1, 3).flatmap(
    lambda boundaries: st.lists(st.tuples(*[signatures] * boundaries), min_size=1, max_size=40).map(tuple)
)


@given(steps, micro_batches)
def test_an_announcement_survives_the_wire(step: StepId, found: tuple[tuple[Signature, ...], ...]) -> None:
    announcement = Announcement(step=replace(step, num_micro_batches=len(found)), signatures=found)
    message, overflow = encode(announcement)
    assert message.shape == (ANNOUNCEMENT_SIZE,)
    header = decode_header(message, source=0)
    assert (header.step, header.overflow_size) == (announcement.step, 0 if overflow is None else overflow.numel())
    assert decode(message, overflow, source=0) == announcement


@pytest.mark.parametrize("status", [Status.END_OF_DATA, Status.ERROR])
def test_a_status_without_a_step_survives_the_wire(status: Status) -> None:
    announcement = Announcement(step=STEP, status=status)
    assert decode(*encode(announcement), source=0) == announcement


def _micro_batches(count: int, *, distinct: int) -> Announcement:
    found = tuple(((TensorSignature(torch.bfloat16, (2, 10 + m % distinct, 64), True),),) for m in range(count))
    return Announcement(step=replace(STEP, num_micro_batches=count), signatures=found)


def test_equal_micro_batches_cost_one_number_each() -> None:
    _, overflow = encode(_micro_batches(1000, distinct=1))
    assert overflow is None


def test_many_distinct_micro_batches_go_into_one_overflow_message() -> None:
    announcement = _micro_batches(1000, distinct=1000)
    message, overflow = encode(announcement)
    assert overflow is not None
    assert decode_header(message, source=0).overflow_size == overflow.numel()
    assert decode(message, overflow, source=0) == announcement


def test_micro_batches_that_are_announced_without_a_boundary_are_refused() -> None:
    message, _ = encode(replace(_micro_batches(3, distinct=2), signatures=((), (), ())))
    with pytest.raises(LinkError, match="3 micro-batches over 0 boundaries"):
        decode(message, source=4)


def test_the_overflow_message_has_to_be_the_announced_one() -> None:
    message, overflow = encode(_micro_batches(1000, distinct=1000))
    assert overflow is not None
    for wrong in (None, overflow[:-1], torch.cat([overflow, overflow])):
        with pytest.raises(LinkError, match="from rank 4: .*further numbers came"):
            decode(message, wrong, source=4)


def test_numbers_that_nobody_reads_are_refused() -> None:
    message, _ = encode(_micro_batches(3, distinct=2))
    message[BODY_SIZE] += 1
    with pytest.raises(LinkError, match="from rank 4: 1 numbers are left over"):
        decode(message, source=4)


def test_the_longest_possible_body_is_believed_and_one_number_more_is_not() -> None:
    largest = ((TensorSignature(torch.bool, (1,) * MAX_DIMENSIONS, False),) * MAX_TENSORS,)
    announcement = Announcement(step=replace(STEP, num_micro_batches=1), signatures=(largest,))
    message, overflow = encode(announcement)
    assert decode(message, overflow, source=4) == announcement
    message[BODY_SIZE] += 1
    with pytest.raises(LinkError, match="1 signatures in 707 numbers cannot be"):
        decode_header(message, source=4)


def test_something_else_than_an_announcement_is_refused() -> None:
    with pytest.raises(LinkError, match=r"rank 4: it starts with 0x0.*same version"):
        decode(torch.zeros(ANNOUNCEMENT_SIZE, dtype=torch.int64), source=4)


@given(st.integers(1, 24), st.integers(-(2**63), 2**63 - 1))
@example(5, 2**62)
@example(7, 0)
@example(9, 2**62)
def test_a_made_up_number_never_does_more_than_a_link_error(place: int, number: int) -> None:
    message, _ = encode(_micro_batches(3, distinct=2))
    message[place] = number
    try:
        announcement = decode(message, source=4)
    except LinkError as error:
        assert "rank 4" in str(error)  # noqa: PT017
    else:
        decoded, _ = encode(announcement)
        assert len(announcement.signatures) in (0, announcement.step.num_micro_batches)
        assert decoded.shape == (ANNOUNCEMENT_SIZE,)


@pytest.mark.parametrize(
    "theirs, words",
    [
        ({"kind": StepKind.EVAL}, "call: rank 0 has eval_batch, rank 5 has train_batch"),
        ({"step": 8}, "step: rank 0 has 8, rank 5 has 7"),
        ({"domain": 0}, "domain: rank 0 has 0, rank 5 has 1"),
        ({"num_micro_batches": 4}, "micro-batches per domain: rank 0 has 4, rank 5 has 3"),
        ({"fingerprint": 255}, "fingerprint of the plan: rank 0 has ff, rank 5 has 2ae"),
    ],
)
def test_S12_ranks_in_different_calls_or_steps_are_told_both_values(theirs: dict[str, int], words: str) -> None:
    with pytest.raises(LinkError, match=words):
        check_same_step(replace(STEP, **theirs), STEP, source=0, rank=5)  # type: ignore[arg-type]
    check_same_step(STEP, STEP, source=0, rank=5)


def test_announcements_arrive_in_order_with_overflow_and_one_posted_ahead(groups: GroupPool) -> None:
    groups.run(3, f"{CASES}:steps_with_and_without_overflow")


def test_S12_eval_on_one_side_and_training_on_the_other_is_a_link_error(groups: GroupPool) -> None:
    message = groups.run(2, f"{CASES}:different_calls")[1]
    assert "call: rank 0 has eval_batch, rank 1 has train_batch" in message


def test_S12_S53_a_silent_edge_is_named_with_the_call_and_the_seconds(groups: GroupPool) -> None:
    message = groups.run(2, f"{CASES}:silent_edge", deadline_s=20)[1]
    for words in ("rank 0 was silent", "train_batch, step 7", "waited 1.", "ldt.timeout_s = 1", "same calls"):
        assert words in message


def test_the_cloud_does_not_believe_an_announcement_against_the_schema(groups: GroupPool) -> None:
    edge, cloud = groups.run(2, f"{CASES}:undeclared_announcement")
    assert edge.startswith("PrivacyError: Announcement refused on the edge")
    assert cloud.startswith("LinkError: Announcement refused on the cloud")
