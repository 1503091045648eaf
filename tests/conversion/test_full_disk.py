"""A disk that is full, or a mode that is asked for: nothing partial stays, nothing is lost, and all may read it."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ds_ldt.checkpointing.adapter import export_adapter, merge_adapter
from ds_ldt.checkpointing.from_hf import convert_to_layers
from ds_ldt.checkpointing.to_hf import convert_to_hf
from tests.conversion.checkpoints import save_adapters
from tests.conversion.models import CONFIG, assert_same_tensors, save_model, tensors_of
from tests.conversion.test_errors import refused
from tests.conversion.test_scripts import ds_ldt_to_hf
from tests.disks import largest_file, small_disk


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its layers, adapters on it as a checkpoint and as PEFT's directory. Its weights are of 250 KB."""
    root = tmp_path_factory.mktemp("originals")
    save_model(root / "hf", vocab_size=900)
    convert_to_layers(root / "hf", config=CONFIG, edge=root / "edge", cloud=root / "cloud")
    save_adapters(root, root / "hf")
    export_adapter(root / "lora_edge", root / "lora_cloud", root / "adapter", hf_config=root / "hf")
    return root


Place = Callable[[str], Path]
Writer = Callable[[Path, Place], Any]
WRITERS: dict[str, Writer] = {
    "to layers": lambda work, place: convert_to_layers(
        work / "hf", config=CONFIG, edge=place("edge"), cloud=place("cloud"), overwrite=True
    ),
    "to Hugging Face": lambda work, place: convert_to_hf(
        work / "edge", work / "cloud", place("model"), overwrite=True, max_shard_size="50KB"
    ),
    "adapter": lambda work, place: export_adapter(
        work / "lora_edge", work / "lora_cloud", place("adapter"), hf_config=work / "hf", overwrite=True
    ),
    "merge": lambda work, place: merge_adapter(work / "hf", work / "adapter", place("model"), overwrite=True),
}
every_writer = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def without_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a writer find the disk full while it writes, as if the room had been there when it looked."""
    for module in ("staging", "from_hf"):
        monkeypatch.setattr(f"ds_ldt.checkpointing.{module}.check_free", lambda needed: None)


@every_writer
def test_S61_disk_without_room_is_said_before_anything_is_written(
    originals: Path, tmp_path: Path, write: Writer
) -> None:
    with small_disk(tmp_path / "disk", 8 << 10) as disk:
        refused(lambda: write(originals, disk.joinpath), f"no space to write {disk}/", " 8,192 are free")
        assert list(disk.iterdir()) == []


@every_writer
def test_S61_write_that_fails_leaves_what_was_there(originals: Path, tmp_path: Path, write: Writer) -> None:
    out = tmp_path / "out"
    write(originals, out.joinpath)
    before = contents(out)
    with largest_file(6 << 10):
        refused(lambda: write(originals, out.joinpath), f"no space to write {out}/", "bytes are needed")
    assert contents(out) == before
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]


@every_writer
def test_S61_disk_that_fills_up_meanwhile_leaves_what_was_there(
    originals: Path, tmp_path: Path, write: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_looking(monkeypatch)
    whole = tmp_path / "whole"
    write(originals, whole.joinpath)
    size = sum(path.stat().st_size + 4096 for path in whole.rglob("*"))
    with small_disk(tmp_path / "disk", size + (4 << 10)) as disk:
        shutil.copytree(whole, disk / "out")
        out, before = disk / "out", contents(disk / "out")
        refused(lambda: write(originals, out.joinpath), f"no space to write {out}/", "No space left on device")
        assert contents(out) == before
        assert not [path.name for path in out.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("known", [True, False], ids=["before", "meanwhile"])
def test_S61_of_two_sites_the_one_whose_disk_is_full_is_named(
    originals: Path, tmp_path: Path, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not known:
        without_looking(monkeypatch)
    with small_disk(tmp_path / "disk", 8 << 10) as disk:
        for edge, cloud in ((disk / "edge", tmp_path / "cloud"), (tmp_path / "edge", disk / "cloud")):
            full = edge if edge.parent == disk else cloud
            said = refused(lambda e=edge, c=cloud: convert_to_layers(originals / "hf", config=CONFIG, edge=e, cloud=c))
            assert said.startswith(f"no space to write {full}{': ' if known else ' ('}")
        assert not (tmp_path / "edge").exists()
        assert not (tmp_path / "cloud").exists()


@pytest.mark.parametrize("options", [[], ["--adapter"], ["--merge"]], ids=str)
def test_S61_script_says_it_without_a_traceback(
    originals: Path,
    tmp_path: Path,
    options: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    halves = ["lora_edge", "lora_cloud"] if options else ["edge", "cloud"]
    arguments = ["--out", str(tmp_path / "out"), *options]
    for name, value in zip(("--edge", "--cloud", "--hf-config"), [*halves, "hf"], strict=True):
        arguments += [name, str(originals / value)]
    with largest_file(6 << 10):
        assert ds_ldt_to_hf(arguments) == 1
    assert "ds_ldt_to_hf: no space to write " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002], ids=oct)
@every_writer
def test_S58_everything_written_has_the_mode_that_the_umask_leaves(
    originals: Path, tmp_path: Path, write: Writer, mask: int
) -> None:
    with umask(mask):
        write(originals, (tmp_path / "out").joinpath)
    for path in [tmp_path / "out", *(tmp_path / "out").rglob("*")]:
        full = 0o777 if path.is_dir() else 0o666
        assert stat.S_IMODE(path.stat().st_mode) == full & ~mask, path


@every_writer
def test_output_that_is_a_file_system_of_its_own_is_filled_from_within(
    originals: Path, tmp_path: Path, write: Writer
) -> None:
    """A volume that is mounted into a container cannot be renamed."""
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        outputs = {name: disk for name in ("model", "adapter", "cloud")} | {"edge": tmp_path / "edge"}
        for _ in range(2):
            write(originals, outputs.__getitem__)
        (disk / "mine.txt").write_text("mine")
        refused(lambda: write(originals, outputs.__getitem__), "not written by this tool: mine.txt")
        assert not [path.name for path in disk.iterdir() if path.name.startswith(".")]


def test_converted_layers_in_mounted_directories_are_exported(originals: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "edge", 4 << 20) as edge, small_disk(tmp_path / "cloud", 4 << 20) as cloud:
        convert_to_layers(originals / "hf", config=CONFIG, edge=edge, cloud=cloud)
        convert_to_hf(edge, cloud, tmp_path / "out")
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(originals / "hf"))
