"""A full disk is named with path, bytes needed and bytes free, whoever was writing; other errors pass."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ds_ldt.checkpointing.disk_space import check_free, free_bytes, writing
from ds_ldt.errors import CheckpointError
from tests.disks import largest_file, small_disk

LARGE = torch.zeros(1 << 18)
NEEDED = 1 << 20
SMALL = 256 << 10


def to_stream(path: Path) -> None:
    with path.open("wb") as stream:
        torch.save({"weight": LARGE}, stream)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "torch.save to a path": lambda path: torch.save({"weight": LARGE}, path),
    "torch.save to a stream": to_stream,
    "safetensors": lambda path: save_file({"weight": LARGE}, path),
    "text": lambda path: path.write_text("x" * NEEDED),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_S61_full_disk_is_named_whoever_writes(tmp_path: Path, write: Callable[[Path], Any]) -> None:
    with small_disk(tmp_path / "disk", SMALL) as disk:
        path = disk / "file"
        with pytest.raises(CheckpointError) as raised, writing(path, NEEDED):
            write(path)
    assert str(raised.value).startswith(f"no space to write {path} (")
    assert "1,048,576 bytes are needed, 262,144 were free before and " in str(raised.value)
    assert "Fix: free some space" in str(raised.value)


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_S61_limit_on_the_size_of_files_is_named(tmp_path: Path, write: Callable[[Path], Any]) -> None:
    path = tmp_path / "file"
    with largest_file(SMALL), pytest.raises(CheckpointError) as raised, writing(path, NEEDED):
        write(path)
    assert f"no space to write {path} (" in str(raised.value)
    assert "raise the limit" in str(raised.value)


def test_S61_device_that_is_always_full_is_named() -> None:
    path = Path("/dev/full")
    if not path.exists():
        pytest.skip("this system has no /dev/full")
    said = pytest.raises(CheckpointError, match=r"no space to write /dev/full \(No space left on device\)")
    with said, writing(path, 3), path.open("w") as stream:
        stream.write("abc")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error"),
        FileNotFoundError(errno.ENOENT, "No such file"),
        RuntimeError("shapes differ"),
        ValueError("No space left on device"),
        CheckpointError("said already"),
    ],
    ids=repr,
)
def test_other_errors_pass(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as raised, writing(tmp_path / "file", 1):
        raise error
    assert raised.value is error


def test_reason_that_the_system_gave_decides_over_torch_s_own_words(tmp_path: Path) -> None:
    def fail(number: int) -> None:
        with writing(tmp_path / "file", 1):
            try:
                raise OSError(number, "a write failed")
            except OSError:
                raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")  # noqa: B904

    with pytest.raises(RuntimeError, match="unexpected pos"):
        fail(errno.EIO)
    with pytest.raises(CheckpointError, match="quota"):
        fail(errno.EDQUOT)


def test_what_does_not_fit_is_refused_before_it_is_written(tmp_path: Path) -> None:
    place = tmp_path / "not" / "there"
    check_free({place: 1})
    free = free_bytes(place)
    with pytest.raises(CheckpointError, match=rf"no space to write {place}: [\d,]+ bytes are needed, [\d,]+ are free"):
        check_free({place: 2 * free})
    assert not place.parent.exists()


def test_what_is_written_to_one_file_system_is_added_up(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", SMALL) as disk:
        edge, cloud = disk / "edge", disk / "cloud"
        check_free({edge: SMALL, tmp_path: SMALL})
        with pytest.raises(CheckpointError, match=rf"write {edge} and {cloud}: 262,145 bytes are needed, 262,144 are"):
            check_free({edge: SMALL, cloud: 1, tmp_path: 1})
