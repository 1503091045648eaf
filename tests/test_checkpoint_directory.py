"""The checkpoint directory of one site on a real disk, with a job that may end at every single operation."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_ldt.checkpointing import directory as checkpoint_directory
from ds_ldt.checkpointing.directory import CheckpointDirectory
from ds_ldt.checkpointing.manifest import CheckpointManifest, check_content, content_id, manifest_name, tag_problem
from ds_ldt.comm.identity import ModelFingerprint, RunIdentity
from ds_ldt.errors import CheckpointError

MANIFEST = CheckpointManifest(
    site="edge",
    tag="t",
    save="s",
    saved_at="2026-01-01T00:00:00",
    run=RunIdentity(run="r", resumed_from=("q",)),
    model=ModelFingerprint(family="llama", settings={"vocab_size": 7}, weights="w"),
    global_steps=3,
    pipeline_num_layers=[[1, 2], [1, 0]],
    data_parallel_size=1,
    frozen_excluded=False,
    lora=None,
    files={},
)


class Ended(BaseException):
    """Stands for the end of the process."""


def save(place: CheckpointDirectory, number: int, *, names: tuple[str, ...] = ("a.pt", "b.pt")) -> CheckpointManifest:
    """Save tag t for the number-th time: files whose content is that number."""
    place.prepare("t")
    for name in names:
        torch.save({"number": torch.tensor(number)}, place.staging("t") / name)
    manifest = replace(MANIFEST, save=f"save-{number}", files=place.content_of_staging("t"))
    place.commit(manifest)
    return manifest


def content(place: CheckpointDirectory) -> dict[str, int]:
    """What is in place under tag t, each file held to its manifest."""
    manifest = CheckpointManifest.read(place.root / "t", "edge")
    return {
        name: int(torch.load(check_content(place.root / "t", manifest.files, name), weights_only=True)["number"])
        for name in manifest.files
    }


def hidden(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.startswith("."))


OPERATIONS = ((os, "replace"), (Path, "unlink"), (Path, "rmdir"), (Path, "mkdir"), (checkpoint_directory, "_sync"))


def ending_before(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the process end before its number-th operation that changes a directory."""
    left = [number]
    for owner, name in OPERATIONS:
        real = getattr(owner, name)

        def operation(*args: Any, real: Callable[..., Any] = real, **options: Any) -> Any:
            if left[0] == 0:
                raise Ended
            left[0] -= 1
            return real(*args, **options)

        monkeypatch.setattr(owner, name, operation)


def test_S92_a_job_that_ends_anywhere_in_a_commit_leaves_the_earlier_save_or_both(tmp_path: Path) -> None:
    outcomes = []
    for number in range(100):
        place = CheckpointDirectory(tmp_path / str(number), "edge")
        save(place, 1)
        place.finish("t")
        with pytest.MonkeyPatch.context() as patch:
            ending_before(patch, number)
            try:
                save(place, 2)
            except Ended:
                ended = True
            else:
                ended = False
        again = CheckpointDirectory(place.root, "edge")
        saves = [held.save for held in again.survey().tags["t"]]
        assert saves in (["save-1"], ["save-2", "save-1"]), number
        assert set(content(again).values()) == {1 if saves == ["save-1"] else 2}
        if len(saves) == 2:  # the other site may have either: each can be had
            again.settle("t", "save-1" if number % 2 else "save-2")
            assert set(content(again).values()) == {1 if number % 2 else 2}
            assert [held.save for held in again.survey().tags["t"]] == ["save-1" if number % 2 else "save-2"]
        outcomes.append(saves[0])
        save(again, 3)
        again.finish("t")
        assert set(content(again).values()) == {3}
        assert hidden(again.root) == []
        if not ended:
            break
    assert not ended
    assert outcomes == sorted(outcomes)
    assert {"save-1", "save-2"} == set(outcomes)
    assert len(outcomes) > 10


def test_S92_a_job_that_ends_while_an_earlier_save_is_put_back_can_put_it_back_again(tmp_path: Path) -> None:
    for number in range(100):
        place = CheckpointDirectory(tmp_path / str(number), "edge")
        save(place, 1, names=("a.pt", "old.pt"))
        place.finish("t")
        save(place, 2, names=("a.pt", "new.pt"))
        with pytest.MonkeyPatch.context() as patch:
            ending_before(patch, number)
            try:
                place.settle("t", "save-1")
            except Ended:
                pass
            else:
                break
        found = place.survey().tags["t"]
        assert "save-1" in [held.save for held in found]
        place.settle("t", "save-1")
        assert content(place) == {"a.pt": 1, "old.pt": 1}
        assert hidden(place.root) == []
    assert number > 5


