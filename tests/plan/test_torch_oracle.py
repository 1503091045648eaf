"""Differential test: torch's own checks of pipeline schedules accept our orders (private API, so tests only).

torch knows neither domains nor an edge that serves several of them: one domain at a time, the edge's other computes
left out. It maps stages to ranks by a function, so a U-shape is a map in which several virtual stages are on rank 0.
"""

from __future__ import annotations

import pytest

from ds_ldt.plan import Op, Plan, build_plan
from tests.plan.shapes import SPARSE_MATRICES, full_shape, shape_of

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
KINDS = {Op.FORWARD: "F", Op.BACKWARD: "B"}


def torch_orders(plan: Plan, domain: int) -> dict[int, list[object]]:
    rows: dict[int, list[object]] = {}
    for rank, order in plan.orders().items():
        if domain in plan.shape.domains_of(rank):
            rows[plan.shape.stage_of(rank)] = [
                schedules._Action.from_str(f"{compute.virtual_stage}{KINDS[compute.op]}{compute.micro_batch}")
                for compute in order
                if compute.domain == domain
            ]
    return rows


def torch_accepts(plan: Plan, domain: int) -> None:
    shape = plan.shape
    orders = torch_orders(plan, domain)
    stages = schedules._validate_schedule(orders, shape.num_stages, shape.num_virtual_stages, shape.num_micro_batches)
    assert stages == dict(enumerate(shape.stages))
    with_messages = schedules._add_send_recv(
        {rank: list(order) for rank, order in orders.items()}, shape.stages.__getitem__, shape.num_virtual_stages
    )
    played = schedules._simulate_comms_compute(with_messages, shape.stages.__getitem__, shape.num_virtual_stages)
    computes = {rank: [action for action in row if action in set(orders[rank])] for rank, row in played.items()}
    assert computes == orders


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("v", [2, 3])
def test_torch_accepts_full_matrices(p: int, v: int) -> None:
    for m in (1, 2, 3, 7):
        torch_accepts(build_plan(full_shape(p, v, m=m)), domain=0)
    sliced = build_plan(full_shape(p, v, m=3, d=4, e=2))
    for domain in range(4):
        torch_accepts(sliced, domain)


@pytest.mark.parametrize("matrix", SPARSE_MATRICES.values(), ids=SPARSE_MATRICES.keys())
def test_torch_accepts_matrices_with_empty_cells(matrix: list[list[int]]) -> None:
    torch_accepts(build_plan(shape_of(matrix, m=5)), domain=0)


def test_torch_refuses_what_we_refuse() -> None:
    plan = build_plan(full_shape(3, 2, m=4))
    orders = torch_orders(plan, 0)
    orders[1].pop()
    with pytest.raises(AssertionError):
        schedules._validate_schedule(orders, 3, 4, 4)
