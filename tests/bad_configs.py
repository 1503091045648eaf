"""Wrong configurations and the essential text of the error each of them raises.

`BAD_CONFIGS` holds (id, configuration, expected fragments). `test_config.py` checks each in one process; a process
test may check that all ranks of a job give the identical text.
"""

from __future__ import annotations

import copy
from typing import Any

GOOD_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "ldt": {
        "pipeline_num_layers": [[2, 13, 13], [2, 0, 0]],
        "edge": {"data_parallel_size": 1},
        "cloud": {"data_parallel_size": 2},
    },
}

ABSENT = object()


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """Return GOOD_CONFIG with the settings at the dotted paths replaced, or removed where the value is ABSENT."""
    config = copy.deepcopy(GOOD_CONFIG)
    for path, value in changes.items():
        *sections, name = path.split(".")
        place = config
        for section in sections:
            place = place.setdefault(section, {})
        if value is ABSENT:
            del place[name]
        else:
            place[name] = value
    return config


_WHOLE = "expected a whole number >= 1"
_FORMULA = "train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * D"
_BOTH_SIZES = [
    "D = ldt.cloud.data_parallel_size = 2",
    "neither the world size nor E = ldt.edge.data_parallel_size = 1 counts",
]
_MATRIX = "ldt.pipeline_num_layers"
_TWO = {"vision_encoder": [[4, 0], [0, 0]], "text_decoder": [[1, 4], [1, 0]]}
_BOOLEAN = "expected true or false, without quotes. Fix: write true or false."

