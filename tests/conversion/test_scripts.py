"""The two scripts of `checkpoint/`: they run from a checkout, and say what is wrong in one message."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.conversion.models import CONFIG, assert_same_tensors, save_model, tensors_of
from tests.harness import ROOT
from tests.scripts import script

hf_to_ds_ldt: Callable[[Sequence[str]], int] = script(ROOT / "checkpoint/hf_to_ds_ldt.py").main
ds_ldt_to_hf: Callable[[Sequence[str]], int] = script(ROOT / "checkpoint/ds_ldt_to_hf.py").main


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
