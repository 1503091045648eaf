"""The configuration: what is accepted, what is derived, and what each wrong one is told."""

from __future__ import annotations

import copy
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from ds_ldt.config.deepspeed_keys import BATCH_KEYS, TABLE
from ds_ldt.config.deepspeed_standing import flattened
from ds_ldt.config.schema import JobConfig, LDTConfig, load_config
from ds_ldt.errors import ConfigError, LDTError
from tests.bad_configs import ABSENT, BAD_CONFIGS, GOOD_CONFIG, changed


@pytest.mark.parametrize("config, fragments", [pytest.param(c, f, id=name) for name, c, f in BAD_CONFIGS])
def test_wrong_config_names_setting_value_expectation_and_fix(config: dict[str, Any], fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(config)
    text = str(raised.value)
    assert [fragment for fragment in fragments if fragment not in text] == []
    assert text.startswith("Configuration error")
    for problem in raised.value.problems:
        assert problem.key
        assert problem.expected
        assert problem.fix
        assert str(problem) in text
    # One setting, one problem: the table changes one setting, but for its last row.
    keys = [problem.key for problem in raised.value.problems]
    assert len(keys) == len(set(keys))
    assert len(keys) == (4 if "4 settings" in text else 1)


def test_table_of_wrong_configs_has_distinct_names() -> None:
    names = [name for name, _, _ in BAD_CONFIGS]
    assert len(names) == len(set(names))
    assert len(names) >= 35


def test_config_error_is_a_value_error_and_survives_pickling() -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(changed({"ldt.timeout_s": 0}))
    error = pickle.loads(pickle.dumps(raised.value))
    assert isinstance(error, LDTError)
    assert isinstance(error, ValueError)
    assert str(error) == str(raised.value)
    assert error.problems == raised.value.problems


def test_good_config_is_loaded_and_completed() -> None:
    job = load_config(GOOD_CONFIG, world_size=5)
    assert (job.num_domains, job.num_replicas, job.slice_size, job.num_stages, job.world_size) == (2, 1, 2, 3, 5)
    assert (job.micro_batch_size, job.num_micro_batches, job.train_batch_size) == (2, 4, 16)
    assert job.ldt.pipeline_num_layers == ((2, 13, 13), (2, 0, 0))
    assert job.deepspeed == {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }


def test_settings_left_out_have_the_documented_values() -> None:
    ldt = LDTConfig(pipeline_num_layers=((1, 1), (1, 0)))
    assert ldt.edge.data_parallel_size == ldt.cloud.data_parallel_size == 1
    assert ldt.edge.tensor_parallel_size == ldt.cloud.tensor_parallel_size == 1
    assert (ldt.schedule.policy, ldt.schedule.max_in_flight, ldt.schedule.split_backward) == ("auto", None, False)
    assert (ldt.schedule.memory_gb, ldt.schedule.layer_activation_mb, ldt.schedule.layer_forward_ms) == (None, None, 2)
    assert (ldt.link.latency_ms, ldt.link.bandwidth_mbps, ldt.link.message_mb) == (20.0, 1000.0, 1.0)
    assert (ldt.schedule.measure_steps, ldt.measured_costs) == (3, None)
    assert ldt.timeout_s == 300.0
    assert ldt.activation_checkpoint_interval is None
    assert (ldt.allow_exposed_edge, ldt.loss_reduction, ldt.trace, ldt.lora) == (False, None, None, None)


def test_every_ldt_setting_is_read() -> None:
    section = {
        "pipeline_num_layers": [[0, 4], [0, 0]],
        "edge": {"data_parallel_size": 2, "tensor_parallel_size": 1},
        "cloud": {"data_parallel_size": 4, "tensor_parallel_size": 1},
        "schedule": {
            "policy": "greedy",
            "max_in_flight": 3,
            "memory_gb": 16,
            "layer_activation_mb": 40,
            "layer_forward_ms": 0.5,
            "split_backward": True,
            "measure_steps": 0,
        },
        "link": {"latency_ms": 0, "bandwidth_mbps": 0, "message_mb": 12.5},
        "timeout_s": 1.5,
        "allow_exposed_edge": True,
        "loss_reduction": "micro_batch",
        "activation_checkpoint_interval": [1, 0],
        "freeze": ["vision_encoder"],
        "lora": None,
        "measured_costs": "costs.json",
        "trace": {"path": "trace", "steps": [3, 4]},
    }
    ldt = load_config({"train_batch_size": 8, "ldt": section}).ldt
    as_read = {"pipeline_num_layers": ((0, 4), (0, 0)), "trace": {"path": "trace", "steps": (3, 4)}}
    assert ldt.model_dump() == section | as_read
    with pytest.raises(ValueError, match="frozen"):
        ldt.timeout_s = 2.0  # type: ignore[misc]


def test_loading_does_not_touch_the_callers_dict() -> None:
    config = copy.deepcopy(GOOD_CONFIG)
    job = load_config(config)
    job.deepspeed["optimizer"]["params"]["lr"] = 1.0
    assert config == GOOD_CONFIG


def test_loading_a_loaded_config_returns_it_and_still_checks_the_world_size() -> None:
    job = load_config(GOOD_CONFIG)
    assert load_config(job) is job
    assert load_config(job, world_size=5) is job
    with pytest.raises(ConfigError, match="found 4 processes"):
        load_config(job, world_size=4)


def test_world_size_error_shows_the_formula_with_its_numbers() -> None:
    config = changed({"ldt.edge.data_parallel_size": 2, "ldt.cloud.data_parallel_size": 4})
    with pytest.raises(ConfigError) as raised:
        load_config(config, world_size=1)
    text = str(raised.value)
    assert "world size: found 1 process, expected E*Te + (P-1)*D*Tc = 2*1 + (3-1)*4*1 = 10" in text
    assert "Fix: launch 2 on the edge and 8 in the cloud, or change the sizes." in text
    assert load_config(config, world_size=10).world_size == 10


@pytest.mark.parametrize("absent", [(), ("train",), ("micro",), ("steps",), ("train", "steps"), ("micro", "steps")])
def test_S47_batch_numbers_left_out_follow_from_the_others(absent: tuple[str, ...]) -> None:  # noqa: N802
    names = {
        "train": "train_batch_size",
        "micro": "train_micro_batch_size_per_gpu",
        "steps": "gradient_accumulation_steps",
    }
    steps = 1 if "steps" in absent and len(absent) == 2 else 4
    numbers = {"train": 2 * steps * 2, "micro": 2, "steps": steps}
    changes = {names[name]: value for name, value in numbers.items() if name not in absent}
    config = {"ldt": GOOD_CONFIG["ldt"], **changes}
    job = load_config(config, world_size=5)
    assert {name: job.deepspeed[key] for name, key in names.items()} == numbers
    assert (job.train_batch_size, job.micro_batch_size, job.num_micro_batches) == tuple(numbers.values())


_NUMBER = st.none() | st.integers(1, 24)


@settings_of_hypothesis(deadline=None)
@given(train=st.none() | st.integers(1, 96), micro=_NUMBER, steps=_NUMBER, domains=st.integers(1, 4))
def test_S47_batch_arithmetic_accepts_what_deepspeed_accepts(  # noqa: N802
    train: int | None, micro: int | None, steps: int | None, domains: int
) -> None:
    oracle = object.__new__(DeepSpeedConfig)
    oracle.train_batch_size, oracle.train_micro_batch_size_per_gpu = train, micro
    oracle.gradient_accumulation_steps, oracle.world_size = steps, domains
    try:
        oracle._configure_train_batch_size()
        expected = (
            oracle.train_batch_size,
            oracle.train_micro_batch_size_per_gpu,
            oracle.gradient_accumulation_steps,
        )
    except AssertionError:
        expected = None
    config = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "ldt": {"pipeline_num_layers": [[1, 1], [1, 0]], "cloud": {"data_parallel_size": domains}},
    }
    if expected is None:
        with pytest.raises(ConfigError, match=re.escape("gradient_accumulation_steps * D")):
            load_config(config)
    else:
        job = load_config(config)
        assert (job.train_batch_size, job.micro_batch_size, job.num_micro_batches) == expected


