"""`"policy": "auto"` measures its first steps and plans anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_ldt.config.schema import load_config
from ds_ldt.plan import PipelineShape, build_plan
from ds_ldt.plan.cost_file import known_from_config, known_from_file, limits_from
from ds_ldt.plan.measured_costs import LATENCY_MARGIN
from ds_ldt.topology.layout import Layout
from tests.engine.cases import config, layout
from tests.engine.measuring import SLEEP_S
from tests.engine.parity import assert_parity, oracle
from tests.harness import GroupPool

TARGETS = "tests.engine.measuring:"
FAR = {"latency_ms": 300, "bandwidth_mbps": 0}
"""Hints that are wrong: there is no link between the processes of a test."""


def test_after_three_steps_every_rank_runs_the_plan_of_what_was_measured(groups: GroupPool, tmp_path: Path) -> None:
    written = tmp_path / "costs.json"
    ldt = {"link": FAR, "schedule": {"layer_forward_ms": 50, "memory_gb": 4e-6}, "measured_costs": str(written)}
    settings = config(layout(2, 2), num_domains=2, num_micro_batches=8, ldt=ldt)
    ranks = groups.run(3, TARGETS + "train_measured", settings, 5, deadline_s=90)
    assert_parity(ranks, oracle(settings, 5), "SGD")
    before, *others = ranks[0]["plans"]
    after = others[-1]
    assert others == [before, before, after, after] and after != before
    for rank in ranks:
        assert rank["plans"] == ranks[0]["plans"]
        assert rank["costs"] == ranks[0]["costs"]
        assert rank["window"] == rank["wanted_window"]
    costs = ranks[0]["costs"]
    assert 2 * SLEEP_S <= costs["forward"][0, 1] < 10 * SLEEP_S, "the slower of the two domains counts"
    assert max(costs["forward"][0, 0], costs["forward"][1, 0], *costs["backward"].values()) < SLEEP_S
    assert 0 < costs["latency"] / LATENCY_MARGIN < 0.05
    assert costs["message_bytes"] == 2 * 8 * 4
    # The middle block keeps its input, what it normed with mean and deviation, what tanh made of it, and its output.
    assert ranks[0]["kept"][0, 1] == 4 * (4 * 2 * 8 + 2 * 2)
    assert all(rank["kept"] == ranks[0]["kept"] for rank in ranks)

    job, built = load_config(settings), Layout.build(settings["ldt"]["pipeline_num_layers"])
    shape = PipelineShape.from_layout(built, num_micro_batches=8, num_domains=2, num_replicas=1)
    hints = known_from_config(job, built)
    assert build_plan(shape, policy="closed_form", costs=hints.costs).fingerprint == before
    read = known_from_file(json.loads(written.read_text()), built, hints=hints)
    limits = limits_from(job, shape, read)
    assert limits is not None and limits[0] < 8 == limits[1], "4 kB hold some of the edge, all of the cloud"
    assert build_plan(shape, policy="auto", costs=read.costs, max_in_flight=limits).fingerprint == after


@pytest.mark.parametrize("schedule", [{"measure_steps": 0}, {"policy": "greedy", "measure_steps": 1}])
def test_without_measuring_the_plan_of_the_hints_stays(groups: GroupPool, schedule: dict[str, object]) -> None:
    settings = config(layout(2, 2), ldt={"schedule": schedule})
    edge, cloud = groups.run(2, TARGETS + "plans_unmeasured", settings, 1, deadline_s=60)
    built = Layout.build(settings["ldt"]["pipeline_num_layers"])
    shape = PipelineShape.from_layout(built, num_micro_batches=4, num_domains=1, num_replicas=1)
    costs = known_from_config(load_config(settings), built).costs
    wanted = build_plan(shape, policy=str(schedule.get("policy", "auto")), costs=costs).fingerprint
    assert edge == cloud == [wanted] * 2
