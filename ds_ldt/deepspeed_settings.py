"""The part of the JSON that belongs to DeepSpeed: what is passed on, and what is refused by name.

DeepSpeed ignores unknown keys in silence, and a setting that ds_ldt does not honour would be ignored too. So a key is
either known and checked, or refused with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ds_ldt.checks import GivenBatch, is_whole
from ds_ldt.errors import Absent, ConfigProblem
from ds_ldt.rules import Rule, boolean, is_number, named_settings, off, text
from ds_ldt.spelling import unknown_key

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

# Refused with any value, since DeepSpeed refuses them or would do what a split pipeline does not: key -> reason.
_REMOVED = "DeepSpeed has removed it"
REFUSED_KEYS: Mapping[str, str] = {
    "amp": f'{_REMOVED}; use "bf16"',
    "compression_training": _REMOVED,
    "curriculum_learning": _REMOVED,
    "eigenvalue": _REMOVED,
    "elasticity": f"{_REMOVED}; the batch numbers are fixed",
    "expert_parallel": "expert parallelism is not supported yet",
    "graph_harvesting": _REMOVED,
    "nebula": _REMOVED,
    "progressive_layer_drop": _REMOVED,
    "quantize_training": _REMOVED,
    "sequence_parallel_size": "sequence parallelism is not supported yet",
    "sparse_attention": _REMOVED,
    "sparse_gradients": f"{_REMOVED}; gradients are reduced dense",
    "tensor_parallel": "tensor parallelism is set by ldt.edge.tensor_parallel_size and ldt.cloud.tensor_parallel_size",
    "weight_quantization": "quantised weights are not supported yet",
}

BOOLEAN_KEYS = frozenset(
    {
        "dataloader_drop_last",
        "disable_allgather",
        "disable_python_gc",
        "dump_state",
        "managed_gradient_accumulation",
        "memory_breakdown",
        "prescale_gradients",
        "use_data_before_expert_parallelism",
        "wall_clock_breakdown",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
    }
)

# Sections with an "enabled" switch; those of the second set have to be off.
SWITCHED_SECTIONS = frozenset(
    {
        "autotuning",
        "bf16",
        "comet",
        "comms_logger",
        "csv_monitor",
        "data_efficiency",
        "flops_profiler",
        "fp16",
        "hybrid_engine",
        "tensorboard",
        "torch_autocast",
        "wandb",
    }
)
OFF_SECTIONS = frozenset({"autotuning", "data_efficiency", "hybrid_engine", "torch_autocast"})

PLAIN_SECTIONS = frozenset(
    {
        "activation_checkpointing",
        "aio",
        "checkpoint",
        "compile",
        "data_types",
        "datastates_ckpt",
        "optimizer",
        "pipeline",
        "scheduler",
        "timers",
        "zero_optimization",
    }
)

OTHER_KEYS = frozenset(
    {
        "communication_data_type",
        "gradient_allreduce_op",
        "gradient_clipping",
        "gradient_predivide_factor",
        "log_level",
        "seq_parallel_communication_data_type",
        "steps_per_print",
        "vocabulary_size",
    }
)

KNOWN_KEYS = frozenset(BATCH_KEYS) | BOOLEAN_KEYS | SWITCHED_SECTIONS | PLAIN_SECTIONS | OTHER_KEYS


_OFFLOADS = ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param", "zenflow")
_HIGHEST_SCALE_POWER = 126
_NO_OFFLOAD = "no offload (it is not supported yet; allowed: null)"


def _is_no_offload(value: object) -> bool:
    return value in (None, False) or (isinstance(value, Mapping) and value.get("device", "none") in (None, "none"))


RULES: tuple[Rule, ...] = (
    *(boolean(key) for key in sorted(BOOLEAN_KEYS - {"prescale_gradients"})),
    *(named_settings(key) for key in sorted(SWITCHED_SECTIONS | PLAIN_SECTIONS)),
    *(boolean(f"{key}.enabled") for key in sorted(SWITCHED_SECTIONS - OFF_SECTIONS)),
    *(off(f"{key}.enabled", "it is not supported yet") for key in sorted(OFF_SECTIONS)),
    off("fp16.auto_cast", "batch_fn= and the layers decide what is cast"),
    off("fp16.fp16_master_weights_and_grads", "master weights and accumulated gradients are fp32"),
    boolean("fp16.consecutive_hysteresis"),
    Rule(
        key="fp16.loss_scale",
        accepts=lambda value: is_number(value, 0),
        expected="the factor of the losses, a number >= 0; 0 means that it adapts",
        fix='write e.g. "loss_scale": 0',
    ),
    Rule(
        key="fp16.initial_scale_power",
        accepts=lambda value: is_whole(value, 0) and value <= _HIGHEST_SCALE_POWER,
        expected=f"a whole number from 0 to {_HIGHEST_SCALE_POWER}, the power of 2 of the first factor of the losses",
        fix='write e.g. "initial_scale_power": 16',
    ),
    *(
        Rule(
            key=f"fp16.{name}",
            accepts=lambda value: is_whole(value, 1),
            expected=f"a whole number {unit} >= 1",
            fix=f'write e.g. "{name}": {example}',
        )
        for name, unit, example in (
            ("loss_scale_window", "of steps", 1000),
            ("hysteresis", "of overflows", 2),
            ("min_loss_scale", "for the least factor of the losses", 1),
        )
    ),
    boolean("bf16.immediate_grad_update"),
    boolean("bf16.check_grad_overflow"),
    off("bf16.bf16_master_weights_and_grads", "master weights and optimizer states are fp32"),
    off("bf16.bf16_optimizer_states", "master weights and optimizer states are fp32"),
    off("prescale_gradients", "gradients are averaged after their sum"),
    off("compile.deepcompile", "it is not supported yet"),
    off("checkpoint.load_universal", "universal checkpoints are not supported yet"),
    Rule(
        key="gradient_predivide_factor",
        accepts=lambda value: not isinstance(value, bool) and value == 1,
        expected="1 (gradients are averaged after their sum)",
        fix="remove it",
    ),
    Rule(
        key="gradient_allreduce_op",
        accepts=lambda value: value == "mean",
        expected='"mean" (gradients are averaged over the domains; a sum is not supported yet)',
        fix="remove it",
    ),
    Rule(
        key="communication_data_type",
        accepts=lambda value: value in (None, "fp32"),
        expected='"fp32" or null (gradients are reduced in fp32)',
        fix="remove it",
    ),
    Rule(
        key="data_types.grad_accum_dtype",
        accepts=lambda value: value in (None, "fp32"),
        expected='"fp32" or null (gradients are accumulated in fp32)',
        fix="remove it",
    ),
    Rule(
        key="gradient_clipping",
        accepts=lambda value: is_number(value, 0),
        expected="the largest gradient norm, a number >= 0; 0 means no clipping",
        fix='write e.g. "gradient_clipping": 1.0',
    ),
    Rule(
        key="steps_per_print",
        accepts=lambda value: is_whole(value, 1),
        expected="a whole number of steps >= 1",
        fix='write e.g. "steps_per_print": 10',
    ),
    Rule(
        key="zero_optimization.stage",
        accepts=lambda value: is_whole(value, 0) and value <= 1,
        expected="0 or 1 (stage 1 shards optimizer states; stages 2 and 3 split what a pipeline needs whole)",
        fix='write "stage": 1, or remove the section',
    ),
    *(
        Rule(
            key=f"zero_optimization.{name}",
            accepts=_is_no_offload,
            expected=_NO_OFFLOAD,
            fix="remove it",
        )
        for name in _OFFLOADS
    ),
    Rule(
        key="pipeline.activation_checkpoint_interval",
        accepts=lambda value: is_whole(value, 0),
        expected="a whole number of layers >= 0; 0 means no activation checkpointing",
        fix='write e.g. "activation_checkpoint_interval": 1',
    ),
    boolean("pipeline.use_reentrant"),
    off("pipeline.pipe_partitioned", "activations cross the link whole"),
    off("pipeline.grad_partitioned", "gradients cross the link whole"),
    text("optimizer.type", "AdamW"),
    named_settings("optimizer.params"),
    Rule(
        key="optimizer.params.max_grad_norm",
        accepts=lambda value: False,
        expected="no such key (DeepSpeed refuses it)",
        fix='use the top-level "gradient_clipping"',
    ),
    text("scheduler.type", "WarmupLR"),
    named_settings("scheduler.params"),
)

# Sections all of whose keys are known here.
_CLOSED: Mapping[str, frozenset[str]] = {
    "bf16": frozenset(
        {
            "enabled",
            "immediate_grad_update",
            "check_grad_overflow",
            "bf16_master_weights_and_grads",
            "bf16_optimizer_states",
        }
    ),
    "fp16": frozenset(
        {
            "enabled",
            "auto_cast",
            "loss_scale",
            "initial_scale_power",
            "loss_scale_window",
            "hysteresis",
            "consecutive_hysteresis",
            "min_loss_scale",
            "fp16_master_weights_and_grads",
        }
    ),
    "optimizer": frozenset({"type", "params", "legacy_fusion"}),
    "pipeline": frozenset({"activation_checkpoint_interval", "use_reentrant", "pipe_partitioned", "grad_partitioned"}),
    "scheduler": frozenset({"type", "params"}),
    # Buckets and overlap are accepted, as configurations are full of them; they have nothing to act upon here.
    "zero_optimization": frozenset(
        {
            "stage",
            "allgather_bucket_size",
            "allgather_partitions",
            "contiguous_gradients",
            "ignore_unused_parameters",
            "overlap_comm",
            "reduce_bucket_size",
            "reduce_scatter",
            "round_robin_gradients",
            *_OFFLOADS,
        }
    ),
}


def deepspeed_problems(settings: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """Yield what is wrong with DeepSpeed's settings (the JSON without its "ldt" section), one problem per setting."""
    for key, value in settings.items():
        if key in REFUSED_KEYS:
            reason = REFUSED_KEYS[key]
            yield ConfigProblem(key=key, found=value, expected=f"no such key ({reason})", fix="remove it")
        elif key not in KNOWN_KEYS:
            known = KNOWN_KEYS | {"ldt"}
            yield unknown_key(str(key), value, known=known, owner='DeepSpeed or "ldt"')
    yield from _batch_problems(settings)
    for rule in RULES:
        present, value = _look_up(settings, rule.key)
        if present and not rule.accepts(value):
            yield ConfigProblem(
                key=rule.key, found=value, expected=rule.expected, fix=_advice_on_auto(value) or rule.fix
            )
    yield from _closed_section_problems(settings)
    yield from _precision_problems(settings)
    yield from _recipe_problems(settings)


