"""Every key that DeepSpeed 0.19.8 reads from its JSON, and what becomes of it here.

Data only. A key is honoured, or harmless for the reason given beside it, or refused: then only the value is accepted
that asks for nothing. A test derives the keys from DeepSpeed's sources and fails when one is missing here.
"""

from __future__ import annotations

from collections.abc import Mapping

from ds_ldt.config.value_rules import (
    ANYTHING,
    BOOLEAN,
    NAME,
    NAMES,
    OBJECT,
    TEXT,
    Setting,
    Value,
    harmless,
    honoured,
    is_number,
    number,
    one_of,
    only,
    or_null,
    refused,
    section,
    whole,
)
from ds_ldt.config.zero_keys import OFFLOADED, REMOVED, ZERO

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
DTYPES = {
    "fp32": ("fp32", "float32", "float", "torch.float32"),
    "fp16": ("fp16", "float16", "half", "torch.float16"),
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
}
"""DeepSpeed's names of the dtypes that a model may compute in."""

_IN_FP32 = "master weights and optimizer states are fp32"
_LAYOUT = "ldt.pipeline_num_layers says which layers each stage holds"
_SET_LAYOUT = 'remove it, and say it in "ldt", e.g. "pipeline_num_layers": [[2, 13, 13], [2, 0, 0]]'
_ARGUMENT = "it is an argument of ds_ldt.LDTPipelineModule"
_HIGHEST_SCALE_POWER = 126


_RECOMPUTES = "DeepSpeed's own checkpoint function, which reads it, is not called"
_RECOMPUTE_INSTEAD = 'remove it; e.g. "pipeline": {"activation_checkpoint_interval": 1} recomputes activations'
_UNTUNED = "the autotuner, which reads it, has to be off"
_UNSWAPPED = "nothing is swapped or written through it: offload and checkpoint.writer are refused"
_UNCOMPILED = "DeepCompile, which reads it, has to be off"
_UNPROFILED = "the profiler, which reads it, has to be off"
_UNLOGGED = "the logger, which reads it, has to be off"
_UNINFERRED = "the hybrid engine, which reads it, has to be off"
_NO_AUTOCAST = "autocast, which reads it, has to be off"
_OWN_WRITER = "each rank writes its own files with torch.save, and both sites commit them together"

_ACTIVATIONS = {
    **{
        name: only(False, why=_RECOMPUTES, fix=_RECOMPUTE_INSTEAD)
        for name in (
            "partition_activations",
            "contiguous_memory_optimization",
            "cpu_checkpointing",
            "synchronize_checkpoint_boundary",
            "profile",
        )
    },
    "number_checkpoints": only(None, why=_RECOMPUTES, fix=_RECOMPUTE_INSTEAD),
}

_AIO = {
    **{name: harmless(whole(1), _UNSWAPPED) for name in ("block_size", "queue_depth", "intra_op_parallelism")},
    **{name: harmless(BOOLEAN, _UNSWAPPED) for name in ("single_submit", "overlap_events")},
    "use_gds": only(False, why="DeepSpeed refuses it on every accelerator but one, and nothing would use it"),
}

_AUTOTUNING = {
    "enabled": only(False, why="it is not supported yet"),
    **{name: harmless(NAME, _UNTUNED) for name in ("results_dir", "exps_dir")},
    **{
        name: harmless(ANYTHING, _UNTUNED)
        for name in (
            *("fast", "overwrite", "start_profile_step", "end_profile_step", "metric", "metric_path", "tuner_type"),
            *("tuner_early_stopping", "tuner_num_trials", "arg_mappings", "model_info_path", "mp_size"),
            *("max_train_batch_size", "min_train_batch_size", "max_train_micro_batch_size_per_gpu"),
            *("min_train_micro_batch_size_per_gpu", "num_tuning_micro_batch_sizes"),
        )
    },
    "model_info": section(
        {name: harmless(ANYTHING, _UNTUNED) for name in ("profile", "num_params", "hidden_size", "num_layers")},
    ),
}

_BF16 = {
    "enabled": honoured(BOOLEAN),
    "immediate_grad_update": honoured(BOOLEAN),
    "check_grad_overflow": only(True, why="a step whose gradient norm is not finite is always skipped"),
    "bf16_master_weights_and_grads": only(False, why=_IN_FP32),
    "bf16_optimizer_states": only(False, why=_IN_FP32),
}

