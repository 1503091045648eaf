"""Every key that DeepSpeed 0.19.8 reads from its JSON, and what becomes of it here.

Data only. A key is honoured, or harmless for the reason given beside it, or refused: then only the value is accepted
that asks for nothing. A test derives the keys from DeepSpeed's sources and fails when one is missing here.
"""

from __future__ import annotations

from collections.abc import Mapping

from ds_ldt.config.deepspeed_standing import (
    ANYTHING,
    BOOLEAN,
    NAME,
    NAMES,
    OBJECT,
    TEXT,
    Setting,
    alike,
    count,
    harmless,
    honoured,
    no_offload,
    number,
    one_of,
    only,
    or_null,
    refused,
    section,
    whole,
)

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
DTYPES = {
    "fp32": ("fp32", "float32", "float", "torch.float32"),
    "fp16": ("fp16", "float16", "half", "torch.float16"),
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
}
"""DeepSpeed's names of the dtypes that a model may compute in."""

_REMOVED = "DeepSpeed has removed it"
_OFFLOADED = "DeepSpeed reads it where something is offloaded, and that is not supported yet"
_STAGE_3 = "ZeRO stage 3 alone reads it, and that is not supported"
_OWN_REDUCTION = "gradients are averaged by one all-reduce for each stage, not in ZeRO's buckets"
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
    **alike(
        only(False, why=_RECOMPUTES, fix=_RECOMPUTE_INSTEAD),
        *("partition_activations", "contiguous_memory_optimization", "cpu_checkpointing"),
        *("synchronize_checkpoint_boundary", "profile"),
    ),
    "number_checkpoints": only(None, why=_RECOMPUTES, fix=_RECOMPUTE_INSTEAD),
}

_AIO = {
    **alike(harmless(whole(1), _UNSWAPPED), "block_size", "queue_depth", "intra_op_parallelism"),
    **alike(harmless(BOOLEAN, _UNSWAPPED), "single_submit", "overlap_events"),
    "use_gds": only(False, why="DeepSpeed refuses it on every accelerator but one, and nothing would use it"),
}

