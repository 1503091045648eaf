"""What the documentation says is what the code does: links, code, keys, defaults, options, messages, pictures."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import ds_ldt
from ds_ldt.config.lora import LoraSettings
from ds_ldt.config.schema import LDTConfig, TraceConfig
from ds_ldt.plan import Costs, PipelineShape, build_plan, lower_bound, simulate
from ds_ldt.topology.layout import Layout
from tests.harness import ROOT, run_group
from tests.scripts import script

README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs/architecture.md"
CONFIGURATION = ROOT / "docs/configuration.md"
GETTING_STARTED = ROOT / "docs/getting-started.md"
PLANS = ROOT / "docs/plans.md"
PRIVACY = ROOT / "docs/privacy.md"
TROUBLESHOOTING = ROOT / "docs/troubleshooting.md"
SITE = ROOT / "mkdocs.yml"
PICTURES = ROOT / "docs/pictures"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
SOURCE_PATH = re.compile(r"`((?:ds_ldt|ds_configs|checkpoint|docs|examples|tests)/[\w./-]*|[\w-]+\.(?:cfg|toml|txt))`")


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of a language, without the indentation of the list they stand in."""
    found = [(match[1], match[3]) for match in FENCE.finditer(text) if match[2] == language]
    return [re.sub(rf"^{indent}", "", body, flags=re.M) for indent, body in found]


