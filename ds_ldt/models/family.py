"""A model family: everything ds_ldt has to know about one architecture of transformers, in one value."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ds_ldt.models.attention import AttentionMemo
from ds_ldt.models.causal_lm import OutputLayer, TokenEmbedding, tied_output
from ds_ldt.models.keys import KeyMap
from ds_ldt.wire import WireSchema, WireTensor

TIE_KEY = "embed_tokens"

WIRE_SCHEMA = WireSchema(
    tensors=(
        WireTensor(
            name="hidden_states",
            dtype="float",
            ndim=3,
            gradient=True,
            reveals="what the edge's layers computed from the tokens; a curious cloud can invert it with effort",
        ),
        WireTensor(
            name="position_ids",
            dtype="int32",
            ndim=2,
            reveals="the lengths of the sequences and where packed ones begin",
        ),
        WireTensor(
            name="padding_mask",
            dtype="bool",
            ndim=2,
            optional=True,
            reveals="which positions are padding; sent only for micro-batches that have some",
        ),
    ),
    uniform=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """One architecture: its layers, the names of their weights and the tensors that cross the link.

    Attributes:
        name: transformers' `model_type`, e.g. `qwen2`.
        model_class: The model that the family splits, e.g. `Qwen2ForCausalLM`.
        decoder_class: Its decoder layer as a pipeline layer (`DecoderMixin`).
        norm_class: Its final norm as a pipeline layer (`FinalNormMixin`).
        rotary_class: Its rotary embedding.
        mask_kinds: config -> the kind of attention mask of each decoder layer, as the model chooses it.
    """

    name: str
    model_class: type[PreTrainedModel]
    decoder_class: type[nn.Module]
    norm_class: type[nn.Module]
    rotary_class: type[nn.Module]
    mask_kinds: Callable[[Any], tuple[str, ...]]

    def key_map(self, config: PreTrainedConfig) -> KeyMap:
        """Return the names of the weights of a model with this config."""
        return KeyMap(num_decoder_layers=config.num_hidden_layers, tied=bool(config.tie_word_embeddings))

    def wire_schema(self) -> WireSchema:
        """Return what crosses every boundary: hidden states, position ids, and the padding mask if there is one."""
        return WIRE_SCHEMA

    def layers(self, config: PreTrainedConfig) -> list[LayerSpec]:
        """Return the pipeline layers of a checked config. Nothing is allocated until a layer is built."""
        memo = AttentionMemo(config, self.rotary_class)
        decoder_layers = [
            LayerSpec(self.decoder_class, config, index, memo=memo, mask_kind=kind)
            for index, kind in enumerate(self.mask_kinds(config))
        ]
        if config.tie_word_embeddings:
            embedding = TiedLayerSpec(TIE_KEY, TokenEmbedding, config)
            output = TiedLayerSpec(TIE_KEY, TokenEmbedding, config, forward_fn=tied_output)
        else:
            embedding, output = LayerSpec(TokenEmbedding, config), LayerSpec(OutputLayer, config)
        return [embedding, *decoder_layers, LayerSpec(self.norm_class, config), output]

    def expected_shapes(self, config: PreTrainedConfig) -> dict[int, dict[str, tuple[int, ...]]]:
        """Return the shape of every weight: pipeline layer index -> key within the layer -> shape."""
        specs, keys = self.layers(config), self.key_map(config)
        with torch.device("meta"):
            return {
                layer: {key: tuple(value.shape) for key, value in specs[layer].build().state_dict().items()}
                for layer in keys.layers_with_weights
            }

    def initializer(self, config: PreTrainedConfig) -> Callable[[nn.Module], None]:
        """Return transformers' own weight initialisation for this model; apply it to every submodule."""
        one_layer = copy.deepcopy(config)
        one_layer.num_hidden_layers = 1
        if getattr(one_layer, "layer_types", None):
            one_layer.layer_types = one_layer.layer_types[:1]
        with torch.device("meta"):
            initialize: Callable[[nn.Module], None] = self.model_class(one_layer)._init_weights
        return initialize
