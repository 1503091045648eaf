"""Step times over a wide-area link: ds_ldt beside what a user would pick instead. One command, one run, one table.

    python tests/benchmarks/wan.py                    two sites in network namespaces (root, /dev/net/tun, iproute2)
    python tests/benchmarks/wan.py --link process     anywhere: latency within the processes, see README.md

README.md says how it measures and what its columns mean.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ds_ldt.plan import Costs, PipelineShape, lower_bound
from ds_ldt.topology.layout import Layout
from tests.benchmarks import link as emulator
from tests.benchmarks.peers import ROWS, Place, Row
from tests.benchmarks.setting import Setup
from tests.harness import GroupSession

_BUILD_DEADLINE_S = 180.0
_GRACE_S = 10.0
_MODULE = "tests.benchmarks.peers"
BEGIN, END = "<!-- wan.py begins -->", "<!-- wan.py ends -->"
"""What the table stands between in a document that shows it."""


@dataclass(slots=True)
class Cell:
    """What was measured of a row at one latency: seconds of each counted step, bytes over the link in all."""

    steps_s: list[float] = field(default_factory=list)
    bytes_up: float = 0.0
    bytes_down: float = 0.0
    cpu_s: float = 0.0
    num_steps: int = 0

    @property
    def step_s(self) -> float:
        """Median of the steps."""
        return statistics.median(self.steps_s)


@dataclass(slots=True, kw_only=True)
class Lane:
    """The processes of one row; they live through the whole run, and are stopped while it is another row's turn."""

    row: Row
    setup: Setup
    session: GroupSession
    link: emulator.Link | None

    @property
    def in_proportion(self) -> float:
        """Factor from the time of this row's M to that of everybody's."""
        wanted = self.row.num_micro_batches(self.setup.num_micro_batches, self.setup.num_stages)
        return bound(self.setup, 0.0, 1) / bound(replace(self.setup, num_micro_batches=wanted), 0.0, 1)

    def start(self, directory: str) -> None:
        """Start the processes and move them to their sites."""
        place = Place(
            edge_ranks=self.row.edge_ranks(self.setup.num_stages),
            link=None if self.link is None else self.link.name,
            directory=None if self.link is not None else directory,
        )
        self.session.run(f"{_MODULE}:prepare", place, deadline_s=_BUILD_DEADLINE_S)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """While the processes run; before and after they are stopped."""
        self.session.resume()
        try:
            yield
        finally:
            self.session.pause()

    def build(self, latency_s: float) -> None:
        """Make the engines, or tell them of a new latency."""
        wanted = self.row.num_micro_batches(self.setup.num_micro_batches, self.setup.num_stages)
        setup = replace(self.setup, num_micro_batches=wanted)
        self.session.run(f"{_MODULE}:build", self.row, setup, latency_s, deadline_s=_BUILD_DEADLINE_S)

    def turn(self, cell: Cell, latency_s: float, steps: int) -> None:
        """Train one step to fill the pipeline's buffers, and `steps` that count."""
        before = self.link.carried() if self.link is not None else (0, 0)
        deadline_s = 20.0 + (steps + 1) * 20 * bound(self.setup, latency_s, self.row.domains)
        answers = self.session.run(f"{_MODULE}:run_steps", steps + 1, deadline_s=deadline_s, grace_s=_GRACE_S)
        after = self.link.carried() if self.link is not None else (0, 0)
        self._check_work([answer["worked_s"] for answer in answers], steps + 1)
        ends = answers[0]["ends"]
        factor = self.in_proportion
        cell.steps_s += [factor * (end - begin) for begin, end in zip(ends, ends[1:], strict=False)]
        cell.bytes_up += after[0] - before[0]
        cell.bytes_down += after[1] - before[1]
        cell.cpu_s += sum(answer["cpu_s"] for answer in answers)
        cell.num_steps += steps + 1

    def _check_work(self, worked_s: Sequence[float], steps: int) -> None:
        """Every device has to have worked as long as in every other row."""
        setup, edge = self.setup, self.row.edge_ranks(self.setup.num_stages)
        micro_batches = self.row.num_micro_batches(setup.num_micro_batches, setup.num_stages) * steps
        wanted = {
            "edge": 3 * 2 * setup.layer_s * micro_batches * self.row.domains,
            "cloud": 3 * setup.stage_s * micro_batches,
        }
        found = [("edge", sum(worked_s[rank] for rank in edge))]
        found += [("cloud", seconds) for rank, seconds in enumerate(worked_s) if rank not in edge]
        for site, seconds in found:
            if abs(seconds - wanted[site]) > 0.1 * wanted[site]:
                raise AssertionError(
                    f"{self.row.name}: a device of the {site} worked {seconds:.3f} s, wanted {wanted[site]:.3f} s"
                )


