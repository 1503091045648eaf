"""What goes wrong ends in one clear error on every rank, within a bound."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ds_ldt.comm.agreement import site_differences
from tests.bad_configs import BAD_CONFIGS
from tests.engine.cases import config, layout
from tests.harness import GroupPool, run_group

TARGETS = "tests.engine.failures:"


@pytest.mark.parametrize("method", ["save_checkpoint", "eval_batch"])
def test_S12_a_call_made_by_one_rank_only_ends_in_a_bounded_error(method: str, tmp_path: Path) -> None:
    edge, cloud = run_group(2, TARGETS + "only_the_edge_calls", method, str(tmp_path), init="gloo", deadline_s=60)
    for kind, message, seconds in (edge, cloud):
        assert kind == "LinkError", message
        assert seconds < 20, message
    assert "train_batch" in cloud[1]
    assert method in edge[1] or "eval_batch" in cloud[1], "neither side names the call"
    assert "every rank" in (edge[1] + cloud[1]).lower()


def test_a_rank_that_plans_with_other_costs_is_told_both_fingerprints_before_its_first_instruction(
    groups: GroupPool,
) -> None:
    (edge, planned_there), (cloud, planned_here) = groups.run(2, TARGETS + "other_costs", deadline_s=60)
    assert (edge[0], cloud[0]) == ("LinkError", "LinkError")
    assert f"fingerprint of the plan: rank 0 has {planned_there}, rank 1 has {planned_here}" in cloud[1]
    assert planned_there != planned_here
    assert "rank 1 is gone or closed the connection" in edge[1]
    assert cloud[2] < 10, "the cloud waited for its timeout instead of comparing"


def test_S12_a_rank_in_another_call_is_told_both_calls(groups: GroupPool) -> None:
    _, cloud = groups.run(2, TARGETS + "other_program_order", deadline_s=60)
    kind, message, seconds = cloud
    assert kind == "LinkError"
    assert "call: rank 0 has eval_batch, rank 1 has train_batch" in message
    assert seconds < 5
    groups.session(2).close()


def test_an_undeclared_int_tensor_is_refused_before_anything_is_sent(groups: GroupPool) -> None:
    edge, cloud = groups.run(2, TARGETS + "leak_an_int_tensor", deadline_s=60)
    assert edge[0] == "PrivacyError"
    assert "int64[2, 4]" in edge[1]
    assert "it is not declared" in edge[1]
    assert cloud[0] == "LinkError"
    assert cloud[2] < 10, "the cloud waited for its timeout instead of being told"


def test_S13_a_failure_in_the_cloud_reaches_the_edge_at_once(groups: GroupPool) -> None:
    edge, cloud = groups.run(2, TARGETS + "fail_in_the_cloud", deadline_s=60)
    assert cloud[0] == "LookupError"
    assert edge[0] == "LinkError"
    assert "rank 1 is gone or closed the connection" in edge[1]
    assert edge[2] < 20, "the edge waited for its timeout"
    groups.session(2).close()


@pytest.mark.parametrize(
    "changes, fact",
    [
        ({"gradient_clipping": 0.5}, "gradient_clipping"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps"),
    ],
)
def test_sites_with_different_files_are_told_what_differs(
    groups: GroupPool, changes: dict[str, Any], fact: str
) -> None:
    edge, cloud = groups.run(2, TARGETS + "different_files", changes, deadline_s=60)
    assert edge[:2] == cloud[:2]
    assert edge[0] == "ConfigError"
    assert fact in edge[1]


def test_S87_hints_and_all_else_that_a_plan_follows_from_are_compared(
    groups: GroupPool,
) -> None:
    named: dict[str, dict[str, Any]] = {
        "ldt.link": {"ldt.link.latency_ms": 40},
        "ldt.link of one site": {"ldt.link": {"bandwidth_mbps": 0}},
        "ldt.link messages": {"ldt.link.message_mb": 3.5},
        "ldt.schedule": {"ldt.schedule.measure_steps": 0},
        "ldt.schedule hints": {"ldt.schedule.layer_forward_ms": 3},
        "ldt.loss_reduction": {"ldt.loss_reduction": "micro_batch"},
        "optimizer": {"optimizer.params.lr": 0.2},
        "gradient_clipping": {"gradient_clipping": 0.5},
        "zero_optimization": {"zero_optimization": {"stage": 1}},
        "dataloader_drop_last": {"dataloader_drop_last": True},
    }
    free = {
        "steps_per_print": {"steps_per_print": 7},
        "timeout": {"ldt.timeout_s": 12.0},
        "trace": {"ldt.trace": {"path": "nowhere", "steps": [900, 901]}},
        "activation checkpoints": {"pipeline.activation_checkpoint_interval": 1},
        "the same written in full": {"ldt.link": {"latency_ms": 20, "bandwidth_mbps": 1000.0, "message_mb": 1}},
    }
    edge, cloud = groups.run(2, TARGETS + "different_settings", {**named, **free}, deadline_s=60)
    for name in named:
        assert edge[name][:2] == cloud[name][:2]
        assert edge[name][0] == "ConfigError", name
        assert f"{name.partition(' ')[0]}: found edge " in edge[name][1]
        assert edge[name][1].count("expected the same on both sites") == 1
    assert {edge[name][0] for name in free} == {cloud[name][0] for name in free} == {"no error"}


def test_equal_facts_are_no_difference() -> None:
    assert site_differences({"a": "1"}, {"a": "1"}) == []
    assert [problem.key for problem in site_differences({"a": "1", "b": "2"}, {"a": "1"})] == ["b"]


def test_every_bad_configuration_is_told_alike_on_all_ranks_before_any_process_group() -> None:
    rows = [row[1] for row in BAD_CONFIGS]
    assert len(rows) >= 25
    wrong_world = config(layout(2, 2), num_domains=2)
    wrong_layers = config([[2, 2], [2, 0]])
    text_for_false = {**config(layout(2, 2)), "optimizer": {"type": "SGD", "params": {"lr": 0.1, "nesterov": "false"}}}
    too_long = config(layout(2, 2), num_micro_batches=100_000)  # S91
    wrong = [*rows, text_for_false, too_long, wrong_world, wrong_layers]
    first, second = run_group(2, TARGETS + "bad_configurations", wrong, deadline_s=100)
    assert first == second
    assert 'optimizer.params.nesterov: found "false", expected true or false' in first[-4]
    for (name, _, fragments), message in zip(BAD_CONFIGS, first, strict=False):
        for fragment in fragments:
            assert fragment in message, f"{name}: {message}"
    assert "gradient_accumulation_steps: found 100000, expected at most 33333 here" in first[-3]
    assert "E*Te + (P-1)*D*Tc" in first[-2]
    assert "whose sum is 6" in first[-1]


@pytest.mark.parametrize(
    "stopped, place, num_stages",
    [(2, "layer", 2), (4, "layer", 3), (3, "reduction", 3), (0, "layer", 2), (0, "reduction", 2)],
)
def test_S93_every_rank_names_the_rank_that_was_stopped_and_no_other(
    groups: GroupPool, stopped: int, place: str, num_stages: int
) -> None:
    world_size = 1 + 2 * (num_stages - 1)
    answers = groups.run(world_size, TARGETS + "one_rank_stops", stopped, place, num_stages, deadline_s=60)
    groups.session(world_size).close()
    for rank, (kind, message, seconds) in enumerate(answers):
        assert kind == "LinkError"
        if rank == stopped:
            assert rank == 0 or "the others have given up waiting for this rank" in message, message
            continue
        assert re.findall(r"rank (\d+) was silent", message) == [str(stopped)], f"rank {rank} was told: {message}"
        assert "ldt.timeout_s" in message
        assert 1.5 < seconds < 6, message


def test_a_rank_that_ends_is_named_by_every_rank_within_a_second(groups: GroupPool) -> None:
    answers = groups.run(5, TARGETS + "one_rank_dies", 4, deadline_s=60, check=False, grace_s=20)
    groups.session(5).close()
    for answer in answers[:4]:
        kind, message, seconds = answer
        assert kind == "LinkError"
        assert "rank 4" in message, message
        assert seconds < 5
