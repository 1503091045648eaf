"""The orders of every policy at a few shapes, as text. A change of policy shows in review as a change of these files.

Write them anew, then read the difference:

    LDT_WRITE_GOLDEN=1 pytest tests/plan/test_golden.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ds_ldt.plan import Costs, PipelineShape, Plan, build_plan, render_orders, render_timeline, simulate
from ds_ldt.plan.policies import EVALUATION, TRAINING
from tests.plan.shapes import full_shape, shape_of

FOLDER = Path(__file__).with_name("golden")
SHAPES: dict[str, PipelineShape] = {
    "P2_V2_M4": full_shape(2, 2, m=4),
    "P4_V2_M8": full_shape(4, 2, m=8),
    "P3_V2_M6_D2": full_shape(3, 2, m=6, d=2),
    "P3_V2_M4_D4_E2": full_shape(3, 2, m=4, d=4, e=2),
    "P3_V3_M6": full_shape(3, 3, m=6),
    "P3_V3_M4_D2_no_middle": shape_of([[1, 1, 1], [0, 1, 1], [1, 0, 0]], m=4, d=2),
}
CASES = [(policy, name, policy in TRAINING) for policy in (*TRAINING, *EVALUATION) for name in SHAPES]


def text_of(plan: Plan) -> str:
    shape = plan.shape
    costs = Costs.uniform(shape, edge=1, cloud=4 * shape.slice_size)
    return "\n".join(
        [
            f"policy {plan.policy}, stages {shape.stages}, chunks {shape.chunks}",
            f"M={shape.num_micro_batches} D={shape.num_domains} E={shape.num_replicas}",
            f"in flight {[plan.peak_in_flight(rank) for rank in range(shape.num_ranks)]}",
            f"fingerprint {plan.fingerprint}",
            "",
            render_orders(plan.orders()),
            "",
            f"one column is {shape.slice_size} edge forwards long, a cloud forward takes 4 columns",
            render_timeline(simulate(plan, costs), seconds_per_column=shape.slice_size),
            "",
        ]
    )


@pytest.mark.parametrize("policy, name, training", CASES, ids=[f"{policy}-{name}" for policy, name, _ in CASES])
def test_the_policy_still_gives_the_plan_on_file(policy: str, name: str, training: bool) -> None:
    plan = build_plan(SHAPES[name], policy=policy if training else "auto", training=training)
    assert plan.policy == policy
    path = FOLDER / f"{policy}_{name}.txt"
    if os.environ.get("LDT_WRITE_GOLDEN"):
        path.write_text(text_of(plan), encoding="utf-8")
    assert text_of(plan) == path.read_text(encoding="utf-8")


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == {f"{policy}_{name}" for policy, name, _ in CASES}
