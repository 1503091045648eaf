"""Promises about the source itself, kept by reading it. Each rule is first shown to catch what it is there for."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ("ds_ldt",)
CODE = ("ds_ldt", "checkpoint", "examples")
TEXT = (*CODE, "ds_configs", "docs", ".ci")
TEXT_SUFFIXES = {".py", ".sh", ".json", ".md", ".cfg", ".toml", ".txt", ""}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

Rule = Callable[[ast.Module], Iterator[tuple[int, str]]]


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def text_files() -> list[Path]:
    inside = (path for folder in TEXT for path in (ROOT / folder).rglob("*"))
    return sorted(
        path
        for path in (
            *inside,
            *ROOT.glob("*.md"),
            ROOT / "setup.cfg",
            ROOT / "pyproject.toml",
            ROOT / "constraints.txt",
        )
        if path.is_file() and path.suffix in TEXT_SUFFIXES and "__pycache__" not in path.parts
    )


# --- rules over syntax trees --------------------------------------------------------------------------------------

DEVICE_APIS = {"cuda", "npu", "xpu", "mps", "hpu"}
DEVICE_NAME = re.compile(rf"({'|'.join(sorted(DEVICE_APIS))})(:\d+)?")


def names_no_device_api(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """DeepSpeed's get_accelerator() is the only door to a device: no torch.<device>, no plug-in, no device by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in DEVICE_APIS:
            if isinstance(node.value, ast.Name) and node.value.id == "torch":
                yield node.lineno, f"torch.{node.attr}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for name in imported(node):
                if name.split(".")[0] in {"torch_npu", "apex"} or name.split(".")[:2] in [
                    ["torch", d] for d in DEVICE_APIS
                ]:
                    yield node.lineno, f"import {name}"
        elif isinstance(node, ast.Constant) and DEVICE_NAME.fullmatch(str(node.value)):
            yield node.lineno, f"device '{node.value}'"


def imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    for alias in node.names:
        yield f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name


def has_no_global_statement(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}"


def has_no_bare_except(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield node.lineno, "except:"


def prints_nothing(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield node.lineno, "print()"


def has_short_functions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            documented = ast.get_docstring(node, clean=False) is not None
            docstring = (first.end_lineno or first.lineno) - first.lineno + 1 if documented else 0
            length = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring
            if length >= MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {length} lines without its docstring"


RULES: list[tuple[Rule, tuple[str, ...], list[str]]] = [
    (
        names_no_device_api,
        CODE,
        [
            "import torch\ntorch.cuda.synchronize()",
            "import torch\nx = torch.npu",
            "import torch_npu",
            "from torch import cuda",
            "import torch.cuda.nccl",
            "from torch.npu import Stream",
            "x.to('cuda')",
            "x.to('npu:0')",
        ],
    ),
    (has_no_global_statement, CODE, ["def f():\n    global n\n    n = 1"]),
    (has_no_bare_except, CODE, ["try:\n    f()\nexcept:\n    pass"]),
    (prints_nothing, LIBRARY, ["print('loss')"]),
    (has_short_functions, CODE, ["def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES]),
]


@pytest.mark.parametrize("rule, folders, wrong", RULES, ids=[rule.__name__ for rule, *_ in RULES])
def test_source(rule: Rule, folders: tuple[str, ...], wrong: list[str]) -> None:
    for snippet in wrong:
        assert list(rule(ast.parse(snippet))), f"the rule does not see {snippet!r}"
    files = python_files(*folders)
    assert files
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in files
        for line, what in rule(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)


def test_files_are_short_enough_to_read_in_one_go() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in python_files(*CODE)
    }
    assert not {name: length for name, length in lengths.items() if length >= MAX_FILE_LINES}


# --- rules over text ----------------------------------------------------------------------------------------------

CLAIM = re.compile(
    r"\b(secure|secures|secured|securely|private|privately|anonymous|anonymously|anonymi[sz]ed)\b", re.I
)
# What the bare U-shape is not may be said, and so may what the words mean in programming.
NEGATION = re.compile(r"\b(no|not|never|neither|nor|cannot|without)\b|n't\b", re.I)
PROGRAMMING = re.compile(r"\bprivate (api|attributes?|names?|members?|methods?|functions?|networks?)\b", re.I)
SENTENCE_END = re.compile(r"(?<=[.!?:])\s|\n\s*\n|\n\s*[-*|#]")
MACHINE_PATH = re.compile(r"(?<![\w.$}])/(home|root|Users|work|tmp|opt|mnt|data)/[\w.-]+")


def unwarranted_claims(text: str) -> list[str]:
    """Return the sentences that claim a property which the U-shape does not have."""
    found = []
    for sentence in SENTENCE_END.split(text):
        claim = CLAIM.search(PROGRAMMING.sub("", sentence))
        if claim and not NEGATION.search(sentence):
            found.append(" ".join(sentence.split()))
    return found


def machine_paths(text: str) -> list[str]:
    """Return the absolute paths that exist on somebody's machine only."""
    return [match.group() for match in MACHINE_PATH.finditer(text)]


@pytest.mark.parametrize(
    "text, claimed",
    [
        ("Training is private.", True),
        ("Your data stays secure in the cloud.", True),
        ("It was never tested. The channel is anonymous.", True),
        ("- not encrypted\n- private by design", True),
        ("This is not private.", False),
        ("Never call the bare U-shape secure.", False),
        ("torch's own validator (private API, tests only)", False),
        ("PrivacyError says that the edge was about to send something undeclared.", False),
    ],
)
def test_claims_are_told_from_honest_negations(text: str, claimed: bool) -> None:
    assert bool(unwarranted_claims(text)) is claimed


def test_nothing_claims_to_be_secure_private_or_anonymous() -> None:
    found = {
        str(path.relative_to(ROOT)): claims
        for path in text_files()
        if (claims := unwarranted_claims(path.read_text(encoding="utf-8")))
    }
    assert not found


@pytest.mark.parametrize(
    "text, paths",
    [
        ("cd /home/me/ds_ldt && ls", ["/home/me"]),
        ('"path": "/tmp/run1"', ["/tmp/run1"]),
        ("${TMPDIR:-/tmp}/x and examples/work/dir and https://host/data/x", []),
    ],
)
def test_machine_paths_are_recognised(text: str, paths: list[str]) -> None:
    assert machine_paths(text) == paths


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    found = {
        str(path.relative_to(ROOT)): paths
        for path in text_files()
        if (paths := machine_paths(path.read_text(encoding="utf-8")))
    }
    assert not found


# --- promises that tie files together -----------------------------------------------------------------------------


def test_readme_tells_to_run_what_ci_runs() -> None:
    lines = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    commands = [line.removeprefix("exec ") for line in lines if line.startswith(("exec ", "bash "))]
    assert commands == ["bash tests/run.sh"]
    assert commands[0] in (ROOT / "README.md").read_text(encoding="utf-8")


def test_constraints_pin_every_package_exactly_and_nothing_local() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wrong = [line for line in lines if not line.startswith("#") and not re.fullmatch(r"[\w.-]+==[\w.]+", line)]
    assert not wrong
    assert "torch==2.13.0" in lines