def bound(setup: Setup, latency_s: float, domains: int, *, split: bool = False) -> float:
    """Seconds that no schedule of the U-shape can undercut, with whole backwards or with split ones."""
    layout = Layout.build(setup.matrix)
    shape = PipelineShape.from_layout(
        layout,
        num_micro_batches=setup.num_micro_batches,
        num_domains=domains,
        num_replicas=1,
        split_backward=split,
    )
    costs = Costs.uniform(
        shape,
        edge=setup.layer_s,
        cloud=setup.stage_s,
        latency=latency_s,
        bandwidth=setup.mbps * 1e6 / 8 or None,
        message_bytes=setup.message_bytes,
    )
    return lower_bound(shape, costs)


@contextlib.contextmanager
def open_lanes(rows: Sequence[Row], setup: Setup, *, over_link: bool) -> Iterator[list[Lane]]:
    """All processes and the link between them; both end with the context, however it ends."""
    with contextlib.ExitStack() as stack:
        directory = tempfile.mkdtemp(prefix="ds_ldt_wan_")
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        link = None
        if over_link:
            link = stack.enter_context(emulator.Link(f"ldt{os.getpid()}"))
            link.set(latency_s=0.0, mbps=setup.mbps)
        lanes = []
        for index, row in enumerate(rows):
            session = stack.enter_context(GroupSession(row.world_size(setup.num_stages)))
            lanes.append(Lane(row=row, setup=setup, session=session, link=link))
            (own := Path(directory) / str(index)).mkdir()
            with lanes[-1].awake():
                lanes[-1].start(str(own))
            say(f"{row.name}: {session.world_size} processes are up")
        yield lanes


def measure(
    lanes: Sequence[Lane], setup: Setup, latencies: Sequence[float], *, turns: int, steps: int
) -> dict[tuple[str, float], Cell]:
    """Measure every row at every latency (in units of t), the rows taking turns.

    Returns:
        (row name, latency in t) -> what was measured.
    """
    cells: dict[tuple[str, float], Cell] = {}
    for ratio in latencies:
        latency_s = ratio * setup.stage_s
        if lanes[0].link is not None:
            lanes[0].link.set(latency_s=latency_s, mbps=setup.mbps)
        for lane in lanes:
            with lane.awake():
                lane.build(latency_s)
        for turn in range(turns):
            for lane in lanes:
                cell = cells.setdefault((lane.row.name, ratio), Cell())
                with lane.awake():
                    lane.turn(cell, latency_s, steps)
                spread = " ".join(f"{seconds:.3f}" for seconds in cell.steps_s[-steps:])
                say(f"L = {ratio:g} t, turn {turn + 1} of {turns}: {lane.row.name}: {spread} s")
    return cells


def table(rows: Sequence[Row], setup: Setup, latencies: Sequence[float], cells: dict[tuple[str, float], Cell]) -> str:
    """The table, as Markdown."""
    head = ["step time (s), efficiency, ratio to ds_ldt auto"] + [f"L = {ratio:g} t" for ratio in latencies]
    lines = [head, ["---"] * len(head)]
    for domains, split in sorted({(row.domains, row.split) for row in rows} | {(1, False)}):
        label = "lower bound" + (f", D = {domains}" if domains > 1 else "") + (", split" if split else "")
        seconds = [bound(setup, ratio * setup.stage_s, domains, split=split) for ratio in latencies]
        lines.append([label, *(f"{one:.2f}" for one in seconds)])
    ours = rows[0].name
    for row in rows:
        line = [row.name]
        for ratio in latencies:
            step_s = cells[row.name, ratio].step_s
            efficiency = bound(setup, ratio * setup.stage_s, row.domains) / step_s
            times = step_s / cells[ours, ratio].step_s
            line.append(f"{step_s:.2f}, {efficiency:.3f}" + (f", {times:.2f}x" if row.domains == 1 else ""))
        lines.append(line)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def room(rows: Sequence[Row], setup: Setup, latencies: Sequence[float], cells: dict[tuple[str, float], Cell]) -> str:
    """What the best peer takes over the lower bounds: more than that no schedule of ours can be ahead of it."""
    best = [min(cells[row.name, ratio].step_s for row in rows if row.is_peer) for ratio in latencies]
    whole, halved = (
        " / ".join(
            f"{seconds / bound(setup, ratio * setup.stage_s, 1, split=split):.2f}"
            for seconds, ratio in zip(best, latencies, strict=True)
        )
        for split in (False, True)
    )
    return (
        f"The best peer takes {whole} of the lower bound, {halved} of that with split backwards: no schedule, however "
        "fast its engine, can be further ahead of it here."
    )


