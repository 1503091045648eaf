"""The validator objects to every mutation: each rule has a fault that it alone, or it first, must see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ds_ldt.errors import ScheduleError
from ds_ldt.plan import Compute, Instruction, Kind, Plan, build_plan, lower, parse_orders, validate
from ds_ldt.plan.lower import lower_slice
from tests.plan.interpreter import Outcome, expected_outcome, interpret
from tests.plan.shapes import full_shape, split

PLANS = {
    "u": build_plan(full_shape(3, 2, m=3)),
    "sliced": build_plan(full_shape(3, 2, m=2, d=2)),
    "replicas": build_plan(full_shape(2, 2, m=2, d=2, e=2)),
    "three chunks": build_plan(full_shape(3, 3, m=3)),
    "evaluation": build_plan(full_shape(3, 2, m=3), training=False),
    "split": build_plan(split(full_shape(3, 2, m=3)), policy="greedy"),
    "split everywhere": build_plan(split(full_shape(2, 3, m=2, d=2), everywhere=True), policy="greedy"),
}
Row = list[Instruction]


def outcome_of(outcome: Outcome) -> tuple[object, ...]:
    return outcome.outputs, outcome.gradients, outcome.weights


def with_row(plan: Plan, rank: int, row: Row) -> Plan:
    rows = list(plan.rows)
    rows[rank] = tuple(row)
    return replace(plan, rows=tuple(rows))


def mutated(plan: Plan, rank: int, change: Callable[[Row], object]) -> Plan:
    row = list(plan.rows[rank])
    change(row)
    return with_row(plan, rank, row)


def position_of(plan: Plan, rank: int, text: str) -> int:
    return next(at for at, instruction in enumerate(plan.rows[rank]) if str(instruction).startswith(text))


def choose_place(data: st.DataObject) -> tuple[Plan, int, int]:
    plan = data.draw(st.sampled_from(list(PLANS.values())))
    rank = data.draw(st.integers(0, len(plan.rows) - 1))
    return plan, rank, data.draw(st.integers(0, len(plan.rows[rank]) - 1))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_the_plans_to_mutate_are_valid(plan: Plan) -> None:
    validate(plan, max_in_flight=6)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_dropping_any_instruction_is_an_error(plan: Plan) -> None:
    for rank, row in enumerate(plan.rows):
        for at in range(len(row)):
            with pytest.raises(ScheduleError):
                validate(mutated(plan, rank, lambda row, at=at: row.pop(at)))


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_doubling_any_instruction_anywhere_is_an_error(data: st.DataObject) -> None:
    plan, rank, at = choose_place(data)
    to = data.draw(st.integers(0, len(plan.rows[rank])))
    with pytest.raises(ScheduleError):
        validate(mutated(plan, rank, lambda row: row.insert(to, row[at])))


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_swapping_any_two_instructions_is_an_error(data: st.DataObject) -> None:
    plan, rank, at = choose_place(data)
    other = data.draw(st.integers(0, len(plan.rows[rank]) - 1))
    assume(other != at)
    # Nothing waits for weight gradients, so two of them may change places.
    assume(any(plan.rows[rank][place].kind is not Kind.WEIGHT_PASS for place in (at, other)))

    def swap(row: Row) -> None:
        row[at], row[other] = row[other], row[at]

    with pytest.raises(ScheduleError):
        validate(mutated(plan, rank, swap))


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_changing_any_field_of_any_instruction_is_an_error(data: st.DataObject) -> None:
    plan, rank, at = choose_place(data)
    instruction = plan.rows[rank][at]
    name = data.draw(st.sampled_from(["chunk", "virtual_stage", "micro_batch", "domain"]))
    value = data.draw(st.integers(-1, 6))
    assume(instruction.serves is not None and value != getattr(instruction, name))
    with pytest.raises(ScheduleError):
        validate(mutated(plan, rank, lambda row: row.__setitem__(at, replace(instruction, **{name: value}))))


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_changing_the_kind_of_any_instruction_is_an_error(data: st.DataObject) -> None:
    plan, rank, at = choose_place(data)
    instruction = plan.rows[rank][at]
    kind = data.draw(st.sampled_from([kind for kind in Kind if kind is not instruction.kind]))
    with pytest.raises(ScheduleError):
        validate(mutated(plan, rank, lambda row: row.__setitem__(at, replace(instruction, kind=kind))))


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_sending_anything_anywhere_else_is_an_error(data: st.DataObject) -> None:
    plan, rank, at = choose_place(data)
    instruction = plan.rows[rank][at]
    channel = data.draw(st.sampled_from([None, *plan.channels()]))
    assume(channel != instruction.channel)
    with pytest.raises(ScheduleError):
        validate(mutated(plan, rank, lambda row: row.__setitem__(at, replace(instruction, channel=channel))))


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_shuffled_orders_are_valid_exactly_if_they_run(data: st.DataObject) -> None:
    """Moves one compute with all its messages: many such plans are fine, and only the interpreter knows which."""
    plan, rank, _ = choose_place(data)
    orders = plan.slice_orders()
    order = list(orders[rank])
    origin = data.draw(st.integers(0, len(order) - 1))
    target = data.draw(st.integers(0, len(order) - 1))
    order.insert(target, order.pop(origin))
    moved = lower_slice({**orders, rank: tuple(order)}, plan.shape, policy="moved", training=plan.training)
    try:
        outcome, expected = interpret(moved, seed=target), expected_outcome(plan)
        runs = outcome_of(outcome) == outcome_of(expected)
    except (AssertionError, KeyError):
        runs = False
    if runs:
        validate(moved)
    else:
        with pytest.raises(ScheduleError):
            validate(moved)


def test_two_receives_of_a_channel_in_another_order_than_their_sends() -> None:
    plan = PLANS["u"]
    orders = plan.orders()
    first, second, *rest = orders[2]
    swapped = lower({**orders, 2: (second, first, *rest)}, plan.shape, policy="swapped")
    with pytest.raises(
        ScheduleError, match="message 0 of channel .* is sent for micro-batch 0 but received as micro-b"
    ):
        validate(swapped)


def test_a_row_is_missing() -> None:
    with pytest.raises(ScheduleError, match="rows for 2 ranks, expected 3"):
        validate(replace(PLANS["u"], rows=PLANS["u"].rows[:2]))


def test_a_fault_of_a_job_with_replicas_is_told_for_one_of_them() -> None:
    plan = PLANS["replicas"]
    with pytest.raises(ScheduleError, match=r"At rank 1 \(cloud stage 1, domain 0\), instruction 0") as caught:
        validate(mutated(plan, 1, lambda row: row.pop(0)))
    assert "D=2 E=2" in str(caught.value) and "all replicas do the same" in str(caught.value)


def test_many_missing_computes_are_counted() -> None:
    plan = PLANS["u"]
    with pytest.raises(ScheduleError, match=r"B1\.0\.0, B1\.1\.0, B1\.2\.0, F1\.0\.0, F1\.1\.0 and 1 more never run"):
        validate(lower({**plan.orders(), 1: ()}, plan.shape, policy="idle"))


def test_a_compute_runs_twice() -> None:
    plan = PLANS["u"]
    orders = plan.orders()
    with pytest.raises(ScheduleError, match=r"F0\.0\.0 runs twice"):
        validate(lower({**orders, 0: (orders[0][0], *orders[0])}, plan.shape, policy="twice"))


def test_a_compute_never_runs() -> None:
    plan = PLANS["u"]
    orders = plan.orders()
    with pytest.raises(ScheduleError, match=r"B1\.2\.0 never run") as caught:
        validate(lower({**orders, 1: orders[1][:-1]}, plan.shape, policy="short"))
    assert "[end]" in str(caught.value)


def test_an_evaluation_runs_a_backward() -> None:
    plan = PLANS["evaluation"]
    orders = plan.orders()
    orders[1] = (*orders[1], Compute.parse("B1.0.0"))
    with pytest.raises(ScheduleError, match=r"an evaluation runs no B1\.0\.0"):
        validate(lower(orders, plan.shape, policy="x", training=False))


def test_an_evaluation_makes_weight_gradients() -> None:
    plan = PLANS["evaluation"]
    orders = plan.orders()
    orders[1] = (*orders[1], Compute.parse("W1.0.0"))
    with pytest.raises(ScheduleError, match=r"an evaluation runs no W1\.0\.0"):
        validate(lower(orders, plan.shape, policy="x", training=False))


def test_a_backward_before_its_forward() -> None:
    plan = PLANS["u"]
    orders = plan.orders()
    order = list(orders[0])
    tail = order.index(Compute.parse("F3.0.0"))
    order[tail], order[tail + 1] = order[tail + 1], order[tail]
    with pytest.raises(ScheduleError, match=r"B3\.0\.0 runs before F3\.0\.0, whose values it uses"):
        validate(lower({**orders, 0: tuple(order)}, plan.shape, policy="x"))


def test_weight_gradients_before_their_backward() -> None:
    plan = PLANS["split"]
    orders = plan.orders()
    order = list(orders[1])
    first, second = order.index(Compute.parse("B1.0.0")), order.index(Compute.parse("W1.0.0"))
    order[first], order[second] = order[second], order[first]
    with pytest.raises(ScheduleError, match=r"W1\.0\.0 runs before B1\.0\.0, whose values it uses"):
        validate(lower({**orders, 1: tuple(order)}, plan.shape, policy="x"))


def test_weight_gradients_never_run() -> None:
    plan = PLANS["split"]
    orders = plan.orders()
    orders[1] = tuple(compute for compute in orders[1] if str(compute) != "W1.2.0")
    with pytest.raises(ScheduleError, match=r"W1\.2\.0 never run"):
        validate(lower(orders, plan.shape, policy="x"))


def test_weight_gradients_of_a_backward_that_is_whole() -> None:
    plan = PLANS["u"]
    orders = plan.orders()
    orders[1] = (*orders[1], Compute.parse("W1.0.0"))
    with pytest.raises(ScheduleError, match=r"W1\.0\.0 is a part of B, which is not split"):
        validate(lower(orders, plan.shape, policy="x"))


def test_weight_gradients_after_the_reduction() -> None:
    plan = PLANS["split"]
    at = max(at for at, instruction in enumerate(plan.for_rank(1)) if instruction.kind is Kind.WEIGHT_PASS)
    with pytest.raises(ScheduleError, match="must end with ReduceGrads and OptimizerStep, once"):
        validate(mutated(plan, 1, lambda row: row.append(row.pop(at))))


def test_a_micro_batch_is_in_flight_until_its_weight_gradients() -> None:
    shape = split(full_shape(2, 2, m=2))
    edge = "0 | F0.0.0 F2.0.0 B2.0.0 B0.0.0 F0.1.0 F2.1.0 B2.1.0 B0.1.0\n"
    late = lower(parse_orders(edge + "1 | F1.0.0 B1.0.0 F1.1.0 B1.1.0 W1.0.0 W1.1.0"), shape, policy="x")
    soon = lower(parse_orders(edge + "1 | F1.0.0 B1.0.0 W1.0.0 F1.1.0 B1.1.0 W1.1.0"), shape, policy="x")
    assert (late.peak_in_flight(1), soon.peak_in_flight(1)) == (2, 1)
    validate(soon, max_in_flight=1)
    with pytest.raises(ScheduleError, match=r"2 micro-batches of the domain of F1\.1\.0 are in flight, 1 are allowed"):
        validate(late, max_in_flight=1)


def test_the_head_computes_before_it_loads() -> None:
    def swap(row: Row) -> None:
        row[0], row[1] = row[1], row[0]

    with pytest.raises(ScheduleError, match=r"expected LoadMicroBatch, ForwardPass, SendActivation of F0\.0\.0"):
        validate(mutated(PLANS["u"], 0, swap))


def test_the_optimizer_steps_before_the_reduction() -> None:
    def swap(row: Row) -> None:
        row[-1], row[-2] = row[-2], row[-1]

    with pytest.raises(ScheduleError, match="must end with ReduceGrads and OptimizerStep, once"):
        validate(mutated(PLANS["u"], 1, swap))


def test_a_row_without_its_end_is_marked_where_it_stops() -> None:
    plan = PLANS["u"]
    last = len(plan.for_rank(1)) - 2
    with pytest.raises(ScheduleError, match=rf"At rank 1 .*, instruction {last}: ReduceGrads"):
        validate(mutated(plan, 1, lambda row: row.pop()))
    with pytest.raises(
        ScheduleError, match=r"must end with ReduceGrads and OptimizerStep, once\n.*instruction 0: the end"
    ):
        validate(with_row(plan, 1, []))


def test_an_evaluation_steps_the_optimizer() -> None:
    step = Instruction(kind=Kind.OPTIMIZER_STEP)
    with pytest.raises(ScheduleError, match="must contain no closing reduction"):
        validate(mutated(PLANS["evaluation"], 1, lambda row: row.append(step)))


def test_a_closing_reduction_of_some_chunk() -> None:
    with pytest.raises(ScheduleError, match="a closing reduction belongs to no virtual stage"):
        validate(mutated(PLANS["u"], 1, lambda row: row.__setitem__(-1, replace(row[-1], chunk=0))))


def test_a_pass_of_nothing() -> None:
    with pytest.raises(ScheduleError, match="it must name virtual stage, micro-batch and domain"):
        validate(mutated(PLANS["u"], 1, lambda row: row.__setitem__(1, Instruction(kind=Kind.FORWARD_PASS))))


def test_a_compute_on_the_rank_of_another_domain() -> None:
    plan = PLANS["sliced"]
    at = position_of(plan, 1, "ForwardPass")
    stray = replace(plan.for_rank(1)[at], domain=1)
    with pytest.raises(ScheduleError, match=r"F1\.0\.1 belongs to rank 2 \(cloud stage 1, domain 1\)"):
        validate(mutated(plan, 1, lambda row: row.__setitem__(at, stray)))


def test_more_in_flight_than_allowed_names_the_compute() -> None:
    with pytest.raises(ScheduleError, match=r"4 micro-batches of the domain of F0\.3\.0 are in flight, 3 are allowed"):
        validate(build_plan(full_shape(3, 2, m=5)), max_in_flight=3)


def test_the_error_shows_the_orders_with_the_place_marked() -> None:
    plan = PLANS["u"]
    at = position_of(plan, 1, "ForwardPass(1.1.0)")
    with pytest.raises(ScheduleError) as caught:
        validate(mutated(plan, 1, lambda row: row.pop(at)))
    text = str(caught.value)
    assert "training plan of policy 'ldt_1f1b' cannot be run" in text
    assert "At rank 1 (cloud stage 1, domain 0), instruction 3: RecvActivation(1.1.0 boundary 0 from rank 0)" in text
    assert "stages=(0, 1, 2, 0) M=3 D=1 E=1" in text
    row = next(line for line in text.splitlines() if line.startswith("   1 |"))
    assert row.split() == ["1", "|", "F1.0.0", "[F1.2.0]", "B1.0.0", "B1.1.0", "B1.2.0"]
