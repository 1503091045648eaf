"""The scripts that users copy: wrong input is named before anything is trained, and a killed run goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import ds_ldt
from examples import finetune, finetune_vl
from tests.engine.cases import config
from tests.example_runs import write_tiny_model
from tests.harness import GroupPool, free_port

ROOT = Path(__file__).resolve().parent.parent
CASES = "tests.example_runs"
LENGTH = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def run_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks; nothing is measured, so that runs are equal to the bit; a rate that a resumed run has to restore."""
    settings = config(
        [[1, 4], [1, 0]],
        num_micro_batches=2,
        optimizer="AdamW",
        timeout_s=30,
        ldt={"schedule": {"measure_steps": 0}},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    )
    path = tmp_path_factory.mktemp("config") / "run.json"
    path.write_text(json.dumps(settings))
    return path


# --- wrong input, before any process group ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, message",
    [
        (["--sequence_length", "0"], "--sequence_length: '0' is no whole number of at least 2"),
        (["--sequence_length", "1"], "--sequence_length: '1' is no whole number of at least 2"),
        (["--sequence_length=-5"], "--sequence_length: '-5' is no whole number of at least 2"),
        (["--sequence_length", "2k"], "--sequence_length: '2k' is no whole number of at least 2"),
        (["--steps", "0"], "--steps: '0' is no whole number of at least 1"),
        (["--save_every", "0"], "--save_every: '0' is no whole number of at least 1"),
        (["--keep", "0"], "--keep: '0' is no whole number of at least 1"),
        (["--eval_every", "0.5"], "--eval_every: '0.5' is no whole number of at least 1"),
        (["--eval_micro_batches", "0"], "--eval_micro_batches: '0' is no whole number of at least 1"),
        (["--token", "x"], "unrecognized arguments: --token x"),
    ],
)
def test_S75_numbers_that_cannot_be_are_refused_by_option(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        finetune.arguments(["--config", "c", "--model", "m", "--save", "s", *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_options_that_need_a_directory_to_save_in_are_refused_without(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        finetune_vl.arguments(["--resume"])
    assert "need --save" in capsys.readouterr().err


def read(model: Path, run_json: Path, *words: str | Path) -> Any:
    args = finetune.arguments(["--config", str(run_json), "--model", str(model), "--save", "s", *map(str, words)])
    return finetune.read_data(args, ds_ldt.load_config(run_json))


@pytest.mark.parametrize("option", ["--text", "--eval_text"])
@pytest.mark.parametrize(
    "content, message",
    [
        (None, "cannot be read: No such file"),
        (b"", "holds no text"),
        ("Köln".encode("latin-1"), "byte 1 is 0xf6"),
        ("Köln".encode("utf-16"), "begins with the mark of UTF-16"),
        (b"too short", "tokens, which make 0 samples of --sequence_length 128; needed are "),
    ],
    ids=["missing", "empty", "latin-1", "utf-16", "short"],
)
def test_S75_texts_that_cannot_be_trained_on_are_named(
    model: Path, run_json: Path, tmp_path: Path, option: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / "my.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises((ds_ldt.ConfigError, SystemExit)) as raised:
        read(model, run_json, option, path)
    assert f"{option}: " in str(raised.value)
    assert str(path) in str(raised.value)
    assert message in str(raised.value)


def test_S75_a_marked_text_gives_the_samples_of_a_plain_one(model: Path, run_json: Path, tmp_path: Path) -> None:
    words = "The quick brown fox jumps over the lazy dog.\n" * 400
    found = []
    for name, encoding in (("plain", "utf-8"), ("marked", "utf-8-sig")):
        (tmp_path / name).write_text(words, encoding=encoding)
        found.append(read(model, run_json, "--text", tmp_path / name, "--sequence_length", LENGTH))
    (plain, plain_held_out), (marked, marked_held_out) = found
    assert plain.rows.equal(marked.rows)
    assert plain_held_out.rows.equal(marked_held_out.rows)
    training, held_out = read(model, run_json, "--eval_text", tmp_path / "marked", "--sequence_length", LENGTH)
    assert held_out.rows[0].equal(plain.rows[0])
    assert len(held_out) == 8
    assert len(training) > len(plain)


# Any connection ends the process with this status, before a name is looked up or a hub tried again.
ASKED = 77
GUARD = f"""
import os, socket, sys
def watched(real, is_method):
    def ask(*args, **kwargs):
        place = args[is_method]
        if (place if isinstance(place, str) else place[0]) not in ("127.0.0.1", "::1", "localhost"):
            sys.stderr.write(f"a network was asked: {{args}}\\n")
            sys.stderr.flush()
            os._exit({ASKED})
        return real(*args, **kwargs)  # the store of the job, on this machine
    return ask
for owner, names in ((socket, ("getaddrinfo", "create_connection")), (socket.socket, ("connect", "connect_ex"))):
    for name in names:
        setattr(owner, name, watched(getattr(owner, name), owner is socket.socket))
"""


def guarded(code: str, *words: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python that must not ask a network, with nothing in its environment that keeps it from doing so."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    launched = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    home = {"HF_HOME": str(folder / "hub"), "HF_ENDPOINT": "http://203.0.113.1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", GUARD + code, *map(str, words)],
        env=environment | launched | home,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


LOADING = """
import json, sys
from argparse import Namespace
from pathlib import Path
import torch
import ds_ldt
from ds_ldt.checkpointing.from_hf import convert_to_layers
from ds_ldt.checkpointing.adapter import merge_adapter
from ds_ldt.data.conversations import ImageTextProcessor
from ds_ldt.models.registry import read_hf_config
from ds_ldt.data.texts import load_tokenizer
from examples import finetune, finetune_vl, quickstart_steps
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

def refused(action):
    try:
        action()
    except (ds_ldt.LDTError, SystemExit) as error:
        return str(error)
    return "accepted"

model, typo, words = Path(sys.argv[1]), "org/typo", {"prompt": "def", "tokens": 2}
options = ["--config", sys.argv[2], "--model", sys.argv[1], "--save", "save", "--tokenizer", typo]
steps = lambda **given: quickstart_steps.generate(Namespace(**words, **given))
missing = [
    lambda: finetune.finetune(finetune.arguments(options)),
    lambda: load_tokenizer(typo),
    lambda: ImageTextProcessor.from_pretrained(typo),
    lambda: read_hf_config(typo),
    lambda: convert_to_layers(typo, config=sys.argv[2], edge="edge", cloud="cloud"),
    lambda: ds_ldt.models.from_pretrained(typo, config=sys.argv[2]),
    lambda: merge_adapter(typo, "adapter", "merged"),
    lambda: steps(model=Path(typo), adapter=None),
    lambda: steps(model=model, adapter=Path(typo)),
]
Path("refusals.json").write_text(json.dumps([refused(action) for action in missing]))
# What is here is loaded without a network as well.
base = AutoModelForCausalLM.from_pretrained(model, local_files_only=True)
adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))
adapted.save_pretrained("adapter", save_embedding_layers=False)
steps(model=model, adapter=None)
steps(model=model, adapter=Path("adapter"))
merge_adapter(model, "adapter", "merged")
convert_to_layers(model, config=sys.argv[2], edge="edge", cloud="cloud")
load_tokenizer("edge")
finetune_vl.byte_processor(56).save_pretrained("processor")
assert ImageTextProcessor.from_pretrained("processor").tokenizer.is_fast
Path("done").touch()
# Who wants the hub has to say so.
finetune.finetune(finetune.arguments([*options, "--allow_download"]))
"""


def test_S64_what_is_not_on_this_machine_is_named_and_no_network_is_asked(
    model: Path, run_json: Path, tmp_path: Path
) -> None:
    done = guarded(LOADING, model, run_json, folder=tmp_path)
    assert (tmp_path / "done").exists(), done.stderr[-3000:]
    refusals = json.loads((tmp_path / "refusals.json").read_text())
    assert len(refusals) == 9
    assert all("org/typo" in text for text in refusals), refusals
    assert '--tokenizer: found "org/typo", which does not exist' in refusals[0]
    assert done.returncode == ASKED, "the guard sees nothing"


# --- both sites ---------------------------------------------------------------------------------------------------


def words_of(model: Path, run_json: Path, folder: Path, *words: str | Path) -> dict[str, list[str]]:
    """The command line of each site."""
    same = ["--config", run_json, "--model", model, "--sequence_length", LENGTH, *words]
    return {site: [str(word) for word in (*same, "--save", folder / site)] for site in ("edge", "cloud")}


def test_S71_a_save_that_cannot_be_written_ends_both_sites_before_the_first_step(
    groups: GroupPool, model: Path, run_json: Path, tmp_path: Path
) -> None:
    (tmp_path / "cloud").write_text("a file where a directory is needed")
    words = words_of(model, run_json, tmp_path, "--steps", 1)
    for kind, message, _ in groups.run(2, f"{CASES}:run_finetune", words):
        assert kind == "ConfigError"
        assert f'--save: found "{tmp_path / "cloud"}", to which rank 1 (cloud) cannot write' in message
    assert not (tmp_path / "edge").exists()


def test_sites_that_were_started_with_other_numbers_are_told_before_the_first_step(
    groups: GroupPool, model: Path, run_json: Path, tmp_path: Path
) -> None:
    words = words_of(model, run_json, tmp_path, "--steps", 3)
    words["edge"] += ["--eval_every", "1", "--steps", "4"]
    for kind, message, _ in groups.run(2, f"{CASES}:run_finetune", words):
        assert kind == "ConfigError"
        assert "--eval_every: found edge 1, cloud null" in message
        assert "--steps: found edge 4, cloud 3" in message


def test_S76_samples_longer_than_the_model_was_made_for_are_said_on_the_edge(
    groups: GroupPool, model: Path, run_json: Path, tmp_path: Path
) -> None:
    words = words_of(model, run_json, tmp_path, "--steps", 2, "--sequence_length", 300, "--eval_micro_batches", 1)
    edge, cloud = groups.run(2, f"{CASES}:run_finetune", words)
    text = "samples reach 300 positions, while the model was made for 256"
    assert [sum(text in line for line in lines) for _, _, lines in (edge, cloud)] == [1, 0]


class Run:
    """A run of the script on both sites, each in a process that the test may kill."""

    def __init__(self, words: dict[str, list[str]], folder: Path) -> None:
        port = str(free_port())
        self.folder = folder
        folder.mkdir()
        self.processes = {
            site: subprocess.Popen(
                [sys.executable, str(ROOT / "examples/finetune.py"), *words[site]],
                env={
                    **os.environ,
                    **{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
                    **{"MASTER_PORT": port, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                    "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
                },
                stdout=(folder / f"{site}.txt").open("wb"),
                stderr=subprocess.STDOUT,
            )
            for rank, site in (("0", "edge"), ("1", "cloud"))
        }

    def said(self, site: str) -> str:
        return (self.folder / f"{site}.txt").read_text(errors="replace")

    def is_running(self) -> bool:
        return all(process.poll() is None for process in self.processes.values())

    def end(self, number: signal.Signals | None = None, timeout_s: float = 120) -> list[int]:
        for process in self.processes.values():
            if number is not None:
                process.send_signal(number)
        try:
            return [process.wait(timeout=timeout_s) for process in self.processes.values()]
        finally:
            for process in self.processes.values():
                process.kill()
                process.wait()


def step_of(directory: Path) -> int:
    """The step that `latest` names; 0 for none."""
    latest = directory / "latest"
    return int(latest.read_text().removeprefix("global_step")) if latest.is_file() else 0


@pytest.mark.distributed
def test_S70_a_killed_run_that_is_started_again_reaches_what_an_uninterrupted_one_does(
    groups: GroupPool, model: Path, run_json: Path, tmp_path: Path
) -> None:
    options = ("--steps", 40, "--eval_every", 7, "--save_every", 4, "--keep", 2, "--resume")
    whole = groups.run(2, f"{CASES}:run_finetune", words_of(model, run_json, tmp_path / "whole", *options))
    (kind, expected, _), _ = whole
    assert kind == "", expected

    sites = {site: tmp_path / "killed" / site for site in ("edge", "cloud")}
    words = words_of(model, run_json, tmp_path / "killed", *options)
    first = Run(words, tmp_path / "first")
    deadline = time.monotonic() + 90
    while first.is_running() and min(map(step_of, sites.values())) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert first.end(signal.SIGKILL) == [-signal.SIGKILL] * 2, first.said("edge")[-3000:]
    assert "starts anew: there is no checkpoint to go on from" in first.said("edge")
    saved = {site: step_of(path) for site, path in sites.items()}
    assert 8 <= min(saved.values()) < 40

    for kind, result, lines in groups.run(2, f"{CASES}:run_finetune", words):
        assert kind == "", result
        assert any(f"goes on after step {step}," in line for line in lines for step in saved.values())
    reached = json.loads((sites["edge"] / "metrics.json").read_text())
    without_times = [
        [{name: row[name] for name in ("loss", "grad_norm")} for row in rows["steps"]] for rows in (expected, reached)
    ]
    assert len(without_times[0]) == 40
    assert without_times[0] == without_times[1]
    for name in ("held_out_before", "held_out_after", "evaluations"):
        assert reached[name] == expected[name]
    assert [row["step"] for row in reached["evaluations"]] == [7, 14, 21, 28, 35]
    for path in sites.values():
        kept = {found.name for found in path.iterdir()} - {"metrics.json"}
        assert kept == {"latest", "global_step36", "global_step40"}


def test_S70_the_script_for_images_goes_on_where_it_was(groups: GroupPool, tmp_path: Path) -> None:
    options = ["--save_every", "1", "--keep", "1", "--resume", "--eval_every", "2"]

    def words(folder: str, steps: int) -> list[str]:
        return ["--save", str(tmp_path / folder), "--steps", str(steps), *options]

    runs = [words("whole", 4), words("parts", 2), words("parts", 4)]
    for answers in groups.run(2, f"{CASES}:run_finetune_vl", runs, deadline_s=120):
        (_, whole, _), _, (_, resumed, lines) = answers
        assert any("goes on after step 2" in line for line in lines)
        assert len(whole["losses"]) == 4
        assert whole["losses"] == pytest.approx(resumed["losses"], rel=1e-6)
        assert whole["held_out_after"] == pytest.approx(resumed["held_out_after"], rel=1e-6)
        assert [row["step"] for row in resumed["evaluations"]] == [2, 4]
    assert {path.name for path in (tmp_path / "parts").iterdir()} == {"latest", "global_step4", "metrics.json"}