def test_deepspeed_takes_the_rest_of_the_config_unchanged() -> None:
    job = load_config(
        changed(
            {
                "ldt.cloud.data_parallel_size": 1,  # DeepSpeed assumes 1 where there are no process groups
                "gradient_clipping": 0.5,
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": 0, "offload_optimizer": {"device": "none"}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
                "pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False, "pipe_partitioned": False},
                "tensorboard": {"enabled": False},
                "steps_per_print": 5,
            }
        )
    )
    config = DeepSpeedConfig(job.deepspeed)
    assert config.train_batch_size == job.train_batch_size == 8
    assert config.gradient_accumulation_steps == job.num_micro_batches == 4
    assert config.bfloat16_config.enabled
    assert config.gradient_clipping == 0.5
    assert config.optimizer_name == "adamw"
    assert config.pipeline["use_reentrant"] is False


def test_file_is_read_and_named_in_errors(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(GOOD_CONFIG), encoding="utf-8")
    assert load_config(path) == load_config(str(path)) == load_config(GOOD_CONFIG)
    path.write_text(json.dumps(changed({"ldt.timeout_s": 0})), encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(f"Configuration error in {path}: ldt.timeout_s: found 0")):
        load_config(path)


@pytest.mark.parametrize(
    "content, fragments",
    [
        (None, ["found no readable file (No such file or directory)", "each site reads its own copy"]),
        (b"{'a': 1}", ["found Expecting property name", "at line 1 column 2", "expected JSON (no comments"]),
        (b'{"a": 1,\n // why\n "b": 2}', ["at line 2 column 2", "Fix: correct the text at line 2 column 2."]),
        (b"", ["found Expecting value at line 1 column 1"]),
        (b"[1, 2]", ["found [1, 2], expected a JSON object", "Fix: put the settings in { ... }."]),
        (
            b'{"ldt": {"timeout_s": 1, "timeout_s": 2}}',
            ['found the key "timeout_s" more than once', "keep one of them"],
        ),
        (b'{"a": NaN}', ["found the constant NaN"]),
        (b"\xff\xfe", ["found bytes that are not UTF-8"]),
        (b"[" * 100_000, ["found objects nested too deeply"]),
        (b'{"train_batch_size": ' + b"9" * 5000 + b"}", ["found a number that cannot be read: Exceeds the limit"]),
    ],
    ids=["missing", "quotes", "comment", "empty", "list", "repeated", "nan", "bytes", "deep", "digits"],
)
def test_file_that_is_no_config_is_named(tmp_path: Path, content: bytes | None, fragments: list[str]) -> None:
    path = tmp_path / "job.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    assert f"config file {path}: found" in str(raised.value)
    assert [fragment for fragment in fragments if fragment not in str(raised.value)] == []


