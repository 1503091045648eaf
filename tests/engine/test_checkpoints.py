"""Checkpoints over two sites: what is saved comes back, and what cannot be saved or loaded is said on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.cases import config, layout
from tests.harness import GroupPool

TARGETS = "tests.engine.checkpoints:"
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 6}}


ZERO_1 = {"zero_optimization": {"stage": 1}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 2, "hysteresis": 1}}


@pytest.mark.parametrize("extra", [{}, {"bf16": {"enabled": True}}, FP16], ids=["fp32", "bf16", "fp16"])
def test_S38_S40_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(
    groups: GroupPool, tmp_path: Path, extra: dict[str, Any]
) -> None:
    as_hinted = {"schedule": {"measure_steps": 0}}  # another plan may add up gradients in another sequence
    settings = config(layout(2, 2), num_domains=2, optimizer="AdamW", scheduler=WARMUP, ldt=as_hinted, **extra)
    ranks = groups.run(3, TARGETS + "resume", settings, str(tmp_path), 3, deadline_s=90)
    for rank in ranks:
        assert rank["resumed"] == rank["losses"][3:]
        whole, resumed = rank["weights"]
        for index, layer in whole.items():
            for name, value in layer.items():
                assert torch.equal(value, resumed[index][name]), f"layer {index} {name}"
        assert rank["lr"][0] == rank["lr"][1]
        assert rank["steps"] == 6
        assert rank["scales"] == ([2.0**14] * 2 if "fp16" in extra else [1.0, 1.0])
        assert rank["client_state"] == {"epoch": 3}
        assert Path(rank["path"]).name == "global_step3"
    assert {path.name for path in (tmp_path / "edge" / "again").glob("layer_*")} == {
        f"layer_{index:02d}-model_states.pt" for index in (0, 1, 3, 4)
    }
    assert [path.name for path in (tmp_path / "cloud" / "again").glob("layer_*")] == ["layer_02-model_states.pt"]


def test_S37_sharded_optimizer_states_load_with_another_number_of_domains(groups: GroupPool, tmp_path: Path) -> None:
    as_hinted = {"schedule": {"measure_steps": 0}}
    one, two = (
        config(layout(2, 2), num_domains=d, num_micro_batches=m, optimizer="AdamW", ldt=as_hinted, **ZERO_1)  # type: ignore[arg-type]
        for d, m in ((1, 4), (2, 2))
    )
    for (saved_by, settings), (loaded_by, others) in (((3, two), (2, one)), ((2, one), (3, two))):
        root = str(tmp_path / f"by {saved_by}")
        expected = groups.run(saved_by, TARGETS + "save_midway", settings, root, 3, deadline_s=60)[0]
        for rank in groups.run(loaded_by, TARGETS + "load_and_train", others, root, 3, deadline_s=60):
            assert rank["losses"] == pytest.approx(expected, abs=2e-6)
            assert "sharded, while this run keeps it whole" in rank["told"]
            assert rank["steps"] == 3


def test_an_incomplete_checkpoint_is_refused_on_every_rank_and_harms_no_earlier_one(
    groups: GroupPool, tmp_path: Path
) -> None:
    edge, cloud = groups.run(2, TARGETS + "failures", config(layout(2, 2)), str(tmp_path), deadline_s=90)
    for told in (edge, cloud):
        assert told["nothing there"] == (None, None)
        assert "the edge saves tag 'a' and the cloud 'b'" in told["tags"]
        assert "no committed checkpoint with tag 'other' on both sites" in told["unknown tag"]
        assert "['good']" in told["unknown tag"]
        assert told["latest"] == "good"
    assert "client_state holds ['optimizer']" in cloud["reserved"]
    assert "1 other rank(s) failed" in edge["reserved"]
    assert "in the way" not in edge["cannot write"]
    assert "1 other rank(s) failed" in edge["cannot write"]
    assert "could not" in cloud["cannot write"]
    assert "layer_00-model_states.pt is missing" in edge["missing file"]
    assert "other rank(s) failed" in cloud["missing file"]


def test_both_sites_may_save_into_one_directory_and_overwrite_a_tag(groups: GroupPool, tmp_path: Path) -> None:
    files, _ = groups.run(2, TARGETS + "same_directory", config(layout(2, 2)), str(tmp_path), deadline_s=60)
    assert files == [
        "latest",
        "t/data_replica_00.pt",
        *[f"t/layer_{index:02d}-model_states.pt" for index in range(5)],
        "t/ldt_checkpoint_cloud.json",
        "t/ldt_checkpoint_edge.json",
        "t/mp_rank_00_model_states.pt",
        "t/mp_rank_01_model_states.pt",
    ]


def test_S36_a_checkpoint_without_frozen_parameters_resumes_and_a_missing_trained_one_is_an_error(
    groups: GroupPool, tmp_path: Path
) -> None:
    settings = config(layout(2, 2), ldt={"schedule": {"measure_steps": 0}})
    edge, cloud = groups.run(2, TARGETS + "own_adapters", settings, str(tmp_path), deadline_s=60)
    for told in (edge, cloud):
        assert told["same"]
        assert told["kept"] == [f"linear.lora_{matrix}.default.weight" for matrix in "AB"]
        assert told["not strict"]
    assert "missing: linear.lora_A.default.weight. Fix: give ldt.lora and ldt.freeze" in cloud["missing"]
    assert "1 other rank(s) failed" in edge["missing"]
