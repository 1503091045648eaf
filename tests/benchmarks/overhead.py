"""What the engine itself costs: layers that take no time, and the processor time of an instruction beside DeepSpeed's.

    python tests/benchmarks/overhead.py              ds_ldt and DeepSpeed's PipelineModule on the same four layers
    python tests/benchmarks/overhead.py --profile 12 also print the 12 functions of each rank that take the most time

Both move the same activations through the same layers: head, one layer on each of two cloud stages, tail. ds_ldt has
head and tail in one process, DeepSpeed in two. Processor time is that of all threads of all processes, so other work
on the machine changes it little; the step time is that of the first rank.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.peers import ROWS, Place, Row
from tests.benchmarks.setting import Setup
from tests.harness import GroupSession

_MODULE = "tests.benchmarks.peers"
_NAMES = ("ds_ldt ldt_1f1b", "DeepSpeed PipelineModule 1F1B")
_DEADLINE_S = 180.0
_MICRO = 1e6


@dataclass(slots=True, kw_only=True)
class Engine:
    """One of the two engines and what was measured of it: seconds of each turn, per step."""

    row: Row
    session: GroupSession
    num_instructions: int = 0
    cpu_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)

    def start(self, setup: Setup) -> None:
        """Start the processes, build the engines, count the instructions of a step, and train the first steps."""
        edge = self.row.edge_ranks(setup.num_stages)
        self.session.run(f"{_MODULE}:prepare", Place(edge_ranks=edge), deadline_s=_DEADLINE_S)
        self.session.run(f"{_MODULE}:build", self.row, setup, 0.0, deadline_s=_DEADLINE_S)
        self.num_instructions = sum(self.session.run(f"{_MODULE}:count_instructions", deadline_s=_DEADLINE_S))
        self.session.run(f"{_MODULE}:run_steps", 3, deadline_s=_DEADLINE_S)

    def turn(self, steps: int) -> None:
        """Train some steps."""
        answers = self.session.run(f"{_MODULE}:run_steps", steps + 1, deadline_s=_DEADLINE_S)
        ends = answers[0]["ends"]
        self.step_s.append((ends[-1] - ends[0]) / steps)
        self.cpu_s.append(sum(answer["cpu_s"] for answer in answers) / (steps + 1))

    @property
    def cpu_per_instruction_s(self) -> float:
        """Processor time of an instruction."""
        return statistics.median(self.cpu_s) / self.num_instructions

    @property
    def time_per_instruction_s(self) -> float:
        """Step time over the instructions of a step."""
        return statistics.median(self.step_s) / self.num_instructions


def measure(setup: Setup, *, turns: int, steps: int, profile: int = 0) -> list[Engine]:
    """Measure both engines, which take turns.

    Args:
        setup: what they train.
        turns: turns of each.
        steps: steps of a turn.
        profile: lines of a profile to print at the end; 0: none.
    """
    with ExitStack() as stack:
        engines = []
        for row in ROWS:
            if row.name in _NAMES:
                session = stack.enter_context(GroupSession(row.world_size(setup.num_stages)))
                engines.append(Engine(row=row, session=session))
                engines[-1].start(setup)
        for _ in range(turns):
            for engine in engines:
                engine.turn(steps)
        for engine in engines if profile else []:
            texts = engine.session.run(f"{_MODULE}:profile_steps", steps, profile, deadline_s=_DEADLINE_S)
            for rank, text in enumerate(texts):
                sys.stderr.write(f"{engine.row.name}, rank {rank}:\n{text}\n")
    return engines


def table(engines: Sequence[Engine]) -> str:
    """The table, as Markdown."""
    lines = [
        "| engine | instructions | processor time of one (us) | step time over instructions (us) | step (ms) |",
        "| --- | --- | --- | --- | --- |",
    ]
    for engine in engines:
        lines.append(
            f"| {engine.row.name} | {engine.num_instructions} | {engine.cpu_per_instruction_s * _MICRO:.0f} | "
            f"{engine.time_per_instruction_s * _MICRO:.0f} | {statistics.median(engine.step_s) * 1e3:.1f} |"
        )
    ours, stock = engines
    lines.append(
        f"| ds_ldt over DeepSpeed | | {ours.cpu_per_instruction_s / stock.cpu_per_instruction_s:.2f}x | "
        f"{ours.time_per_instruction_s / stock.time_per_instruction_s:.2f}x | |"
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(description="Processor time of an instruction, beside DeepSpeed's.")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn")
    parser.add_argument("--micro-batches", type=int, default=32)
    parser.add_argument("--message-bytes", type=int, default=65536)
    parser.add_argument("--profile", type=int, default=0, help="lines of a profile to print; default none")
    options = parser.parse_args(argv)
    setup = Setup(
        layer_s=0.0,
        cloud_layers=1,
        num_micro_batches=options.micro_batches,
        message_bytes=options.message_bytes,
    )
    engines = measure(setup, turns=options.turns, steps=options.steps, profile=options.profile)
    sys.stdout.write(table(engines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
