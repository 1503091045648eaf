"""What `ds-ldt plan --memory` says before a run, against what the run then holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_ldt.cli import main as cli
from ds_ldt.config.schema import load_config
from ds_ldt.runtime.dry_run import footprint_of
from tests.engine.cases import config
from tests.engine.memory_cases import LENGTH, MODEL
from tests.harness import GroupPool
from tests.models.tiny import tiny_config

ADAPTERS = {"r": 16, "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]}
IN_THE_CLOUD = {**ADAPTERS, "layers_to_transform": [1, 2], "lora_dropout": 0.1, "use_dora": True}

CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, ZeRO 1": {"zero_optimization": {"stage": 1}},
    "bf16": {"bf16": {"enabled": True}},
    "fp32, checkpoints": {"pipeline": {"activation_checkpoint_interval": 1}},
    "fp32, adapters": {"ldt": {"lora": ADAPTERS}},
    "bf16, adapters of the cloud, with dropout": {"bf16": {"enabled": True}, "ldt": {"lora": IN_THE_CLOUD}},
    "fp32, adapters of the tail": {"ldt": {"lora": {**ADAPTERS, "layers_to_transform": [3]}}},
    "bf16, checkpoints": {"bf16": {"enabled": True}, "pipeline": {"activation_checkpoint_interval": 1}},
}


def test_S33_the_estimate_is_within_a_fifth_of_what_ranks_hold(
    groups: GroupPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    matrix = [[1, 2], [1, 0]]
    tiny_config("llama", num_hidden_layers=4, **MODEL).save_pretrained(tmp_path)
    sizes: dict[str, Any] = {"micro_batch_size": 4, "num_micro_batches": 6, "num_domains": 2, "optimizer": "AdamW"}
    cases = [
        config(matrix, **sizes, **{**case, "ldt": {"schedule": {"measure_steps": 0}, **case.get("ldt", {})}})
        for case in CASES.values()
    ]
    measured = groups.run(3, "tests.engine.memory_cases:peaks", cases, deadline_s=240)
    passes = footprint_of(load_config(cases[0]), str(tmp_path), sequence_length=LENGTH).passes
    for index, (name, settings) in enumerate(zip(CASES, cases, strict=True)):
        path = tmp_path / "job.json"
        path.write_text(json.dumps(settings))
        options = ["--json", "--memory", "--model", str(tmp_path), "--sequence-length", str(LENGTH)]
        assert cli.main(["plan", str(path), *options]) == 0
        memory = json.loads(capsys.readouterr().out)["memory"]
        for rank in range(3):
            peak, held = measured[rank][index]
            estimate = memory["ranks"][str(rank)]
            assert 0.8 < estimate["peak"] / peak < 1.2, f"{name}, rank {rank}: measured {peak}, {estimate}"
            if name == "fp32":
                assert held == {stage: pytest.approx(passes[stage].held, rel=0.05) for stage in held}