# id, changes to GOOD_CONFIG, fragments of the message
_TABLE: list[tuple[str, dict[str, Any], list[str]]] = [
    # The ldt section as a whole
    ("ldt_missing", {"ldt": ABSENT}, ["ldt: found nothing", 'Fix: add an "ldt" object to the JSON.']),
    ("ldt_not_an_object", {"ldt": [[2, 26], [2, 0]]}, ["ldt: found [[2, 26], [2, 0]], expected the section"]),
    ("ldt_upper_case", {"LDT": {}}, ["LDT: found {}", 'did you mean "ldt"?']),
    (
        "ldt_unknown_key",
        {"ldt.pipeline_layers": [[1]]},
        ["ldt.pipeline_layers: found [[1]], expected one of the keys", 'did you mean "pipeline_num_layers"?'],
    ),
    (
        "ldt_unknown_key_in_site",
        {"ldt.cloud.data_paralel_size": 4},
        ["ldt.cloud.data_paralel_size: found 4", 'Fix: did you mean "data_parallel_size"? Rename it or remove it.'],
    ),
    ("ldt_unknown_key_far_off", {"ldt.zzzzz": None}, ["ldt.zzzzz: found null", "Fix: remove it."]),
    ("ldt_key_not_a_text", {"ldt": {**GOOD_CONFIG["ldt"], 5: 1}}, ["ldt.5: found", "Fix: remove it."]),
    # The matrix
    ("matrix_missing", {_MATRIX: ABSENT}, [f"{_MATRIX}: found nothing, expected a list of chunks", "Fix: write e.g."]),
    ("matrix_is_a_number", {_MATRIX: 30}, [f"{_MATRIX}: found 30, expected a list of chunks, each a list"]),
    (
        "matrix_is_flat",
        {_MATRIX: [2, 26, 2]},
        [f"{_MATRIX}: found [2, 26, 2], expected a list of chunks, each a list"],
    ),
    ("matrix_is_text", {_MATRIX: "[[2, 26], [2, 0]]"}, [f'{_MATRIX}: found "[[2, 26], [2, 0]]", expected a list']),
    (
        "modality_unknown",
        {_MATRIX: {"vision_tower": [[1, 1], [1, 0]], "text_decoder": [[1, 1], [1, 0]]}},
        [f"{_MATRIX}.vision_tower: found [[1, 1], [1, 0]], expected the modalities vision_encoder and text_decoder"],
    ),
    (
        "modality_missing",
        {_MATRIX: {"text_decoder": [[1, 1], [1, 0]]}},
        [f"{_MATRIX}.vision_encoder: found nothing, expected a matrix for each of vision_encoder and text_decoder"],
    ),
    (
        "modalities_of_two_sizes",
        {_MATRIX: {"vision_encoder": [[4, 0], [0, 0]], "text_decoder": [[1, 4, 4], [1, 0, 0]]}},
        [f"{_MATRIX}.text_decoder: found 2 chunks of 3 stages, expected 2 chunks of 2 stages"],
    ),
    (
        "modality_ragged",
        {_MATRIX: {"vision_encoder": [[4, 0], [0]], "text_decoder": [[1, 4], [1, 0]]}},
        [f"{_MATRIX}.vision_encoder[1]: found [0], expected 2 layer counts"],
    ),
    (
        "modalities_that_meet_in_the_cloud",
        {_MATRIX: {"vision_encoder": [[1, 2, 2], [0, 0, 0]], "text_decoder": [[0, 0, 4], [1, 0, 0]]}},
        [f"{_MATRIX}.vision_encoder[0][2]: found 2, expected 0: text_decoder begins in chunk 0, and before that both"],
    ),
    (
        "text_before_vision",
        {_MATRIX: {"vision_encoder": [[0, 0], [2, 2], [1, 0]], "text_decoder": [[1, 4], [0, 0], [1, 0]]}},
        [f"{_MATRIX}.vision_encoder[2][0]: found 1, expected 0: every layer of vision_encoder comes before the first"],
    ),
    (
        "layout_published_upstream",
        {_MATRIX: {"vision_encoder": [[3, 7], [1, 0], [0, 0]], "text_decoder": [[0, 0], [0, 28], [0, 0]]}},
        [f"{_MATRIX}.text_decoder[1][0]: found 0, expected 1 or more", "token ids", '"allow_exposed_edge": true'],
    ),
    (
        "exposed_pixels",
        {_MATRIX: {"vision_encoder": [[0, 7], [1, 0], [0, 0]], "text_decoder": [[0, 0], [1, 26], [1, 0]]}},
        [f"{_MATRIX}.vision_encoder[0][0]: found 0, expected 1 or more", "pixels", '"allow_exposed_edge": true'],
    ),
    (
        "matrix_of_one_chunk",
        {_MATRIX: [[2, 26]]},
        [f"{_MATRIX}: found [[2, 26]], which is 1 chunk, expected at least 2 chunks", "Fix: add a last chunk"],
    ),
    ("matrix_of_no_chunk", {_MATRIX: []}, [f"{_MATRIX}: found [], which is 0 chunks, expected at least 2 chunks"]),
    (
        "matrix_of_one_stage",
        {_MATRIX: [[2], [2]]},
        [f"{_MATRIX}[0]: found [2], expected 2 layer counts (one for the edge and one per cloud stage)"],
    ),
    (
        "matrix_ragged",
        {_MATRIX: [[2, 13, 13], [2, 0]]},
        [f"{_MATRIX}[1]: found [2, 0], expected 3 layer counts", "Fix: write 0 where a stage holds no layers"],
    ),
    (
        "matrix_negative",
        {_MATRIX: [[2, -1], [2, 0]]},
        [f"{_MATRIX}[0][1]: found -1, expected a whole number of layers"],
    ),
    ("matrix_boolean", {_MATRIX: [[2, 9], [True, 0]]}, [f"{_MATRIX}[1][0]: found true, expected a whole number"]),
    ("matrix_fraction", {_MATRIX: [[2, 9.0], [2, 0]]}, [f"{_MATRIX}[0][1]: found 9.0, expected a whole number"]),
    (
        "S45_matrix_empty_stage",
        {_MATRIX: [[2, 26, 0], [2, 0, 0]]},
        [
            f"{_MATRIX}: found [[2, 26, 0], [2, 0, 0]], with no layers on stage 2",
            "expected at least one layer on every cloud stage",
            "Fix: give stage 2 layers in some chunk, or remove its column and its ranks.",
        ],
    ),
    (
        "matrix_ends_in_the_cloud",
        {_MATRIX: [[2, 13, 13], [2, 0, 5]]},
        [f"{_MATRIX}[1]: found", "with the last layers on stage 2", "expected the last layers on stage 0, the edge"],
    ),
    (
        "exposed_first_layers",
        {_MATRIX: [[0, 13, 13], [2, 0, 0]]},
        [f"{_MATRIX}[0][0]: found 0, expected 1 or more", "token ids", '"allow_exposed_edge": true'],
    ),
    (
        "exposed_last_layers",
        {_MATRIX: [[2, 13, 13], [0, 0, 0]]},
        [f"{_MATRIX}[1][0]: found 0, expected 1 or more", "labels", '"allow_exposed_edge": true'],
    ),
    (
        "exposed_as_text",
        {"ldt.allow_exposed_edge": "true"},
        ['ldt.allow_exposed_edge: found "true", expected true or'],
    ),
    # Sizes
    ("edge_size_is_text", {"ldt.edge.data_parallel_size": "1"}, ['ldt.edge.data_parallel_size: found "1"', _WHOLE]),
    ("edge_size_is_zero", {"ldt.edge.data_parallel_size": 0}, ["ldt.edge.data_parallel_size: found 0", _WHOLE]),
    (
        "cloud_size_is_true",
        {"ldt.cloud.data_parallel_size": True},
        ["ldt.cloud.data_parallel_size: found true", _WHOLE],
    ),
    ("cloud_is_a_number", {"ldt.cloud": 2}, ["ldt.cloud: found 2, expected an object with named settings"]),
    (
        "edge_does_not_divide_cloud",
        {"ldt.edge.data_parallel_size": 2, "ldt.cloud.data_parallel_size": 3},
        [
            "ldt.edge.data_parallel_size: found 2, expected a divisor of ldt.cloud.data_parallel_size = 3",
            "Fix: change",
        ],
    ),
    (
        "tensor_parallel_edge",
        {"ldt.edge.tensor_parallel_size": 2},
        ["ldt.edge.tensor_parallel_size: found 2, expected 1 (other tensor parallel sizes are not supported yet)"],
    ),
    (
        "tensor_parallel_cloud",
        {"ldt.cloud.tensor_parallel_size": 4},
        ["ldt.cloud.tensor_parallel_size: found 4, expected 1 (other tensor parallel sizes are not supported yet)"],
    ),
    # The rest of the ldt section
    (
        "policy_unknown",
        {"ldt.schedule.policy": "1f1b"},
        ['ldt.schedule.policy: found "1f1b", expected one of "ldt_1f1b", "closed_form", "greedy", "auto"'],
    ),
    (
        "split_backward_is_a_word",
        {"ldt.schedule.split_backward": "yes"},
        ['ldt.schedule.split_backward: found "yes", expected true or false'],
    ),
    (
        "weights_wait_for_an_impatient_optimizer",
        {"ldt.schedule.split_backward": True, "bf16": {"enabled": True, "immediate_grad_update": True}},
        ["bf16.immediate_grad_update: found true, expected false where ldt.schedule.split_backward is true"],
    ),
    ("max_in_flight_zero", {"ldt.schedule.max_in_flight": 0}, ["ldt.schedule.max_in_flight: found 0", "or null"]),
    ("latency_negative", {"ldt.link.latency_ms": -1}, ["ldt.link.latency_ms: found -1, expected milliseconds"]),
    ("latency_infinite", {"ldt.link.latency_ms": float("inf")}, ["ldt.link.latency_ms: found inf"]),
    ("latency_nan", {"ldt.link.latency_ms": float("nan")}, ["ldt.link.latency_ms: found nan, expected milliseconds"]),
    ("bandwidth_negative", {"ldt.link.bandwidth_mbps": -1}, ["ldt.link.bandwidth_mbps: found -1, expected megabits"]),
    ("message_negative", {"ldt.link.message_mb": -1}, ["ldt.link.message_mb: found -1, expected megabytes"]),
    ("memory_zero", {"ldt.schedule.memory_gb": 0}, ["ldt.schedule.memory_gb: found 0, expected gigabytes", "or null"]),
    (
        "layer_activation_zero",
        {"ldt.schedule.layer_activation_mb": 0},
        ["ldt.schedule.layer_activation_mb: found 0, expected megabytes"],
    ),
    (
        "layer_forward_zero",
        {"ldt.schedule.layer_forward_ms": 0},
        ["ldt.schedule.layer_forward_ms: found 0, expected milliseconds"],
    ),
    *(
        (f"hint_{name}", {_MATRIX: layers, f"ldt.{key}": value}, [f"ldt.{key}: found {{", expected])
        for name, layers, key, value, expected in (
            ("of_no_modality", _TWO, "link.message_mb", {"video": 1}, "or one for each of vision_encoder and text_"),
            ("of_one_modality", _TWO, "link.message_mb", {"text_decoder": 1}, "or one for each of vision_encoder"),
            ("zero", _TWO, "schedule.layer_forward_ms", dict.fromkeys(_TWO, 0), "expected milliseconds, a number > 0"),
            ("text", _TWO, "schedule.layer_activation_mb", dict.fromkeys(_TWO, "1"), "expected megabytes, a number >"),
            ("without_modalities", [[1, 4], [1, 0]], "link.message_mb", dict.fromkeys(_TWO, 1), "expected one number"),
        )
    ),
    (
        "measure_steps_negative",
        {"ldt.schedule.measure_steps": -1},
        ["ldt.schedule.measure_steps: found -1, expected a whole number >= 0", '"measure_steps": 3'],
    ),
    (
        "measured_costs_empty",
        {"ldt.measured_costs": ""},
        ['ldt.measured_costs: found "", expected the path of a file'],
    ),
    (
        "interval_below_zero",
        {"ldt.activation_checkpoint_interval": [1, -1]},
        ["ldt.activation_checkpoint_interval: found -1, expected whole numbers of layers >= 0, one for each chunk"],
    ),
    (
        "interval_of_no_chunk",
        {"ldt.activation_checkpoint_interval": [1]},
        ["ldt.activation_checkpoint_interval: found [1], expected 2 numbers, one for each chunk of ldt.pipeline"],
    ),
    (
        "timeout_is_text",
        {"ldt.timeout_s": "300"},
        ['ldt.timeout_s: found "300", expected seconds', '"timeout_s": 300'],
    ),
    ("timeout_is_infinite", {"ldt.timeout_s": float("inf")}, ["ldt.timeout_s: found inf, expected seconds"]),
    ("timeout_is_false", {"ldt.timeout_s": False}, ["ldt.timeout_s: found false, expected seconds"]),
    ("loss_reduction", {"ldt.loss_reduction": "sum"}, ['ldt.loss_reduction: found "sum", expected one of "token"']),
    ("freeze_is_text", {"ldt.freeze": "merger"}, ['ldt.freeze: found "merger", expected a list of names of parts']),
    ("freeze_a_number", {"ldt.freeze": [1]}, ["ldt.freeze: found 1, expected a list of names of parts of the model"]),
    ("lora_is_text", {"ldt.lora": "q_proj"}, ['ldt.lora: found "q_proj", expected an object with named settings']),
    ("lora_rank_0", {"ldt.lora": {"r": 0}}, ["ldt.lora.r: found 0, expected a whole number >= 1"]),
    ("lora_alpha_text", {"ldt.lora": {"lora_alpha": "8"}}, ['ldt.lora.lora_alpha: found "8", expected a number > 0']),
    ("lora_typo", {"ldt.lora": {"target_module": ["q_proj"]}}, ['did you mean "target_modules"?']),
    ("lora_no_targets", {"ldt.lora": {"target_modules": []}}, ["ldt.lora.target_modules: found []"]),
    ("lora_index", {"ldt.lora": {"layers_to_transform": [-1]}}, ["ldt.lora.layers_to_transform: found [-1]"]),
    ("lora_ranks", {"ldt.lora": {"rank_pattern": {"q_proj": 0}}}, ['ldt.lora.rank_pattern: found {"q_proj": 0}']),
    (
        "lora_changes_the_base",
        {"ldt.lora": {"init_lora_weights": "pissa"}},
        ['ldt.lora.init_lora_weights: found "pissa", expected true, false or "gaussian"'],
    ),
    (
        "lora_quantised",
        {"ldt.lora": {"use_qalora": True}},
        ["ldt.lora.use_qalora: found true, expected nothing: quantised base weights (QLoRA) are not supported"],
    ),
    (
        "lora_expression_and_indices",
        {"ldt.lora": {"target_modules": ".*q_proj", "layers_to_transform": [1]}},
        ["ldt.lora.layers_to_transform: found [1], expected null, because ldt.lora.target_modules is not a list"],
    ),
    (
        "lora_magnitudes_and_bias",
        {"ldt.lora": {"use_dora": True, "lora_bias": True}},
        ["ldt.lora.lora_bias: found true, expected false with use_dora"],
    ),
    (
        "lora_and_freeze",
        {"ldt.lora": {}, "ldt.freeze": ["head"]},
        ['ldt.freeze: found ["head"], expected nothing beside ldt.lora'],
    ),
    ("trace_is_text", {"ldt.trace": "trace"}, ['ldt.trace: found "trace", expected an object with named settings']),
    ("trace_without_path", {"ldt.trace": {"steps": [1, 2]}}, ["ldt.trace.path: found nothing"]),
    (
        "trace_typo",
        {"ldt.trace": {"path": "trace", "steps": [1, 2], "step": 1}},
        ["ldt.trace.step: found 1", 'did you mean "steps"?'],
    ),
    *(
        (
            f"trace_steps_{name}",
            {"ldt.trace": {"path": "trace", "steps": steps}},
            ["ldt.trace.steps: found", "expected two whole numbers, first <= last, from 1 on", '"steps": [3, 4]'],
        )
        for name, steps in {"backwards": [3, 2], "from_0": [0, 2], "one": 3, "text": ["1", "2"]}.items()
    ),
    # The batch numbers
    (
        "S47_batch_product",
        {"train_batch_size": 24},
        [f"train_batch_size: found 24, expected {_FORMULA}, here 2 * 4 * 2 = 16", *_BOTH_SIZES, "size to 16"],
    ),
    (
        "S47_batch_not_divisible_by_micro",
        {"train_batch_size": 18, "gradient_accumulation_steps": ABSENT},
        [
            f"train_batch_size: found 18, expected {_FORMULA}, here 2 * gradient_accumulation_steps * 2",
            *_BOTH_SIZES,
            "Fix: set train_batch_size to a multiple of 4.",
        ],
    ),
    (
        "S47_batch_not_divisible_by_steps",
        {"train_batch_size": 20, "train_micro_batch_size_per_gpu": ABSENT},
        [f"{_FORMULA}, here train_micro_batch_size_per_gpu * 4 * 2", *_BOTH_SIZES, "a multiple of 8."],
    ),
    (
        "S47_batch_smaller_than_domains",
        {
            "train_batch_size": 1,
            "train_micro_batch_size_per_gpu": ABSENT,
            "gradient_accumulation_steps": ABSENT,
        },
        [f"train_batch_size: found 1, expected {_FORMULA}", *_BOTH_SIZES, "a multiple of 2."],
    ),
    (
        "S47_batch_missing",
        {"train_micro_batch_size_per_gpu": ABSENT},
        [f"train_batch_size: found nothing, expected {_FORMULA}", *_BOTH_SIZES, 'Fix: set "train_micro_batch_size'],
    ),
    ("batch_is_text", {"train_batch_size": "16"}, ['train_batch_size: found "16"', f"{_WHOLE}, without quotes"]),
    (
        "batch_is_true",
        {"train_micro_batch_size_per_gpu": True},
        ["train_micro_batch_size_per_gpu: found true", _WHOLE],
    ),
    ("batch_is_a_float", {"gradient_accumulation_steps": 4.0}, ["gradient_accumulation_steps: found 4.0", _WHOLE]),
    ("batch_is_zero", {"gradient_accumulation_steps": 0}, ["gradient_accumulation_steps: found 0", _WHOLE]),
    (
        "batch_is_auto",
        {"train_batch_size": "auto"},
        ['train_batch_size: found "auto"', 'or write the number: "auto" is filled in by other trainers'],
    ),
    # DeepSpeed's settings
    (
        "deepspeed_misspelled",
        {"gradient_acumulation_steps": 4},
        ["gradient_acumulation_steps: found 4", 'did you mean "gradient_accumulation_steps"? Rename it or remove it.'],
    ),
    ("deepspeed_unknown", {"colour": "red"}, ['colour: found "red", expected one of the keys of DeepSpeed']),
    ("deepspeed_old_bf16", {"bfloat16": {"enabled": True}}, ["bfloat16: found", 'did you mean "bf16"?']),
    *(
        (
            f"S51_zero_stage_{stage}",
            {"zero_optimization": {"stage": stage}},
            [f"zero_optimization.stage: found {stage}, expected 0 or 1 (stage 1 shards optimizer states; stages"],
        )
        for stage in (2, 3)
    ),
    ("zero_stage_text", {"zero_optimization.stage": "0"}, ['zero_optimization.stage: found "0", expected 0 or 1']),
    ("zero_typo", {"zero_optimization.stages": 1}, ["zero_optimization.stages: found 1", 'did you mean "stage"?']),
    ("zero_is_true", {"zero_optimization": True}, ["zero_optimization: found true, expected an object"]),
    (
        "zero_offload",
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        ['zero_optimization.offload_optimizer: found {"device": "cpu"}, expected no offload', "Fix: remove it."],
    ),
    ("zero_cpu_offload", {"zero_optimization.cpu_offload": True}, ["zero_optimization.cpu_offload: found true"]),
    (
        "fp16_and_bf16",
        {"fp16.enabled": True, "bf16.enabled": True},
        ["fp16.enabled: found true, expected false where bf16.enabled is true", "Fix: enable one of the two."],
    ),
    ("fp16_auto", {"fp16.enabled": "auto"}, ['fp16.enabled: found "auto", expected true or', '"auto" is filled in']),
    ("fp16_unknown_key", {"fp16.loss_scal": 0}, ["fp16.loss_scal: found 0", 'did you mean "loss_scale"?']),
    ("fp16_auto_cast", {"fp16.auto_cast": True}, ["fp16.auto_cast: found true, expected false (batch_fn="]),
    ("fp16_scale_negative", {"fp16.loss_scale": -1}, ["fp16.loss_scale: found -1, expected the factor", "adapts"]),
    ("fp16_scale_huge", {"fp16.loss_scale": 1e300}, ["fp16.loss_scale: found 1e+300", "that fp32 holds"]),
    ("hint_not_to_what_does_nothing", {"seed": 42}, ["seed: found 42", "it is base_seed= of LDTPipelineModule"]),
    ("hint_of_another_trainer", {"max_grad_norm": 1}, ["max_grad_norm: found 1", '"gradient_clipping": 1.0']),
    ("hint_to_a_harmless_key", {"zero_optimization.pin_memory": True}, ["pin_memory: found true", "Fix: remove it."]),
    ("fp16_power", {"fp16.initial_scale_power": 200}, ["fp16.initial_scale_power: found 200, expected a whole"]),
    ("fp16_window", {"fp16.loss_scale_window": 0}, ["fp16.loss_scale_window: found 0, expected a whole number of"]),
    ("fp16_hysteresis", {"fp16.hysteresis": 0}, ["fp16.hysteresis: found 0, expected a whole number of overflows"]),
    ("fp16_min", {"fp16.min_loss_scale": 0.5}, ["fp16.min_loss_scale: found 0.5, expected a whole number for"]),
    ("fp16_masters", {"fp16.fp16_master_weights_and_grads": True}, ["fp16_master_weights_and_grads: found true"]),
    ("bf16_text", {"bf16.enabled": "true"}, ['bf16.enabled: found "true"', _BOOLEAN]),
    ("bf16_number", {"bf16.enabled": 1}, ["bf16.enabled: found 1", _BOOLEAN]),
    ("bf16_unknown_key", {"bf16.enable": True}, ["bf16.enable: found true", 'did you mean "enabled"?']),
    ("bf16_is_true", {"bf16": True}, ["bf16: found true, expected an object with named settings"]),
    ("bf16_states", {"bf16.bf16_optimizer_states": True}, ["bf16.bf16_optimizer_states: found true, expected false"]),
    ("amp", {"amp": {"enabled": False}}, ['amp: found {"enabled": false}, expected no such key (DeepSpeed has']),
    ("sparse_gradients", {"sparse_gradients": True}, ["sparse_gradients: found true, expected no such key"]),
    ("elasticity", {"elasticity": {"enabled": True}}, ["elasticity: found", "expected no such key"]),
    (
        "tensor_parallel",
        {"tensor_parallel": {"autotp_size": 2}},
        ["tensor_parallel: found", "ldt.edge.tensor_parallel"],
    ),
    ("prescale", {"prescale_gradients": True}, ["prescale_gradients: found true, expected false (gradients are"]),
    ("prescale_text", {"prescale_gradients": "false"}, ['prescale_gradients: found "false", expected false']),
    ("predivide", {"gradient_predivide_factor": 2.0}, ["gradient_predivide_factor: found 2.0, expected 1 (gradients"]),
    ("allreduce_sum", {"gradient_allreduce_op": "sum"}, ['gradient_allreduce_op: found "sum", expected "mean"']),
    (
        "reduce_in_fp16",
        {"communication_data_type": "fp16"},
        ['communication_data_type: found "fp16", expected "fp32"'],
    ),
    ("accumulate_bf16", {"data_types.grad_accum_dtype": "bf16"}, ['data_types.grad_accum_dtype: found "bf16"']),
    ("autocast", {"torch_autocast.enabled": True}, ["torch_autocast.enabled: found true, expected false"]),
    ("clipping_negative", {"gradient_clipping": -1.0}, ["gradient_clipping: found -1.0", "a number >= 0; 0 means no"]),
    ("clipping_true", {"gradient_clipping": True}, ["gradient_clipping: found true", "a number >= 0"]),
    (
        "clipping_auto",
        {"gradient_clipping": "auto"},
        ['gradient_clipping: found "auto"', '"auto" is filled in by other'],
    ),
    ("clipping_infinite", {"gradient_clipping": float("inf")}, ["gradient_clipping: found inf"]),
    ("clipping_nan", {"gradient_clipping": float("nan")}, ["gradient_clipping: found nan", "a number >= 0"]),
    (
        "steps_per_print_float",
        {"steps_per_print": 1.5},
        ["steps_per_print: found 1.5, expected a whole number of steps"],
    ),
    ("breakdown_text", {"wall_clock_breakdown": "false"}, ['wall_clock_breakdown: found "false"', _BOOLEAN]),
    ("monitor_text", {"tensorboard.enabled": "True"}, ['tensorboard.enabled: found "True"', _BOOLEAN]),
    (
        "pipeline_stages",
        {"pipeline.stages": 3},
        ["pipeline.stages: found 3, expected one of the keys of this section"],
    ),
    ("pipeline_typo", {"pipeline.use_reentrent": False}, ["pipeline.use_reentrent", 'did you mean "use_reentrant"?']),
    (
        "pipeline_partitioned",
        {"pipeline.pipe_partitioned": True},
        ["pipeline.pipe_partitioned: found true, expected false"],
    ),
    (
        "pipeline_interval",
        {"pipeline.activation_checkpoint_interval": -1},
        ["activation_checkpoint_interval: found -1"],
    ),
    ("optimizer_type_number", {"optimizer.type": 1}, ["optimizer.type: found 1, expected a name in quotes"]),
    ("optimizer_no_type", {"optimizer.type": ABSENT}, ["optimizer.type: found nothing", '"type": "AdamW"']),
    ("optimizer_typo", {"optimizer.parms": {}}, ["optimizer.parms: found {}", 'did you mean "params"?']),
    (
        "optimizer_auto",
        {"optimizer.params.lr": "auto"},
        ['optimizer.params.lr: found "auto", expected a value that AdamW'],
    ),
    (
        "optimizer_clips",
        {"optimizer.params.max_grad_norm": 1},
        ["optimizer.params.max_grad_norm", '"gradient_clipping"'],
    ),
    (
        "scheduler_no_params",
        {"scheduler.type": "WarmupLR"},
        ["scheduler.params: found nothing", "or remove the section"],
    ),
    (
        "scheduler_params_list",
        {"scheduler": {"type": "WarmupLR", "params": [1]}},
        ["scheduler.params: found [1], expected an"],
    ),
]

BAD_CONFIGS: list[tuple[str, dict[str, Any], list[str]]] = [
    *((name, changed(changes), fragments) for name, changes, fragments in _TABLE),
    (
        "several_faults",
        changed({"ldt.timeout_s": 0, "ldt.edge.data_parallel_size": "1", "fp16.enabled": 1, "zero": {}}),
        ["4 settings are at fault:\n", "1. zero: ", "2. fp16.enabled: ", "3. ldt.edge.data_", "4. ldt.timeout_s: "],
    ),
]
