from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_ldt.errors import ScheduleError
from ds_ldt.plan import Compute, Costs, PipelineShape, build_plan, lower, lower_bound, simulate
from ds_ldt.plan.deadlock import find_stall
from ds_ldt.plan.lower import lower_slice
from tests.plan.shapes import full_shape, shape_of, shapes
from tests.plan.test_replay import DEADLOCK


def efficiency(shape: PipelineShape, costs: Costs) -> float:
    return lower_bound(shape, costs) / simulate(build_plan(shape), costs).makespan


def test_one_micro_batch_takes_its_journey() -> None:
    shape = full_shape(3, 2, m=1)
    costs = Costs.uniform(shape, edge=1, cloud=10, latency=100)
    timeline = simulate(build_plan(shape), costs)
    starts = [(str(span.compute), span.start, span.end) for span in sorted(timeline.spans, key=lambda s: s.start)]
    assert starts == [
        ("F0.0.0", 0, 1),
        ("F1.0.0", 101, 111),
        ("F2.0.0", 111, 121),
        ("F3.0.0", 221, 222),
        ("B3.0.0", 222, 224),
        ("B2.0.0", 324, 344),
        ("B1.0.0", 344, 364),
        ("B0.0.0", 464, 466),
    ]
    assert timeline.makespan == 466 == lower_bound(shape, costs)
    assert timeline.busy_seconds(1) == 30
    assert timeline.bubble(1) == pytest.approx(1 - 30 / 466)


def test_messages_share_the_bandwidth_of_their_replica_in_each_direction() -> None:
    shape = full_shape(2, 2, m=1, d=2)
    costs = Costs.uniform(shape, edge=0, cloud=0, latency=5, bandwidth=100, message_bytes=1000)
    spans = {str(span.compute): span.start for span in simulate(build_plan(shape), costs).spans}
    assert (spans["F1.0.0"], spans["F1.0.1"]) == (15, 25)  # both leave at 0, each takes 10 of the uplink
    assert (spans["F2.0.0"], spans["F2.0.1"]) == (30, 40)  # the downlink is another one: no further wait


def test_a_backward_that_no_gradient_reaches_costs_nothing() -> None:
    shape = shape_of([[1, 1], [1, 0]], m=1, gradients=(False, True))
    timeline = simulate(build_plan(shape), Costs.uniform(shape, edge=1, cloud=1))
    assert {str(span.compute): span.seconds for span in timeline.spans} == {
        "F0.0.0": 1, "F1.0.0": 1, "F2.0.0": 1, "B2.0.0": 2, "B1.0.0": 2, "B0.0.0": 0,
    }  # fmt: skip


def test_a_deadlock_says_who_waits_for_whom() -> None:
    shape = full_shape(2, 2, m=2)
    with pytest.raises(
        ScheduleError, match=r"rank 0 \(edge replica 0\) at RecvGrad.* waits for a message from rank 1"
    ):
        simulate(lower(DEADLOCK, shape, policy="by hand"), Costs.uniform(shape, edge=1))


@pytest.mark.parametrize("latency, expected", [(0, 1.0), (2, 0.77), (4, 0.54)])
def test_the_published_rule_loses_what_the_study_measured_when_latency_grows(latency: float, expected: float) -> None:
    shape = full_shape(4, 2, m=32)
    costs = Costs.uniform(shape, edge=0.25, cloud=1.0, latency=latency)
    assert efficiency(shape, costs) == pytest.approx(expected, abs=0.01)


@settings(deadline=None, max_examples=60)
@given(
    shape=shapes(max_micro_batches=6),
    training=st.booleans(),
    edge=st.sampled_from([0.1, 0.25, 1.0, 3.0]),
    ratio=st.sampled_from([1.0, 2.0, 2.5]),
    latency=st.sampled_from([0.0, 0.5, 7.0]),
    message_bytes=st.sampled_from([0, 40]),
)
def test_no_plan_beats_the_lower_bound(
    shape: PipelineShape, training: bool, edge: float, ratio: float, latency: float, message_bytes: int
) -> None:
    costs = Costs.uniform(
        shape, edge=edge, backward_ratio=ratio, latency=latency, bandwidth=100.0, message_bytes=message_bytes
    )
    timeline = simulate(build_plan(shape, training=training), costs)
    assert timeline.makespan >= lower_bound(shape, costs, training=training) * (1 - 1e-12)


@settings(deadline=None, max_examples=40)
@given(shape=shapes(max_micro_batches=5), training=st.booleans(), latency=st.sampled_from([0.0, 3.0]))
def test_a_timeline_keeps_orders_dependencies_and_one_compute_at_a_time(
    shape: PipelineShape, training: bool, latency: float
) -> None:
    plan = build_plan(shape, training=training)
    timeline = simulate(plan, Costs.uniform(shape, edge=1.0, cloud=2.0, latency=latency))
    ends = {span.compute: span.end for span in timeline.spans}
    tail = shape.num_boundaries
    for rank, order in plan.orders().items():
        spans = timeline.of_rank(rank)
        assert timeline.order_of(rank) == order
        assert timeline.peak_in_flight(rank) == plan.peak_in_flight(rank)
        assert all(earlier.end <= later.start for earlier, later in zip(spans, spans[1:], strict=False))
        for span in spans:
            stage, place = span.compute.virtual_stage, f"{span.compute.micro_batch}.{span.compute.domain}"
            if span.compute.op == "F":
                before = f"F{stage - 1}.{place}" if stage else None
            else:
                before = f"F{stage}.{place}" if stage == tail else f"B{stage + 1}.{place}"
            assert before is None or span.start >= ends[Compute.parse(before)]


@settings(deadline=None, max_examples=60)
@given(shape=shapes(max_micro_batches=3), data=st.data())
def test_the_simulator_and_the_replay_agree_on_deadlocks(shape: PipelineShape, data: st.DataObject) -> None:
    orders = build_plan(shape).slice_orders()
    rank = data.draw(st.sampled_from(sorted(orders)))
    plan = lower_slice({**orders, rank: tuple(data.draw(st.permutations(orders[rank])))}, shape, policy="shuffled")
    stuck = find_stall(plan)
    if stuck:
        with pytest.raises(ScheduleError, match="deadlock"):
            simulate(plan, Costs.uniform(shape, edge=1))
    else:
        assert len(simulate(plan, Costs.uniform(shape, edge=1)).spans) == shape.num_replicas * sum(
            map(len, orders.values())
        )


def test_longer_hops_never_make_a_step_shorter() -> None:
    shape = full_shape(4, 3, m=8, d=2)
    plan = build_plan(shape)
    steps = [simulate(plan, Costs.uniform(shape, edge=0.2, latency=latency)).makespan for latency in (0, 0.1, 1, 2, 9)]
    assert steps == sorted(steps)


@pytest.mark.parametrize(
    "settings_, message",
    [
        ({"latency": -1}, "latency is -1"),
        ({"backward_ratio": float("nan")}, "backward_ratio is nan"),
        ({"bandwidth": 0.0}, "bandwidth is 0.0"),
        ({"edge": -2.0}, r"forward\[\(0, 0\)\] is -2.0"),
    ],
)
def test_costs_that_would_bend_time_are_refused(settings_: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Costs.uniform(full_shape(2, 2, m=1), **{"edge": 1.0, **settings_})
