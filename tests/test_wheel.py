"""The wheel, built as `python -m build` does (from an sdist), in a fresh environment outside the checkout.

What ds_ldt depends on is not installed again: the fresh environment sees the packages of the running one, but not
ds_ldt, which comes from the wheel alone.
"""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import ds_ldt
from tests.conversion.models import CONFIG, assert_same_tensors, save_model, tensors_of
from tests.harness import ROOT, free_port
from tests.test_docs import README, blocks, read

RANKS = 3
EXAMPLE = """
import os, sys
import ds_ldt.api
assert ds_ldt.__file__ == sys.argv[2], ds_ldt.__file__
source = compile(open(sys.argv[1]).read(), sys.argv[1], "exec")
children = []
for rank in range(int(os.environ["WORLD_SIZE"])):
    if (child := os.fork()) == 0:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        exec(source, {})
        sys.stdout.flush()
        os._exit(0)
    children.append(child)
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""
"""Starts the ranks as forks of a process that has imported ds_ldt, which takes seconds."""

RIGHT = """
from torch import nn

import ds_ldt

job = ds_ldt.load_config("config.json")
layers = [ds_ldt.LayerSpec(nn.Linear, 16, 16) for _ in range(4)]
module = ds_ldt.LDTPipelineModule(layers=layers, config=job, loss_fn=nn.functional.mse_loss)
engine, optimizer, loader, scheduler = ds_ldt.initialize(model=module, training_data=[1], num_workers=2)
other = ds_ldt.models.from_pretrained("edge/layers", config="config.json")
ds_ldt.initialize(model=other, shuffle_seed=3)
path, state = engine.load_checkpoint("checkpoint", tag="last")
stages: int = job.num_stages
with ds_ldt.preparing_data(job):
    pass
