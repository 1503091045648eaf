"""What a training leaves behind: places are tried before the first step, checkpoints are kept and gone on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.disks import small_disk
from tests.harness import GroupPool

CASES = "tests.engine.outputs"
SOON_S = 15.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("a file where a directory is needed\n")
    return path


def test_S86_unwritable_paths_of_the_json_are_an_error_on_every_rank_before_the_first_step(
    groups: GroupPool, file: Path
) -> None:
    place = str(file / "run")
    board: dict[str, Any] = {"enabled": True, "output_path": place, "job_name": "job"}
    cases = [
        (0, "ldt.trace.path", {"ldt.trace": {"path": place, "steps": [1, 2]}}),
        (2, "ldt.trace.path", {"ldt.trace": {"path": "/proc/trace", "steps": [1, 2]}}),
        (0, "ldt.measured_costs", {"ldt.measured_costs": str(file.parent)}),
        (0, "tensorboard.output_path", {"tensorboard": board}),
        (0, "csv_monitor.output_path", {"csv_monitor": board}),
    ]
    answers = groups.run(3, f"{CASES}:unwritable_settings", [(rank, changes) for rank, _, changes in cases])
    for rank, outcomes in enumerate(answers):
        for (bad_rank, setting, _), (kind, message, seconds) in zip(cases, outcomes, strict=True):
            assert kind == "ConfigError", message
            assert seconds < SOON_S
            site = "edge" if bad_rank == 0 else "cloud"
            assert f"{setting}: found" in message
            assert f"rank {bad_rank} ({site}) cannot write" in message
            assert f"Fix: name another one on the {site}" in message
            # The cloud's path is named to everybody, what the edge calls its directories stays there.
            assert ("/proc/trace" in message) == (bad_rank == 2)
            assert (str(file.parent) in message) == (bad_rank == 0 and rank == 0), message
    assert list(file.parent.iterdir()) == [file]


def test_S71_a_save_directory_is_tried_on_every_rank_and_nothing_is_left_behind(groups: GroupPool, file: Path) -> None:
    good, bad = str(file.parent / "new/run"), str(file / "run")
    cases = [
        {0: good, 1: good, 2: good},
        {0: None, 1: None, 2: None},
        {0: good, 1: bad, 2: good},
        {0: bad, 1: good, 2: good},
        {0: good, 1: "/proc/run", 2: "/proc/run"},
        {0: good, 1: None, 2: None},
    ]
    answers = groups.run(3, f"{CASES}:check_before_the_first_step", cases)
    for rank, (saves, loss, arguments) in enumerate(answers):
        assert [kind for kind, _, _ in saves] == ["no error"] * 2 + ["ConfigError"] * 4
        assert all(seconds < SOON_S for _, _, seconds in saves)
        assert f'--save: found "{bad}", to which rank 1 (cloud) cannot write' in saves[2][1]
        assert "to which rank 0 (edge) cannot write" in saves[3][1]
        assert (bad in saves[3][1]) == (rank == 0)
        assert "to which ranks 1, 2 (cloud) cannot write: No such file or directory" in saves[4][1]
        assert "a directory on 1 of 3 ranks" in saves[5][1]
        assert loss > 0
        assert [kind for kind, _, _ in arguments] == ["no error", "ConfigError", "ConfigError"]
        assert "--steps: found edge 5, cloud 6" in arguments[1][1]
        assert "--seed" not in arguments[1][1]
        assert "5 on rank 1, 7 on rank 2" in arguments[2][1] or rank != 2
    assert list(file.parent.iterdir()) == [file]


def test_S86_trace_and_monitor_that_fail_later_end_with_a_warning_and_training_goes_on(
    groups: GroupPool, tmp_path: Path
) -> None:
    answers = groups.run(3, f"{CASES}:places_that_go_bad", str(tmp_path))
    for rank, (losses, plain, said) in enumerate(answers):
        assert losses == plain
        assert sum("ldt.trace.path" in line and f"rank {rank} wrote no trace" in line for line in said) == 1
        assert sum("monitoring ends here" in line for line in said) == (rank == 0)


def test_S86_a_disk_that_is_full_when_the_trace_is_written_does_not_end_the_training(
    groups: GroupPool, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", 65536) as disk:
        answers = groups.run(3, f"{CASES}:fill_disk_after_the_start", str(disk))
        assert [path.name for path in disk.iterdir()] == ["other"]
    assert all(steps == 2 for steps, _ in answers)
    assert all(any("No space left on device" in line for line in said) for _, said in answers)


@pytest.mark.parametrize("is_shared", [False, True], ids=["a directory each", "one directory"])
def test_S70_the_last_checkpoints_are_kept_and_those_of_others_are_left_alone(
    groups: GroupPool, tmp_path: Path, is_shared: bool
) -> None:
    answers = groups.run(3, f"{CASES}:save_and_resume", str(tmp_path), is_shared)
    others = ["best", "global_step99", "latest"]
    for rank, found in enumerate(answers):
        is_leader = rank < 2
        assert found["fresh"] is None
        assert any("starts anew: there is no checkpoint" in line for line in found["said"]) == is_leader
        assert found["after 1"] == sorted([*others, "global_step1"])
        assert found["after 2"] == sorted([*others, "global_step1", "global_step2"])
        assert found["after 3"] == sorted([*others, "global_step2", "global_step3"])
        assert (found["state"], found["steps"]) == ({"losses": [0.5] * 3}, 3)
        assert any("goes on after step 3" in line for line in found["resumed"]) == is_leader
        # Every second step from there on, and the last one: what the first engine saved has gone.
        assert found["in the end"] == sorted([*others, "global_step4", "global_step6"])
        assert found["latest"] == "global_step6"
        assert any("holds checkpoints" in line for line in found["unasked"]) == is_leader
        kind, message, _ = found["differing"]
        assert kind == "ConfigError"
        assert "save_every: found edge 1, cloud 2" in message
        assert "resume: found edge true, cloud false" in message


def test_a_saver_without_a_directory_saves_nothing(groups: GroupPool) -> None:
    assert groups.run(3, f"{CASES}:saver_without_a_directory") == [(1, None)] * 3
