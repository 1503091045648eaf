"""The harness itself: order of results, failures of one rank, hangs within a bound, reuse and replacement of pools."""

from __future__ import annotations

import os
import time

import pytest

from tests.harness import Failure, GroupError, GroupPool, GroupSession, GroupTimeoutError, run_group

CASES = "tests.harness_cases"


def test_results_come_back_in_rank_order() -> None:
    results = run_group(3, f"{CASES}:rank_and", 5)
    assert [result[:2] for result in results] == [(0, 5), (1, 5), (2, 5)]


def test_a_hang_becomes_a_failure_with_the_stack_within_its_deadline() -> None:
    begin = time.monotonic()
    with pytest.raises(GroupTimeoutError) as caught:
        run_group(2, f"{CASES}:sleep_in_a_function_with_a_telling_name", 1, deadline_s=1.0)
    assert time.monotonic() - begin < 10
    assert [failure.rank for failure in caught.value.failures] == [1]
    assert "sleep_in_a_function_with_a_telling_name" in str(caught.value)
    assert "about to sleep" in str(caught.value)


def test_an_exception_of_one_rank_keeps_the_answers_of_the_others() -> None:
    good, bad = run_group(2, f"{CASES}:raise_on", 1, check=False)
    assert good == "fine"
    assert isinstance(bad, Failure)
    assert (bad.rank, bad.type_name, bad.message) == (1, "ConnectionResetError", "told to on rank 1")
    assert bad.is_a("OSError")
    assert not bad.is_a("ValueError")
    assert "raise_on" in bad.traceback


def test_an_exception_raises_with_the_childs_traceback() -> None:
    with pytest.raises(GroupError, match=r"1 failed(.|\n)*rank 0: ConnectionResetError(.|\n)*in raise_on"):
        run_group(2, f"{CASES}:raise_on", 0)


def test_a_process_that_dies_is_seen_at_once_and_the_others_get_only_a_grace() -> None:
    begin = time.monotonic()
    hung, dead = run_group(2, f"{CASES}:die_on", 1, check=False, deadline_s=60, grace_s=0.5)
    assert time.monotonic() - begin < 10
    assert (dead.type_name, dead.message) == ("ProcessDied", "exit status 7")
    assert "last words" in dead.traceback
    assert hung.type_name == "Killed"
    assert "in die_on" in hung.traceback


def test_an_unpicklable_result_is_a_failure() -> None:
    (failure,) = run_group(1, f"{CASES}:unpicklable", check=False)
    assert isinstance(failure, Failure)
    assert "pickle" in failure.message.lower()


def test_a_session_reuses_its_processes_and_replaces_them_after_a_failure() -> None:
    with GroupSession(2) as group:
        first = group.run(f"{CASES}:rank_and", 1)
        assert group.run(f"{CASES}:rank_and", 1) == first
        with pytest.raises(GroupError):
            group.run(f"{CASES}:raise_on", 0)
        assert [result[:2] for result in group.run(f"{CASES}:rank_and", 1)] == [(0, 1), (1, 1)]
        assert group.launches == 2


def test_a_full_pool_closes_the_least_recently_used_sessions() -> None:
    pool = GroupPool(max_processes=4)
    two, one = pool.session(2), pool.session(1)
    assert pool.session(2) is two
    assert pool.session(1) is one
    assert pool.session(2) is two
    pool.session(3)  # 1 + 2 + 3 > 4, and so is 2 + 3: both go
    assert pool.session(1) is not one
    assert pool.session(2) is not two
    pool.close()


def test_cases_run_with_an_initialised_group(groups: GroupPool) -> None:
    assert groups.run(2, f"{CASES}:all_reduce_of_ranks") == [3.0, 3.0]


def test_ranks_are_forked_from_one_template_that_has_imported_torch_and_has_no_other_thread(groups: GroupPool) -> None:
    first, second = groups.run(2, f"{CASES}:template_of")
    assert first == second
    assert first[0] != os.getpid()
    assert first[1:] == (1, True)


def test_a_hang_inside_gloo_shows_where(groups: GroupPool) -> None:
    with pytest.raises(GroupTimeoutError, match="in hang_in_a_receive"):
        groups.run(2, f"{CASES}:hang_in_a_receive", deadline_s=2.0)
    assert groups.run(2, f"{CASES}:all_reduce_of_ranks") == [3.0, 3.0]
