"""Which models are supported, and how the others are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, PreTrainedConfig

from ds_ldt.errors import ConfigError
from ds_ldt.models import build_layers, checked_config, family_of, read_hf_config
from ds_ldt.models.registry import layout_of
from tests.models.tiny import FAMILY_NAMES, tiny_config

WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "quantised": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["model.quantization_config"]),
    "head": ({"architectures": ["Qwen2ForSequenceClassification"]}, ["model.architectures", "Qwen2ForCausalLM"]),
    "not causal": ({"is_causal": False}, ["model.is_causal", "found false"]),
    "attention": ({"attn_implementation": "flash_attention_2"}, ["model.attn_implementation", "sdpa or eager"]),
    "no layers": ({"num_hidden_layers": 0, "layer_types": []}, ["model.num_hidden_layers", "at least 1"]),
    "layer type": ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, ["chunked_attention"]),
    "window": ({"layer_types": ["sliding_attention"] * 3}, ["model.sliding_window", "found null"]),
}


@pytest.mark.parametrize("changes, fragments", WRONG.values(), ids=WRONG)
def test_unsupported_feature_is_refused_by_name(changes: dict[str, Any], fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        checked_config(tiny_config("qwen2", **changes))
    assert [fragment for fragment in fragments if fragment not in str(raised.value)] == []


def test_unknown_rope_scaling_is_refused_by_name() -> None:
    config = tiny_config("llama")
    config.rope_parameters = {"rope_type": "spiral", "rope_theta": 1.0}
    with pytest.raises(ConfigError, match=r'model\.rope_parameters\.rope_type: found "spiral".*llama3'):
        build_layers(config)


def test_all_problems_of_a_config_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        build_layers(tiny_config("qwen3", quantization_config={"quant_method": "awq"}), attn_implementation="paged")
    assert [problem.key for problem in raised.value.problems] == [
        "model.quantization_config",
        "model.attn_implementation",
    ]


def test_unknown_architecture_names_the_supported_ones() -> None:
    with pytest.raises(ConfigError, match=r'found "gpt2", expected one of llama, mistral, qwen2, qwen2_5_vl, qwen3'):
        family_of(GPT2Config())


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_config_read_from_a_directory_is_the_one_saved(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    config.save_pretrained(tmp_path)
    found = read_hf_config(tmp_path)
    assert isinstance(found, PreTrainedConfig)
    assert found.to_diff_dict() == config.to_diff_dict()


@pytest.mark.parametrize(
    "content, fragment",
    [
        (None, "found no "),
        ("{", "transformers refuses"),
        (json.dumps({"model_type": "no_such_model"}), "transformers refuses"),
    ],
)
def test_unreadable_config_names_the_file(tmp_path: Path, content: str | None, fragment: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError) as raised:
        read_hf_config(tmp_path)
    assert fragment in str(raised.value)
    assert str(tmp_path) in str(raised.value)


def test_S41_layout_has_to_hold_every_decoder_layer() -> None:
    config = tiny_config("llama", num_hidden_layers=5)
    layout = layout_of([[1, 3], [1, 0]], config, allow_exposed_edge=False)
    assert [(v.start, v.stop) for v in layout.virtual_stages] == [(0, 2), (2, 5), (5, 8)]
    with pytest.raises(ConfigError, match=r"whose sum is 4.*a sum of 5"):
        layout_of([[1, 2], [1, 0]], config, allow_exposed_edge=False)


@pytest.mark.parametrize("matrix", [[[0, 4], [1, 0]], [[1, 4], [0, 0]]], ids=["head", "tail"])
def test_exposed_edge_is_refused_unless_allowed(matrix: list[list[int]]) -> None:
    config = tiny_config("llama", num_hidden_layers=5)
    with pytest.raises(ConfigError, match="allow_exposed_edge"):
        layout_of(matrix, config, allow_exposed_edge=False)
    assert layout_of(matrix, config, allow_exposed_edge=True).num_layers == 8
