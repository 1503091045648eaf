"""Checkpoints over two sites: what is saved comes back, and what cannot be saved or loaded is said on every rank."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_ldt.config.schema import load_config
from tests.engine.cases import config, layout
from tests.harness import GroupPool

TARGETS = "tests.engine.checkpoints:"
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 6}}


BF16 = {"bf16": {"enabled": True}}
ZERO_1 = {"zero_optimization": {"stage": 1}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 2, "hysteresis": 1}}


@pytest.mark.parametrize("extra", [{}, ZERO_1, BF16, FP16], ids=["fp32", "fp32 and ZeRO 1", "bf16", "fp16"])
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


def shape(
    num_domains: int, num_replicas: int, num_micro_batches: int, num_chunks: int = 2, **sections: Any
) -> dict[str, Any]:
    return config(
        layout(2, num_chunks),
        num_domains=num_domains,
        num_replicas=num_replicas,
        num_micro_batches=num_micro_batches,
        optimizer="AdamW",
        ldt={"schedule": {"measure_steps": 0}},
        **sections,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A run that is saved by one job and goes on in another."""

    name: str
    saved: dict[str, Any]
    loaded: dict[str, Any]


TOLERANCES = {"fp32": ({"abs": 2e-6}, 1e-5), "bf16": ({"rel": 4e-3}, 8e-3), "fp16": ({"rel": 5e-4}, 1e-3)}
"""Of the losses and of the weights after the resume; what is loaded is equal to the bit."""


def moves() -> list[Move]:
    """Every change of D and of E, in both directions; the global batch stays the same."""
    found = []
    precisions = {"fp32": (3, {}), "fp32, ZeRO 1": (2, ZERO_1), "bf16, ZeRO 1": (2, BF16 | ZERO_1), "fp16": (3, FP16)}
    for precision, (chunks, sections) in precisions.items():
        shapes = {"E = 2": shape(2, 2, 2, chunks, **sections), "E = 1": shape(2, 1, 2, chunks, **sections)}
        if precision == "fp32, ZeRO 1":
            shapes = {"D = 2": shapes["E = 1"], "D = 1": shape(1, 1, 4, **sections)}
        for one, other in itertools.permutations(shapes):
            found.append(Move(name=f"{precision}, {one} to {other}", saved=shapes[one], loaded=shapes[other]))
    return found


def by_world_size(
    groups: GroupPool, target: str, jobs: list[tuple[dict[str, Any], str]]
) -> dict[str, list[dict[str, Any]]]:
    """Run (configuration, directory) jobs, those of one world size in one go; directory -> results by rank."""
    found: dict[str, list[dict[str, Any]]] = {}
    for size in (2, 3, 4):
        mine = [job for job in jobs if load_config(job[0]).world_size == size]
        ranks = groups.run(size, TARGETS + target, mine, 3, deadline_s=90)
        found |= {root: [rank[number] for rank in ranks] for number, (_, root) in enumerate(mine)}
    return found


def whole_optimizer(ranks: list[dict[str, Any]], stage: int) -> dict[str, Tensor]:
    """The optimizer state of a stage: slices put together, without padding; or what every replica holds alike."""
    parts = [rank for _, rank in sorted((rank["place"], rank) for rank in ranks if rank["place"][0] == stage)]
    numel = sum(value.numel() for layer in parts[0]["weights"].values() for value in layer.values())
    whole = {}
    for name, first in parts[0]["optimizer"].items():
        values = [part["optimizer"][name] for part in parts]
        is_sliced = parts[0]["is_sharded"] and first.ndim > 0
        assert is_sliced or all(torch.equal(value, first) for value in values)
        whole[name] = torch.cat(values)[:numel] if is_sliced else first
    return whole


def test_S37_a_run_goes_on_with_another_number_of_domains_or_of_edge_replicas(
    groups: GroupPool, tmp_path: Path
) -> None:
    jobs = moves()
    roots = [str(tmp_path / str(number)) for number, _ in enumerate(jobs)]
    saved = by_world_size(groups, "save_midway", [(one.saved, root) for one, root in zip(jobs, roots, strict=True)])
    loaded = by_world_size(
        groups, "load_and_train", [(one.loaded, root) for one, root in zip(jobs, roots, strict=True)]
    )
    for move, root in zip(jobs, roots, strict=True):
        loss, weight = TOLERANCES[move.name[:4]]
        before, after = saved[root], loaded[root]
        weights = {index: layer for rank in before for index, layer in rank["weights"].items()}
        later = {index: layer for rank in before for index, layer in rank["weights_later"].items()}
        for rank in after:
            assert rank["losses"] == pytest.approx(before[0]["losses"], **loss), move.name
            assert rank["position"] in (before[0]["position"], None), move.name
            assert rank["scaler"] == before[0]["scaler"], move.name
            assert rank["scale_later"] == before[0]["scale_later"], move.name
            torch.testing.assert_close(rank["weights"], {i: weights[i] for i in rank["weights"]}, atol=0, rtol=0)
            wanted = {index: later[index] for index in rank["weights_later"]}
            torch.testing.assert_close(rank["weights_later"], wanted, atol=weight, rtol=0)
        assert after[0]["position"] == {"epoch": 0, "samples": 24, "num_samples": 96, "shuffle_seed": None}
        for stage in (0, 1):
            kept, given = whole_optimizer(before, stage), whole_optimizer(after, stage)
            assert kept.keys() == given.keys(), move.name
            assert all(torch.equal(kept[name], given[name]) for name in kept), (move.name, stage)
    sharded = next(root for move, root in zip(jobs, roots, strict=True) if move.name == "fp32, ZeRO 1, D = 2 to D = 1")
    for told, step in groups.run(3, TARGETS + "load_whole", shape(2, 1, 2), sharded, deadline_s=60):
        assert "sharded, while this run keeps it whole" in told
        assert step == 3


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
