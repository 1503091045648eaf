"""What a plan without a model says of adapters is what the layers of the model say."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedConfig

from ds_ldt.config.lora import LoraSettings
from ds_ldt.config.schema import LDTConfig
from ds_ldt.models import build_layers, family_of
from ds_ldt.models.lora import plan_adapters
from ds_ldt.models.registry import checked_config, layout_of
from ds_ldt.plan.trained_layers import describe_layers, gradient_boundaries, trained_layers
from ds_ldt.topology.layout import Layout
from tests.models.tiny import tiny_config
from tests.models.tiny_vl import tiny_vl_config

TEXT_MATRIX = [[1, 1, 1], [1, 1, 1], [1, 0, 0]]
VL_MATRIX = {"vision_encoder": [[1, 2], [1, 0], [0, 0]], "text_decoder": [[0, 0], [1, 2], [1, 0]]}

TEXT_CASES: list[tuple[dict[str, Any], list[bool]]] = [
    ({}, [True] * 6),
    ({"target_modules": "all-linear"}, [True] * 6),
    ({"target_modules": ["up_proj"], "exclude_modules": ["layers.0.mlp.up_proj"]}, [False] + [True] * 5),
    ({"target_modules": ["q_proj"], "layers_to_transform": [2, 4]}, [False, False, True, True, True, True]),
    ({"target_modules": ["q_proj"], "layers_to_transform": [6]}, [False] * 6),
    ({"target_modules": ["q_proj"], "layers_to_transform": 4, "layers_pattern": "layers"}, [False] * 4 + [True] * 2),
    ({"target_modules": ["layers.1.mlp.up_proj", "o_proj"], "exclude_modules": ["o_proj"]}, [False] + [True] * 5),
    ({"target_modules": ["lm_head"]}, [False] * 6),
    ({"target_modules": ["v_proj"], "layers_to_transform": [5], "modules_to_save": ["lm_head"]}, [False] * 5 + [True]),
    ({"target_modules": ["v_proj"], "layers_to_transform": [5], "modules_to_save": ["input_layernorm"]}, [True] * 6),
    ({"target_modules": r".*layers\.[35]\..*_proj"}, [False] * 3 + [True] * 3),
]
VL_CASES: list[dict[str, Any]] = [
    {"target_modules": ["q_proj"]},
    {"target_modules": ["qkv"], "layers_to_transform": [3]},
    {"target_modules": ["q_proj", "qkv"], "layers_to_transform": [1]},
    {"target_modules": ["visual.merger.mlp.0"]},
    {"target_modules": ["up_proj"], "layers_to_transform": [2], "layers_pattern": "layers"},
    {"target_modules": "all-linear"},
    {"target_modules": r"model\.language_model\..*\.3\.mlp\.up_proj"},
]


def of_the_model(lora: dict[str, Any], config: PreTrainedConfig, matrix: Any) -> tuple[bool, ...]:
    """What the layers of a model say, by PEFT itself."""
    config = checked_config(config)
    family, layout = family_of(config), layout_of(matrix, config, allow_exposed_edge=False)
    keys = family.key_map(config)
    names = [keys.module_name(index) for index in range(keys.num_layers)]
    settings = LoraSettings(**lora)
    plan = plan_adapters(settings, build_layers(config), names=names, model_type=family.name)
    whole = settings.modules_to_save or []
    trained = [
        index
        for index, name in enumerate(names)
        if any(target == name or target.startswith(name + ".") for target in plan.targets)
        or any(f"{name}.{key}".rpartition(".")[0].endswith(one) for one in whole for key in shapes(config, index))
    ]
    return tuple(any(index < virtual.stop for index in trained) for virtual in layout.virtual_stages[:-1])


def shapes(config: PreTrainedConfig, layer: int) -> list[str]:
    return list(family_of(config).expected_shapes(config).get(layer, {}))


def without_a_model(lora: dict[str, Any], matrix: Any) -> tuple[bool, ...] | None:
    """What the plan says; layers that join the matrix are missing, as `ds-ldt plan` leaves them out."""
    ldt = LDTConfig.model_validate({"pipeline_num_layers": matrix, "lora": lora})
    joining = {"num_leading": 1, "num_between": 1, "num_trailing": 1} if isinstance(matrix, dict) else {}
    layout = Layout.build(matrix, **joining)
    return gradient_boundaries(trained_layers(ldt, layout), layout)


@pytest.mark.parametrize("lora, expected", TEXT_CASES)
def test_boundaries_with_gradients_are_those_of_the_model(lora: dict[str, Any], expected: list[bool]) -> None:
    config = tiny_config("qwen2", num_hidden_layers=7, tie_word_embeddings=False)
    assert of_the_model(lora, config, TEXT_MATRIX) == tuple(expected)
    assert without_a_model(lora, TEXT_MATRIX) == tuple(expected)


@pytest.mark.parametrize("lora", VL_CASES)
def test_boundaries_of_two_modalities_are_those_of_the_model(lora: dict[str, Any]) -> None:
    config = tiny_vl_config(text={"num_hidden_layers": 4})
    assert without_a_model(lora, VL_MATRIX) == of_the_model(lora, config, VL_MATRIX)


def test_names_of_a_list_of_layers_are_taken_for_modules_of_every_layer() -> None:
    lora = {"target_modules": ["linear"], "layers_to_transform": [2]}
    assert without_a_model(lora, [[1, 2], [1, 0]]) == (False, True)


@pytest.mark.parametrize("lora", [{"bias": "all", "layers_to_transform": [3]}, {"target_modules": ".*linear"}])
def test_what_only_the_model_can_tell_is_taken_for_everywhere(lora: dict[str, Any]) -> None:
    assert without_a_model({"target_modules": ["q_proj"], **lora}, [[1, 2], [1, 0]]) is None


def test_layers_are_named_by_their_modality() -> None:
    layout = Layout.build(VL_MATRIX, num_leading=1, num_between=1, num_trailing=1)
    assert describe_layers(frozenset({0, 2, 3, 4, 5, 8, 10}), layout) == (
        "leading; vision_encoder 1-3; between; text_decoder 2; trailing"
    )