def prose(text: str) -> str:
    """Return a text without its fenced blocks."""
    return FENCE.sub("", text)


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path, text: str) -> list[str]:
    """Return the links within the repository that lead nowhere."""
    broken = []
    for target in LINK.findall(prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        destination = (path.parent / file).resolve() if file else path
        if not destination.exists() or (anchor and anchor not in anchors(read(destination))):
            broken.append(target)
    return broken


def table(text: str, first_heading: str) -> list[list[str]]:
    """Return the cells of the rows below the heading of the table that begins with this column."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith(f"| {first_heading} |"):
            next(lines)
            break
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


# --- links and paths ------------------------------------------------------------------------------------------------


def test_broken_links_are_noticed() -> None:
    text = "[a](nowhere.md) [b](CONTRIBUTING.md) [c](#no-such) [d](https://example.org)\n# Such\n[e](#limits-of-this)"
    assert broken_links(README, text) == ["nowhere.md", "#no-such", "#limits-of-this"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_links_resolve(path: Path) -> None:
    assert not broken_links(path, read(path))


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_files_that_are_named_exist(path: Path) -> None:
    named = [name for name in SOURCE_PATH.findall(read(path)) if "NAME" not in name and "..." not in name]
    assert not [name for name in named if not (ROOT / name).exists()]


def test_architecture_gives_every_module_its_place() -> None:
    entries = [path for path in (ROOT / "ds_ldt").iterdir() if not path.name.startswith(("_", "py.typed"))]
    names = {f"ds_ldt/{path.name}{'/' if path.is_dir() else ''}" for path in entries}
    assert len(names) > 11
    rows = table(read(ARCHITECTURE), "layer")
    placed = [name for row in rows for name in SOURCE_PATH.findall(row[1])]
    assert sorted(placed) == sorted(names)


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs/decisions"
    listed = set(LINK.findall(read(folder / "README.md")))
    assert listed == {path.name for path in folder.glob("*.md")} - {"README.md"}


# --- code -----------------------------------------------------------------------------------------------------------


def unknown_names(source: str) -> list[str]:
    """Return what a code block takes from ds_ldt or ds_ldt.models without their exporting it."""
    unknown = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute):
            continue
        owner = ast.unparse(node.value)
        if owner == "ds_ldt" and node.attr not in ds_ldt.__all__:
            unknown.append(f"ds_ldt.{node.attr}")
        if owner == "ds_ldt.models" and node.attr not in ds_ldt.models.__all__:
            unknown.append(f"ds_ldt.models.{node.attr}")
    return unknown


def test_unknown_names_are_noticed() -> None:
    assert unknown_names("import ds_ldt\nds_ldt.initialise()\nds_ldt.models.from_hub()\nds_ldt.initialize()") == [
        "ds_ldt.initialise",
        "ds_ldt.models.from_hub",
    ]


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_python_blocks_compile_and_use_what_is_exported(path: Path) -> None:
    sources = blocks(read(path), "python")
    assert sources or path not in (README, GETTING_STARTED)
    for source in sources:
        compile(source, str(path), "exec")
        assert not unknown_names(source)


def test_getting_started_shows_the_example_of_the_readme() -> None:
    assert blocks(read(GETTING_STARTED), "python")[0] == blocks(read(README), "python")[0]


def run_readme_example(folder: str) -> dict[str, Any]:
    """Run the first Python block of the README on this rank."""
    os.chdir(folder)
    scope: dict[str, Any] = {}
    exec(compile(blocks(read(README), "python")[0], "README.md", "exec"), scope)
    engine = scope["engine"]
    return {
        "steps": engine.global_steps,
        "batch": engine.train_batch_size(),
        "numbers": [float(scope[name]) for name in ("loss", "norm", "held_out_loss")],
        "path": scope["path"],
        "data": scope["dataloader"] is not None,
    }


@pytest.mark.distributed
def test_readme_example_trains(tmp_path: Path) -> None:
    ranks = run_group(3, "tests.test_docs:run_readme_example", str(tmp_path), deadline_s=180)
    assert all(rank["numbers"] == ranks[0]["numbers"] for rank in ranks), "not equal on every rank, as the README says"
    assert all(0 < number < 10 for number in ranks[0]["numbers"])
    assert all((rank["steps"], rank["batch"]) == (3, 4 * 2 * 2) for rank in ranks)
    assert all(rank["path"] == "checkpoint/global_step3" for rank in ranks)
    assert [rank["data"] for rank in ranks] == [True, False, False]


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of every command in shell blocks."""
    for block in blocks(text, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = line.split("#")[0].split()
            if words:
                yield words


def unknown_options(words: list[str]) -> list[str]:
    """Return the options of a command that none of the repository's scripts in it mentions."""
    scripts = [ROOT / word for word in words if word.endswith((".sh", ".py")) and (ROOT / word).is_file()]
    known = "".join(map(read, scripts)) + ("--hostfile --interface" if scripts else "")
    if any(script.name in ("run_edge.sh", "run_cloud.sh") for script in scripts):
        known += read(ROOT / "examples/run_site.sh")
    if "deepspeed" in words:
        known += "--no_ssh --node_rank --hostfile --master_addr --master_port"
    commands = {"hf_to_ds_ldt.py": "convert", "ds_ldt_to_hf.py": "export"}
    command = words[1] if words[0] == "ds-ldt" else next((commands.get(script.name) for script in scripts), None)
    if command is not None:
        known += "".join(read(ROOT / f"ds_ldt/cli/{module}.py") for module in (command, "job"))
    options = [word.split("=")[0] for word in words if word.startswith("--")]
    return [option for option in options if not re.search(rf"{option}\b(?!-)", known)]


def test_unknown_options_are_noticed() -> None:
    assert unknown_options(["python", "checkpoint/ds_ldt_to_hf.py", "--edge", "A", "--brink", "B"]) == ["--brink"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_documented_commands_name_scripts_and_options_that_exist(path: Path) -> None:
    for words in commands(read(path)):
        scripts = [word for word in words if re.fullmatch(r"(examples|tests|checkpoint|docs)/[\w/]+\.(sh|py)", word)]
        assert not [script for script in scripts if not (ROOT / script).is_file()], words
        assert not unknown_options(words), words


# --- settings -------------------------------------------------------------------------------------------------------


def settings_of(section: type[BaseModel], values: Any, prefix: str) -> dict[str, str]:
    """Return key path -> default as JSON for every setting of a section."""
    found: dict[str, str] = {}
    for name, field in section.model_fields.items():
        default = field.default if values is None else getattr(values, name)
        if isinstance(default, BaseModel):
            found |= settings_of(type(default), default, f"{prefix}.{name}")
        else:
            found[f"{prefix}.{name}"] = "required" if field.is_required() else json.dumps(default)
    return found


def test_configuration_lists_every_setting_with_its_default() -> None:
    text = read(CONFIGURATION)
    sections = {"ldt": LDTConfig, "ldt.lora": LoraSettings, "ldt.trace": TraceConfig}
    for prefix, section in sections.items():
        rows = table(text.partition(f"<!-- {prefix} begins -->")[2], "key")
        listed = {key.strip("`"): default.strip("`") for key, default, *_ in rows}
        assert listed == settings_of(section, None, prefix)
        assert all(accepted and meaning for _, _, accepted, meaning in rows)


def test_configuration_is_what_its_script_writes() -> None:
    text = read(CONFIGURATION)
    assert script(ROOT / "docs/make_configuration.py").page(text) == text, "python docs/make_configuration.py"


def test_configuration_quotes_the_default_clipping_of_deepspeed() -> None:
    from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT

    assert f"- `gradient_clipping` is **{GRADIENT_CLIPPING_DEFAULT}** in DeepSpeed" in read(CONFIGURATION)


@pytest.mark.parametrize("path", [README, GETTING_STARTED], ids=["README", "getting-started"])
def test_every_family_is_named(path: Path) -> None:
    sentence = re.search(r"Supported families:(.*?)\(", read(path), re.S)
    assert sentence is not None
    assert set(ds_ldt.models.FAMILIES) <= set(re.findall(r"\w+", sentence[1].lower()))


# --- statements and pictures ----------------------------------------------------------------------------------------


def test_privacy_prints_the_wire_schema_of_every_family() -> None:
    statements = blocks(read(PRIVACY), "text")
    matrices = {"vision_encoder": [[1, 4], [1, 0], [0, 0]], "text_decoder": [[0, 0], [1, 4], [1, 0]]}
    layouts = {1: Layout.build([[1, 1], [1, 0]]), 2: Layout.build(matrices, num_leading=1, num_between=2)}
    for family in ds_ldt.models.FAMILIES.values():
        layout = layouts[2 if family.num_between else 1]
        assert family.wire_schema(layout).describe() + "\n" in statements


def test_limits_of_the_split_are_stated() -> None:
    readme, privacy = (" ".join(read(path).split()) for path in (README, PRIVACY))
    for phrase in ("This is not secrecy.", "nothing is encrypted", "99%", "70%"):
        assert phrase in readme
        assert phrase in privacy
    assert "| tokens recovered | 99% | 96% | 92% | 82% | 70% |" in privacy


def test_readme_says_at_the_top_where_it_has_been_run_and_stays_short() -> None:
    text = read(README)
    assert "run on CPUs over gloo only" in text.partition("\n## ")[0]
    assert len(text.splitlines()) <= 200


def test_readme_quotes_the_benchmark_as_it_was_measured() -> None:
    measured = read(PLANS).partition("<!-- wan.py begins -->")[2]
    whole = {row[0]: row for row in table(measured, "step time (s), efficiency, ratio to ds_ldt auto")}
    rows = table(read(README).partition("## How fast it is")[2], "schedule")
    assert len(rows) == 4
    for name, *cells in rows:
        for column, cell in zip((2, 3), cells, strict=True):
            step_s, *others = whole[name][column].split(", ")
            assert cell == ", ".join([step_s, *others[-1:]])


def literals() -> list[str]:
    """Return the texts in the source of ds_ldt, with … for what is put into them."""
    found = []
    for path in sorted((ROOT / "ds_ldt").rglob("*.py")):
        for node in ast.walk(ast.parse(read(path))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def unknown_parts(message: str, texts: list[str]) -> list[str]:
    """Return the parts of a quoted message, between its …, that no text of the source has."""
    parts = [part.strip() for part in message.split("…")]
    return [part for part in parts if re.search(r"\w", part) and not any(part in text for text in texts)]


def test_unknown_parts_of_messages_are_noticed() -> None:
    assert unknown_parts("was silent … and then … was silent first", ["it … was silent first"]) == ["and then"]


def test_messages_in_troubleshooting_are_those_of_the_code() -> None:
    texts = literals()
    quoted = [row[0] for part in read(TROUBLESHOOTING).split("\n## ")[1:] for row in table(part, "message")]
    messages = [message for cell in quoted for message in re.findall(r"`([^`]+)`", cell)]
    assert len(messages) > 40
    assert not [(message, unknown) for message in messages if (unknown := unknown_parts(message, texts))]


def test_the_site_loads_nothing_from_a_network() -> None:
    text = read(SITE)
    assert re.search(r"^  font: false$", text, re.M)
    plugins = re.search(r"^plugins:\n(.*?)\n\S", text, re.M | re.S)
    assert plugins is not None
    assert re.findall(r"^  - (\w+)", plugins[1], re.M) == ["search", "mkdocstrings"]
    assert "inventories: []" in plugins[1]
    assert "http" not in text


def test_pictures_are_what_their_script_draws() -> None:
    drawn = script(PICTURES / "make_pictures.py").pictures()
    assert {path.name for path in PICTURES.glob("*.svg")} == set(drawn)
    for name, content in drawn.items():
        assert read(PICTURES / name) == content, "draw it anew: python docs/pictures/make_pictures.py"


def test_the_picture_of_the_schedule_shows_every_compute() -> None:
    maker = script(PICTURES / "make_pictures.py")
    shape = maker.shape_of()
    num_computes = 2 * shape.num_virtual_stages * shape.num_micro_batches * shape.num_domains
    legend = 2 * 6
    assert maker.schedule().count('rx="0"') == num_computes + legend


def test_quoted_reach_of_the_policy_is_what_the_simulator_gives() -> None:
    (row,) = table(read(ARCHITECTURE), "L")
    layout = Layout.build([[2, 9, 9, 8], [2, 0, 0, 0]], num_leading=1, num_trailing=2)
    shape = PipelineShape.from_layout(layout, num_micro_batches=32, num_domains=1, num_replicas=1)
    plan = build_plan(shape, policy="ldt_1f1b")
    reach = []
    for latency in (0, 0.25, 0.5, 1, 2, 4):
        costs = Costs.uniform(shape, edge=0.25, cloud=1, latency=latency)
        reach.append(lower_bound(shape, costs) / simulate(plan, costs).makespan)
    assert row[1:] == [f"{value:.2f}" for value in reach]
    sentence = re.search(r"in simulation \(.*?\.\n", read(PLANS), re.S)
    assert sentence is not None
    assert re.findall(r"\b0\.\d\d\b", sentence[0]) == row[4:]


def test_quoted_gain_of_split_backwards_is_what_the_simulator_gives() -> None:
    layout = Layout.build([[2, 9, 9, 8], [2, 0, 0, 0]], num_leading=1, num_trailing=2)
    sizes = {"num_micro_batches": 32, "num_domains": 1, "num_replicas": 1}
    whole = PipelineShape.from_layout(layout, **sizes)
    halves = PipelineShape.from_layout(layout, **sizes, split_backward=True)
    gains, more = [], []
    for latency in (1, 2, 4):
        costs = Costs.uniform(whole, edge=0.25, cloud=1, latency=latency)
        before, after = (build_plan(shape, policy="auto", costs=costs) for shape in (whole, halves))
        gains.append(f"{1 - simulate(after, costs).makespan / lower_bound(whole, costs):.1%}".replace("%", " %"))
        more.append([after.peak_in_flight(rank) - before.peak_in_flight(rank) for rank in range(4)])
    text = " ".join(read(PLANS).split())
    assert f"a step is then {gains[0]}, {gains[1]} and {gains[2]} shorter than any with whole backwards can be" in text
    assert " | ".join(gains) in read(ARCHITECTURE)
    assert {edge for edge, *_ in more} == {1}
    assert {count for _, *cloud in more for count in cloud} == {2, 3, 4}
    assert "the edge holds one micro-batch more in flight" in text
    assert "a cloud stage two to four more" in text
