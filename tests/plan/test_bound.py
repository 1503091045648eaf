from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_ldt.plan import Compute, Costs, Order, lower_bound
from ds_ldt.plan.list_schedule import list_orders
from ds_ldt.plan.lower import lower
from ds_ldt.plan.simulate import simulate
from tests.plan.shapes import full_shape


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


def test_the_bound_is_below_every_order_of_a_small_pipeline() -> None:
    """Exhaustive: all orders of two domains on one edge and two cloud ranks with one micro-batch each."""
    shape = full_shape(2, 2, m=1, d=2)
    costs = Costs.uniform(shape, edge=1.0, cloud=1.0, latency=0.5)
    cloud = {1: order_of("F1.0.0 B1.0.0"), 2: order_of("F1.0.1 B1.0.1")}
    best = min(
        simulate(lower({0: edge, **cloud}, shape, policy="any"), costs).makespan
        for edge in itertools.permutations(order_of("F0.0.0 F2.0.0 B2.0.0 B0.0.0 F0.0.1 F2.0.1 B2.0.1 B0.0.1"))
        if is_causal(edge)
    )
    assert lower_bound(shape, costs) <= best