_FP16 = {
    "enabled": honoured(BOOLEAN),
    "auto_cast": only(False, why="batch_fn= and the layers decide what is cast"),
    "fp16_master_weights_and_grads": only(False, why="master weights and accumulated gradients are fp32"),
    "consecutive_hysteresis": honoured(BOOLEAN),
    "loss_scale": honoured(
        Value(
            accepts=lambda value: is_number(value, 0) and value <= 2.0**_HIGHEST_SCALE_POWER,
            expected="the factor of the losses, a number >= 0 that fp32 holds; 0 means that it adapts",
            example=0,
        )
    ),
    "initial_scale_power": honoured(
        Value(
            accepts=whole(0, most=_HIGHEST_SCALE_POWER).accepts,
            expected=f"a whole number from 0 to {_HIGHEST_SCALE_POWER}, the power of 2 of the first factor of the "
            "losses",
            example=16,
        )
    ),
    "loss_scale_window": honoured(whole(1, "of steps", example=1000)),
    "hysteresis": honoured(whole(1, "of overflows", example=2)),
    "min_loss_scale": honoured(whole(1, "for the least factor of the losses")),
}

_CHECKPOINT = {
    "tag_validation": harmless(one_of("Ignore", "Warn", "Fail", any_case=True), "tags that differ are always refused"),
    "load_universal": only(False, why="universal checkpoints are not supported yet"),
    "use_node_local_storage": only(False, why="each site has one directory, which its ranks share"),
    "checkpoint_serialization": only(True, why="files are read in the form that torch.save writes by default"),
    "parallel_write": section(
        {"pipeline_stage": only(False, why="DeepSpeed would leave layers to ranks that write none, and lose them")}
    ),
    "writer": only(None, why=_OWN_WRITER),
}

_COMET = {
    "enabled": honoured(BOOLEAN),
    "samples_log_interval": honoured(whole(1, "of samples", example=100)),
    **{
        name: honoured(or_null(TEXT))
        for name in ("project", "workspace", "api_key", "experiment_name", "experiment_key", "mode")
    },
    "online": honoured(or_null(BOOLEAN)),
}

_COMMS_LOGGER = {
    "enabled": only(
        False,
        why="it counts what passes through deepspeed.comm, and activations and gradients between stages do not",
        fix='remove it; e.g. "ldt": {"trace": {"path": "trace", "steps": [3, 4]}} records what each rank sends',
    ),
    "verbose": only(False, why="DeepSpeed logs each operation even where enabled is false"),
    **{name: harmless(BOOLEAN, _UNLOGGED) for name in ("prof_all", "debug")},
    "prof_ops": harmless(NAMES, _UNLOGGED),
}

_COMPILE = {
    "deepcompile": only(False, why="it is not supported yet"),
    "passes": only(None, why=_UNCOMPILED),
    **{
        name: only(False, why=_UNCOMPILED)
        for name in (
            *("autoep_non_moe", "free_activation", "offload_activation", "offload_opt_states", "offload_parameters"),
            *("symmetric_memory", "debug_log", "sync_before_reduce", "sync_after_reduce", "sync_before_allgather"),
            *("sync_after_allgather", "keep_all_input_tensors"),
        )
    },
    "free_activation_threshold": harmless(whole(0, "of bytes"), _UNCOMPILED),
    **{
        name: harmless(BOOLEAN, _UNCOMPILED)
        for name in ("offload_activation_pin_memory", "double_buffer", "keep_int_input_tensors")
    },
}

_DATA_TYPES = {
    "grad_accum_dtype": only("fp32", None, why="gradients are accumulated in fp32"),
    "param_dtype": honoured(or_null(one_of(*(name for names in DTYPES.values() for name in names)))),
    "buffer_dtype": only(None, why="buffers keep their dtype, as rotary tables lose positions in half precision"),
    "keep_in_fp32_modules": only("auto", why="names are those of a rank's layers, not those of the model"),
}

_DATA_EFFICIENCY = {
    "enabled": only(False, why="it is not supported yet"),
    "seed": harmless(whole(0), "nothing is sampled with it: the parts that do are refused"),
    "data_sampling": refused("the order of the samples is that of ds_ldt.initialize(shuffle_seed=...)"),
    "data_routing": refused("DeepSpeed turns random-LTD on by it even where data_efficiency.enabled is false"),
}