_AUTOTUNING = {
    "enabled": only(False, why="it is not supported yet"),
    **alike(harmless(NAME, _UNTUNED), "results_dir", "exps_dir"),
    **alike(
        harmless(ANYTHING, _UNTUNED),
        *("fast", "overwrite", "start_profile_step", "end_profile_step", "metric", "metric_path"),
        *("tuner_type", "tuner_early_stopping", "tuner_num_trials", "arg_mappings", "model_info_path"),
        *("mp_size", "max_train_batch_size", "min_train_batch_size", "max_train_micro_batch_size_per_gpu"),
        *("min_train_micro_batch_size_per_gpu", "num_tuning_micro_batch_sizes"),
    ),
    "model_info": section(
        alike(harmless(ANYTHING, _UNTUNED), "profile", "num_params", "hidden_size", "num_layers"),
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
        number(0, most=2.0**_HIGHEST_SCALE_POWER).described(
            "the factor of the losses, a number >= 0 that fp32 holds; 0 means that it adapts", 0
        )
    ),
    "initial_scale_power": honoured(
        whole(0, most=_HIGHEST_SCALE_POWER).described(
            f"a whole number from 0 to {_HIGHEST_SCALE_POWER}, the power of 2 of the first factor of the losses", 16
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
    **alike(
        honoured(or_null(TEXT)),
        *("project", "workspace", "api_key", "experiment_name", "experiment_key", "mode"),
    ),
    "online": honoured(or_null(BOOLEAN)),
}

_COMMS_LOGGER = {
    "enabled": only(
        False,
        why="it counts what passes through deepspeed.comm, and activations and gradients between stages do not",
        fix='remove it; e.g. "ldt": {"trace": {"path": "trace", "steps": [3, 4]}} records what each rank sends',
    ),
    "verbose": only(False, why="DeepSpeed logs each operation even where enabled is false"),
    **alike(harmless(BOOLEAN, _UNLOGGED), "prof_all", "debug"),
    "prof_ops": harmless(NAMES, _UNLOGGED),
}

_COMPILE = {
    "deepcompile": only(False, why="it is not supported yet"),
    "passes": only(None, why=_UNCOMPILED),
    **alike(
        only(False, why=_UNCOMPILED),
        *("autoep_non_moe", "free_activation", "offload_activation", "offload_opt_states"),
        *("offload_parameters", "symmetric_memory", "debug_log", "sync_before_reduce", "sync_after_reduce"),
        *("sync_before_allgather", "sync_after_allgather", "keep_all_input_tensors"),
    ),
    "free_activation_threshold": harmless(whole(0, "of bytes"), _UNCOMPILED),
    **alike(
        harmless(BOOLEAN, _UNCOMPILED),
        *("offload_activation_pin_memory", "double_buffer", "keep_int_input_tensors"),
    ),
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
    **alike(harmless(whole(1), _UNINFERRED), "max_out_tokens", "inference_tp_size", "tp_gather_partition_size"),
    **alike(harmless(BOOLEAN, _UNINFERRED), "release_inference_cache", "pin_parameters", "enable_cuda_graph"),
}

_OPTIMIZER = {
    "type": honoured(NAME.described(NAME.expected, "AdamW")),
    "params": honoured(OBJECT.described(OBJECT.expected, {"lr": 1e-4})),
    "legacy_fusion": harmless(BOOLEAN, "it chooses between two wrappers for fp16, in whose place ds_ldt has its own"),
}

_PIPELINE = {
    "activation_checkpoint_interval": honoured(
        whole(0).described("a whole number of layers >= 0; 0 means no activation checkpointing", 1)
    ),
    "use_reentrant": honoured(BOOLEAN),
    "pipe_partitioned": only(False, why="activations cross the link whole"),
    "grad_partitioned": only(False, why="gradients cross the link whole"),
    **alike(
        refused(_LAYOUT, fix=_SET_LAYOUT, expected="one of the keys of this section"),
        *("stages", "num_stages", "partition", "partition_method", "topology"),
    ),
    "seed_layers": refused("each layer is always seeded, by base_seed and its index in the model"),
    **alike(refused(_ARGUMENT), "base_seed", "loss_fn", "checkpointable_layers", "dynamic_shape"),
    "activation_checkpoint_func": refused("pipeline.use_reentrant chooses between torch's two"),
}

_SCHEDULER = {
    "type": honoured(NAME.described(NAME.expected, "WarmupLR")),
    "params": honoured(OBJECT.described(OBJECT.expected, {"warmup_num_steps": 10})),
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

_OF_STAGE_3 = (
    *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold"),
    *("max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save"),
    *("module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential"),
)
"""DeepSpeed takes each of them with "stage3_" in front, too."""

_OFFLOAD = {
    "device": only("none", why="nothing is offloaded"),
    "nvme_path": harmless(or_null(TEXT), _OFFLOADED),
    "buffer_count": harmless(whole(0), _OFFLOADED),
    "pin_memory": harmless(BOOLEAN, _OFFLOADED),
}
_OFFLOAD_OPTIMIZER = {
    **_OFFLOAD,
    **alike(harmless(BOOLEAN, _OFFLOADED), "pipeline_read", "pipeline_write", "fast_init", "super_offload"),
    "ratio": only(1, why="DeepSpeed refuses it without stage 3"),
    "cpuadam_cores_perc": harmless(number(0, most=1).described("a number from 0 to 1", 0.8), _OFFLOADED),
}
_OFFLOAD_PARAM = {
    **_OFFLOAD,
    "buffer_size": harmless(count("numbers"), _OFFLOADED),
    "max_in_cpu": harmless(count("numbers"), _OFFLOADED),
}

_ZERO = {
    "stage": honoured(
        whole(0, most=1).described(
            "0 or 1 (stage 1 shards optimizer states; stages 2 and 3 split what a pipeline needs whole)", 1
        ),
        fix='write "stage": 1, or remove the section',
    ),
    "allgather_bucket_size": harmless(count("numbers"), "one all-gather brings the updated weights back"),
    "reduce_bucket_size": harmless(count("numbers"), _OWN_REDUCTION),
    **alike(
        harmless(BOOLEAN, _OWN_REDUCTION),
        *("allgather_partitions", "contiguous_gradients", "reduce_scatter", "round_robin_gradients"),
        "use_multi_rank_bucket_allreduce",
    ),
    "overlap_comm": harmless(or_null(BOOLEAN), _OWN_REDUCTION),
    "ignore_unused_parameters": harmless(BOOLEAN, "stage 2 reads it; here what a step does not use gets zeros"),
    "compute_grad_norm": only(True, why="the norm says whether a step is skipped"),
    "load_from_fp32_weights": only(True, why="a checkpoint restores the fp32 master weights"),
    "elastic_checkpoint": only(False, why="a checkpoint fits any number of replicas as it is"),
    "legacy_stage1": only(False, why="there is one implementation"),
    "parameter_alignment": only(False, why="flat buffers are padded at their ends alone"),
    "offload_optimizer": no_offload(_OFFLOAD_OPTIMIZER),
    "offload_param": no_offload(_OFFLOAD_PARAM),
    **alike(
        only(None, False, why="offload is not supported yet"),
        *("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"),
    ),
    "zenflow": only(None, why="offload is not supported yet"),
    **alike(refused(_STAGE_3), *_OF_STAGE_3, *(f"stage3_{name}" for name in _OF_STAGE_3)),
    **alike(
        refused(_STAGE_3),
        *("stage3_gather_fp16_weights_on_model_save", "sub_group_size", "zero_hpz_partition_size"),
        *("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"),
        *("memory_efficient_linear", "pipeline_loading_checkpoint", "override_module_apply"),
        *("log_trace_cache_warnings", "enable_sanity_checks", "save_muon_momentum_buffer_in_memory"),
        "leaf_module",
    ),
    **alike(refused(_REMOVED), "mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"),
}

TABLE: Mapping[str, Setting] = {
    **{key: honoured(ANYTHING, "the three are checked together") for key in BATCH_KEYS},
    "gradient_clipping": honoured(
        number(0).described("the largest gradient norm, a number >= 0; 0 means no clipping", 1.0)
    ),
    "steps_per_print": honoured(whole(1, "of steps", example=10)),
    "wall_clock_breakdown": honoured(BOOLEAN, "the optimizer step is timed; ldt.trace has the other instructions"),
    "memory_breakdown": honoured(BOOLEAN),
    "dump_state": honoured(BOOLEAN),
    "disable_python_gc": honoured(BOOLEAN),
    "log_level": honoured(or_null(one_of("debug", "info", "warning", "error", "critical", any_case=True))),
    "dataloader_drop_last": honoured(BOOLEAN),
    "zero_allow_untested_optimizer": honoured(BOOLEAN),
    "zero_force_ds_cpu_optimizer": harmless(BOOLEAN, _OFFLOADED),
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
    "zero_optimization": section(_ZERO, example={"stage": 1}),
    "bfloat16": refused("it is the old name of bf16", fix='did you mean "bf16"? Rename it or remove it'),
    "allgather_size": refused("DeepSpeed reads it where zero_optimization is true or false, which is refused"),
    "amp": refused(f'{_REMOVED}; use "bf16"'),
    "data_parallel_size": refused("ldt.edge.data_parallel_size and ldt.cloud.data_parallel_size say it"),
    "elasticity": refused(f"{_REMOVED}; the batch numbers are fixed"),
    "expert_parallel": refused("expert parallelism is not supported yet"),
    "sequence_parallel_size": refused("sequence parallelism is not supported yet"),
    "sparse_gradients": refused(f"{_REMOVED}; gradients are reduced dense"),
    "tensor_parallel": refused(
        "tensor parallelism is set by ldt.edge.tensor_parallel_size and ldt.cloud.tensor_parallel_size"
    ),
    "weight_quantization": refused("quantised weights are not supported yet"),
    **alike(
        refused(_REMOVED),
        *("compression_training", "curriculum_learning", "eigenvalue", "graph_harvesting", "nebula"),
        *("progressive_layer_drop", "quantize_training", "sparse_attention"),
    ),
}
"""Settings of the JSON by name; a section holds those inside it. All keys are here: another one is an error."""
