"""Who was silent first, from what the ranks report."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ldt.comm.waits import Wait, explain, judge, read_waits


def wait(rank: int, *peers: int, closed: bool = False) -> Wait:
    return Wait(rank=rank, peers=peers, doing="to receive something", seconds=3.0, closed=closed)


def verdict_of(mine: Wait, *others: Wait) -> tuple[tuple[int, ...], tuple[int, ...]]:
    verdict = judge(mine, {other.rank: other for other in others})
    return verdict.silent, tuple(one.rank for one in verdict.chain)


@pytest.mark.parametrize(
    "mine, others, silent, chain",
    [
        (wait(0, 1), [], (1,), (0,)),
        (wait(0, 1), [wait(1, 3), wait(4, 0)], (3,), (0, 1)),
        (wait(0, 1), [wait(1, 2), wait(2, 3)], (3,), (0, 1, 2)),
        (wait(0, 1, 2, 3), [wait(1, 0, 2, 3), wait(3, 2)], (2,), (0,)),
        (wait(0, 1, 2, 3), [wait(1, 0, 2, 3)], (2, 3), (0,)),
        (wait(0, 1), [wait(1, 0)], (), (0, 1)),
        (wait(0, 1), [wait(1, 2), wait(2, 1)], (), (0, 1, 2)),
    ],
)
def test_S93_waits_lead_to_the_rank_that_has_reported_none(
    mine: Wait, others: list[Wait], silent: tuple[int, ...], chain: tuple[int, ...]
) -> None:
    assert verdict_of(mine, *others) == (silent, chain)


@given(st.integers(2, 12).flatmap(lambda n: st.tuples(st.just(n), st.permutations(range(n)))))
def test_S93_any_chain_leads_everybody_to_its_end(case: tuple[int, list[int]]) -> None:
    _, order = case
    waits = {before: wait(before, after) for before, after in zip(order, order[1:], strict=False)}
    for mine in waits.values():
        assert judge(mine, waits).silent == (order[-1],)


def text_of(mine: Wait, *others: Wait) -> str:
    verdict = judge(mine, {other.rank: other for other in others})
    return explain(verdict, plain="PLAIN", timeout_s=3, cause="CAUSE")


def test_S93_the_text_blames_the_silent_rank_alone_and_names_the_setting() -> None:
    text = text_of(wait(0, 1), wait(1, 2))
    assert text.startswith("rank 0: rank 2 was silent first: rank 0 waited 3.0 s for rank 1 (to receive something), ")
    assert "ldt.timeout_s (now 3 s)" in text


def test_the_text_of_a_rank_that_is_gone_says_so_though_neighbours_closed_their_connections_too() -> None:
    assert "rank 0: rank 2 is gone or closed the connection first" in text_of(
        wait(0, 1, closed=True), wait(1, 2, closed=True)
    )
    assert "rank 0: rank 2 was silent first" in text_of(wait(0, 1, closed=True), wait(1, 2))


def test_a_wait_for_the_silent_rank_itself_needs_no_further_words() -> None:
    assert text_of(wait(0, 1)) == "PLAIN"


def test_ranks_that_wait_for_each_other_make_different_calls() -> None:
    assert "They make different calls" in text_of(wait(0, 1), wait(1, 0))


def test_a_rank_that_went_on_too_late_is_told_that_it_was_the_silent_one() -> None:
    assert "the others have given up waiting for this rank" in text_of(wait(0, 1, closed=True), wait(1, 0))


def test_several_without_a_report_are_all_named() -> None:
    assert text_of(wait(0, 1, 2, 3), wait(1, 2, 3)) == (
        "PLAIN Those who have reported no wait of their own: ranks 2, 3."
    )


@pytest.mark.parametrize(
    "line", ["", "{", "[]", "{}", "null", '{"rank": 9, "peers": [], "doing": "", "seconds": 1, "closed": false}']
)
def test_what_is_no_report_is_left_out(line: str) -> None:
    text = f"{line}\n{wait(1, 0).dumps()}"
    assert read_waits(text, world_size=3) == {1: wait(1, 0)}


def test_the_first_report_of_a_rank_counts() -> None:
    assert read_waits(wait(1, 0).dumps() + wait(1, 2).dumps(), world_size=3) == {1: wait(1, 0)}