_FLOPS_PROFILER = {
    "enabled": only(
        False,
        why="DeepSpeed's own forward pass, which it measures, is not called",
        fix='remove it; e.g. "ldt": {"trace": {"path": "trace", "steps": [3, 4]}} records the times of a step',
    ),
    "recompute_fwd_factor": harmless(number(0), _UNPROFILED),
    "profile_step": harmless(whole(0), _UNPROFILED),
    "module_depth": harmless(whole(-1), _UNPROFILED),
    "top_modules": harmless(whole(0), _UNPROFILED),
    "detailed": harmless(BOOLEAN, _UNPROFILED),
    "output_file": harmless(or_null(TEXT), _UNPROFILED),
}

_HYBRID_ENGINE = {
    "enabled": only(False, why="it is not supported yet"),
    **{
        name: harmless(whole(1), _UNINFERRED)
        for name in ("max_out_tokens", "inference_tp_size", "tp_gather_partition_size")
    },
    **{
        name: harmless(BOOLEAN, _UNINFERRED)
        for name in ("release_inference_cache", "pin_parameters", "enable_cuda_graph")
    },
}

_OPTIMIZER = {
    "type": honoured(Value(accepts=NAME.accepts, expected=NAME.expected, example="AdamW")),
    "params": honoured(Value(accepts=OBJECT.accepts, expected=OBJECT.expected, example={"lr": 1e-4})),
    "legacy_fusion": harmless(BOOLEAN, "it chooses between two wrappers for fp16, in whose place ds_ldt has its own"),
}

_PIPELINE = {
    "activation_checkpoint_interval": honoured(
        Value(
            accepts=whole(0).accepts,
            expected="a whole number of layers >= 0; 0 means no activation checkpointing",
            example=1,
        )
    ),
    "use_reentrant": honoured(BOOLEAN),
    "pipe_partitioned": only(False, why="activations cross the link whole"),
    "grad_partitioned": only(False, why="gradients cross the link whole"),
    **{
        name: refused(_LAYOUT, fix=_SET_LAYOUT, expected="one of the keys of this section")
        for name in ("stages", "num_stages", "partition", "partition_method", "topology")
    },
    "seed_layers": refused("each layer is always seeded, by base_seed and its index in the model"),
    **{name: refused(_ARGUMENT) for name in ("base_seed", "loss_fn", "checkpointable_layers", "dynamic_shape")},
    "activation_checkpoint_func": refused("pipeline.use_reentrant chooses between torch's two"),
}

_SCHEDULER = {
    "type": honoured(Value(accepts=NAME.accepts, expected=NAME.expected, example="WarmupLR")),
    "params": honoured(Value(accepts=OBJECT.accepts, expected=OBJECT.expected, example={"warmup_num_steps": 10})),
}

_LOG = {"enabled": honoured(BOOLEAN), "output_path": honoured(TEXT), "job_name": honoured(NAME)}

_WANDB = {
    "enabled": honoured(BOOLEAN),
    "group": honoured(or_null(TEXT)),
    "team": honoured(or_null(TEXT)),
    "project": honoured(TEXT),
}

_UNTIMED = "it switches timers of DeepSpeed's other engine; the pipeline engine prints by steps_per_print"
_TIMERS = {
    "throughput": section(
        {"enabled": harmless(BOOLEAN, _UNTIMED), "synchronized": harmless(BOOLEAN, _UNTIMED)},
        example={"enabled": True},
    )
}

_TORCH_AUTOCAST = {
    "enabled": only(False, why="it is not supported yet"),
    "dtype": harmless(one_of(*DTYPES["bf16"], *DTYPES["fp16"], *DTYPES["fp32"]), _NO_AUTOCAST),
    "lower_precision_safe_modules": harmless(NAMES, _NO_AUTOCAST),
}

