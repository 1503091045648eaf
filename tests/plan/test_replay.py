from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from ds_ldt.errors import ScheduleError
from ds_ldt.plan import build_plan, lower, min_posted_receives, parse_orders, validate
from ds_ldt.plan.deadlock import describe_stall, find_stall
from tests.plan.shapes import full_shape

# The edge waits for the gradient of micro-batch 0 before it sends micro-batch 1; the cloud, for that before it sends.
DEADLOCK = parse_orders(
    """
    0 | F0.0.0 F2.0.0 B2.0.0 B0.0.0 F0.1.0 F2.1.0 B2.1.0 B0.1.0
    1 | F1.0.0 F1.1.0 B1.0.0 B1.1.0
    """
)
# The cloud lets the edge run ahead by one micro-batch.
AHEAD = parse_orders(
    """
    0 | F0.0.0 F0.1.0 F0.2.0 F2.0.0 B2.0.0 F2.1.0 B2.1.0 F2.2.0 B2.2.0 B0.0.0 B0.1.0 B0.2.0
    1 | F1.0.0 B1.0.0 F1.1.0 B1.1.0 F1.2.0 B1.2.0
    """
)


@pytest.mark.parametrize("p", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_S11_one_posted_receive_per_channel_is_enough_for_rendezvous_around_the_u(p: int, training: bool) -> None:
    for m in range(1, 13):
        for d in (1, 2):
            validate(build_plan(full_shape(p, 2, m=m, d=d), training=training), posted_ahead=1)


@pytest.mark.parametrize("p", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_S11_posted_receives_that_rendezvous_needs_are_bounded_with_several_passes(p: int, training: bool) -> None:
    for m in (1, 2, 5, 12):
        for d in (1, 2):
            plan = build_plan(full_shape(p, 3, m=m, d=d), training=training)
            needed = min_posted_receives(plan)
            assert needed <= p
            validate(plan, posted_ahead=needed)
            assert needed == 1 or find_stall(plan, posted_ahead=needed - 1)


@pytest.mark.parametrize("v", [2, 3])
def test_S54_paired_send_recv(v: int) -> None:
    plan = build_plan(full_shape(4, v, m=6, d=4, e=2))
    ends: Counter[tuple[object, int | None]] = Counter()
    for rank in range(plan.shape.num_ranks):
        for instruction in plan.for_rank(rank):
            channel = instruction.channel
            if channel is not None:
                end = channel.source if instruction.kind.is_send else channel.destination
                assert rank == end != (channel.destination if instruction.kind.is_send else channel.source)
                ends[channel, instruction.micro_batch] += 1 if instruction.kind.is_send else -1
    assert ends
    assert set(ends.values()) == {0}
    for channel in plan.channels():
        assert plan.send_order(channel) == plan.receive_order(channel)


def test_a_deadlock_is_found_and_says_who_waits_for_whom() -> None:
    plan = lower(DEADLOCK, full_shape(2, 2, m=2), policy="by hand")
    stuck = find_stall(plan)
    edge, cloud = "RecvGrad(0.0.0 boundary 0 from rank 1)", "RecvActivation(1.1.0 boundary 0 from rank 0)"
    assert describe_stall(plan, stuck).splitlines() == [
        "deadlock:",
        f"  rank 0 (edge replica 0) at {edge} waits for a message from rank 1 (gradient), "
        f"which is itself stuck at {cloud}",
        f"  rank 1 (cloud stage 1, domain 0) at {cloud} waits for a message from rank 0 (activation), "
        f"which is itself stuck at {edge}",
    ]


def test_a_plan_may_need_posted_receives_although_it_has_no_deadlock() -> None:
    plan = lower(AHEAD, full_shape(2, 2, m=3), policy="by hand")
    assert not find_stall(plan)
    assert min_posted_receives(plan) == 2
    validate(plan, posted_ahead=2)
    with pytest.raises(ScheduleError, match="sends wait for one of 1 posted receives, deadlock"):
        validate(plan, posted_ahead=1)


def test_a_deadlock_of_many_ranks_is_told_in_few_lines() -> None:
    shape = full_shape(2, 2, m=2, d=14)
    orders = {
        rank: tuple(
            replace(compute, domain=domain)
            for domain in shape.domains_of(rank)
            for compute in DEADLOCK[shape.stage_of(rank)]
        )
        for rank in range(shape.num_ranks)
    }
    plan = lower(orders, shape, policy="by hand")
    lines = describe_stall(plan, find_stall(plan)).splitlines()
    assert len(lines) == 14
    assert lines[-1] == "  and 3 more ranks"
