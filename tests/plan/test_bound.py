from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_ldt.plan import Compute, Costs, Order, PipelineShape, build_plan, lower_bound
from ds_ldt.plan.bound import Cause, bound_of
from ds_ldt.plan.list_schedule import list_orders
from ds_ldt.plan.lower import lower
from ds_ldt.plan.policies import TRAINING
from ds_ldt.plan.simulate import simulate, simulate_slice
from tests.plan.shapes import full_shape, shape_of, shapes, split_shapes


def order_of(text: str) -> Order:
    return tuple(map(Compute.parse, text.split()))


def is_causal(order: tuple[Compute, ...]) -> bool:
    places = {str(compute): at for at, compute in enumerate(order)}
    return all(places[f"F0.0.{d}"] < places[f"F2.0.{d}"] < places[f"B2.0.{d}"] < places[f"B0.0.{d}"] for d in (0, 1))


@given(
    p=st.integers(2, 6),
    m=st.integers(8, 40),  # enough for the pipeline, not the journey of one micro-batch, to be the longest
    k=st.integers(1, 4),
    latency=st.sampled_from([0.0, 0.5, 3.0]),
)
def test_a_cloud_bottleneck_gives_the_closed_form(p: int, m: int, k: int, latency: float) -> None:
    shape = full_shape(p, 2, m=m, d=k)
    t, e = 1.0, 0.1 / k
    bound = lower_bound(shape, Costs.uniform(shape, edge=e, cloud=t, latency=latency))
    assert bound == pytest.approx(3 * t * (m + p - 2) + e + 2 * e * k + 2 * latency, abs=1e-9)


def test_a_busy_edge_is_its_own_bound() -> None:
    shape = full_shape(3, 2, m=10)
    assert lower_bound(shape, Costs.uniform(shape, edge=5.0, cloud=0.1)) >= 10 * 2 * 3 * 5.0


def test_the_journey_bounds_a_single_micro_batch() -> None:
    shape = full_shape(3, 3, m=1)
    costs = Costs.uniform(shape, edge=1.0, cloud=2.0, latency=10.0)
    assert lower_bound(shape, costs) == 3 * (3 * 1.0 + 4 * 2.0) + 8 * 10.0
    assert lower_bound(shape, costs, training=False) == (3 * 1.0 + 4 * 2.0) + 4 * 10.0


@settings(deadline=None, max_examples=50)
@given(
    p=st.integers(2, 4),
    v=st.integers(2, 3),
    k=st.integers(1, 3),
    m=st.integers(1, 6),
    cap=st.integers(1, 20),
    edge=st.sampled_from([0.1, 0.5, 2.0]),
    latency=st.sampled_from([0.0, 1.0, 5.0]),
)
def test_no_list_schedule_of_any_depth_beats_the_bound(
    p: int, v: int, k: int, m: int, cap: int, edge: float, latency: float
) -> None:
    shape = full_shape(p, v, m=m, d=k)
    costs = Costs.uniform(shape, edge=edge, latency=latency)
    plan = lower(list_orders(shape, costs, training=True, caps=[cap] * p), shape, policy="list")
    assert simulate(plan, costs).makespan >= lower_bound(shape, costs) - 1e-9


@st.composite
def costs_of_a_thin_link(draw: st.DrawFn, shape: PipelineShape) -> Costs:
    """Messages take as long as computes, more or less, and may differ by boundary."""
    times = st.sampled_from([0.0, 0.1, 0.25, 1.0, 3.0])
    boundaries = range(shape.num_boundaries)
    return Costs(
        forward={cell: draw(times) for cell in zip(shape.chunks, shape.stages, strict=True)},
        backward_ratio=draw(st.sampled_from([0.5, 1.0, 2.0])),
        weight_share=draw(st.sampled_from([0.0, 0.3, 0.5, 1.0])),
        latency=draw(st.sampled_from([0.0, 0.3, 5.0])),
        bandwidth=draw(st.sampled_from([10.0, 40.0, 100.0])),
        message_bytes=draw(st.sampled_from([0, 40, 100])),
        hop_bytes={b: draw(st.sampled_from([0, 7, 200])) for b in boundaries if draw(st.booleans())},
        hop_latency={b: draw(st.sampled_from([0.0, 1.5])) for b in boundaries if draw(st.booleans())},
    )


