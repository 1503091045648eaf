"""The keys of DeepSpeed's "zero_optimization" section, and what becomes of them here. Data, as `deepspeed_keys`."""

from __future__ import annotations

from collections.abc import Mapping

from ds_ldt.config.value_rules import (
    BOOLEAN,
    TEXT,
    Setting,
    Value,
    count,
    harmless,
    honoured,
    is_number,
    only,
    or_null,
    refused,
    whole,
)

REMOVED = "DeepSpeed has removed it"
OFFLOADED = "DeepSpeed reads it where something is offloaded, and that is not supported yet"
_NO_OFFLOAD = "no offload (it is not supported yet; allowed: null)"
_STAGE_3 = "ZeRO stage 3 alone reads it, and that is not supported"
_OWN_REDUCTION = "gradients are averaged by one all-reduce for each stage, not in ZeRO's buckets"


def _is_no_offload(value: object) -> bool:
    return value is None or (isinstance(value, Mapping) and value.get("device", "none") == "none")


def _offload(**more: Setting) -> Setting:
    keys = {
        "device": only("none", why="nothing is offloaded"),
        "nvme_path": harmless(or_null(TEXT), OFFLOADED),
        "buffer_count": harmless(whole(0), OFFLOADED),
        "pin_memory": harmless(BOOLEAN, OFFLOADED),
        **more,
    }
    value = Value(accepts=_is_no_offload, expected=_NO_OFFLOAD, example=None)
    kept = honoured(value, fix="remove it")
    return Setting(
        standing=kept.standing,
        why="nothing is offloaded",
        accepts=kept.accepts,
        expected=kept.expected,
        example=None,
        fix=kept.fix,
        keys=keys,
    )


ZERO: Mapping[str, Setting] = {
    "stage": honoured(
        Value(
            accepts=whole(0, most=1).accepts,
            expected="0 or 1 (stage 1 shards optimizer states; stages 2 and 3 split what a pipeline needs whole)",
            example=1,
        ),
        fix='write "stage": 1, or remove the section',
    ),
    "allgather_bucket_size": harmless(count("numbers"), "one all-gather brings the updated weights back"),
    "reduce_bucket_size": harmless(count("numbers"), _OWN_REDUCTION),
    **{
        name: harmless(BOOLEAN, _OWN_REDUCTION)
        for name in (
            *("allgather_partitions", "contiguous_gradients", "reduce_scatter", "round_robin_gradients"),
            "use_multi_rank_bucket_allreduce",
        )
    },
    "overlap_comm": harmless(or_null(BOOLEAN), _OWN_REDUCTION),
    "ignore_unused_parameters": harmless(BOOLEAN, "stage 2 reads it; here what a step does not use gets zeros"),
    "compute_grad_norm": only(True, why="the norm says whether a step is skipped"),
    "load_from_fp32_weights": only(True, why="a checkpoint restores the fp32 master weights"),
    "elastic_checkpoint": only(False, why="a checkpoint fits any number of replicas as it is"),
    "legacy_stage1": only(False, why="there is one implementation"),
    "parameter_alignment": only(False, why="flat buffers are padded at their ends alone"),
    "offload_optimizer": _offload(
        pipeline_read=harmless(BOOLEAN, OFFLOADED),
        pipeline_write=harmless(BOOLEAN, OFFLOADED),
        fast_init=harmless(BOOLEAN, OFFLOADED),
        super_offload=harmless(BOOLEAN, OFFLOADED),
        ratio=only(1, why="DeepSpeed refuses it without stage 3"),
        cpuadam_cores_perc=harmless(
            Value(
                accepts=lambda value: is_number(value, 0) and value <= 1,
                expected="a number from 0 to 1",
                example=0.8,
            ),
            OFFLOADED,
        ),
    ),
    "offload_param": _offload(
        buffer_size=harmless(count("numbers"), OFFLOADED), max_in_cpu=harmless(count("numbers"), OFFLOADED)
    ),
    **{
        name: only(None, False, why="offload is not supported yet")
        for name in ("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory")
    },
    "zenflow": only(None, why="offload is not supported yet"),
    **{
        name: refused(_STAGE_3)
        for short in (
            *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold"),
            *("max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save"),
            *("module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential"),
        )
        for name in (short, f"stage3_{short}")
    },
    **{
        name: refused(_STAGE_3)
        for name in (
            *("stage3_gather_fp16_weights_on_model_save", "sub_group_size", "zero_hpz_partition_size"),
            *("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"),
            *("memory_efficient_linear", "pipeline_loading_checkpoint", "override_module_apply"),
            *("log_trace_cache_warnings", "enable_sanity_checks", "save_muon_momentum_buffer_in_memory"),
            "leaf_module",
        )
    },
    **{name: refused(REMOVED) for name in ("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param")},
}
