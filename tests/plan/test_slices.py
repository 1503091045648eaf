"""A plan holds one slice, and says of every rank of every slice what a plan of all ranks would say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_ldt.errors import ScheduleError
from ds_ldt.plan import Channel, Compute, Costs, Flow, PipelineShape, Plan, build_plan, lower, simulate, validate
from ds_ldt.plan.simulate import simulate_slice
from tests.plan.interpreter import expected_outcome, interpret
from tests.plan.shapes import full_shape, matrices, shape_of

REPLICAS = full_shape(3, 3, m=4, d=6, e=3)


@st.composite
def replicated(draw: st.DrawFn) -> PipelineShape:
    e, k = draw(st.integers(2, 3)), draw(st.integers(1, 3))
    return shape_of(draw(matrices()), m=draw(st.integers(1, 4)), d=e * k, e=e)


def place_of(shape: PipelineShape, rank: int) -> tuple[int, tuple[int, ...]]:
    return shape.stage_of(rank), tuple(shape.domains_of(rank))


@given(shape=replicated())
def test_the_ranks_of_the_slices_are_all_ranks_and_each_has_its_number(shape: PipelineShape) -> None:
    slices = [shape.ranks_of_slice(replica) for replica in range(shape.num_replicas)]
    assert sorted(rank for ranks in slices for rank in ranks) == list(range(shape.num_ranks))
    part = shape.one_slice
    for replica, ranks in enumerate(slices):
        for number, rank in enumerate(ranks):
            assert (shape.replica_of(rank), shape.rank_in_slice(rank)) == (replica, number)
            stage, domains = place_of(part, number)
            assert place_of(shape, rank) == (stage, tuple(domain + replica * shape.slice_size for domain in domains))


@settings(deadline=None, max_examples=40)
@given(shape=replicated(), training=st.booleans(), seed=st.integers(0, 2**20))
def test_all_ranks_together_do_what_a_step_has_to_do(shape: PipelineShape, training: bool, seed: int) -> None:
    plan = build_plan(shape, training=training)
    outcome, expected = interpret(plan, seed), expected_outcome(plan)
    assert (outcome.outputs, outcome.gradients) == (expected.outputs, expected.gradients)
    assert outcome.undelivered == 0
    assert {channel for row in plan.instructions for one in row if (channel := one.channel)} == set(plan.channels())
    assert list(plan.channels()) == sorted(plan.channels())
    assert set(plan.channels()) <= set(shape.channels().values())


@settings(deadline=None, max_examples=20)
@given(shape=replicated())
def test_orders_of_all_ranks_are_lowered_to_the_same_plan(shape: PipelineShape) -> None:
    plan = build_plan(shape)
    again = lower(plan.orders(), shape, policy=plan.policy)
    assert again == plan and again.fingerprint == plan.fingerprint
    validate(again)


def test_replicas_that_do_not_do_the_same_are_no_plan() -> None:
    orders = build_plan(REPLICAS).orders()
    odd = REPLICAS.ranks_of_slice(2)[3]
    first, second, *rest = orders[odd]
    with pytest.raises(ScheduleError, match=rf"rank {odd} \(cloud stage 2, domain 4\) does not do for its domains"):
        lower({**orders, odd: (second, first, *rest)}, REPLICAS, policy="odd")


@settings(deadline=None, max_examples=20)
@given(shape=replicated())
def test_what_a_rank_receives_is_what_its_instructions_say(shape: PipelineShape) -> None:
    plan = build_plan(shape)
    for rank in range(shape.num_ranks):
        found: dict[Channel, list[int | None]] = {}
        for one in plan.for_rank(rank):
            if one.channel is not None and one.kind.is_receive:
                found.setdefault(one.channel, []).append(one.micro_batch)
        received = plan.received_by(rank)
        assert received == {channel: tuple(micro_batches) for channel, micro_batches in found.items()}
        assert list(received) == sorted(received)
        assert plan.first_messages(rank) == first_messages(plan, rank)


def first_messages(plan: Plan, rank: int) -> dict[Channel, tuple[int, ...]]:
    """Of all channels of the job those of the rank that leave the head, as many as their destination holds."""
    return {
        channel: plan.receive_order(channel)[: plan.peak_in_flight(channel.destination)]
        for channel in plan.channels()
        if channel.boundary == 0 and channel.flow is Flow.ACTIVATION and rank in (channel.source, channel.destination)
    }


def test_every_slice_runs_at_the_same_time() -> None:
    costs = Costs.uniform(REPLICAS, edge=0.3, latency=1.0, bandwidth=100.0, message_bytes=30)
    plan = build_plan(REPLICAS, policy="greedy", costs=costs)
    whole, part = simulate(plan, costs), simulate_slice(plan, costs)
    assert whole.num_ranks == REPLICAS.num_ranks and len(whole.spans) == 3 * len(part.spans)
    assert whole.makespan == part.makespan
    for replica in range(3):
        for number, rank in enumerate(REPLICAS.ranks_of_slice(replica)):
            moved = [
                replace(span, rank=rank, compute=replace(span.compute, domain=span.compute.domain + 2 * replica))
                for span in part.of_rank(number)
            ]
            assert list(whole.of_rank(rank)) == moved
            assert whole.order_of(rank) == plan.orders()[rank]
            assert whole.peak_in_flight(rank) == plan.peak_in_flight(rank)


def test_plans_of_other_numbers_of_replicas_have_other_fingerprints() -> None:
    """The rows are the same: the ranks would not be."""
    plans = [build_plan(full_shape(3, 2, m=4, d=2 * e, e=e)) for e in (1, 2, 3)]
    assert plans[0].rows == plans[1].rows == plans[2].rows
    assert len({plan.fingerprint for plan in plans}) == 3


def test_a_rank_of_a_large_job_asks_for_its_own_instructions_only() -> None:
    """512 domains: all instructions of this plan are some millions, those of one slice some ten thousand."""
    shape = full_shape(16, 2, m=8, d=512, e=64)
    plan = build_plan(shape, policy="ldt_1f1b")
    assert sum(map(len, plan.rows)) < 10_000
    row = plan.for_rank(shape.rank_of(3, 500))
    assert {one.domain for one in row if one.serves} == {500}
    assert Compute.parse("F3.7.500") in {one.compute for one in row}
    assert {one.channel.destination for one in row if one.channel and one.kind.is_send} == {
        shape.rank_of(4, 500),
        shape.rank_of(2, 500),
    }
