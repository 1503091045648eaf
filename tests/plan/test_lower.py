from __future__ import annotations

from ds_ldt.plan import Kind, Plan, build_plan, lower, parse_orders
from ds_ldt.plan.plan import in_flight_counts
from tests.plan.shapes import full_shape, shape_of


def words(plan: Plan, rank: int) -> list[str]:
    return [str(instruction) for instruction in plan.for_rank(rank)]


def test_one_micro_batch_of_a_u_reads_like_its_journey() -> None:
    plan = build_plan(full_shape(2, 2, m=1))
    assert words(plan, 0) == [
        "LoadMicroBatch(0.0.0)",
        "ForwardPass(0.0.0)",
        "SendActivation(0.0.0 boundary 0 to rank 1)",
        "RecvActivation(2.0.0 boundary 1 from rank 1)",
        "ForwardPass(2.0.0)",
        "BackwardPass(2.0.0)",
        "SendGrad(2.0.0 boundary 1 to rank 1)",
        "RecvGrad(0.0.0 boundary 0 from rank 1)",
        "BackwardPass(0.0.0)",
        "ReduceGrads",
        "OptimizerStep",
    ]
    assert words(plan, 1) == [
        "RecvActivation(1.0.0 boundary 0 from rank 0)",
        "ForwardPass(1.0.0)",
        "SendActivation(1.0.0 boundary 1 to rank 0)",
        "RecvGrad(1.0.0 boundary 1 from rank 0)",
        "BackwardPass(1.0.0)",
        "SendGrad(1.0.0 boundary 0 to rank 0)",
        "ReduceGrads",
        "OptimizerStep",
    ]


def test_only_the_head_loads() -> None:
    plan = build_plan(full_shape(3, 3, m=4, d=2))
    loads = [
        (rank, instruction.virtual_stage)
        for rank in range(plan.shape.num_ranks)
        for instruction in plan.for_rank(rank)
        if instruction.kind is Kind.LOAD_MICRO_BATCH
    ]
    assert loads == [(0, 0)] * 8


def test_an_evaluation_sends_no_gradients_and_closes_without_a_step() -> None:
    plan = build_plan(full_shape(3, 2, m=4), training=False)
    kinds = {instruction.kind for rank in range(3) for instruction in plan.for_rank(rank)}
    assert kinds == {Kind.LOAD_MICRO_BATCH, Kind.RECV_ACTIVATION, Kind.FORWARD_PASS, Kind.SEND_ACTIVATION}


def test_a_boundary_without_gradients_has_no_gradient_messages() -> None:
    plan = build_plan(shape_of([[1, 1, 1], [1, 0, 0]], m=3, gradients=(False, True, True)))
    assert {channel.boundary for channel in plan.channels() if channel.flow == "gradient"} == {1, 2}
    assert [str(compute) for compute in plan.orders()[0] if str(compute).startswith("B0")] == [
        "B0.0.0",
        "B0.1.0",
        "B0.2.0",
    ]


def test_chunks_are_those_of_the_cells() -> None:
    plan = build_plan(shape_of([[1, 1, 0], [0, 1, 1], [1, 0, 0]], m=1))
    chunks = {i.virtual_stage: i.chunk for rank in range(3) for i in plan.for_rank(rank) if i.compute}
    assert chunks == {0: 0, 1: 0, 2: 1, 3: 2}


def test_orders_survive_lowering() -> None:
    shape = full_shape(4, 3, m=3, d=2, e=2)
    orders = build_plan(shape).orders()
    assert lower(orders, shape, policy="ldt_1f1b").orders() == orders


def test_a_channel_carries_every_micro_batch_once_in_one_order() -> None:
    plan = build_plan(full_shape(3, 3, m=4, d=2))
    boundaries, flows = plan.shape.num_boundaries, 2
    assert len(plan.channels()) == boundaries * flows * plan.shape.num_domains
    for channel in plan.channels():
        assert plan.receive_order(channel) == plan.send_order(channel) == (0, 1, 2, 3)


def test_in_flight_counts_from_the_first_to_the_last_compute_of_a_micro_batch() -> None:
    shape = full_shape(2, 2, m=2)
    orders = parse_orders(
        "0 | F0.0.0 F0.1.0 F2.0.0 B2.0.0 B0.0.0 F2.1.0 B2.1.0 B0.1.0\n1 | F1.0.0 B1.0.0 F1.1.0 B1.1.0"
    )
    plan = lower(orders, shape, policy="by hand")
    assert (plan.peak_in_flight(0), plan.peak_in_flight(1)) == (2, 1)
    assert in_flight_counts(orders[0]) == [1, 2, 2, 2, 2, 1, 1, 1]
    assert in_flight_counts(orders[1]) == [1, 1, 1, 1]
