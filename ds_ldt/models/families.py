"""The supported families. They differ in the classes they take from transformers and in how layers choose a mask."""

from __future__ import annotations

from typing import Any

from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer, MistralRMSNorm, MistralRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from ds_ldt.models.attention import FULL, SLIDING
from ds_ldt.models.causal_lm import DecoderMixin, FinalNormMixin
from ds_ldt.models.family import ModelFamily
from ds_ldt.models.qwen2_5_vl import QWEN2_5_VL


class LlamaLayer(DecoderMixin, LlamaDecoderLayer):
    """A Llama decoder layer of the pipeline."""


class LlamaFinalRMSNorm(FinalNormMixin, LlamaRMSNorm):
    """Llama's final norm as a pipeline layer."""


class MistralLayer(DecoderMixin, MistralDecoderLayer):
    """A Mistral decoder layer of the pipeline."""


class MistralFinalRMSNorm(FinalNormMixin, MistralRMSNorm):
    """Mistral's final norm as a pipeline layer."""


class Qwen2Layer(DecoderMixin, Qwen2DecoderLayer):
    """A Qwen2 decoder layer of the pipeline."""


class Qwen2FinalRMSNorm(FinalNormMixin, Qwen2RMSNorm):
    """Qwen2's final norm as a pipeline layer."""


class Qwen3Layer(DecoderMixin, Qwen3DecoderLayer):
    """A Qwen3 decoder layer of the pipeline."""


class Qwen3FinalRMSNorm(FinalNormMixin, Qwen3RMSNorm):
    """Qwen3's final norm as a pipeline layer."""


def _always_full(config: Any) -> tuple[str, ...]:
    """Llama: every layer sees everything before it."""
    return (FULL,) * config.num_hidden_layers


def by_layer_types(config: Any) -> tuple[str, ...]:
    """Qwen: `layer_types` says it layer by layer (the config derives it from `use_sliding_window`)."""
    return tuple(config.layer_types)


def _all_alike(config: Any) -> tuple[str, ...]:
    """Mistral: every layer slides if the config has a window, and none does otherwise."""
    return (FULL if config.sliding_window is None else SLIDING,) * config.num_hidden_layers


FAMILIES: dict[str, ModelFamily] = {
    family.name: family
    for family in (
        ModelFamily(
            name="llama",
            model_class=LlamaForCausalLM,
            decoder_class=LlamaLayer,
            norm_class=LlamaFinalRMSNorm,
            rotary_class=LlamaRotaryEmbedding,
            mask_kinds=_always_full,
        ),
        ModelFamily(
            name="mistral",
            model_class=MistralForCausalLM,
            decoder_class=MistralLayer,
            norm_class=MistralFinalRMSNorm,
            rotary_class=MistralRotaryEmbedding,
            mask_kinds=_all_alike,
        ),
        ModelFamily(
            name="qwen2",
            model_class=Qwen2ForCausalLM,
            decoder_class=Qwen2Layer,
            norm_class=Qwen2FinalRMSNorm,
            rotary_class=Qwen2RotaryEmbedding,
            mask_kinds=by_layer_types,
        ),
        ModelFamily(
            name="qwen3",
            model_class=Qwen3ForCausalLM,
            decoder_class=Qwen3Layer,
            norm_class=Qwen3FinalRMSNorm,
            rotary_class=Qwen3RotaryEmbedding,
            mask_kinds=by_layer_types,
        ),
        QWEN2_5_VL,
    )
}
