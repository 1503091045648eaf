"""From what ranks measured to what plans cost."""

from __future__ import annotations

import json

import pytest

from ds_ldt.plan import Costs, Op, PipelineShape, build_plan
from ds_ldt.plan.cost_file import Known, costs_document, known_from_file, memory_limits
from ds_ldt.plan.measured_costs import (
    LATENCY_MARGIN,
    Duration,
    Kept,
    LinkTimes,
    Reading,
    Readings,
    Size,
    asked_of,
    describe,
    find,
)
from ds_ldt.plan.memory import peak_held
from ds_ldt.topology.layout import Layout
from tests.plan.shapes import full_matrix, full_shape, shape_of

SHAPE = full_shape(3, 2, m=8, d=2)
HINTS = Known(
    costs=Costs.uniform(SHAPE, edge=1.0, cloud=2.0, latency=0.5, bandwidth=1e6, message_bytes=1000),
    activation_bytes=None,
    measured=False,
)
MS = 10**6
NOTHING = LinkTimes(round_trips=(0,) * 10, arrivals=((0,) * 5, (0,) * 5), num_bytes=1000)


def readings() -> dict[Reading, int]:
    """Forwards of 10 ms on the edge, of 40 ms in the cloud, backwards of twice that, messages of 70 kB, 1 MB kept."""
    found: dict[Reading, int] = {}
    for name in asked_of(SHAPE):
        if isinstance(name, Size):
            found[name] = 70_000
        elif isinstance(name, Kept):
            found[name] = 10**6
        else:
            forward = 10 * MS if name.rank == 0 else 40 * MS
            found[name] = forward if name.op is Op.FORWARD else 2 * forward
    return found


def link(*, there_ms: list[float], back_ms: list[float]) -> LinkTimes:
    """A link of 20 ms with a spread; when messages of 100 kB arrived."""
    trips, there, back = (
        tuple(round(time * MS) for time in times)
        for times in ([40.1, 40, 40.2, 40.1, 40, 40.1, 40.2, 40.3, 42, 90], there_ms, back_ms)
    )
    return LinkTimes(round_trips=trips, arrivals=(there, back), num_bytes=100_000)


QUIET = link(there_ms=[20, 60, 61, 62, 63, 64], back_ms=[20, 80, 80.1, 85, 86, 99])
"""There at best 100 MB/s; back at best 3 messages in 6 ms, though two came together."""


def test_every_rank_is_asked_for_its_own_stages_and_the_edge_for_messages_over_the_link() -> None:
    asked = asked_of(full_shape(3, 2, m=8, d=2, e=2))
    assert len(set(asked)) == len(asked)
    assert {name.boundary for name in asked if isinstance(name, Size)} == {0, 2}
    assert {name.rank for name in asked if isinstance(name, Size)} == {0, 1}
    durations = [name for name in asked if isinstance(name, Duration)]
    assert {name.virtual_stage for name in durations if name.rank == 1} == {0, 3}
    assert {name.rank for name in durations if name.virtual_stage == 2} == {4, 5}
    assert all({Op.FORWARD, Op.BACKWARD} == {n.op for n in durations if n.rank == rank} for rank in range(6))


def test_the_slowest_rank_of_a_virtual_stage_counts() -> None:
    slow = readings() | {Duration(3, 2, Op.FORWARD): 61_234_567, Duration(4, 2, Op.BACKWARD): 99 * MS}
    costs = find(SHAPE, slow, QUIET, hints=HINTS).known.costs
    assert costs.forward == {(0, 0): 0.01, (0, 1): 0.04, (0, 2): 0.0612, (1, 0): 0.01}
    assert costs.backward == {(0, 0): 0.02, (0, 1): 0.08, (0, 2): 0.099, (1, 0): 0.02}
    assert costs.message_bytes == 70_000


def test_the_latency_is_a_high_percentile_with_a_margin_and_the_bandwidth_that_of_the_slower_way_at_its_best() -> None:
    found = find(SHAPE, readings(), QUIET, hints=HINTS)
    assert found.one_way == 0.021
    assert found.known.costs.latency == pytest.approx(0.021 * LATENCY_MARGIN, rel=1e-2)
    assert found.known.costs.bandwidth == 5e7
    assert (found.kept, found.known.measured) == ((), True)


@pytest.mark.parametrize("back_ms", [[0, 0, 0, 0], [20, 21], [20, 20, 20, 20]])
def test_a_bandwidth_that_cannot_be_told_is_the_hint(back_ms: list[float]) -> None:
    found = find(SHAPE, readings(), link(there_ms=[20, 21, 22, 23], back_ms=back_ms), hints=HINTS)
    assert (found.known.costs.bandwidth, found.kept) == (1e6, ("bandwidth",))


@pytest.mark.parametrize("nothing", [{}, dict.fromkeys(asked_of(SHAPE), 0), dict.fromkeys(asked_of(SHAPE), -5)])
def test_what_was_not_measured_stays_as_hinted_and_is_named(nothing: Readings) -> None:
    found = find(SHAPE, nothing, NOTHING, hints=HINTS)
    costs = found.known.costs
    assert (costs.forward, costs.latency, costs.bandwidth, costs.message_bytes) == (
        HINTS.costs.forward,
        0.5,
        1e6,
        1000,
    )
    assert costs.backward == {cell: 2 * seconds for cell, seconds in costs.forward.items()}
    assert found.one_way is None
    assert set(found.kept) == {
        *(f"{op} of {cell}" for op in ("forward", "backward") for cell in ("0.0", "0.1", "0.2", "1.0")),
        "latency",
        "bandwidth",
        "bytes of a message",
        "bytes kept of a micro-batch",
    }