@settings(deadline=None, max_examples=250)
@given(data=st.data(), policy=st.sampled_from([*TRAINING]))
def test_no_plan_of_any_policy_beats_the_bound_on_a_thin_link(data: st.DataObject, policy: str) -> None:
    shape = data.draw(shapes(max_micro_batches=6) | split_shapes(max_micro_batches=6))
    costs = data.draw(costs_of_a_thin_link(shape))
    bound = bound_of(shape, costs)
    step = simulate_slice(build_plan(shape, policy=policy, costs=costs), costs).makespan
    assert step >= bound.seconds * (1 - 1e-9)
    assert bound.seconds == max(bound.edge_compute, bound.cloud_compute, bound.rate) >= bound.latency


@settings(deadline=None, max_examples=60)
@given(data=st.data(), shape=shapes(max_micro_batches=6))
def test_no_evaluation_beats_the_bound_on_a_thin_link(data: st.DataObject, shape: PipelineShape) -> None:
    costs = data.draw(costs_of_a_thin_link(shape))
    step = simulate_slice(build_plan(shape, training=False, costs=costs), costs).makespan
    assert step >= lower_bound(shape, costs, training=False) * (1 - 1e-9)


@settings(deadline=None, max_examples=60)
@given(
    p=st.integers(2, 3),
    v=st.integers(2, 3),
    k=st.integers(1, 3),
    m=st.integers(1, 5),
    cap=st.integers(1, 20),
    size=st.sampled_from([10, 100, 500]),
    latency=st.sampled_from([0.0, 2.0]),
)
def test_no_list_schedule_of_any_depth_beats_the_bound_on_a_thin_link(
    p: int, v: int, k: int, m: int, cap: int, size: int, latency: float
) -> None:
    shape = full_shape(p, v, m=m, d=k)
    costs = Costs.uniform(shape, edge=0.2, latency=latency, bandwidth=100.0, message_bytes=size)
    plan = lower(list_orders(shape, costs, training=True, caps=[cap] * p), shape, policy="list")
    assert simulate(plan, costs).makespan >= lower_bound(shape, costs) - 1e-9


@pytest.mark.parametrize("v", [2, 3])
def test_a_busy_link_is_a_bound_of_its_own(v: int) -> None:
    """Each direction carries a message of 5 s for each boundary on the edge, each micro-batch and each domain."""
    shape = full_shape(2, v, m=10, d=6, e=2)
    costs = Costs.uniform(shape, edge=0.1, cloud=0.2, latency=1.0, bandwidth=100.0, message_bytes=500)
    bound = bound_of(shape, costs)
    crossings = 2 * (v - 1)  # an activation and a gradient for each way to the cloud, as for each way back
    busy = 10 * 3 * crossings * 5.0
    assert bound.cause is Cause.RATE and bound.seconds == bound.rate
    # Before the first message the head's forward; after the last one at least its latency and the head's backward.
    assert bound.rate >= busy + 0.1 + 1.0
    assert bound.rate <= busy + (2 * crossings - 1) * 6.0 + 10 * 0.6
    assert simulate(build_plan(shape, policy="auto", costs=costs), costs).makespan <= bound.rate * 1.03


