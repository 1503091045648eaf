"""Places that cannot be written to, tried by really writing: root passes permission bits, a mount does not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ds_ldt.checkpointing.output_paths import OutputPath, output_paths_of, why_not_writable
from ds_ldt.config.schema import load_config
from tests.disks import fill, small_disk
from tests.engine.cases import config, layout


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """A file, a directory, a link to nowhere, and a link that leads to itself."""
    (tmp_path / "file").write_text("old\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    return tmp_path


@pytest.mark.parametrize(
    "path, is_directory, reason",
    [
        ("folder", True, None),
        ("new/and/deep", True, None),
        ("new/../other", True, None),
        ("folder/costs.json", False, None),
        ("new/costs.json", False, None),
        ("file", False, None),
        ("nowhere", False, None),  # writing through the link makes the file
        ("/dev/null", False, None),
        ("file", True, "a part of the path is a file"),
        ("file/below/it", True, "a part of the path is a file"),
        ("nowhere", True, "a part of the path is a file"),
        ("loop", True, "a part of the path is a file"),
        ("/proc/trace", True, "No such file or directory"),
        ("/sys/kernel/trace_of_mine", True, "denied|permitted|Read-only|No such"),
        ("x" * 300, True, "name too long"),
        (f"folder/{'x' * 300}.json", False, "name too long"),
        ("folder/a\0b", True, "null byte"),
        ("folder", False, "Is a directory"),
        ("file/costs.json", False, "a part of the path is a file"),
        ("/proc/costs.json", False, "No such file or directory"),
    ],
)
def test_S86_a_place_is_tried_and_left_as_it_was(
    places: Path, path: str, is_directory: bool, reason: str | None
) -> None:
    before = tree(places)
    found = why_not_writable(OutputPath(setting="x", path=os.path.join(places, path), is_directory=is_directory))
    if reason is None:
        assert found is None
    else:
        assert found is not None
        assert any(part in found for part in reason.split("|")), found
        assert str(places) not in found
    assert tree(places) == before
    assert (places / "file").read_text() == "old\n"


def test_S71_a_read_only_and_a_full_disk_are_found_out(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 65536) as disk:
        place = OutputPath(setting="--save", path=str(disk / "run"))
        assert why_not_writable(place) is None
        full = disk / "full"
        fill(full)
        assert why_not_writable(place) == "No space left on device"
        full.unlink()
        remount = subprocess.run(["mount", "-o", "remount,ro", str(disk)], capture_output=True, check=False)
        if remount.returncode == 0:
            assert why_not_writable(place) == "Read-only file system"
        assert list(disk.iterdir()) == []


def test_each_rank_tries_what_it_will_write() -> None:
    monitors = {
        "tensorboard": {"enabled": True, "output_path": "board", "job_name": "job"},
        "csv_monitor": {"enabled": True},
    }
    ldt = {"trace": {"path": "trace", "steps": [1, 2]}, "measured_costs": "costs.json"}
    job = load_config(config(layout(2, 2), ldt=ldt, **monitors))
    found = {output.setting: output.path for output in output_paths_of(job, 0)}
    assert found == {
        "ldt.trace.path": "trace",
        "ldt.measured_costs": "costs.json",
        "tensorboard.output_path": "board/job",
        "csv_monitor.output_path": "DeepSpeedJobName",
    }
    assert [output.setting for output in output_paths_of(job, 1)] == ["ldt.trace.path"]
    off = load_config(config(layout(2, 2), csv_monitor={"enabled": False, "output_path": "x"}))
    assert output_paths_of(off, 0) == []
