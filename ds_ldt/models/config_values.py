"""Values of a model's `config.json` that no layer could be built or run with, each refused by its name."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ds_ldt.config.rules import is_whole
from ds_ldt.errors import Absent, ConfigProblem
from ds_ldt.models.family import ModelFamily, model_problem

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
_SIZES_OR_NULL = ("num_key_value_heads", "head_dim")
_CORRECT = "correct config.json"
_TRIED_TOKENS = 5
_IMAGE_AXES = 3
"""Axes of a position where there are images: time, height and width."""


def value_problems(text: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """Yield sizes, ids and rates of the decoder that are out of range.

    Args:
        text: The config of the decoder, as `to_dict()` or the file has it; what is absent is not asked about.
    """
    problems = list(_size_problems(text))
    yield from problems
    if not problems:
        yield from _head_problems(text)
        yield from _padding_problems(text)
    activation = text.get("hidden_act", "silu")
    if activation not in ACT2FN:
        yield model_problem("hidden_act", activation, f"one of {', '.join(sorted(ACT2FN))}", _CORRECT)
    dropout = text.get("attention_dropout", 0.0)
    if not _is_number(dropout) or not 0 <= dropout < 1:
        yield model_problem("attention_dropout", dropout, "a number >= 0 and < 1", _CORRECT)
    epsilon = text.get("rms_norm_eps", 1e-6)
    if not _is_number(epsilon) or not epsilon > 0:
        yield model_problem("rms_norm_eps", epsilon, "a number > 0", _CORRECT)


def rope_problems(text: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """Yield what is wrong with the rotary positions of the decoder: an unknown kind, or numbers that are none.

    Args:
        text: As for `value_problems`.
    """
    known, found = ("default", *ROPE_INIT_FUNCTIONS), text.get("rope_parameters")
    parameters = found if isinstance(found, Mapping) else {}
    kind = parameters.get("rope_type")
    nested = [name for name, value in parameters.items() if isinstance(value, Mapping)]
    if nested:
        yield model_problem(
            "rope_parameters", found, "one set of parameters for all layers", "use a model whose layers are alike"
        )
    elif kind not in known:
        found = Absent() if kind is None else kind
        yield model_problem("rope_parameters.rope_type", found, f"one of {', '.join(known)}", _CORRECT)
    for name in ("rope_theta", "factor"):
        number = parameters.get(name)
        if number is not None and (not _is_number(number) or not number > 0):
            yield model_problem(f"rope_parameters.{name}", number, "a number > 0", _CORRECT)
    if "rope_theta" in parameters and parameters["rope_theta"] is None:
        yield model_problem("rope_parameters.rope_theta", None, "a number > 0", _CORRECT)
    yield from _factor_problems(text, parameters)


def _factor_problems(text: Mapping[str, Any], parameters: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """Yield factors of single frequencies that are none; those of long texts show in no trial with a short one."""
    low, high = parameters.get("low_freq_factor"), parameters.get("high_freq_factor")
    if isinstance(low, int | float) and isinstance(high, int | float) and low >= high:
        expected = f"a number > low_freq_factor = {low:g}"
        yield model_problem("rope_parameters.high_freq_factor", high, expected, _CORRECT)
    heads, width = text.get("num_attention_heads"), text.get("head_dim")
    if width is None and heads and text.get("hidden_size"):
        width = text["hidden_size"] // heads
    count = int(width * (parameters.get("partial_rotary_factor") or 1)) // 2 if width else None
    for name in ("long_factor", "short_factor"):
        factors = parameters.get(name)
        if factors is None:
            continue
        if not isinstance(factors, list) or not all(_is_number(factor) and factor > 0 for factor in factors):
            yield model_problem(f"rope_parameters.{name}", factors, "a list of numbers > 0", _CORRECT)
        elif count is not None and len(factors) != count:
            found = Absent(f"{len(factors)} factors")
            yield model_problem(f"rope_parameters.{name}", found, f"{count}, one for each frequency", _CORRECT)


def trial_problem(config: PreTrainedConfig, family: ModelFamily) -> ConfigProblem | None:
    """Build one layer of each kind without memory, and run a decoder layer on a few tokens.

    Args:
        config: A config in which nothing else was found.
        family: Its family.

    Returns:
        What transformers or torch object to, in their words; None if nothing.
    """
    small = copy.deepcopy(config)
    text = small.get_text_config()
    text.num_hidden_layers, text.use_cache = 1, False
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    axes: tuple[int, ...] = ()
    if hasattr(small, "vision_config"):
        small.vision_config.depth = 1
        axes = (_IMAGE_AXES,)
    small._attn_implementation = "sdpa"
    try:
        keys, specs = family.key_map(small), family.layers(small)
        with torch.device("meta"), torch.no_grad():
            layers = [spec.build() for spec in specs]
            hidden = torch.empty(1, _TRIED_TOKENS, text.hidden_size)
            positions = torch.zeros(*axes, 1, _TRIED_TOKENS, dtype=torch.int32)
            hidden, *_ = layers[keys.norm - 1]((hidden, positions))
            layers[keys.norm]((hidden, positions))
    except Exception as error:  # noqa: BLE001 - torch and transformers raise what they like; all mean the same here
        lines = str(error).strip().splitlines()
        said = lines[0] if lines else ""
        return model_problem(
            "config.json",
            Absent(f"values with which a layer cannot be built ({type(error).__name__}: {said})"),
            f"a config with which {family.model_class.__name__} of transformers runs",
            "check the file against the one that was published with the model",
        )
    return None


def _size_problems(text: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    for name in (*_SIZES, *_SIZES_OR_NULL):
        if name not in text or (text[name] is None and name in _SIZES_OR_NULL):
            continue
        if not is_whole(text[name], 1):
            yield model_problem(name, text[name], "a whole number >= 1", _CORRECT)


def _head_problems(text: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
    if hidden is None or heads is None:
        return
    of_keys, width = text.get("num_key_value_heads"), text.get("head_dim")
    if of_keys is not None and heads % of_keys:
        yield model_problem("num_key_value_heads", of_keys, f"a divisor of num_attention_heads = {heads}", _CORRECT)
    if width is None and hidden % heads:
        expected = f"a divisor of hidden_size = {hidden}, as no head_dim is given"
        yield model_problem("num_attention_heads", heads, expected, _CORRECT)
    elif width is not None and width % 2:
        yield model_problem("head_dim", width, "an even number: rotary positions turn pairs", _CORRECT)


def _padding_problems(text: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """A padding token counts from the end of the vocabulary where it is negative, as in transformers."""
    padding, size = text.get("pad_token_id"), text.get("vocab_size")
    if padding is None or size is None:
        return
    if not is_whole(padding, -size) or padding >= size:
        yield model_problem(
            "pad_token_id",
            padding,
            f"a token of the vocabulary, 0 to {size - 1} (vocab_size = {size}), or null",
            "set it to null where nothing is padded, or to a token that the model has",
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
