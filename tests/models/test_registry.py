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


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "short_factor": [1.0] * 3}
ROPE: dict[str, tuple[dict[str, Any], str]] = {
    "infinite base": ({"rope_type": "default", "rope_theta": float("inf")}, "rope_theta: found inf, expected"),
    "no base": ({"rope_type": "default", "rope_theta": None}, "rope_theta: found null, expected a number > 0"),
    "factors of long texts": (
        {**LONG, "long_factor": [1.0] * 99},
        "long_factor: found 99 factors, expected 3, one for each frequency",
    ),
    "a factor is text": ({**LONG, "long_factor": ["1"] * 3}, 'long_factor: found ["1", "1", "1"], expected a list of'),
    "bands the wrong way": (
        {
            **{"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64},
            **{"low_freq_factor": 4.0, "high_freq_factor": 1.0},
        },
        "high_freq_factor: found 1.0, expected a number > low_freq_factor = 4",
    ),
}


@pytest.mark.parametrize("parameters, text", ROPE.values(), ids=ROPE)
def test_S67_rotary_values_that_show_in_long_texts_are_refused_too(parameters: dict[str, Any], text: str) -> None:
    config = tiny_config("llama")
    config.rope_parameters = parameters
    with pytest.raises(ConfigError) as raised:
        build_layers(config)
    assert f"model.rope_parameters.{text}" in str(raised.value)
    build_layers(tiny_config("llama", rope_parameters={**LONG, "long_factor": [2.0] * 3}))


def test_S64_code_that_comes_with_a_config_is_refused_and_nobody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda prompt="": asked.append(prompt) or "y")
    settings = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "mine.py").write_text("raise SystemExit('the code ran')\n")
    with pytest.raises(ConfigError, match="which transformers refuses: .*custom code"):
        read_hf_config(tmp_path)
    assert asked == []


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


_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
# What a config.json says -> the family, the key that the error names, and part of its text.
BAD_VALUES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    **{
        f"S90 {kind} in {family}": (
            family,
            {"rope_parameters": {**_ROPE, "rope_type": kind}},
            "rope_parameters.rope_type",
            f'found "{kind}", expected one of default, linear',
        )
        for kind in ("su", "mrope", "axial", "YARN")
        for family in ("llama", "qwen2")
    },
    "S90 su as files wrote it": (
        "llama",
        {"rope_parameters": None, "rope_scaling": {"type": "su", "short_factor": [1.0] * 3, "long_factor": [1.0] * 3}},
        "rope_parameters.rope_type",
        'found "su"',
    ),
    "S90 mrope as files wrote it": (
        "qwen2",
        {"rope_parameters": None, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}},
        "rope_parameters.rope_type",
        'found "mrope"',
    ),
    "S90 by kind of layer": ("qwen3", {"rope_parameters": {"full_attention": _ROPE}}, "rope_parameters", "one set"),
    "rope without a factor": ("llama", {"rope_parameters": {**_ROPE, "rope_type": "linear"}}, "model", "{'factor'}"),
    "factor is text": (
        "llama",
        {"rope_parameters": {**_ROPE, "rope_type": "linear", "factor": "2"}},
        "rope_parameters.factor",
        'found "2", expected a number > 0',
    ),
    "theta is text": (
        "mistral",
        {"rope_parameters": {**_ROPE, "rope_theta": "1e4"}},
        "rope_parameters.rope_theta",
        "",
    ),
    "S67 padding beyond the vocabulary": ("llama", {"pad_token_id": 61}, "pad_token_id", "found 61, expected a token"),
    "S67 padding far below it": ("qwen2", {"pad_token_id": -62}, "pad_token_id", "0 to 60 (vocab_size = 61)"),
    "S67 padding is text": ("qwen3", {"pad_token_id": "0"}, "pad_token_id", 'found "0"'),
    "heads that do not divide": (
        "llama",
        {"num_key_value_heads": 3},
        "num_key_value_heads",
        "num_attention_heads = 4",
    ),
    "more heads of keys": ("mistral", {"num_key_value_heads": 8}, "num_key_value_heads", "found 8"),
    "no heads": ("llama", {"num_attention_heads": 0}, "num_attention_heads", "a whole number >= 1"),
    "no heads of keys": ("qwen2", {"num_key_value_heads": 0}, "num_key_value_heads", "a whole number >= 1"),
    "hidden size of no head": ("qwen2", {"hidden_size": 23}, "num_attention_heads", "a divisor of hidden_size = 23"),
    "odd heads": ("qwen3", {"head_dim": 7}, "head_dim", "found 7, expected an even number"),
    "negative heads": ("qwen3", {"head_dim": -2}, "head_dim", "a whole number >= 1"),
    "heads of null": ("qwen2", {"head_dim": None}, "config.json", "TypeError: unsupported operand"),
    "activation": ("llama", {"hidden_act": "gelux"}, "hidden_act", 'found "gelux", expected one of gelu'),
    "dropout is text": ("qwen2", {"attention_dropout": "0.1"}, "attention_dropout", "a number >= 0 and < 1"),
    "dropout of 2": ("mistral", {"attention_dropout": 2.0}, "attention_dropout", "a number >= 0 and < 1"),
    "epsilon": ("llama", {"rms_norm_eps": -1.0}, "rms_norm_eps", "a number > 0"),
    "no vocabulary": ("qwen3", {"vocab_size": 0}, "vocab_size", "a whole number >= 1"),
    "inner size": ("mistral", {"intermediate_size": -1}, "intermediate_size", "a whole number >= 1"),
    "too few kinds of layers": ("qwen2", {"layer_types": ["full_attention"]}, "model", "num_hidden_layers` (3)"),
    "window": ("mistral", {"sliding_window": -4}, "sliding_window", "found -4, expected a window in tokens"),
    "layers is text": ("llama", {"num_hidden_layers": "3"}, "model", "Field 'num_hidden_layers' expected int"),
    "boolean is text": ("llama", {"tie_word_embeddings": "false"}, "model", "Field 'tie_word_embeddings'"),
}