"""
WRONG = """
ds_ldt.initialize(model="module")  # arg-type
ds_ldt.initialize(model=module, shuffle_seed="3")  # arg-type
ds_ldt.initialize(module=module)  # call-arg
ds_ldt.initialize_all(model=module)  # attr-defined
ds_ldt.LDTPipelineModule(layers=3, config=job)  # arg-type
ds_ldt.LDTPipelineModule(layers=layers)  # call-arg
ds_ldt.models.from_pretrained("edge/layers", config=3)  # arg-type
engine.load_checkpoint(3)  # arg-type
engine.load_checkpoint("checkpoint", tag=3)  # arg-type
engine.load_checkpoint("checkpoint", load_optimizer=False)  # call-arg
ds_ldt.load_config(3)  # arg-type
steps: str = job.num_stages  # assignment
"""
MYPY = """
[mypy]
strict = true
[mypy-torch.*,deepspeed.*,transformers.*,peft.*]
follow_imports = skip
ignore_missing_imports = true
"""
"""What is not the wheel's own is not looked at, as following torch alone takes longer than all else here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A fresh environment with the wheel.

    Attributes:
        wheel: The wheel.
        prefix: The environment.
        folder: An empty folder, the working directory of what runs in it.
    """

    wheel: Path
    prefix: Path
    folder: Path

    @property
    def package(self) -> Path:
        """Where ds_ldt has to come from."""
        return self.prefix / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages/ds_ldt"

    def run(self, *command: str, **variables: str) -> str:
        """Run a program of the environment; return what it writes to stdout."""
        environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        environ |= {"OMP_NUM_THREADS": "1", **variables}
        program = str(self.prefix / "bin" / command[0])
        ran = subprocess.run(
            [program, *command[1:]],
            cwd=self.folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout


def build(folder: Path) -> Path:
    """Build an sdist, and a wheel from it."""
    hook = "import sys; from setuptools import build_meta as b; b.build_sdist(sys.argv[1])"
    source = folder / "checkout"
    source.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)  # a copy, as setuptools leaves folders beside what it builds
    for name in ("ds_ldt", "tests", "checkpoint"):  # the latter two have no place in a wheel
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-c", hook, str(folder)], cwd=source, check=True, capture_output=True, timeout=60)
    (packed,) = folder.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extractall(folder / "sdist", filter="data")
    (unpacked,) = (folder / "sdist").iterdir()
    offline = ("--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--disable-pip-version-check")
    wheel = [sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", str(folder), str(unpacked)]
    subprocess.run(wheel, cwd=folder, check=True, capture_output=True, timeout=60)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    wheel = build(folder)
    prefix = folder / "environment"
    venv.create(prefix, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(prefix / "bin/python"), "--disable-pip-version-check"]
    install = [*pip, "install", "--no-deps", "--no-index", "--quiet", str(wheel)]
    subprocess.run(install, cwd=folder, check=True, capture_output=True, timeout=60)
    (folder / "work").mkdir()
    found = Installed(wheel=wheel, prefix=prefix, folder=folder / "work")
    # The packages of the running environment, without its .pth files: one of them may lead to the checkout.
    paths = sysconfig.get_paths()
    (found.package.parent / "dependencies.pth").write_text(f"{paths['purelib']}\n{paths['platlib']}\n")
    return found


def test_the_wheel_holds_the_package_and_nothing_else(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as archive:
        names = archive.namelist()
        metadata = email.message_from_bytes(archive.read(f"ds_ldt-{ds_ldt.__version__}.dist-info/METADATA"))
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "ds_ldt").rglob("*") if path.suffix in (".py", ".typed")}
    assert {name for name in names if ".dist-info/" not in name} == files
    assert "ds_ldt/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"ds_ldt", f"ds_ldt-{ds_ldt.__version__}.dist-info"}
    assert f"ds_ldt-{ds_ldt.__version__}.dist-info/licenses/LICENSE" in names
    assert metadata["Version"] == ds_ldt.__version__
    assert metadata["License"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert str(metadata.get_payload()).strip() == read(README).strip()
    assert {"plot", "lora", "monitor", "vl", "npu"} <= set(metadata.get_all("Provides-Extra", []))


def test_plan_draw_convert_and_export_run(installed: Installed, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    where = "import ds_ldt, sys; sys.stdout.write(ds_ldt.__file__)"
    assert installed.run("python", "-c", where) == str(installed.package / "__init__.py")
    save_model(tmp_path / "hf", tie_word_embeddings=False)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    assert installed.run("ds-ldt", "--version") == f"ds_ldt {ds_ldt.__version__}\n"
    assert "efficiency" in installed.run("ds-ldt", "plan", str(config))
    assert "wrote plan.svg" in installed.run("ds-ldt", "draw", str(config), "-o", "plan.svg")
    assert (installed.folder / "plan.svg").stat().st_size > 1000
    told = installed.run(
        *("ds-ldt", "convert", "--hf", str(tmp_path / "hf"), "--config", str(config)),
        *("--out-edge", "edge", "--out-cloud", "cloud"),
    )
    assert told.splitlines() == ["edge: layers [0, 1, 4, 5, 6] of 7 in edge", "cloud: layers [2, 3] of 7 in cloud"]
    told = installed.run("ds-ldt", "export", "--edge", "edge", "--cloud", "cloud", "--out", "out")
    assert told == "wrote 1 file of weights to out\n"
    assert_same_tensors(tensors_of(installed.folder / "out"), tensors_of(tmp_path / "hf"))


@pytest.mark.distributed
def test_the_example_of_the_readme_trains(installed: Installed) -> None:
    (installed.folder / "example.py").write_text(blocks(read(README), "python")[0])
    (installed.folder / "start.py").write_text(EXAMPLE)
    launched = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    installed.run("python", "start.py", "example.py", str(installed.package / "__init__.py"), **launched)
    assert (installed.folder / "checkpoint/latest").read_text().strip() == "global_step3"


def test_a_type_checker_knows_the_types_of_the_wheel(installed: Installed) -> None:
    source = RIGHT + WRONG
    (installed.folder / "script.py").write_text(source)
    (installed.folder / "mypy.ini").write_text(MYPY)
    mypy = ["-m", "mypy", "--config-file", "mypy.ini", "--no-error-summary", "--cache-dir", "cache"]
    ran = subprocess.run(
        [sys.executable, *mypy, "--python-executable", str(installed.prefix / "bin/python"), "script.py"],
        cwd=installed.folder,
        env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    found = re.findall(r"^script\.py:(\d+): error: .*\[([\w-]+)\]$", ran.stdout, re.M)
    marked = [
        (str(number), line.rpartition("# ")[2]) for number, line in enumerate(source.splitlines(), 1) if "  # " in line
    ]
    assert found == marked, ran.stdout + ran.stderr
    assert ran.stdout.count(" error: ") == len(marked), ran.stdout