def test_S75_a_byte_order_mark_is_no_part_of_a_config(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(GOOD_CONFIG), encoding="utf-8-sig")
    assert load_config(path) == load_config(GOOD_CONFIG)


@pytest.mark.parametrize("path", ["", ".", "a\0b"])
def test_path_that_cannot_be_a_file_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="found no readable file"):
        load_config(path)


@pytest.mark.parametrize("source", [None, 3, ["a"], b"ds.json"])
def test_source_of_another_kind_is_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match="found an object of type .*, expected the path of a JSON file"):
        load_config(source)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.sampled_from(["auto", "", "true", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["stage", "enabled", "x"]), inner),
    max_leaves=6,
)
_PATHS = sorted(
    {"ldt", "ldt.edge", "ldt.link", "ldt.schedule", "ldt.pipeline_num_layers", "ldt.timeout_s", "ldt.edge.x"}
    | flattened(TABLE).keys()
)


@settings_of_hypothesis(max_examples=400, deadline=None)
@given(path=st.sampled_from(_PATHS), value=_JSON)
def test_any_value_anywhere_is_accepted_or_a_config_error(path: str, value: object) -> None:
    try:
        job = load_config(changed({path: value}))
    except ConfigError as error:
        owners = {path.partition(".")[0]} | ({"train_batch_size"} if path in BATCH_KEYS else set())
        assert {problem.key.partition(".")[0].partition("[")[0] for problem in error.problems} <= owners  # noqa: PT017
        assert error.problems  # noqa: PT017
    else:
        assert isinstance(job, JobConfig)
        assert "ldt" not in job.deepspeed


def test_table_helper_removes_settings() -> None:
    assert "optimizer" not in changed({"optimizer": ABSENT})
