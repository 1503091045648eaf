"""`ds-ldt convert` and `ds-ldt export`, and the scripts of `checkpoint/`, which are the same two commands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ds_ldt.checkpointing.shards import DEFAULT_MAX_SHARD_SIZE
from ds_ldt.cli import export
from ds_ldt.cli.main import main as ds_ldt
from tests.conversion.models import CONFIG, assert_same_tensors, save_model, tensors_of
from tests.harness import ROOT
from tests.scripts import script

hf_to_ds_ldt: Callable[[Sequence[str]], int] = script(ROOT / "checkpoint/hf_to_ds_ldt.py").main
ds_ldt_to_hf: Callable[[Sequence[str]], int] = script(ROOT / "checkpoint/ds_ldt_to_hf.py").main


def command(name: str) -> Callable[[Sequence[str]], int]:
    """Return a subcommand of `ds-ldt`."""
    return lambda arguments: ds_ldt([name, *arguments])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_model(tmp_path / "hf", tie_word_embeddings=True)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_scripts_convert_there_and_back(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf, config, edge, cloud, out = (str(model / name) for name in ("hf", "config.json", "edge", "cloud", "out"))
    assert hf_to_ds_ldt(["--hf", hf, "--config", config, "--out-edge", edge, "--out-cloud", cloud]) == 0
    assert f"edge: layers [0, 1, 4, 5] of 7 in {edge}\ncloud: layers [2, 3] of 7 in {cloud}" in capsys.readouterr().out
    assert ds_ldt_to_hf(["--edge", edge, "--cloud", cloud, "--hf-config", hf, "--out", out]) == 0
    assert f"wrote 1 file of weights to {out}" in capsys.readouterr().out
    assert_same_tensors(tensors_of(model / "out"), tensors_of(model / "hf"))


def test_commands_do_and_say_what_the_scripts_do(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf, config = str(model / "hf"), str(model / "config.json")
    files, said = {}, {}
    pairs = (("script", hf_to_ds_ldt, ds_ldt_to_hf), ("ds-ldt", command("convert"), command("export")))
    for name, convert, join in pairs:
        edge, cloud, out, lost = (str(model / name / part) for part in ("edge", "cloud", "out", "lost"))
        statuses = [
            convert(["--hf", hf, "--config", config, "--out-edge", edge, "--out-cloud", cloud]),
            join(["--edge", edge, "--cloud", cloud, "--hf-config", hf, "--out", out, "--max-shard-size", "20KB"]),
            convert(["--hf", hf, "--config", config, "--out-edge", edge]),
            join(["--edge", edge, "--cloud", lost, "--out", out]),
            join(["--edge", edge, "--cloud", cloud, "--hf-config", hf, "--out", lost, "--adapter"]),
            join(["--edge", edge, "--cloud", cloud, "--hf-config", hf, "--out", lost, "--merge"]),
        ]
        assert statuses == [0, 0, 1, 1, 1, 1]
        captured = capsys.readouterr()
        said[name] = [text.replace(str(model / name), "") for text in captured]
        files[name] = {
            str(path.relative_to(model / name)): path.read_bytes()
            for path in sorted((model / name).rglob("*"))
            if path.is_file()
        }
    assert files["script"] == files["ds-ldt"]
    assert said["script"][0] == said["ds-ldt"][0]
    assert re.sub(r"^(hf_to_ds_ldt|ds_ldt_to_hf):", "ds-ldt:", said["script"][1], flags=re.M) == said["ds-ldt"][1]
    assert said["ds-ldt"][1].count("ds-ldt: ") == 4


@pytest.mark.parametrize("call", [ds_ldt_to_hf, command("export")], ids=["script", "ds-ldt"])
@pytest.mark.parametrize(
    "options, message",
    [
        (["--adapter"], "--adapter and --merge need --hf-config, the base model"),
        (["--merge"], "--adapter and --merge need --hf-config, the base model"),
        (["--adapter", "--hf-config", "M", "--max-shard-size", "1GB"], "--max-shard-size has no meaning"),
        (["--adapter", "--merge", "--hf-config", "M"], "not allowed with argument --adapter"),
    ],
)
def test_options_that_do_not_go_together_end_with_2(
    call: Callable[[Sequence[str]], int], options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        call(["--edge", "E", "--cloud", "C", "--out", "O", *options])
    error = capsys.readouterr().err
    assert message in error
    assert "usage: " in error


def test_adapters_without_peft_are_one_message(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    for kind in ("--adapter", "--merge"):
        assert ds_ldt(["export", "--edge", "E", "--cloud", "C", "--hf-config", "M", "--out", "O", kind]) == 1
        assert "pip install ds_ldt[lora]" in capsys.readouterr().err


def test_the_default_size_of_a_shard_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        ds_ldt(["export", "--help"])
    assert f"(default: {DEFAULT_MAX_SHARD_SIZE})" in capsys.readouterr().out


def test_errors_are_one_message_and_status_1(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf, config, edge = str(model / "hf"), str(model / "config.json"), str(model / "edge")
    assert hf_to_ds_ldt(["--hf", str(model / "nowhere"), "--config", config, "--out-edge", edge]) == 1
    assert capsys.readouterr().err.startswith("hf_to_ds_ldt: Configuration error: model: found no ")
    assert hf_to_ds_ldt(["--hf", hf, "--config", str(model / "no.json"), "--out-edge", edge]) == 1
    assert "no.json" in capsys.readouterr().err
    assert ds_ldt_to_hf(["--edge", edge, "--cloud", edge, "--out", str(model / "out")]) == 1
    assert capsys.readouterr().err == f"ds_ldt_to_hf: {edge} is not a directory\n"


def test_script_without_a_target_shows_its_usage(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        hf_to_ds_ldt(["--hf", str(model / "hf"), "--config", str(model / "config.json")])
    assert raised.value.code == 2
    assert "at least one of --out-edge and --out-cloud" in capsys.readouterr().err


def test_script_runs_from_a_checkout_without_a_traceback(model: Path) -> None:
    command = [sys.executable, "checkpoint/ds_ldt_to_hf.py", "--edge", "none", "--cloud", "none", "--out", str(model)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "ds_ldt_to_hf: none is not a directory" in done.stderr
    assert "Traceback" not in done.stderr
