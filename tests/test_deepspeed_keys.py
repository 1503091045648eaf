"""Every key that DeepSpeed reads has a standing here, and what is accepted DeepSpeed accepts too."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from typing import Any

import pytest
from deepspeed.runtime import config as runtime_config
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from ds_ldt.config.deepspeed_keys import BATCH_KEYS, TABLE
from ds_ldt.config.deepspeed_standing import ANYTHING, Setting, Standing, flattened
from ds_ldt.config.schema import LDT_PATHS, load_config
from ds_ldt.errors import ConfigError
from tests import deepspeed_sources
from tests.bad_configs import BAD_CONFIGS, changed

SETTINGS = flattened(TABLE)
SECTIONS = sorted(path for path, setting in SETTINGS.items() if setting.keys is not None)
PLAIN = sorted(path for path, setting in SETTINGS.items() if setting.keys is None and path not in BATCH_KEYS)

# Names that DeepSpeed looks up only where a section is used that is refused as a whole, by the module that does so.
OWNERS = {
    "deepspeed.runtime.data_pipeline.config": ("data_efficiency.data_sampling", "data_efficiency.data_routing"),
    "deepspeed.runtime.tensor_parallel.config": ("tensor_parallel",),
}
# What a base class of its models looks up in the descriptions of their fields, and a name inside optimizer.params.
NO_KEYS = {"deprecated", "deprecated_msg", "new_param", "new_param_fn", "set_new_param", "max_grad_norm"}


def is_classified(path: str) -> bool:
    """Whether a key is in the table, or lies in something that is refused whatever it holds."""
    parts = path.split(".")
    above = (".".join(parts[:depth]) for depth in range(1, len(parts)))
    return path in SETTINGS or any(_is_refused(SETTINGS[a]) for a in above if a in SETTINGS)


def _is_refused(setting: Setting) -> bool:
    return setting.standing is Standing.REFUSED and not setting.accepts({})


def unclassified_names(looked_up: dict[str, set[str]]) -> dict[str, set[str]]:
    known = {path.rpartition(".")[2] for path in {*SETTINGS, *deepspeed_sources.paths_read()}} | NO_KEYS
    left = {module: names - known for module, names in looked_up.items() if module not in OWNERS}
    return {module: names for module, names in left.items() if names}


def test_S81_every_key_that_deepspeed_reads_is_classified() -> None:
    paths = deepspeed_sources.paths_read()
    assert {"checkpoint.parallel_write.pipeline_stage", "zero_optimization.offload_param.pin_memory"} <= paths
    assert len(paths) > 250
    assert sorted(path for path in paths if not is_classified(path)) == []


def test_S81_every_name_that_deepspeed_looks_up_is_classified() -> None:
    looked_up = deepspeed_sources.all_names_looked_up()
    assert len(looked_up) > 12
    assert unclassified_names(looked_up) == {}
    for sections in OWNERS.values():
        assert all(_is_refused(SETTINGS[section]) for section in sections)


def test_S81_a_new_key_of_a_new_deepspeed_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    source = deepspeed_sources.config_modules()["deepspeed.runtime.config"].read_text()
    more = (
        "\ndef get_new(d):\n    return get_scalar_param(d, 'brand_new', 0) or 'also_new' in d or d[TRAIN_BATCH_SIZE]"
    )
    names = {"new": deepspeed_sources.names_looked_up(source + more, runtime_config)}
    assert unclassified_names(names) == {"new": {"brand_new", "also_new"}}

    class Newer(DeepSpeedZeroConfig):
        brand_new: int = 0

    fields = deepspeed_sources.fields_of(Newer, "zero_optimization.")
    assert [path for path in fields if not is_classified(path)] == ["zero_optimization.brand_new"]

    read = DeepSpeedConfig._initialize_params

    def reads_more(self: Any, settings: Any) -> None:
        settings.get("brand_new")
        settings.get("checkpoint", {}).get("brand_new")
        read(self, settings)

    monkeypatch.setattr(DeepSpeedConfig, "_initialize_params", reads_more)
    paths = deepspeed_sources.paths_read()
    assert sorted(path for path in paths if not is_classified(path)) == ["brand_new", "checkpoint.brand_new"]


def test_what_deepspeed_does_not_read_is_refused() -> None:
    paths, sections = deepspeed_sources.paths_read(), ("optimizer.params", "scheduler.params")
    unread = {path for path in SETTINGS if path not in paths and path not in sections}
    assert {path for path in unread if SETTINGS[path].standing is not Standing.REFUSED} == set()


def test_a_standing_that_needs_a_reason_has_one() -> None:
    bare = [path for path, s in SETTINGS.items() if s.standing is not Standing.HONOURED and len(s.why) < 8]
    assert bare == []


# Accepted values of a setting: its example, and what else is worth trying.
TRIED = (None, False, True, 0, 1, 2, 0.5, 5e8, -1, "", "auto", "fp32", "bf16", "Warn", "mean", [], ["a"], {}, {"a": 1})
CONTEXT: dict[str, dict[str, Any]] = {
    "wall_clock_breakdown": {"steps_per_print": 1},
    "optimizer.params": {"optimizer.type": "AdamW"},
    "scheduler.params": {"scheduler.type": "WarmupLR"},
    "scheduler.type": {"scheduler.params": {"warmup_num_steps": 2}},
    "fp16.enabled": {"bf16.enabled": False},
}


@pytest.mark.parametrize("path", PLAIN)
def test_S81_what_is_accepted_deepspeed_accepts_and_all_else_names_its_key(path: str) -> None:
    setting, accepted = SETTINGS[path], 0
    for value in (*TRIED, setting.example):
        changes = {"ldt.cloud.data_parallel_size": 1, **CONTEXT.get(path, {}), path: value}
        try:
            job = load_config(changed(changes))
        except ConfigError as error:
            (problem,) = error.problems  # noqa: PT017
            assert problem.key.startswith(path) or path.startswith(problem.key)  # noqa: PT017
            continue
        accepted += 1
        DeepSpeedConfig(copy.deepcopy(job.deepspeed))
    refuses_all = setting.example is None and not setting.accepts(None)
    assert bool(accepted) == (not refuses_all)


@pytest.mark.parametrize("path", SECTIONS)
def test_S81_an_unknown_key_is_refused_at_every_depth_with_a_hint(path: str) -> None:
    near = next((name for name, one in SETTINGS[path].keys.items() if one.standing is not Standing.REFUSED), None)  # type: ignore[union-attr]
    name = f"{near or 'key'}x"
    with pytest.raises(ConfigError) as raised:
        load_config(changed({f"{path}.{name}": 1}))
    problem = raised.value.problems[0]
    assert problem.key == f"{path}.{name}"
    assert problem.fix.startswith(f'did you mean "{near}"?' if near else "remove it")


SILENT = {
    "layers are lost": {"checkpoint": {"parallel_write": {"pipeline_stage": True}}},
    "another writer": {"checkpoint": {"writer": {"type": "fast"}}},
    "another engine for checkpoints": {"datastates_ckpt": {}},
    "null turns it on too": {"datastates_ckpt": None},
    "old files": {"checkpoint": {"checkpoint_serialization": False}},
    "node local": {"checkpoint": {"use_node_local_storage": True}},
    "activations on the host": {"activation_checkpointing": {"cpu_checkpointing": True}},
    "activations in parts": {"activation_checkpointing": {"partition_activations": True}},
    "number of checkpoints": {"activation_checkpointing": {"number_checkpoints": 4}},
    "random-LTD without its switch": {"data_efficiency": {"data_routing": {"random_ltd": {"enabled": True}}}},
    "flops": {"flops_profiler": {"enabled": True}},
    "messages": {"comms_logger": {"enabled": True}},
    "overflow": {"bf16": {"enabled": True, "check_grad_overflow": False}},
    "buffers": {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"}},
    "dtype of the parameters": {"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp16"}},
    "the caller's steps": {"managed_gradient_accumulation": False},
    "norm": {"zero_optimization": {"stage": 1, "compute_grad_norm": False}},
    "zenflow": {"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}},
    "quantised": {"zero_optimization": {"zero_quantized_gradients": True}},
    "part of the states": {"zero_optimization": {"offload_optimizer": {"device": "none", "ratio": 0.5}}},
    "compiled": {"compile": {"offload_activation": True}},
    "times without a step": {"wall_clock_breakdown": True},
}


@pytest.mark.parametrize("name", SILENT)
def test_S81_a_setting_that_would_be_ignored_or_lose_weights_is_refused(name: str) -> None:
    key = list(SILENT[name])[-1]
    with pytest.raises(ConfigError) as raised:
        load_config({**changed({}), **SILENT[name]})
    (problem,) = raised.value.problems
    assert problem.key.startswith(key)
    assert "(" in problem.expected or problem.key in ("wall_clock_breakdown", "data_types.param_dtype")
    assert problem.fix


def test_configurations_that_are_full_of_defaults_are_accepted() -> None:
    load_config(
        changed(
            {
                "zero_optimization": {
                    "stage": 1,
                    "allgather_partitions": True,
                    "allgather_bucket_size": 5e8,
                    "reduce_bucket_size": 500000000,
                    "overlap_comm": False,
                    "reduce_scatter": True,
                    "contiguous_gradients": True,
                    "offload_optimizer": {"device": "none", "pin_memory": True},
                },
                "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
                "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1, "top_modules": 1},
                "checkpoint": {"tag_validation": "WARN", "parallel_write": {"pipeline_stage": False}, "writer": None},
                "comms_logger": {"enabled": False, "verbose": False, "prof_all": True, "debug": False},
                "data_types": {"grad_accum_dtype": "fp32", "param_dtype": "fp32"},
                "datastates_ckpt": False,
                "timers": {"throughput": {"enabled": True, "synchronized": True}},
            }
        )
    )


@pytest.mark.parametrize("config", [pytest.param(c, id=name) for name, c, _ in BAD_CONFIGS])
def test_whatever_a_fix_quotes_is_json(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(config)
    for problem in raised.value.problems:
        for place in re.finditer(r'"[A-Za-z_0-9]+": ', problem.fix):
            json.JSONDecoder().raw_decode(problem.fix[place.end() :])


@pytest.mark.parametrize("path", sorted(LDT_PATHS.values()))
def test_an_example_in_a_fix_of_the_ldt_section_is_accepted(path: str) -> None:
    wrong: Any = {"what is": "this"} if path not in ("ldt.edge", "ldt.cloud", "ldt.schedule", "ldt.link") else [1]
    around = {"ldt.trace": {"path": "trace", "steps": [1, 2]}} if path.startswith("ldt.trace.") else {}
    with pytest.raises(ConfigError) as raised:
        load_config(changed({**around, path: wrong}))
    quoted = next((json_in(p.fix) for p in raised.value.problems if p.key == path and json_in(p.fix)), None)
    if quoted is not None:  # a typing error inside a section is answered by its keys
        assert quoted[0] == path.rpartition(".")[2]
        settings = {"ldt.freeze": []} if path.startswith("ldt.lora") else {}
        load_config(changed({**around, **settings, path: quoted[1]}))


_QUOTED = re.compile(r'(?:write|e\.g\.) ("[A-Za-z_0-9]+": .*)')


def json_in(fix: str) -> tuple[str, Any] | None:
    """The setting that a fix writes out, if it does: its name and its value, which has to be JSON."""
    found = _QUOTED.search(fix)
    if found is None:
        return None
    name, _, rest = found.group(1).partition(": ")
    value, _ = json.JSONDecoder().raw_decode(rest)
    return json.loads(name), value


@pytest.mark.parametrize("path", sorted(SETTINGS))
def test_a_fix_quotes_json_that_is_accepted(path: str) -> None:
    setting, name = SETTINGS[path], path.rpartition(".")[2]
    quoted = json_in(setting.advice(name))
    assert quoted or not re.search(r'": ', setting.advice(name))
    if quoted and quoted[0] == name:
        assert setting.accepts(quoted[1])
    if setting.standing is not Standing.REFUSED and setting.accepts is not ANYTHING.accepts:
        assert setting.accepts(setting.example) or dataclasses.asdict(setting)["example"] is None


@pytest.mark.parametrize(
    "changes, fix",
    [
        ({"pipeline.partition_method": "uniform"}, "pipeline_num_layers"),
        ({"pipeline.partition_metod": "uniform"}, "ldt.pipeline_num_layers says which layers"),
        ({"pipeline.partition": "uniform"}, '"pipeline_num_layers": [[2, 13, 13], [2, 0, 0]]'),
        ({"pipeline_num_layers": [[1]]}, "move it to ldt.pipeline_num_layers"),
        ({"activation_checkpoint_interval": 1}, "move it to ldt.activation_checkpoint_interval"),
        ({"loss_scale": 1}, "move it to fp16.loss_scale"),
        ({"ldt.gradient_clipping": 1}, "move it to gradient_clipping"),
        ({"ldt.link.timeout_s": 1}, "move it to ldt.timeout_s"),
        ({"elastisity": {}}, 'remove it. If "elasticity" was meant: expected no such key (DeepSpeed has removed it'),
        ({"autotuning.enable": False}, 'If "enabled" was meant: expected false (it is not supported yet)'),
        ({"zero_optimization.overlap_com": True}, 'did you mean "overlap_comm"?'),
    ],
)
def test_a_hint_never_leads_to_a_key_that_would_be_refused(changes: dict[str, Any], fix: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(changed(changes))
    (problem,) = raised.value.problems
    assert fix in str(problem)
    assert "pipe_partitioned" not in problem.fix