def test_the_domains_of_a_slice_enter_by_the_link_one_after_another() -> None:
    """One micro-batch each: the message of the last domain waits for all others, and its cloud rank is slow."""
    shape = full_shape(2, 2, m=1, d=4)
    costs = Costs.uniform(shape, edge=0.0, cloud=100.0, latency=2.0, bandwidth=10.0, message_bytes=10)
    assert lower_bound(shape, costs) == 4 * 1.0 + 2.0 + 300.0 + 4 * 3.0 - 3.0
    best = simulate(build_plan(shape, policy="auto", costs=costs), costs).makespan
    assert best == pytest.approx(lower_bound(shape, costs))


def test_a_link_that_is_slow_in_one_direction_only_bounds_by_that_one() -> None:
    shape = shape_of([[1, 1], [1, 0]], m=100, gradients=(False, True))
    costs = Costs.uniform(shape, edge=0.01, cloud=0.01, bandwidth=10.0, message_bytes=10)
    # Two messages to the cloud (activation, gradient of the tail's input), one back: no gradient reaches the head.
    assert bound_of(shape, costs).rate == pytest.approx(100 * 2 * 1.0, rel=0.02)


@pytest.mark.parametrize(
    "cause, m, changes",
    [
        (Cause.EDGE_COMPUTE, 32, {"edge": 5.0}),
        (Cause.CLOUD_COMPUTE, 32, {}),
        (Cause.RATE, 32, {"bandwidth": 100.0, "message_bytes": 500}),
        (Cause.LATENCY, 2, {"latency": 50.0}),
        (Cause.LATENCY, 1, {"latency": 50.0, "bandwidth": 100.0, "message_bytes": 500}),
        (Cause.CLOUD_COMPUTE, 1, {}),
        (Cause.CLOUD_COMPUTE, 32, {"bandwidth": 100.0, "message_bytes": 0}),
    ],
)
def test_what_bounds_a_step_is_named(cause: Cause, m: int, changes: dict[str, float]) -> None:
    shape = full_shape(3, 2, m=m)
    costs = Costs.uniform(shape, **{"edge": 0.1, "latency": 0.01, **changes})  # type: ignore[arg-type]
    bound = bound_of(shape, costs)
    assert bound.cause is cause
    assert bound.latency == pytest.approx(4 * costs.latency)
    assert bound.figures()[Cause.RATE] == bound.rate
    assert (bound.rate > 0) is (costs.message_bytes > 0)


def test_a_link_that_is_busy_all_the_time_is_not_held_against_the_plan() -> None:
    """P = 8, D = 8, E = 1, M = 128 with the default hints: 0.742 of a bound that forgot the rate."""
    shape = full_shape(8, 2, m=128, d=8)
    costs = Costs.uniform(shape, edge=0.002, cloud=0.008, latency=0.02, bandwidth=1.25e8, message_bytes=10**6)
    bound = bound_of(shape, costs)
    assert bound.cause is Cause.RATE
    assert bound.seconds == pytest.approx(2 * 8 * 128 * 0.008, rel=0.02)
    assert bound.seconds / simulate(build_plan(shape, policy="auto", costs=costs), costs).makespan >= 0.99


@pytest.mark.parametrize("transfer", [0.0, 0.5, 1.5])
def test_the_bound_is_below_every_order_of_a_small_pipeline(transfer: float) -> None:
    """Exhaustive: all orders of two domains on one edge and two cloud ranks with one micro-batch each."""
    shape = full_shape(2, 2, m=1, d=2)
    costs = Costs.uniform(shape, edge=1.0, cloud=1.0, latency=0.5, bandwidth=10.0, message_bytes=round(10 * transfer))
    cloud = {1: order_of("F1.0.0 B1.0.0"), 2: order_of("F1.0.1 B1.0.1")}
    best = min(
        simulate(lower({0: edge, **cloud}, shape, policy="any"), costs).makespan
        for edge in itertools.permutations(order_of("F0.0.0 F2.0.0 B2.0.0 B0.0.0 F0.0.1 F2.0.1 B2.0.1 B0.0.1"))
        if is_causal(edge)
    )
    assert lower_bound(shape, costs) <= best