def test_S61_a_commit_that_fails_anywhere_is_rolled_back_whole(tmp_path: Path) -> None:
    for number in range(100):
        place = CheckpointDirectory(tmp_path / str(number), "edge")
        save(place, 1)
        place.finish("t")
        place.prepare("t")
        for name in ("a.pt", "c.pt"):
            torch.save({"number": torch.tensor(2)}, place.staging("t") / name)
        manifest = replace(MANIFEST, save="save-2", files=place.content_of_staging("t"))
        with pytest.MonkeyPatch.context() as patch:
            ending_before(patch, number)
            try:
                place.commit(manifest)
            except Ended:
                ended = True
            else:
                ended = False
        place.roll_back(manifest)
        assert content(place) == {"a.pt": 1, "b.pt": 1}
        assert hidden(place.root) == []
        assert sorted(path.name for path in (place.root / "t").iterdir()) == [
            "a.pt",
            "b.pt",
            "ldt_checkpoint_edge.json",
        ]
        if not ended:
            break
    assert not ended
    assert number > 5


def test_a_first_commit_that_is_rolled_back_leaves_nothing(tmp_path: Path) -> None:
    place = CheckpointDirectory(tmp_path, "edge")
    place.roll_back(save(place, 1))
    assert list(tmp_path.iterdir()) == []


def test_what_earlier_jobs_left_half_written_goes_when_the_next_one_saves(tmp_path: Path) -> None:
    place = CheckpointDirectory(tmp_path, "edge")
    place.prepare("other")
    (place.staging("other") / "layer.pt").write_bytes(b"half")
    cloud = CheckpointDirectory(tmp_path, "cloud")
    cloud.prepare("other")
    place.prepare("t")
    assert hidden(tmp_path) == [".other.cloud.partial", ".t.edge.partial"]


def test_a_damaged_manifest_hides_its_own_tag_only(tmp_path: Path) -> None:
    place = CheckpointDirectory(tmp_path, "edge")
    save(place, 1)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / manifest_name("edge")).write_text("{")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / manifest_name("edge")).write_text(json.dumps({"format": 1}))
    assert list(place.survey().tags) == ["t"]
    with pytest.raises(CheckpointError, match="damaged"):
        CheckpointManifest.read(tmp_path / "bad", "edge")
    with pytest.raises(CheckpointError, match="has format 1, expected 2"):
        CheckpointManifest.read(tmp_path / "old", "edge")
    with pytest.raises(CheckpointError, match="nothing was committed there by the cloud"):
        CheckpointManifest.read(tmp_path / "t", "cloud")


def test_a_manifest_comes_back_as_it_was(tmp_path: Path) -> None:
    manifest = replace(MANIFEST, files={"a.pt": "0"}, lora={"r": 2}, model=None)
    for one in (MANIFEST, manifest):
        (tmp_path / manifest_name("edge")).write_text(json.dumps(one.as_json()))
        assert CheckpointManifest.read(tmp_path, "edge") == one
    assert "run r (save s, step 3" in str(MANIFEST)


def test_the_identity_of_a_file_is_that_of_its_content(tmp_path: Path) -> None:
    one, same, other = (tmp_path / name for name in ("one.pt", "same.pt", "other.pt"))
    for path, value in ((one, 1.0), (same, 1.0), (other, 1.0 + 1e-7)):
        torch.save({"w": torch.full((3, 4), value)}, path)
    assert content_id(one) == content_id(same) != content_id(other)
    files = {"one.pt": content_id(one), "gone.pt": "0"}
    assert check_content(tmp_path, files, "one.pt") == one
    one.write_bytes(other.read_bytes())
    with pytest.raises(CheckpointError, match="not the file that was saved with its manifest"):
        check_content(tmp_path, files, "one.pt")
    one.write_bytes(other.read_bytes()[:-30])
    with pytest.raises(CheckpointError, match="damaged"):
        check_content(tmp_path, files, "one.pt")
    with pytest.raises(CheckpointError, match=r"gone\.pt is missing"):
        check_content(tmp_path, files, "gone.pt")


@pytest.mark.parametrize(
    "tag", ["run1/best", "../x", "/tmp/x", "..", ".", "", ".hidden", "latest", "a\nb", "a\0b", " a", "x" * 101, "a\\b"]
)
def test_S85_a_tag_that_cannot_name_a_directory_is_a_problem(tag: str) -> None:
    assert tag_problem(tag) is not None


@pytest.mark.parametrize("tag", ["best", "global_step10", "2026-01-01 10:00", "größe", "a.b", "x" * 100])
def test_a_plain_name_is_a_tag(tag: str) -> None:
    assert tag_problem(tag) is None
