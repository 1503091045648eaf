"""How much does it cost to plan for the wrong link? Simulated, without torch; a minute on one core.

    python tests/benchmarks/planning.py                     the table for P = 4, D = 1 and 2, M = 32
    python tests/benchmarks/planning.py --stages 3 --micro-batches 16

Each row plans for one latency and runs that plan on links of others; an entry is the lower bound of the true link over
the step. The last columns let every message take up to that much longer than the true latency, at random and in
sequence, as a busy link does: mean of several steps, for a plan of the least latency and one of the highest.
Times are in units of t, the forward time of a cloud stage.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from ds_ldt.plan import Channel, Costs, PipelineShape, Plan, build_plan, lower_bound, simulate
from ds_ldt.plan.costs import touches_edge
from ds_ldt.topology.layout import Layout

LATENCIES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
JITTERS = (0.25, 0.5, 1.0)
STEPS = 5


def shape_of(num_stages: int, num_domains: int, num_micro_batches: int) -> PipelineShape:
    """One layer on every cloud stage, a head and a tail on the edge."""
    layout = Layout.build([[1] * num_stages, [1] + [0] * (num_stages - 1)])
    return PipelineShape.from_layout(
        layout, num_micro_batches=num_micro_batches, num_domains=num_domains, num_replicas=1
    )


def costs_of(shape: PipelineShape, latency: float) -> Costs:
    """The edge keeps up with all of its domains."""
    return Costs.uniform(shape, edge=0.25 / shape.slice_size, latency=latency)


def step_with_jitter(plan: Plan, costs: Costs, jitter: float, rng: random.Random) -> float:
    """Seconds of a step in which messages over the link are late by up to `jitter`; a channel keeps its sequence."""
    arrivals: dict[Channel, deque[float]] = defaultdict(deque)
    last: dict[Channel, float] = defaultdict(float)
    now = [0.0] * len(plan.instructions)
    at = [0] * len(plan.instructions)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(plan.instructions):
            while at[rank] < len(row):
                instruction, channel = row[at[rank]], row[at[rank]].channel
                if channel is not None and instruction.kind.is_receive:
                    if not arrivals[channel]:
                        break
                    now[rank] = max(now[rank], arrivals[channel].popleft())
                elif channel is not None:
                    crosses = touches_edge(channel.boundary, plan.shape)
                    travel = costs.latency + rng.random() * jitter if crosses else 0.0
                    last[channel] = max(last[channel], now[rank] + travel)
                    arrivals[channel].append(last[channel])
                elif instruction.compute is not None:
                    now[rank] += costs.seconds(instruction.compute, plan.shape)
                at[rank] += 1
                moved = True
    return max(now)


def table_of_latencies(shape: PipelineShape, policy: str) -> list[str]:
    """Rows: planned latency. Columns: true latency."""
    lines = [f"{'planned L':>10} {'in flight':>10} | true L: " + "".join(f"{true:>8g}" for true in LATENCIES)]
    for planned in LATENCIES:
        plan = build_plan(shape, policy=policy, costs=costs_of(shape, planned))
        peak = max(map(plan.peak_in_flight, range(shape.num_ranks)))
        reached = []
        for true in LATENCIES:
            costs = costs_of(shape, true)
            reached.append(lower_bound(shape, costs) / simulate(plan, costs).makespan)
        lines.append(f"{planned:>10g} {peak:>10} |         " + "".join(f"{value:>8.3f}" for value in reached))
    return lines


def table_of_jitter(shape: PipelineShape, policy: str, true: float) -> list[str]:
    """Rows: what is planned for, from the least latency to the highest. Columns: jitter."""
    lines = [f"{'planned L':>10} | true L {true:g} + up to: " + "".join(f"{jitter * true:>8g}" for jitter in JITTERS)]
    costs = costs_of(shape, true)
    for planned, name in ((true, "least"), (true * 1.5, "median"), (true * 2, "highest")):
        plan = build_plan(shape, policy=policy, costs=costs_of(shape, planned))
        reached = []
        for jitter in JITTERS:
            rng = random.Random(0)  # the same delays for every plan
            steps = [step_with_jitter(plan, costs, jitter * true, rng) for _ in range(STEPS)]
            reached.append(lower_bound(shape, costs) / (sum(steps) / STEPS))
        lines.append(f"{planned:>10g} | {name:<21} " + "".join(f"{value:>8.3f}" for value in reached))
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="Efficiency of plans that were made for another link.")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=32)
    parser.add_argument("--domains", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--policy", nargs="+", default=["auto", "closed_form", "ldt_1f1b"])
    options = parser.parse_args(arguments)
    for num_domains in options.domains:
        shape = shape_of(options.stages, num_domains, options.micro_batches)
        for policy in options.policy:
            sys.stdout.write(f"\n{policy}: P = {options.stages}, D = {num_domains}, M = {options.micro_batches}\n")
            lines = [*table_of_latencies(shape, policy), "", *table_of_jitter(shape, policy, 2.0)]
            sys.stdout.write("\n".join(lines) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
