"""Which checkpoint two sites load: what they hold is data here, no file is read."""

from __future__ import annotations

import json

import pytest

from ds_ldt.checkpointing.choice import Held, Survey, choose, common_save
from ds_ldt.errors import CheckpointError


def held(save: str, step: int = 5, minute: int = 0, run: str = "run-a") -> Held:
    return Held(save=save, run=run, step=step, saved_at=f"2026-01-01T00:{minute:02d}")


def site(latest: str | None, **tags: list[Held]) -> Survey:
    return Survey(latest=latest, tags=tags)


def test_S57_latest_is_loaded_though_another_tag_has_a_higher_step_and_that_one_is_named() -> None:
    abandoned, rolled_back = held("a", step=9, minute=1), held("b", step=2, minute=3, run="run-b")
    both = site("back", old=[abandoned], back=[rolled_back])
    choice = choose(both, both, None)
    assert choice is not None
    assert (choice.tag, choice.held, choice.newer) == ("back", rolled_back, ("old",))
    later = site("old", old=[abandoned], back=[rolled_back])
    choice = choose(later, later, None)
    assert choice is not None
    assert (choice.tag, choice.newer) == ("old", ("back",))


def test_S56_halves_of_two_runs_under_one_tag_and_step_are_refused_naming_both() -> None:
    edge, cloud = site("t", t=[held("a")]), site("t", t=[held("b", run="run-b")])
    for wanted in (None, "t"):
        with pytest.raises(CheckpointError, match=r"edge holds that of run run-a .*cloud that of run run-b") as told:
            choose(edge, cloud, wanted)
        assert "save a" in str(told.value)
        assert "save b" in str(told.value)


def test_S92_where_a_job_ended_inside_a_commit_the_save_that_both_hold_is_taken() -> None:
    new, old = held("new", step=6, minute=2), held("old", step=5, minute=1)
    committed, behind = site("t", t=[new, old]), site("t", t=[old])
    for edge, cloud in ((committed, behind), (behind, committed)):
        choice = choose(edge, cloud, None)
        assert choice is not None
        assert choice.held == old
    choice = choose(committed, committed, None)
    assert choice is not None
    assert choice.held == new
    assert common_save([new], [old]) is None


@pytest.mark.parametrize("swapped", [False, True])
def test_where_the_files_latest_differ_the_later_tag_that_is_whole_is_taken(swapped: bool) -> None:
    first, second = held("a", step=1, minute=1), held("b", step=2, minute=2)
    ahead = site("second", first=[first], second=[second])
    behind = site("first", first=[first], second=[second])
    edge, cloud = (behind, ahead) if swapped else (ahead, behind)
    choice = choose(edge, cloud, None)
    assert choice is not None
    assert choice.tag == "second"
    lacking = site("first", first=[first])
    choice = choose(ahead, lacking, None)
    assert choice is not None
    assert choice.tag == "first"
    choice = choose(ahead, site(None, second=[second]), None)
    assert choice is not None
    assert choice.tag == "second"


def test_nothing_at_all_is_no_error_and_everything_else_that_is_not_whole_is() -> None:
    empty, full = site(None), site("t", t=[held("a")])
    assert choose(empty, empty, None) is None
    for edge, cloud, wanted, fragment in (
        (empty, empty, "t", "no committed checkpoint with tag 't' on both sites: the edge holds []"),
        (full, empty, None, "the tag that latest names ('t') on both sites: the edge holds ['t'], the cloud holds []"),
        (full, full, "u", "no committed checkpoint with tag 'u' on both sites: the edge holds ['t']"),
        (site(None, t=[held("a")]), site(None, t=[held("a")]), None, "neither site has a file `latest`"),
        (site("gone", t=[held("a")]), site("gone", t=[held("a")]), None, "latest names ('gone')"),
    ):
        with pytest.raises(CheckpointError) as told:
            choose(edge, cloud, wanted)
        assert fragment in str(told.value)


def test_a_survey_that_is_too_long_keeps_what_is_asked_for_and_the_newest() -> None:
    tags = {f"tag{number:03d}": [held(f"{number:016x}", minute=number % 60)] for number in range(60)}
    told = Survey(latest="tag000", tags=tags).as_text(wanted="tag001", max_bytes=1000)
    assert len(told.encode()) <= 1000
    kept = Survey.from_text(told)
    assert kept.latest == "tag000"
    assert {"tag000", "tag001", "tag059"} <= kept.tags.keys()
    assert "tag002" not in kept.tags
    whole = Survey(latest=None, tags=tags)
    assert Survey.from_text(whole.as_text(wanted=None, max_bytes=100_000)) == whole
    assert json.loads(whole.as_text(wanted=None, max_bytes=10))["tags"] == {}