def traffic(rows: Sequence[Row], setup: Setup, ratio: float, cells: dict[tuple[str, float], Cell]) -> str:
    """Bytes over the link per step, each way, over the least: one activation and one gradient of every micro-batch."""
    lines = ["| bytes over the link, over the least | edge to cloud | cloud to edge |", "| --- | --- | --- |"]
    for row in rows:
        cell = cells[row.name, ratio]
        micro_batches = row.num_micro_batches(setup.num_micro_batches, setup.num_stages)
        least = 2.0 * setup.message_bytes * micro_batches * row.domains * cell.num_steps
        lines.append(f"| {row.name} | {cell.bytes_up / least:.3f} | {cell.bytes_down / least:.3f} |")
    return "\n".join(lines)


def machine() -> str:
    """The machine in a line."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = names[0].partition(":")[2].strip() if names else "unknown processor"
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{os.cpu_count()} cores ({model}), load at the end {load} (1, 5, 15 minutes)"


def put_into(document: Path, text: str) -> None:
    """Replace what stands between `BEGIN` and `END` in a document.

    Raises:
        ValueError: It has no such place.
    """
    before, begin, rest = document.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{document} has no lines {BEGIN} and {END}")
    document.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def say(text: str) -> None:
    """Progress, on standard error."""
    sys.stderr.write(f"[{time.strftime('%H:%M:%S')}, load {os.getloadavg()[0]:.1f}] {text}\n")
    sys.stderr.flush()


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Step times over a wide-area link.")
    parser.add_argument("--link", choices=["namespaces", "process"], default="namespaces")
    parser.add_argument("--latencies", type=float, nargs="+", default=[0, 1, 4], help="one way, in units of t")
    parser.add_argument("--rows", nargs="+", default=[], help="parts of the names of the rows to run; default all")
    parser.add_argument("--turns", type=int, default=3, help="turns of every row at every latency")
    parser.add_argument("--steps", type=int, default=2, help="counted steps of a turn")
    parser.add_argument("--layer-ms", type=float, default=5.0, help="forward of one layer; t is four layers")
    parser.add_argument("--micro-batches", type=int, default=32)
    parser.add_argument("--mbps", type=float, default=1000.0, help="of the link, each way")
    parser.add_argument("--json", type=Path, help="also write every step time there")
    parser.add_argument("--into", type=Path, help="also put the table into this document, e.g. docs/plans.md")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the table."""
    options = arguments(argv)
    missing = emulator.available() if options.link == "namespaces" else None
    if missing is not None:
        say(f"--link namespaces needs {missing}; --link process runs without")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # let every context end
    setup = Setup(layer_s=options.layer_ms / 1e3, num_micro_batches=options.micro_batches, mbps=options.mbps)
    rows = [row for row in ROWS if not options.rows or any(part in row.name for part in options.rows)]
    with open_lanes(rows, setup, over_link=options.link == "namespaces") as lanes:
        cells = measure(lanes, setup, options.latencies, turns=options.turns, steps=options.steps)
    notes = [f"{row.name}: {row.note}." for row in rows if row.note]
    if any(row.is_peer for row in rows):
        notes.append(room(rows, setup, options.latencies, cells))
    lines = [table(rows, setup, options.latencies, cells), ""]
    if options.link == "namespaces":
        lines += [traffic(rows, setup, options.latencies[-1], cells), ""]
    count = options.turns * options.steps
    lines += [
        f"t = {setup.stage_s * 1e3:g} ms, M = {setup.num_micro_batches}, P = {setup.num_stages}, "
        f"{setup.message_bytes} bytes of activations, {setup.mbps:g} Mbit/s; medians of {count} steps; "
        f"{machine()}.",
        *notes,
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    if options.into is not None:
        put_into(options.into, "\n".join(lines))
    if options.json is not None:
        found = {f"{name} @ {ratio:g}": cell.steps_s for (name, ratio), cell in cells.items()}
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
