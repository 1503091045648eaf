"""A model family: everything ds_ldt has to know about one architecture of transformers, in one value."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ds_ldt.comm.wire import WireSchema, WireTensor
from ds_ldt.config.layer_matrix import TEXT
from ds_ldt.errors import ConfigProblem
from ds_ldt.models.attention import AttentionMemo
from ds_ldt.models.batch import TextBatches
from ds_ldt.models.causal_lm import OutputLayer, TokenEmbedding, tied_output
from ds_ldt.models.weight_names import NUM_LEADING, NUM_TRAILING, KeyMap
from ds_ldt.topology.layout import Layout

TIE_KEY = "embed_tokens"

PADDING_MASK = WireTensor(
    name="padding_mask",
    dtype="bool",
    ndim=2,
    optional=True,
    reveals="which positions are padding; sent only for micro-batches that have some",
)
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
        PADDING_MASK,
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

    @property
    def num_leading(self) -> int:
        """Pipeline layers that join the head without being counted in `pipeline_num_layers`: the embedding."""
        return NUM_LEADING

    @property
    def num_between(self) -> int:
        """Pipeline layers between two modalities, on the edge."""
        return 0

    @property
    def num_trailing(self) -> int:
        """Pipeline layers that join the tail: the final norm and the output layer."""
        return NUM_TRAILING

    def depths(self, config: PreTrainedConfig) -> int | dict[str, int]:
        """Return the number of layers that `pipeline_num_layers` distributes, for each modality if there are two."""
        depth: int = config.num_hidden_layers
        return depth

    def key_map(self, config: PreTrainedConfig) -> KeyMap:
        """Return the names of the weights of a model with this config."""
        return KeyMap(num_decoder_layers=config.num_hidden_layers, tied=bool(config.tie_word_embeddings))

    def wire_schema(self, layout: Layout) -> WireSchema:
        """Return what crosses the boundaries of a layout: hidden states, position ids, the padding mask if any."""
        return WIRE_SCHEMA

    def local_layers(self, config: PreTrainedConfig) -> tuple[int, ...]:
        """Return the layers that take what stays on the edge besides what the layer before them returns."""
        return ()

    def parts(self, config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
        """Return the parts that `ldt.freeze` can name -> their pipeline layers."""
        keys = self.key_map(config)
        return {
            "embedding": (keys.embedding,),
            TEXT: tuple(range(keys.embedding + 1, keys.norm)),
            "head": (keys.norm, keys.head),
        }

    def batches(self, config: PreTrainedConfig) -> Callable[[Any], Any]:
        """Return what turns a collated batch into what a model with this config takes."""
        return TextBatches(vocab_size=config.vocab_size)

    def layers(self, config: PreTrainedConfig) -> list[LayerSpec]:
        """Return the pipeline layers of a checked config. Nothing is allocated until a layer is built."""
        memo = AttentionMemo(config, self.rotary_class)
        decoder_layers = [
            LayerSpec(self.decoder_class, config, index, memo=memo, mask_kind=kind)
            for index, kind in enumerate(self.mask_kinds(config))
        ]
        embedding, output = tie_or_not(TokenEmbedding, config, tied=config.tie_word_embeddings)
        return [embedding, *decoder_layers, LayerSpec(self.norm_class, config), output]

    def expected_shapes(self, config: PreTrainedConfig) -> dict[int, dict[str, tuple[int, ...]]]:
        """Return the shape of every weight: pipeline layer index -> key within the layer -> shape."""
        specs, keys = self.layers(config), self.key_map(config)
        with torch.device("meta"):
            return {
                layer: {key: tuple(value.shape) for key, value in specs[layer].build().state_dict().items()}
                for layer in keys.layers_with_weights
            }

    def initializer(self, config: PreTrainedConfig) -> Callable[[int, nn.Module], None]:
        """Return transformers' own weight initialisation: apply it to the index of a layer and every submodule."""
        one_layer = copy.deepcopy(config)
        one_layer.num_hidden_layers = 1
        if getattr(one_layer, "layer_types", None):
            one_layer.layer_types = one_layer.layer_types[:1]
        with torch.device("meta"):
            model = self.model_class(one_layer)
        return lambda layer, module: model._init_weights(module)

    def problems(self, config: PreTrainedConfig) -> Iterator[ConfigProblem]:
        """Yield what a config asks for and this family alone cannot do."""
        return iter(())


def tie_or_not(embedding_class: type[nn.Module], config: Any, *, tied: bool, **options: Any) -> list[LayerSpec]:
    """Return the pipeline layers of the embedding and of the output layer, one module if they are tied.

    Args:
        embedding_class: The class of the embedding, built from the config of the decoder.
        config: The config of the decoder.
        tied: Whether the output layer uses the embedding's weight.
        options: Further arguments of the embedding.
    """
    if not tied:
        return [LayerSpec(embedding_class, config, **options), LayerSpec(OutputLayer, config)]
    return [
        TiedLayerSpec(TIE_KEY, embedding_class, config, **options),
        TiedLayerSpec(TIE_KEY, embedding_class, config, forward_fn=tied_output, **options),
    ]


def model_problem(key: str, found: object, expected: str, fix: str) -> ConfigProblem:
    """Return a fault of a setting in a model's config."""
    return ConfigProblem(key=f"model.{key}", found=found, expected=expected, fix=fix)
