"""Directories, calls, numbers and layers as others make them: a checkpoint loads exactly or is refused everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.checkpoint_inputs import ARGUMENTS, EDITS
from tests.engine.test_checkpoint_faults import settings
from tests.engine.test_checkpoints import BF16
from tests.harness import GroupPool

TARGETS = "tests.engine.checkpoint_inputs:"
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": BF16}


def test_S56_sites_that_name_different_tags_or_options_are_refused_and_load_no_halves(
    groups: GroupPool, tmp_path: Path
) -> None:
    for rank in groups.run(2, TARGETS + "other_arguments", settings(timeout_s=20), str(tmp_path), deadline_s=60):
        for name in (*ARGUMENTS, "save_latest"):
            told, is_unchanged = rank["told"][name]
            assert is_unchanged, name
            words = {"a long tag": "more than 100 bytes", "a path": "it is a path"}
            assert words.get(name, "Fix: pass the same") in told, name
        assert "the edge loads tag 'a' and the cloud 'b'" in rank["told"]["tags"][0]
        assert rank["number"] == "5"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_S82_numbers_of_numpy_are_saved_as_plain_ones_and_what_could_not_be_read_back_is_refused(
    groups: GroupPool, tmp_path: Path, precision: str
) -> None:
    job = settings(optimizer=None, **PRECISIONS[precision])
    edge, cloud = groups.run(2, TARGETS + "numbers_of_numpy", job, str(tmp_path), deadline_s=60)
    for rank in (edge, cloud):
        assert rank["rate"]
        assert rank["same"]
        assert rank["there"] == ["global_step1", "latest"]
    assert "the state of LambdaLR holds PosixPath('x') of type PosixPath" in cloud["told"]
    assert "keeps _extra_state, which is no tensor" in cloud["extra"]
    assert "1 other rank(s) failed (1)" in edge["told"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_S79_one_byte_that_changed_inside_a_file_is_found_before_anything_is_put_in(
    groups: GroupPool, tmp_path: Path, precision: str
) -> None:
    job = settings(**PRECISIONS[precision])
    edge, cloud = groups.run(2, TARGETS + "flipped", job, str(tmp_path), deadline_s=60)
    assert len(cloud) == 4
    for name, (told, is_unchanged) in cloud.items():
        assert "is damaged: the checksum of" in told, name
        assert "1 other rank(s) failed (1)" in edge[name][0], name
        assert is_unchanged, name
        assert edge[name][1], name


@pytest.mark.parametrize("precision", PRECISIONS)
def test_S79_a_layer_whose_own_code_refuses_leaves_every_rank_as_it_was(
    groups: GroupPool, tmp_path: Path, precision: str
) -> None:
    job = settings(**PRECISIONS[precision])
    edge, cloud = groups.run(2, TARGETS + "a_layer_refuses", job, str(tmp_path), deadline_s=60)
    assert "ArithmeticError: no weights for this layer" in edge[0]
    assert "1 other rank(s) failed (0)" in cloud[0]
    assert edge[1:] == cloud[1:] == (True, [2, 1])


def test_S57_what_somebody_made_of_manifests_and_latest_is_refused_and_never_taken_for_no_checkpoint(
    groups: GroupPool, tmp_path: Path
) -> None:
    for rank in groups.run(2, TARGETS + "edited", settings(timeout_s=20), str(tmp_path), deadline_s=60):
        for name, (_, expected) in EDITS.items():
            told, is_unchanged = rank[name]
            assert expected in told, name
            assert is_unchanged, name


def test_S85_S92_what_is_in_the_way_of_a_tag_is_said_and_nothing_is_left(groups: GroupPool, tmp_path: Path) -> None:
    edge, cloud = groups.run(2, TARGETS + "in_the_way", settings(timeout_s=20), str(tmp_path), deadline_s=60)
    for tag in ("file", "link"):
        assert f"{tmp_path}/cloud/{tag} is in the way: it is no directory" in cloud["told"][tag]
    assert f"what {tmp_path}/cloud/t holds is not overwritten" in cloud["told"]["t"]
    for rank in (edge, cloud):
        assert rank["hidden"] == []
        assert rank["loaded"] == "good"
    assert all("1 other rank(s) failed (1)" in told for told in edge["told"].values())
