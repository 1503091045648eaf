"""Backwards in two halves: weight gradients fill the bubbles, within the memory that there is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_ldt.errors import ConfigError
from ds_ldt.plan import Compute, Costs, Kind, Op, PipelineShape, build_plan, lower_bound, simulate
from ds_ldt.plan.policies import TRAINING
from ds_ldt.plan.policies.auto import tried
from tests.plan.interpreter import expected_outcome, interpret
from tests.plan.shapes import full_shape, shape_of, split, split_shapes
from tests.plan.test_planners import any_costs, played, three_chunks

POLICIES = (*TRAINING, "auto")


def step(shape: PipelineShape, costs: Costs, policy: str) -> float:
    return simulate(build_plan(shape, policy=policy, costs=costs), costs).makespan


# --- what it is for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize("latency, least", [(1, 0.05), (2, 0.055), (4, 0.07)])
def test_a_step_is_five_to_eight_percent_shorter_than_any_with_whole_backwards(
    latency: float, least: float, d: int
) -> None:
    whole = full_shape(4, 2, m=32, d=d)
    costs = Costs.uniform(whole, edge=0.25 / d, latency=latency)
    plan = build_plan(split(whole), policy="auto", costs=costs)
    made = simulate(plan, costs).makespan
    assert least <= 1 - made / lower_bound(whole, costs) <= 0.08
    assert made == pytest.approx(lower_bound(split(whole), costs), rel=1 / 1000)
    deepest = max(map(build_plan(whole, policy="auto", costs=costs).peak_in_flight, range(whole.num_ranks)))
    assert max(map(plan.peak_in_flight, range(whole.num_ranks))) <= deepest + 2


@pytest.mark.parametrize("latency", [0, 2])
def test_three_chunks_come_near_the_bound(latency: float) -> None:
    shape, costs = three_chunks(3, 1, latency)
    assert lower_bound(split(shape), costs) / step(split(shape), costs, "auto") >= 0.99


def test_a_cap_is_kept_and_still_gains() -> None:
    whole = full_shape(4, 2, m=16)
    costs = Costs.uniform(whole, edge=0.25, latency=1)
    for cap in (1, 2, 4, 7):
        plan = build_plan(split(whole), policy="auto", costs=costs, max_in_flight=cap)
        assert max(map(plan.peak_in_flight, range(4))) <= cap
        best = simulate(build_plan(whole, policy="auto", costs=costs, max_in_flight=cap), costs).makespan
        assert simulate(plan, costs).makespan <= best


# --- what holds for any pipeline -----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(data=st.data(), shape=split_shapes(max_micro_batches=6), policy=st.sampled_from(POLICIES))
def test_no_plan_beats_the_bound_and_every_plan_is_valid(
    data: st.DataObject, shape: PipelineShape, policy: str
) -> None:
    costs = replace(data.draw(any_costs(shape)), weight_share=data.draw(st.sampled_from([0.0, 0.3, 0.5, 1.0])))
    limits = data.draw(st.none() | st.tuples(*[st.integers(1, 5)] * shape.num_stages))
    plan = build_plan(shape, policy=policy, costs=costs, max_in_flight=limits)  # validates
    assert simulate(plan, costs).makespan >= lower_bound(shape, costs) * (1 - 1e-12) - 1e-9
    assert lower_bound(shape, costs) <= lower_bound(replace(shape, split_backward=None), costs) + 1e-9
    if limits is not None:
        assert all(plan.peak_in_flight(rank) <= limits[shape.stage_of(rank)] for rank in range(shape.num_ranks))


@settings(deadline=None, max_examples=60)
@given(data=st.data(), shape=split_shapes(max_micro_batches=6), policy=st.sampled_from([*TRAINING]))
def test_splitting_never_makes_a_policy_slower(data: st.DataObject, shape: PipelineShape, policy: str) -> None:
    costs = replace(data.draw(any_costs(shape)), bandwidth=None)
    limits = data.draw(st.none() | st.tuples(*[st.integers(1, 5)] * shape.num_stages))
    whole = replace(shape, split_backward=None)
    halves, full = (tried(policy, TRAINING[policy], one, costs=costs, limits=limits) for one in (shape, whole))
    assert halves.ticks <= full.ticks * (1 + 1 / 1200) + 10  # ticks are rounded, and the search ends near the bound


@settings(deadline=None, max_examples=40)
@given(data=st.data(), shape=split_shapes(max_micro_batches=5), policy=st.sampled_from([*TRAINING]))
def test_playing_in_ticks_takes_as_long_as_simulating(data: st.DataObject, shape: PipelineShape, policy: str) -> None:
    played(shape, replace(data.draw(any_costs(shape)), bandwidth=None), policy)


@settings(deadline=None, max_examples=40)
@given(shape=split_shapes(max_micro_batches=5), policy=st.sampled_from([*TRAINING]), seed=st.integers(0, 2**20))
def test_weight_gradients_are_made_once_from_their_own_micro_batch(
    shape: PipelineShape, policy: str, seed: int
) -> None:
    plan = build_plan(shape, policy=policy)
    outcome, expected = interpret(plan, seed), expected_outcome(plan)
    assert (outcome.outputs, outcome.gradients, outcome.weights) == (
        expected.outputs,
        expected.gradients,
        expected.weights,
    )


# --- which backwards split -----------------------------------------------------------------------------------------


def test_only_a_backward_that_sends_a_gradient_is_split() -> None:
    shape = split(full_shape(3, 2, m=1), everywhere=True)
    assert shape.split_stages == (1, 2, 3)
    frozen = replace(
        shape, gradient_boundaries=(False, True, True)
    )  # nobody waits for the gradient of stage 1's input
    assert frozen.split_stages == (2, 3)
    assert split(full_shape(3, 3, m=1)).split_stages == (1, 2, 4, 5)
    assert full_shape(3, 2, m=1).split_stages == ()


def test_a_whole_plan_keeps_its_fingerprint_and_a_split_one_has_its_own() -> None:
    whole = full_shape(3, 2, m=4)
    in_vain = replace(whole, split_backward=(True, False, False, False))
    assert build_plan(in_vain).fingerprint == build_plan(whole).fingerprint
    assert build_plan(split(whole)).fingerprint != build_plan(whole).fingerprint
    evaluations = {build_plan(shape, training=False).fingerprint for shape in (whole, split(whole))}
    assert len(evaluations) == 1


def test_one_micro_batch_reads_like_its_journey() -> None:
    plan = build_plan(split(full_shape(2, 2, m=1)), policy="greedy")
    assert [str(instruction) for instruction in plan.for_rank(1)][3:] == [
        "RecvGrad(1.0.0 boundary 1 from rank 0)",
        "BackwardPass(1.0.0)",
        "SendGrad(1.0.0 boundary 0 to rank 0)",
        "WeightPass(1.0.0)",
        "ReduceGrads",
        "OptimizerStep",
    ]
    assert all(instruction.kind is not Kind.WEIGHT_PASS for instruction in plan.for_rank(0))


def test_the_halves_of_a_backward_take_as_long_as_the_whole() -> None:
    whole = shape_of([[1, 1], [1, 0]], m=1)
    costs = replace(Costs.uniform(whole, edge=1, cloud=2, backward_ratio=2.5), weight_share=0.4)

    def seconds(op: Op, shape: PipelineShape) -> float:
        return costs.seconds(Compute(op=op, virtual_stage=1, micro_batch=0, domain=0), shape)

    assert seconds(Op.BACKWARD, whole) == 5
    assert (seconds(Op.BACKWARD, split(whole)), seconds(Op.WEIGHT, split(whole))) == (3, 2)
    with pytest.raises(ValueError, match="weight_share is 1.5"):
        replace(costs, weight_share=1.5)


def test_a_cloud_bottleneck_gives_the_closed_form() -> None:
    for p, m, k, latency in ((4, 32, 1, 2.0), (3, 16, 2, 0.5), (5, 40, 4, 3.0)):
        whole = full_shape(p, 2, m=m, d=k)
        bound = lower_bound(split(whole), Costs.uniform(whole, edge=0.1 / k, latency=latency))
        assert bound == pytest.approx(3 * m + (p - 2) + 0.1 + latency)


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="one entry for each of 4 virtual stages"):
        replace(full_shape(3, 2, m=1), split_backward=(True,))