def test_the_rank_that_keeps_most_of_a_micro_batch_counts_and_limits_what_is_in_flight() -> None:
    unequal = readings() | {Kept(4, 2): 2_345_678}
    known = find(SHAPE, unequal, QUIET, hints=HINTS).known
    assert known.activation_bytes == {(0, 0): 1e6, (0, 1): 1e6, (0, 2): 2.35e6, (1, 0): 1e6}
    limits = memory_limits(SHAPE, memory_gb=0.012, activation_bytes=known.activation_bytes)
    assert limits == (3, 8, 5), "12 MB over 2 + 2 MB of two domains, 1 MB, 2.35 MB"
    plan = build_plan(SHAPE, policy="auto", costs=known.costs, max_in_flight=limits)
    held = [known.activation_bytes[cell] for cell in zip(SHAPE.chunks, SHAPE.stages, strict=True)]
    free = build_plan(SHAPE, policy="ldt_1f1b", costs=known.costs)
    assert all(0 < peak_held(plan, rank, dict(enumerate(held))) <= 12e6 for rank in range(SHAPE.num_ranks))
    assert peak_held(free, 0, dict(enumerate(held))) > 8e6, "the edge holds both domains"


def test_a_backward_that_no_gradient_reaches_is_not_missed() -> None:
    frozen = shape_of(full_matrix(3, 2), m=8, d=2, gradients=(False, False, True))
    without = ((0, Op.BACKWARD), (1, Op.BACKWARD))
    some = {
        name: number
        for name, number in readings().items()
        if not isinstance(name, Duration) or name[1:] not in without
    }
    found = find(frozen, some, QUIET, hints=HINTS)
    assert found.kept == ()
    assert found.known.costs.backward[0, 1] == 0.08


def test_the_halves_of_a_backward_are_added_up_and_their_share_is_known() -> None:
    split = PipelineShape.from_layout(
        Layout.build(full_matrix(3, 2)), num_micro_batches=8, num_domains=1, num_replicas=1, split_backward=True
    )
    taken = {Op.FORWARD: 40 * MS, Op.BACKWARD: 50 * MS, Op.WEIGHT: 30 * MS}
    some = {name: taken[name.op] if isinstance(name, Duration) else 1000 for name in asked_of(split)}
    found = find(split, some, QUIET, hints=HINTS)
    assert found.kept == ()
    assert found.known.costs.backward == {(0, 0): 0.05, (0, 1): 0.08, (0, 2): 0.08, (1, 0): 0.05}
    assert found.known.costs.weight_share == 0.375
    half = {name: number for name, number in some.items() if name != Duration(1, 1, Op.WEIGHT)}
    found = find(split, half, QUIET, hints=HINTS)
    assert found.kept == ("weight gradients of 0.1",)
    assert (found.known.costs.backward[0, 1], found.known.costs.weight_share) == (0.08, 0.375)


@pytest.mark.parametrize("sizes", [{}, {Size(0, 2): 5000}])
def test_the_same_readings_give_the_same_plan_also_by_way_of_a_file(sizes: Readings) -> None:
    layout = Layout.build(full_matrix(3, 2))
    known = find(SHAPE, {**readings(), **sizes}, QUIET, hints=HINTS).known
    assert known.costs.hop_bytes == ({0: 70_000, 2: 5000} if sizes else {})
    read = known_from_file(json.loads(json.dumps(costs_document(known))), layout, hints=HINTS)
    assert read == known
    plans = [build_plan(SHAPE, policy="auto", costs=one.costs) for one in (known, read)]
    assert plans[0].fingerprint == plans[1].fingerprint


def test_the_description_says_what_was_measured_and_what_came_of_it() -> None:
    before = build_plan(SHAPE, policy="closed_form", costs=HINTS.costs)
    found = find(SHAPE, readings(), QUIET, hints=HINTS)
    after = build_plan(SHAPE, policy="auto", costs=found.known.costs)
    text = describe(found, before=before, after=after)
    assert "forward 0.0 10, 0.1 40, 0.2 40, 1.0 10 ms, backward 0.0 20, 0.1 80, 0.2 80, 1.0 20 ms" in text
    assert "21 ms one way, planned for 31.5 ms; 400 Mbit/s, messages of at most 0.07 MB" in text
    assert "Schedule closed_form -> " in text
    peaks = [max(map(one.peak_in_flight, range(SHAPE.num_ranks))) for one in (before, after)]
    assert f"of the bound, at most {peaks[0]} -> {peaks[1]} micro-batches of a domain in flight on a rank" in text
    assert "; of a micro-batch in flight 0.0 1, 0.1 1, 0.2 1, 1.0 1 MB are kept" in text
    assert "as configured: latency" in describe(
        find(SHAPE, readings(), NOTHING, hints=HINTS), before=before, after=after
    )
