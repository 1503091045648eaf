"""What a job says when it starts, and settings of DeepSpeed that change nothing in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_ldt.config.deepspeed_keys import TABLE
from ds_ldt.config.deepspeed_standing import BOOLEAN, Standing, flattened
from tests.engine.cases import config, layout
from tests.harness import GroupPool

TARGETS = "tests.engine.starting:"
STEPS = 4

pytestmark = pytest.mark.distributed


def _with_schedule(name: str, **params: Any) -> dict[str, Any]:
    return config(layout(2, 2), num_domains=2, num_replicas=2, scheduler={"type": name, "params": params})


SCHEDULES: dict[str, tuple[dict[str, Any], int]] = {
    "DeepSpeed's warm-up": (_with_schedule("WarmupLR", warmup_max_lr=0.1, warmup_num_steps=10), 2),
    "linear": (_with_schedule("WarmupLR", warmup_max_lr=0.1, warmup_num_steps=10, warmup_type="linear"), 2),
    "with decay": (_with_schedule("WarmupDecayLR", warmup_max_lr=0.1, warmup_num_steps=3, total_num_steps=9), 2),
    "cosine": (_with_schedule("WarmupCosineLR", warmup_num_steps=3, total_num_steps=9), 2),
    "from above 0": (_with_schedule("WarmupLR", warmup_min_lr=0.01, warmup_max_lr=0.1, warmup_num_steps=10), 0),
    "torch's": (_with_schedule("StepLR", step_size=2), 0),
    "none": (config(layout(2, 2), num_domains=2, num_replicas=2), 0),
}


def test_S73_the_steps_that_a_schedule_gives_a_rate_of_0_are_said(groups: GroupPool) -> None:
    cases = {name: settings for name, (settings, _) in SCHEDULES.items()}
    ranks = groups.run(4, TARGETS + "logged_at_start", cases, STEPS, deadline_s=120)
    for name, (_, steps) in SCHEDULES.items():
        for rank in ranks:
            assert rank[name]["changed"] == [False] * steps + [True] * (STEPS - steps), name
        said = [text for text in ranks[0][name]["texts"] if "learning rate of 0" in text]
        assert [f"gives the first {steps} training step" in text for text in said] == [True] * bool(steps), name
        assert not any("learning rate of 0" in text for rank in ranks[1:] for text in rank[name]["texts"])


def test_S73_a_schedule_of_the_script_is_looked_at_without_being_moved(groups: GroupPool) -> None:
    edge, cloud = groups.run(2, TARGETS + "schedules_of_the_script", config(layout(2, 2), optimizer=None))
    assert cloud == []
    (said,) = edge
    assert said.startswith("ds_ldt: LambdaLR gives the first 4 training steps of a new run a learning rate of 0")


def test_the_parameters_of_the_whole_model_are_counted_once(groups: GroupPool) -> None:
    whole = config(layout(2, 2), num_domains=2, num_replicas=2)
    frozen = config(layout(2, 2), num_domains=2, num_replicas=2, ldt={"freeze": ["first"]})
    half = config(layout(2, 2), num_domains=2, num_replicas=2, bf16={"enabled": True})
    ranks = groups.run(4, TARGETS + "logged_at_start", {"whole": whole, "frozen": frozen, "half": half}, 0)
    sizes = {**ranks[0]["whole"]["sizes"], **ranks[2]["whole"]["sizes"]}
    assert sorted(sizes) == list(range(5))
    total = sum(sizes.values())
    for name, trained in (("whole", total), ("frozen", total - sizes[0]), ("half", total)):
        (said,) = [text for text in ranks[0][name]["texts"] if text.startswith("ds_ldt: the model has")]
        assert said.startswith(f"ds_ldt: the model has {total} parameters ("), name
        assert f"), {trained} of them trained (" in said, name
        assert not any("the model has" in text for rank in ranks[1:] for text in rank[name]["texts"])


def test_tied_parameters_count_once(groups: GroupPool) -> None:
    settings = config([[1, 1], [1, 0]], num_domains=2)
    (said,), *others = groups.run(3, TARGETS + "parameters_of_tied_layers", settings)
    assert said.startswith(f"ds_ldt: the model has {2 * (8 * 8 + 8)} parameters (")
    assert others == [[], []]


def _harmless(boolean: bool) -> dict[str, Any]:
    """Every setting that is said to be harmless, with a value that is not what DeepSpeed has by default."""
    settings: dict[str, Any] = {}
    for path, setting in flattened(TABLE).items():
        if setting.standing is Standing.HARMLESS:
            *sections, name = path.split(".")
            place = settings
            for section in sections:
                place = place.setdefault(section, {})
            is_switch = setting.accepts(True) and setting.expected.startswith(BOOLEAN.expected)
            place[name] = boolean if is_switch else setting.example
    for section in ("autotuning", "comms_logger", "flops_profiler", "hybrid_engine", "torch_autocast"):
        settings[section]["enabled"] = False
    for kind in ("offload_optimizer", "offload_param"):
        settings["zero_optimization"][kind]["device"] = "none"
    del settings["optimizer"]
    return settings


def test_S81_settings_that_are_called_harmless_change_no_bit(groups: GroupPool, tmp_path: Path) -> None:
    honoured = {
        "steps_per_print": 1,
        "wall_clock_breakdown": True,
        "dump_state": True,
        "disable_python_gc": True,
        "log_level": "warning",
        "dataloader_drop_last": True,
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"},
        "data_types": {"grad_accum_dtype": "fp32", "keep_in_fp32_modules": "auto"},
        "checkpoint": {"tag_validation": "Fail", "parallel_write": {"pipeline_stage": False}, "writer": None},
    }
    plain: dict[str, dict[str, Any]] = {
        "fp32": {},
        "ZeRO 1": {"zero_optimization": {"stage": 1}},
        "bf16": {"bf16": {"enabled": True}},
    }
    cases = {}
    for name, settings in plain.items():
        cases[name, "plain"] = settings
        for boolean in (True, False):
            harmless = _harmless(boolean)
            harmless["zero_optimization"] |= settings.get("zero_optimization", {})
            cases[name, f"harmless {boolean}"] = {**settings, **harmless}
    cases["fp32", "honoured"] = honoured
    runs = {
        key: config(layout(2, 2), num_domains=2, **{"steps_per_print": 1000, **more}) | more
        for key, more in ((key, dict(more)) for key, more in cases.items())
    }
    edge, *cloud = groups.run(3, TARGETS + "losses_of", runs, 3, deadline_s=180)
    assert all(rank == edge for rank in cloud)
    for (name, kind), seen in edge.items():
        assert seen == edge[name, "plain"], f"{name}, {kind}"
    assert list(tmp_path.rglob("*.csv"))