def precision(settings: Mapping[str, Any]) -> str:
    """Return in what a model computes: "bf16", "fp16" or "fp32"."""
    return next((name for name in ("bf16", "fp16") if _look_up(settings, f"{name}.enabled") == (True, True)), "fp32")


def shards_optimizer(settings: Mapping[str, Any]) -> bool:
    """Return whether weights and optimizer states are trained as slices of flat fp32 buffers, one for each replica."""
    _, stage = _look_up(settings, "zero_optimization.stage")
    return precision(settings) != "fp32" or bool(stage)


def batch_numbers(settings: Mapping[str, Any]) -> GivenBatch:
    """Return the batch numbers that are given; the settings have passed `deepspeed_problems`."""
    return GivenBatch(
        train=settings.get("train_batch_size"),
        micro=settings.get("train_micro_batch_size_per_gpu"),
        accumulation=settings.get("gradient_accumulation_steps"),
    )


def _look_up(settings: Mapping[str, Any], path: str) -> tuple[bool, Any]:
    value: Any = settings
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return False, None
        value = value[name]
    return True, value


def _advice_on_auto(value: object) -> str | None:
    if value == "auto":
        return 'write the value: "auto" is filled in by other trainers and is not supported here'
    return None


def _batch_problems(settings: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    for key in BATCH_KEYS:
        value = settings.get(key)
        if value is not None and not is_whole(value, 1):
            yield ConfigProblem(
                key=key,
                found=value,
                expected="a whole number >= 1, without quotes",
                fix='remove it where it follows from the other two, or write the number: "auto" is filled in by other '
                "trainers and is not supported here"
                if value == "auto"
                else f'write e.g. "{key}": 4',
            )


def _closed_section_problems(settings: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    for section, known in _CLOSED.items():
        content = settings.get(section)
        if isinstance(content, Mapping):
            for name, value in content.items():
                if name not in known:
                    yield unknown_key(f"{section}.{name}", value, known=known, owner="this section")


def _precision_problems(settings: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    if all(_look_up(settings, f"{section}.enabled") == (True, True) for section in ("bf16", "fp16")):
        yield ConfigProblem(
            key="fp16.enabled",
            found=True,
            expected="false where bf16.enabled is true: a model computes in one precision",
            fix="enable one of the two",
        )


def _recipe_problems(settings: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """Yield what is missing or left to others in the optimizer and the scheduler."""
    for section, required, example in (
        ("optimizer", {"type": '"AdamW"'}, "AdamW"),
        ("scheduler", {"type": '"WarmupLR"', "params": '{"warmup_num_steps": 10}'}, "WarmupLR"),
    ):
        content = settings.get(section)
        if not isinstance(content, Mapping):
            continue
        for name in required:
            if name not in content:
                yield ConfigProblem(
                    key=f"{section}.{name}",
                    found=Absent(),
                    expected=f"{name} of the {section}: DeepSpeed drops or fails on the section without it",
                    fix=f'write e.g. "{name}": {required[name]}, or remove the section',
                )
        params = content.get("params")
        for name, value in params.items() if isinstance(params, Mapping) else ():
            if value == "auto":
                yield ConfigProblem(
                    key=f"{section}.params.{name}",
                    found=value,
                    expected=f"a value that {content.get('type', example)} takes",
                    fix=_advice_on_auto(value) or "write the value",
                )
