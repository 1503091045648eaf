"""What importing costs: `ds_ldt` and its pure layers load neither torch nor deepspeed nor transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ds_ldt
from tests.harness import ROOT

HEAVY = ("torch", "deepspeed", "transformers")
PURE = (
    "ds_ldt",
    "ds_ldt.config.schema",
    "ds_ldt.errors",
    "ds_ldt.topology.layout",
    "ds_ldt.topology.ranks",
    "ds_ldt.plan",
)


def loaded_by(statement: str) -> list[str]:
    """Return the heavy packages that a fresh interpreter has loaded after a statement."""
    script = f"import sys\n{statement}\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    return ran.stdout.split()


@pytest.mark.parametrize("module", PURE)
def test_pure_layers_load_nothing_heavy(module: str) -> None:
    assert loaded_by(f"import {module}") == []


def test_config_is_loaded_through_the_package_without_torch() -> None:
    assert (
        loaded_by("from ds_ldt import ConfigError, JobConfig, LDTConfig, load_config; dir(__import__('ds_ldt'))") == []
    )


def test_the_check_would_notice_torch() -> None:
    assert "torch" in loaded_by("import torch")


@pytest.mark.parametrize("name", sorted(ds_ldt.__all__))
def test_public_names_exist(name: str) -> None:
    value = getattr(ds_ldt, name)
    assert getattr(value, "__name__", name).rpartition(".")[2] == name
    assert name in dir(ds_ldt)
    assert getattr(ds_ldt, name) is value


FIRST = """
import os, sys
import ds_ldt.api, ds_ldt.models.qwen2_5_vl  # with all that they need from elsewhere, which stays
for name in [name for name in sys.modules if name.partition(".")[0] == "ds_ldt"]:
    del sys.modules[name]
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            __import__(name)
        except BaseException as error:
            sys.stdout.write(f"{name}: {error!r}\\n")
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_any_module_may_be_the_first_that_is_imported() -> None:
    paths = [path.relative_to(ROOT) for path in sorted((ROOT / "ds_ldt").rglob("*.py"))]
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]
    ran = subprocess.run(
        [sys.executable, "-c", FIRST, *names], capture_output=True, text=True, check=True, timeout=240
    )
    assert len(names) > 100
    assert [line for line in ran.stdout.splitlines() if line.startswith("ds_ldt.")] == []


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'ds_ldt' has no attribute 'nonsense'"):
        ds_ldt.nonsense  # noqa: B018
    assert not hasattr(ds_ldt, "__wrapped__")


def test_every_lazy_name_is_public() -> None:
    assert set(ds_ldt._HOMES) | {"models", "__version__"} == set(ds_ldt.__all__)
