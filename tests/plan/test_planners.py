"""`closed_form`, `greedy` and `auto`: they fit the schedule to the link, within the memory that there is."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_ldt.plan import Costs, PipelineShape, Plan, build_plan, lower_bound, simulate
from ds_ldt.plan.machine import TICKS_PER_SECOND, JobOrders, Machine
from ds_ldt.plan.playback import Follow
from ds_ldt.plan.policies import TRAINING
from ds_ldt.plan.policies.auto import Candidate, best_of, tried
from ds_ldt.plan.policies.in_flight import link_caps, round_trip_caps
from tests.benchmarks import planning
from tests.plan.shapes import full_shape, shapes

LATENCIES = (0, 0.25, 0.5, 1, 2, 4, 8)
PLANNERS = ("closed_form", "greedy", "auto")


def candidates(
    shape: PipelineShape, costs: Costs, *, limits: tuple[int, ...] | None = None, names: Sequence[str] = (*TRAINING,)
) -> list[Candidate]:
    return [tried(name, TRAINING[name], shape, costs=costs, limits=limits) for name in names]


def efficiency(shape: PipelineShape, costs: Costs, *, policy: str = "auto") -> float:
    """Of the orders alone: far faster than a validated plan, which other tests show to be the same."""
    best = best_of(candidates(shape, costs, names=[*TRAINING] if policy == "auto" else [policy]))
    return lower_bound(shape, costs) * TICKS_PER_SECOND / best.ticks


def three_chunks(p: int, d: int, latency: float) -> tuple[PipelineShape, Costs]:
    """A vision tower before a language model: edge .2, .1, .15; ViT .4 and LLM 1 on every cloud stage."""
    shape = full_shape(p, 3, m=32, d=d)
    seconds = {(chunk, 0): (0.2, 0.1, 0.15)[chunk] / d for chunk in range(3)}
    seconds |= {(chunk, stage): (0.4, 1.0)[chunk] for chunk in (0, 1) for stage in range(1, p)}
    return shape, Costs(forward=seconds, latency=latency)


def played(shape: PipelineShape, costs: Costs, policy: str) -> tuple[Plan, Machine, JobOrders]:
    """A plan and its orders in ticks, which take as long as the simulated plan."""
    plan = build_plan(shape, policy=policy, costs=costs)
    machine = Machine.build(shape, costs, training=True)
    rows = machine.jobs_of(plan.orders())
    assert machine.orders_of(rows) == plan.orders()
    assert Follow(machine, rows).play() / TICKS_PER_SECOND == pytest.approx(simulate(plan, costs).makespan, abs=1e-6)
    return plan, machine, rows


# --- the bars -----------------------------------------------------------------------------------------------------

EDGES = {1: (0.25, 0.1), 2: (0.25, 0.125, 0.1), 4: (0.25, 0.0625, 0.1)}
GRID = [(p, d, m, latency) for p in (2, 3, 4, 5) for d in EDGES for m in (4, 8, 16, 32) for latency in LATENCIES]
WORST = [(2, 2, 4, 2), (2, 4, 4, 2), (2, 2, 8, 4), (2, 4, 8, 4), (2, 2, 16, 8), (2, 4, 16, 8), (4, 4, 4, 0.25)]


@pytest.mark.parametrize("p, d, m, latency", [*WORST, *GRID[::23]])
def test_auto_hides_the_link(p: int, d: int, m: int, latency: float) -> None:
    shape = full_shape(p, 2, m=m, d=d)
    for edge in EDGES[d]:
        costs = Costs.uniform(shape, edge=edge, latency=latency)
        assert efficiency(shape, costs) >= (0.99 if m >= 16 else 0.98)


@pytest.mark.planner_full
@pytest.mark.parametrize("p, d", [(p, d) for p in (2, 3, 4, 5) for d in EDGES])
def test_auto_hides_the_link_at_every_point(p: int, d: int) -> None:
    for m in (4, 8, 16, 32):
        for latency in LATENCIES:
            test_auto_hides_the_link(p, d, m, latency)


def points_with_one_domain() -> Iterator[tuple[int, int, float]]:
    yield from ((p, m, latency) for p in (2, 3, 4, 5) for m in (8, 32) for latency in LATENCIES)


@pytest.mark.parametrize("edge", [0.1, 0.25])
def test_one_domain_reaches_the_bound_with_no_more_in_flight_than_the_link_asks_for(edge: float) -> None:
    for p, m, latency in [*[*points_with_one_domain()][::5], (5, 32, 4)]:
        shape = full_shape(p, 2, m=m)
        costs = Costs.uniform(shape, edge=edge, latency=latency)
        within = link_caps(shape, costs)
        for limits in (None, within):
            best = best_of(candidates(shape, costs, limits=limits))
            assert lower_bound(shape, costs) * TICKS_PER_SECOND / best.ticks >= 0.999
            assert all(peak <= cap for peak, cap in zip(best.peaks, within, strict=True))


def test_an_evaluation_keeps_no_more_than_its_round_trip_asks_for() -> None:
    shape = full_shape(3, 2, m=8)
    costs = Costs.uniform(shape, edge=0.5, cloud=2.0, latency=1.0)
    assert round_trip_caps(shape, costs, training=False) == (4, 1, 1)


def test_of_candidates_as_fast_to_a_part_in_1200_the_shallower_one_wins_and_then_the_first() -> None:
    def candidate(policy: str, ticks: int, *peaks: int) -> Candidate:
        return Candidate(policy=policy, orders={}, ticks=ticks, peaks=peaks)

    fast = candidate("fast", 1200, 5, 5)
    assert best_of([fast, candidate("near", 1201, 5, 4)]).policy == "near"
    assert best_of([fast, candidate("far", 1202, 5, 4)]).policy == "fast"
    assert best_of([fast, candidate("same", 1200, 6, 4)]).policy == "fast"


def test_the_cap_that_the_link_asks_for_is_the_published_one() -> None:
    shape = full_shape(4, 2, m=32)
    assert link_caps(shape, Costs.uniform(shape, edge=0.25, latency=0.25)) == (6, 5, 4, 3)
    assert link_caps(shape, Costs.uniform(shape, edge=0.25, latency=1.5)) == (8, 7, 6, 5)
    assert link_caps(shape, Costs.uniform(shape, edge=1.0, cloud=4.0, latency=6.0)) == (8, 7, 6, 5)
    assert link_caps(shape, Costs.uniform(shape, edge=0.25, latency=99.0)) == (32, 32, 32, 32)


@pytest.mark.parametrize("edge", [0.1, 0.25])
def test_closed_form_reaches_the_bound_with_one_domain(edge: float) -> None:
    for p, m, latency in points_with_one_domain():
        shape = full_shape(p, 2, m=m)
        assert efficiency(shape, Costs.uniform(shape, edge=edge, latency=latency), policy="closed_form") >= 0.999


@pytest.mark.parametrize("p, m, latency", [(5, 32, 0), (2, 16, 4)])
def test_closed_form_finds_other_numbers_where_the_edge_serves_two_domains(p: int, m: int, latency: float) -> None:
    shape = full_shape(p, 2, m=m, d=2)
    assert efficiency(shape, Costs.uniform(shape, edge=0.25, latency=latency), policy="closed_form") >= 0.999


@pytest.mark.parametrize("p, d, latency, least", [(3, 1, 0, 0.98), (3, 2, 2, 0.98), (5, 1, 0, 0.96), (5, 1, 4, 0.96)])
def test_three_chunks_come_near_the_bound(p: int, d: int, latency: float, least: float) -> None:
    assert efficiency(*three_chunks(p, d, latency)) >= least


@pytest.mark.planner_full
@pytest.mark.parametrize("p, least", [(3, 0.98), (5, 0.96)])
def test_three_chunks_come_near_the_bound_at_every_latency(p: int, least: float) -> None:
    for latency in LATENCIES:
        for d in (1, 2):
            assert efficiency(*three_chunks(p, d, latency)) >= least


@pytest.mark.parametrize("d, m, seconds", [(2, 32, 1.0), pytest.param(8, 128, 10.0, marks=pytest.mark.planner_full)])
def test_planning_is_quick(d: int, m: int, seconds: float) -> None:
    shape = full_shape(4 if d == 2 else 8, 2, m=m, d=d)
    costs = Costs.uniform(shape, edge=0.25 / d, latency=2.013)
    began = time.process_time()
    build_plan(shape, policy="auto", costs=costs)
    assert time.process_time() - began < seconds


# --- what holds for any pipeline ----------------------------------------------------------------------------------


@st.composite
def any_costs(draw: st.DrawFn, shape: PipelineShape) -> Costs:
    times = st.sampled_from([0.0, 0.1, 0.25, 1.0, 3.0])
    cells = zip(shape.chunks, shape.stages, strict=True)
    return Costs(
        forward={cell: draw(times) for cell in cells},
        backward_ratio=draw(st.sampled_from([0.0, 1.0, 2.0])),
        latency=draw(st.sampled_from([0.0, 0.3, 5.0])),
        bandwidth=draw(st.none() | st.just(100.0)),
        message_bytes=draw(st.sampled_from([0, 40])),
    )


@settings(deadline=None, max_examples=60)
@given(data=st.data(), shape=shapes(max_micro_batches=6), policy=st.sampled_from(PLANNERS))
def test_any_layout_with_any_costs_under_any_cap_has_a_valid_plan(
    data: st.DataObject, shape: PipelineShape, policy: str
) -> None:
    costs = data.draw(any_costs(shape))
    limits = data.draw(st.none() | st.tuples(*[st.integers(1, 5)] * shape.num_stages))
    plan = build_plan(shape, policy=policy, costs=costs, max_in_flight=limits)  # validates
    if limits is not None:
        assert all(plan.peak_in_flight(rank) <= limits[shape.stage_of(rank)] for rank in range(shape.num_ranks))


@settings(deadline=None, max_examples=40)
@given(data=st.data(), shape=shapes(max_micro_batches=6))
def test_auto_is_no_slower_than_any_policy_and_tells_which_one_it_took(
    data: st.DataObject, shape: PipelineShape
) -> None:
    costs = data.draw(any_costs(shape))
    steps = {name: simulate(build_plan(shape, policy=name, costs=costs), costs).makespan for name in TRAINING}
    auto = build_plan(shape, policy="auto", costs=costs)
    assert auto == build_plan(shape, policy=auto.policy, costs=costs)
    if costs.bandwidth is None:  # simultaneous messages may take the link in another sequence
        assert steps[auto.policy] <= min(steps.values()) * (1 + 1 / 1200) + 1e-6


@settings(deadline=None, max_examples=60)
@given(data=st.data(), shape=shapes(max_micro_batches=6), policy=st.sampled_from([*TRAINING]))
def test_playing_orders_in_ticks_takes_as_long_as_simulating_their_plan(
    data: st.DataObject, shape: PipelineShape, policy: str
) -> None:
    plan, machine, rows = played(shape, replace(data.draw(any_costs(shape)), bandwidth=None), policy)
    peaks = [0] * shape.num_stages
    for rank in range(shape.num_ranks):
        peaks[shape.stage_of(rank)] = max(peaks[shape.stage_of(rank)], plan.peak_in_flight(rank))
    assert machine.peaks(rows) == tuple(peaks)


def test_a_deadlock_is_noticed_when_orders_are_played() -> None:
    shape = full_shape(2, 2, m=2)
    machine = Machine.build(shape, Costs.uniform(shape, edge=1), training=True)
    rows = machine.jobs_of(build_plan(shape).orders())
    good, bad = Follow(machine, rows), Follow(machine, [rows[0][::-1], rows[1]])
    assert good.play() > 0 and not good.stuck
    bad.play()
    assert bad.stuck


def test_replicas_do_the_same_for_their_own_domains() -> None:
    shape = full_shape(3, 2, m=6, d=4, e=2)
    orders = build_plan(shape, policy="greedy", costs=Costs.uniform(shape, edge=0.2, latency=1)).orders()

    def shifted(rank: int, by: int) -> list[str]:
        return [str(replace(compute, domain=compute.domain + by)) for compute in orders[rank]]

    assert shifted(0, 2) == shifted(1, 0)
    assert all(shifted(2 + 4 * stage + d, 2) == shifted(2 + 4 * stage + d + 2, 0) for stage in (0, 1) for d in (0, 1))


# --- what planning is for -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", PLANNERS)
def test_a_longer_link_makes_the_plan_deeper(policy: str) -> None:
    shape = full_shape(4, 2, m=32)
    depths = [
        build_plan(shape, policy=policy, costs=Costs.uniform(shape, edge=0.25, latency=latency)).peak_in_flight(3)
        for latency in (0, 1, 4)
    ]
    assert depths == sorted(depths) and depths[0] < depths[2]


def test_the_link_that_the_published_rule_cannot_hide_is_hidden() -> None:
    shape = full_shape(4, 2, m=32)
    costs = Costs.uniform(shape, edge=0.25, latency=4)
    assert efficiency(shape, costs, policy="ldt_1f1b") < 0.55
    assert min(efficiency(shape, costs, policy=policy) for policy in PLANNERS) >= 0.999


def test_less_memory_costs_time_and_a_tight_cap_still_runs() -> None:
    shape = full_shape(4, 2, m=16, d=2)
    costs = Costs.uniform(shape, edge=0.1, latency=2)
    steps = [
        simulate(build_plan(shape, policy="auto", costs=costs, max_in_flight=cap), costs).makespan
        for cap in (1, 2, 4, 8, None)
    ]
    assert steps == sorted(steps, reverse=True) and steps[0] > 2 * steps[-1]


@pytest.mark.parametrize("policy", PLANNERS)
@pytest.mark.parametrize("d", [1, 2])
def test_planning_for_a_longer_link_than_there_is_costs_memory_only(d: int, policy: str) -> None:
    shape = full_shape(4, 2, m=32, d=d)
    true = Costs.uniform(shape, edge=0.25 / d, latency=2)
    exact, wary = (build_plan(shape, policy=policy, costs=costs) for costs in (true, true.with_margin(2)))
    assert lower_bound(shape, true) / simulate(wary, true).makespan >= 0.99
    late = true.with_margin(2)
    assert simulate(wary, late).makespan < 0.96 * simulate(exact, late).makespan
    assert wary.peak_in_flight(0) > exact.peak_in_flight(0)


def test_the_benchmark_of_wrong_links_runs_and_its_steps_are_those_of_the_simulator(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shape = planning.shape_of(3, 2, 6)
    costs = planning.costs_of(shape, 1.0)
    plan = build_plan(shape, policy="greedy", costs=costs)
    exact = planning.step_with_jitter(plan, costs, 0.0, random.Random(0))
    assert exact == pytest.approx(simulate(plan, costs).makespan)
    assert planning.step_with_jitter(plan, costs, 1.0, random.Random(0)) > exact
    planning.main(["--stages", "2", "--micro-batches", "4", "--domains", "1", "--policy", "auto"])
    assert "auto: P = 2, D = 1, M = 4" in capsys.readouterr().out


def test_a_slow_stage_decides_the_depth() -> None:
    shape = full_shape(3, 2, m=32)
    costs = Costs(forward={(0, 0): 0.1, (0, 1): 0.5, (0, 2): 2.0, (1, 0): 0.1}, latency=2.0)
    plan = build_plan(shape, policy="auto", costs=costs)
    assert lower_bound(shape, costs) / simulate(plan, costs).makespan >= 0.99
    assert max(map(plan.peak_in_flight, range(3))) <= 3 + 1 + 2


def test_a_thin_link_is_planned_for() -> None:
    shape = full_shape(3, 2, m=32, d=2)
    free = Costs.uniform(shape, edge=0.1, latency=1)
    thin = replace(free, bandwidth=1000.0, message_bytes=1000)  # a message takes as long as a cloud forward
    blind, aware = (build_plan(shape, policy="greedy", costs=costs) for costs in (free, thin))
    assert simulate(aware, thin).makespan <= simulate(blind, thin).makespan


def test_a_hop_can_have_its_own_latency_and_size() -> None:
    shape = full_shape(2, 2, m=1)
    costs = Costs.uniform(shape, edge=0, cloud=0, latency=1, bandwidth=10, message_bytes=10)
    slower = replace(costs, hop_latency={0: 3.0}, hop_bytes={1: 50})
    assert simulate(build_plan(shape), costs).makespan == 4 * (1 + 1) == lower_bound(shape, costs)
    assert simulate(build_plan(shape), slower).makespan == 2 * (3 + 1) + 2 * (1 + 5) == lower_bound(shape, slower)


def test_hops_inside_the_cloud_can_take_time_and_a_margin_is_on_all_of_them() -> None:
    shape = full_shape(3, 2, m=1)
    costs = replace(Costs.uniform(shape, edge=0, cloud=0, latency=1), hop_latency={1: 3.0})
    for margin in (1, 2):
        wary = costs.with_margin(margin)
        assert simulate(build_plan(shape), wary).makespan == margin * 2 * (1 + 3 + 1) == lower_bound(shape, wary)


def test_costs_are_values() -> None:
    one = Costs(forward={(0, 0): 1.0, (0, 1): 2.0, (1, 0): 1.0})
    same = Costs(forward={(1, 0): 1.0, (0, 1): 2.0, (0, 0): 1.0})
    assert one == same and hash(one) == hash(same)
    assert one != replace(one, latency=1.0)
    given_mapping = {(0, 0): 1.0}
    kept = Costs(forward=given_mapping)
    given_mapping[0, 0] = 5.0
    assert kept.forward == {(0, 0): 1.0}


def test_other_processes_find_the_same_plan() -> None:
    shape = full_shape(3, 3, m=5, d=2)
    costs = "Costs.uniform(shape, edge=0.1, latency=0.7, bandwidth=1e6, message_bytes=12345)"
    script = (
        "from ds_ldt.plan import Costs, PipelineShape, build_plan\n"
        f"shape = PipelineShape(stages={shape.stages}, chunks={shape.chunks}, num_stages=3,"
        " num_micro_batches=5, num_domains=2, num_replicas=1)\n"
        f"print(*[build_plan(shape, policy=name, costs={costs}).fingerprint for name in {PLANNERS}])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(found) == 1
