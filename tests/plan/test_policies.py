from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_ldt.plan import Costs, Op, PipelineShape, build_plan, lower_bound, simulate, validate
from tests.plan.interpreter import expected_outcome, interpret
from tests.plan.shapes import SPARSE_MATRICES, full_shape, grid_of_shapes, shape_of, shapes


def order_text(shape: PipelineShape, rank: int, *, training: bool = True) -> str:
    return " ".join(map(str, build_plan(shape, training=training).orders()[rank]))


def in_edge_words(shape: PipelineShape) -> list[str]:
    """The order of edge replica 0 in the words of the published rule, runs of equal words counted."""
    tail = shape.num_boundaries
    names = {(Op.FORWARD, 0): "FS", (Op.FORWARD, tail): "FE", (Op.BACKWARD, tail): "BS", (Op.BACKWARD, 0): "BE"}
    return [names[compute.op, compute.virtual_stage] for compute in build_plan(shape).orders()[0]]


@pytest.mark.parametrize("p, m", [(2, 8), (3, 8), (4, 8), (4, 32), (7, 16), (6, 3), (5, 1), (4, 5)])
def test_the_edge_follows_the_published_numbers(p: int, m: int) -> None:
    warm_up, ahead = min(m, p + 1), min(m, (4 * p + 5) // 6)
    full_units = m - warm_up
    expected = ["FS"] * warm_up + ["FE", "BS"] * ahead
    expected += ["FS", "FE", "BS", "BE"] * full_units + ["FE", "BS", "BE"] * (m - ahead - full_units)
    expected += ["BE"] * ahead
    assert in_edge_words(full_shape(p, 2, m=m)) == expected


@pytest.mark.parametrize("p, published, shipped", [(4, 3, 2), (7, 5, 4)])
def test_the_depth_is_the_published_one_where_the_shipped_code_falls_short(
    p: int, published: int, shipped: int
) -> None:
    words = in_edge_words(full_shape(p, 2, m=20))
    first_unit = words.index("FS", p + 1)
    assert words[:first_unit].count("FE") == published != shipped


def test_a_limit_that_the_published_rule_just_keeps_changes_nothing_and_a_lower_one_is_kept() -> None:
    shape = full_shape(3, 2, m=9)
    within = (5, 3, 2)
    assert build_plan(shape, max_in_flight=within) == build_plan(shape)
    for stage, limit in enumerate(within):
        plan = build_plan(shape, max_in_flight=(*within[:stage], limit - 1, *within[stage + 1 :]))
        assert plan.peak_in_flight(stage) == limit - 1


def test_a_cloud_stage_warms_up_by_its_distance_from_the_end() -> None:
    shape = full_shape(4, 2, m=5)
    assert order_text(shape, 1).startswith("F1.0.0 F1.1.0 F1.2.0 F1.3.0 B1.0.0 F1.4.0 B1.1.0 B1.2.0")
    assert order_text(shape, 3).startswith("F3.0.0 F3.1.0 B3.0.0 F3.2.0 B3.1.0")


def test_time_slicing_runs_each_entry_for_every_domain_and_returns_a_gradient_before_the_next_tail_forward() -> None:
    text = order_text(full_shape(2, 2, m=2, d=4, e=2), rank=1)
    assert text == (
        "F0.0.2 F0.0.3 F0.1.2 F0.1.3 "
        "F2.0.2 B2.0.2 F2.0.3 B2.0.3 F2.1.2 B2.1.2 F2.1.3 B2.1.3 "
        "B0.0.2 B0.0.3 B0.1.2 B0.1.3"
    )


def test_an_evaluation_uses_results_before_new_samples_enter() -> None:
    assert order_text(full_shape(3, 2, m=5), 0, training=False) == (
        "F0.0.0 F0.1.0 F0.2.0 F3.0.0 F0.3.0 F3.1.0 F0.4.0 F3.2.0 F3.3.0 F3.4.0"
    )


def test_every_shape_of_the_grid_has_a_valid_training_plan() -> None:
    for shape in grid_of_shapes():
        build_plan(shape)  # validates


def test_every_other_shape_of_the_grid_has_a_valid_evaluation_plan() -> None:
    for shape in islice(grid_of_shapes(), 0, None, 2):
        build_plan(shape, training=False)


@pytest.mark.parametrize("matrix", SPARSE_MATRICES.values(), ids=SPARSE_MATRICES.keys())
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_matrices_with_empty_cells_have_a_valid_plan(matrix: list[list[int]], training: bool) -> None:
    for m in (1, 2, 7):
        for d, e in ((1, 1), (2, 1), (2, 2)):
            build_plan(shape_of(matrix, m=m, d=d, e=e), training=training)


@settings(deadline=None, max_examples=60)
@given(shape=shapes(), training=st.booleans(), cap=st.none() | st.integers(1, 6))
def test_any_layout_has_a_valid_plan_under_any_cap(shape: PipelineShape, training: bool, cap: int | None) -> None:
    plan = build_plan(shape, training=training, max_in_flight=cap)
    assert cap is None or max(map(plan.peak_in_flight, range(shape.num_ranks))) <= cap


@settings(deadline=None, max_examples=40)
@given(shape=shapes(max_micro_batches=5), training=st.booleans(), data=st.data())
def test_any_layout_has_a_valid_plan_whichever_boundaries_carry_gradients(
    shape: PipelineShape, training: bool, data: st.DataObject
) -> None:
    frozen = data.draw(st.integers(0, shape.num_boundaries))
    carries = (False,) * frozen + (True,) * (shape.num_boundaries - frozen)
    partly = PipelineShape(
        stages=shape.stages,
        chunks=shape.chunks,
        num_stages=shape.num_stages,
        num_micro_batches=shape.num_micro_batches,
        num_domains=shape.num_domains,
        num_replicas=shape.num_replicas,
        gradient_boundaries=carries,
    )
    plan = build_plan(partly, training=training)
    outcome, expected = interpret(plan, seed=frozen), expected_outcome(plan)
    assert (outcome.outputs, outcome.gradients) == (expected.outputs, expected.gradients)


@settings(deadline=None, max_examples=40)
@given(shape=shapes(max_micro_batches=5), training=st.booleans(), seed=st.integers(0, 2**20))
def test_S07_outputs_meet_the_labels_of_their_own_micro_batch(shape: PipelineShape, training: bool, seed: int) -> None:
    plan = build_plan(shape, training=training)
    outcome = interpret(plan, seed)
    assert outcome.outputs == expected_outcome(plan).outputs
    assert outcome.undelivered == 0


@pytest.mark.parametrize("p, v", [(p, v) for p in (2, 3, 4) for v in (2, 3)])
def test_S09_fewer_micro_batches_than_stages_still_run(p: int, v: int) -> None:
    for m in range(1, p + 1):
        plan = build_plan(full_shape(p, v, m=m, d=2))
        assert interpret(plan, seed=m).outputs == expected_outcome(plan).outputs


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("p, v, k", [(2, 2, 1), (4, 2, 2), (3, 3, 1), (4, 3, 2), (3, 4, 1)])
def test_S33_values_kept_do_not_grow_with_the_micro_batches(p: int, v: int, k: int, training: bool) -> None:
    in_flight, kept = {}, {}
    for m in (4, 16, 64):
        plan = build_plan(full_shape(p, v, m=m, d=k), training=training)
        in_flight[m] = max(map(plan.peak_in_flight, range(plan.shape.num_ranks)))
        kept[m] = interpret(plan, seed=m).kept
    assert in_flight[64] == in_flight[16] <= p * (v - 1) + 2
    if training:
        stages_per_rank = [v * k] + [v - 1] * (p - 1) * k
        assert all(count <= (p * (v - 1) + 2) * own for count, own in zip(kept[64], stages_per_rank, strict=True))
        assert kept[64] == kept[16]


@settings(deadline=None, max_examples=25)
@given(shape=shapes(max_micro_batches=1), training=st.booleans())
def test_S33_any_layout_keeps_a_bounded_number_in_flight(shape: PipelineShape, training: bool) -> None:
    def peaks(m: int) -> list[int]:
        longer = PipelineShape(
            stages=shape.stages,
            chunks=shape.chunks,
            num_stages=shape.num_stages,
            num_micro_batches=m,
            num_domains=shape.num_domains,
            num_replicas=shape.num_replicas,
        )
        plan = build_plan(longer, training=training)
        return [plan.peak_in_flight(rank) for rank in range(longer.num_ranks)]

    assert max(peaks(40)) <= shape.num_virtual_stages + 1


@settings(deadline=None, max_examples=25)
@given(p=st.integers(2, 4), v=st.integers(2, 3), m=st.integers(1, 6), seed=st.integers(0, 2**20))
def test_S52_every_slice_gets_the_gradients_of_its_own_activations(p: int, v: int, m: int, seed: int) -> None:
    plan = build_plan(full_shape(p, v, m=m, d=3))
    assert interpret(plan, seed).gradients == expected_outcome(plan).gradients


@pytest.mark.parametrize(
    "p, v, k, m, least",
    [
        *((p, 2, 1, m, 0.999) for p in (2, 3, 4, 5) for m in (4, 8, 32)),
        *((p, 2, k, 32, 0.995) for p in (2, 3, 4) for k in (2, 4)),
        *((p, 3, k, 32, 0.96) for p in (2, 3, 4, 5) for k in (1, 2)),
        *((p, 4, 1, 32, 0.98) for p in (2, 3, 4, 5)),
    ],
)
def test_without_latency_the_pipeline_has_almost_no_bubble(p: int, v: int, k: int, m: int, least: float) -> None:
    shape = full_shape(p, v, m=m, d=k)
    costs = Costs.uniform(shape, edge=0.25 / k)
    assert lower_bound(shape, costs) / simulate(build_plan(shape), costs).makespan >= least


def test_the_rule_keeps_its_own_cap_and_a_tighter_one_changes_the_plan() -> None:
    shape = full_shape(4, 2, m=16)
    free = build_plan(shape)
    assert [free.peak_in_flight(rank) for rank in range(4)] == [6, 4, 3, 2]
    assert build_plan(shape, max_in_flight=6) == free
    tight = build_plan(shape, max_in_flight=3)
    validate(tight, max_in_flight=3)
    assert [tight.peak_in_flight(rank) for rank in range(4)] == [3, 3, 3, 2]