def _written(family: str, changes: dict[str, Any], directory: Path) -> PreTrainedConfig:
    """The config of a family as a file that somebody has edited."""
    content = {**tiny_config(family).to_dict(), **changes}
    if content["rope_parameters"] is None:
        del content["rope_parameters"]
    (directory / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return read_hf_config(directory)


@pytest.mark.parametrize("name", BAD_VALUES)
def test_S67_S90_a_value_that_no_layer_can_be_built_with_is_refused_by_name(name: str, tmp_path: Path) -> None:
    family, changes, key, fragment = BAD_VALUES[name]
    with pytest.raises(ConfigError) as raised:
        build_layers(_written(family, changes, tmp_path))
    assert key.removeprefix("model.") in {p.key.removeprefix("model.") for p in raised.value.problems}
    assert fragment in str(raised.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"pad_token_id": None},
        {"pad_token_id": -1},
        {"pad_token_id": 60},
        {"num_key_value_heads": 4},
        {"attention_dropout": 0.1},
        {"eos_token_id": [2, 3]},
        {"rope_parameters": {**_ROPE, "rope_type": "dynamic", "factor": 2.0}},
        {"rope_parameters": {**_ROPE, "rope_type": "linear", "factor": 2}},
    ],
)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_S67_values_that_transformers_takes_are_taken(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = _written(family, changes, tmp_path)
    embedding = build_layers(config)[0].build()
    assert embedding.padding_idx == family_of(config).model_class(config).model.embed_tokens.padding_idx


def test_what_is_only_found_by_building_is_refused_too() -> None:
    config = tiny_config("llama")
    config.rope_parameters = {"rope_type": "linear", "rope_theta": 1e4}  # as a script may write it, unchecked
    with pytest.raises(ConfigError, match=r"model\.config\.json: found values with which .*KeyError: 'factor'"):
        build_layers(config)