TABLE: Mapping[str, Setting] = {
    **{key: honoured(ANYTHING, "the three are checked together") for key in BATCH_KEYS},
    "gradient_clipping": honoured(
        Value(
            accepts=lambda value: is_number(value, 0),
            expected="the largest gradient norm, a number >= 0; 0 means no clipping",
            example=1.0,
        )
    ),
    "steps_per_print": honoured(whole(1, "of steps", example=10)),
    "wall_clock_breakdown": honoured(BOOLEAN, "the optimizer step is timed; ldt.trace has the other instructions"),
    "memory_breakdown": honoured(BOOLEAN),
    "dump_state": honoured(BOOLEAN),
    "disable_python_gc": honoured(BOOLEAN),
    "log_level": honoured(or_null(one_of("debug", "info", "warning", "error", "critical", any_case=True))),
    "dataloader_drop_last": honoured(BOOLEAN),
    "zero_allow_untested_optimizer": honoured(BOOLEAN),
    "zero_force_ds_cpu_optimizer": harmless(BOOLEAN, OFFLOADED),
    "disable_allgather": harmless(BOOLEAN, "DeepSpeed reads it and uses it nowhere"),
    "vocabulary_size": harmless(or_null(whole(1)), "DeepSpeed warns where it is no multiple of 8, and that is all"),
    "seq_parallel_communication_data_type": harmless(
        or_null(one_of("fp32", "fp16", "bf16", any_case=True)), "sequence parallelism, which reads it, is refused"
    ),
    "managed_gradient_accumulation": only(True, why="a step is all micro-batches of train_batch"),
    "use_data_before_expert_parallelism": only(False, why="expert parallelism is not supported yet"),
    "prescale_gradients": only(False, why="gradients are averaged after their sum"),
    "gradient_predivide_factor": only(1, why="gradients are averaged after their sum"),
    "gradient_allreduce_op": only("mean", why="gradients are averaged over the domains; a sum is not supported yet"),
    "communication_data_type": only("fp32", None, why="gradients are reduced in fp32"),
    "datastates_ckpt": only(False, why=_OWN_WRITER, fix="remove it"),
    "activation_checkpointing": section(_ACTIVATIONS),
    "aio": section(_AIO),
    "autotuning": section(_AUTOTUNING, example={"enabled": False}),
    "bf16": section(_BF16, example={"enabled": True}),
    "fp16": section(_FP16, example={"enabled": True}),
    "checkpoint": section(_CHECKPOINT),
    "comet": section(_COMET, example={"enabled": True}),
    "comms_logger": section(_COMMS_LOGGER, example={"enabled": False}),
    "compile": section(_COMPILE),
    "csv_monitor": section(_LOG, example={"enabled": True}),
    "data_efficiency": section(_DATA_EFFICIENCY, example={"enabled": False}),
    "data_types": section(_DATA_TYPES),
    "flops_profiler": section(_FLOPS_PROFILER, example={"enabled": False}),
    "hybrid_engine": section(_HYBRID_ENGINE, example={"enabled": False}),
    "optimizer": section(_OPTIMIZER, example={"type": "AdamW", "params": {"lr": 1e-4}}),
    "pipeline": section(_PIPELINE, example={"activation_checkpoint_interval": 1}),
    "scheduler": section(_SCHEDULER, example={"type": "WarmupLR", "params": {"warmup_num_steps": 10}}),
    "tensorboard": section(_LOG, example={"enabled": True}),
    "timers": section(_TIMERS),
    "torch_autocast": section(_TORCH_AUTOCAST, example={"enabled": False}),
    "wandb": section(_WANDB, example={"enabled": True}),
    "zero_optimization": section(ZERO, example={"stage": 1}),
    "bfloat16": refused("it is the old name of bf16", fix='did you mean "bf16"? Rename it or remove it'),
    "allgather_size": refused("DeepSpeed reads it where zero_optimization is true or false, which is refused"),
    "amp": refused(f'{REMOVED}; use "bf16"'),
    "data_parallel_size": refused("ldt.edge.data_parallel_size and ldt.cloud.data_parallel_size say it"),
    "elasticity": refused(f"{REMOVED}; the batch numbers are fixed"),
    "expert_parallel": refused("expert parallelism is not supported yet"),
    "sequence_parallel_size": refused("sequence parallelism is not supported yet"),
    "sparse_gradients": refused(f"{REMOVED}; gradients are reduced dense"),
    "tensor_parallel": refused(
        "tensor parallelism is set by ldt.edge.tensor_parallel_size and ldt.cloud.tensor_parallel_size"
    ),
    "weight_quantization": refused("quantised weights are not supported yet"),
    **{
        name: refused(REMOVED)
        for name in (
            *("compression_training", "curriculum_learning", "eigenvalue", "graph_harvesting", "nebula"),
            *("progressive_layer_drop", "quantize_training", "sparse_attention"),
        )
    },
}
"""Settings of the JSON by name; a section holds those inside it. All keys are here: another one is an error."""
