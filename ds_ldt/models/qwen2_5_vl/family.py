"""Qwen2.5-VL as a model family: its layers, the names of their weights and the tensors that cross the link."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from torch import nn
from transformers import PreTrainedConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding

from ds_ldt.comm.wire import WireSchema, WireTensor
from ds_ldt.config.layer_matrix import TEXT, VISION
from ds_ldt.errors import ConfigProblem
from ds_ldt.models.family import PADDING_MASK, ModelFamily, model_problem, tie_or_not
from ds_ldt.models.qwen2_5_vl.batch import VisionBatches, shallow
from ds_ldt.models.qwen2_5_vl.keys import NUM_BETWEEN, NUM_LEADING, VisionLanguageKeyMap
from ds_ldt.models.qwen2_5_vl.layers import (
    PatchEmbedding,
    PatchMerger,
    PositionMemo,
    Qwen2_5_VLFinalRMSNorm,
    Qwen2_5_VLLayer,
    TextEmbedding,
    VisionBlock,
)
from ds_ldt.models.qwen2_5_vl.windows import WindowMemo
from ds_ldt.topology.layout import Layout

VISION_WIRE = (
    WireTensor(
        name="vision_hidden_states",
        dtype="float",
        ndim=2,
        gradient=True,
        reveals="what the edge's layers computed from the pixels; a curious cloud can try to invert it (how well that "
        "works has not been measured)",
    ),
    WireTensor(
        name="grid_thw",
        dtype="int32",
        ndim=2,
        reveals="how many images a micro-batch has, and the height and width of each in patches",
    ),
)
TEXT_WIRE = (
    WireTensor(
        name="hidden_states",
        dtype="float",
        ndim=3,
        gradient=True,
        reveals="what the edge's layers computed from tokens and images; a curious cloud can invert it with effort",
    ),
    WireTensor(
        name="position_ids",
        dtype="int32",
        ndim=3,
        reveals="the lengths of the sequences, where in them images stand, and of which height and width",
    ),
    PADDING_MASK,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionLanguageFamily(ModelFamily):
    """A vision encoder whose features take the place of image tokens in a decoder."""

    @property
    def num_leading(self) -> int:
        """The patch embedding."""
        return NUM_LEADING

    @property
    def num_between(self) -> int:
        """The patch merger and the text embedding."""
        return NUM_BETWEEN

    def depths(self, config: PreTrainedConfig) -> dict[str, int]:
        """Return the number of vision blocks and of decoder layers."""
        return {VISION: config.vision_config.depth, TEXT: config.text_config.num_hidden_layers}

    def key_map(self, config: PreTrainedConfig) -> VisionLanguageKeyMap:
        """Return the names of the weights of a model with this config."""
        depths = self.depths(config)
        return VisionLanguageKeyMap(
            num_vision_blocks=depths[VISION],
            num_decoder_layers=depths[TEXT],
            tied=bool(config.tie_word_embeddings),
        )

    def wire_schema(self, layout: Layout) -> WireSchema:
        """Return what crosses each boundary of a layout: patches and grids, or tokens and positions."""
        return WireSchema.by_modality(layout, {VISION: VISION_WIRE, TEXT: TEXT_WIRE})

    def local_layers(self, config: PreTrainedConfig) -> tuple[int, ...]:
        """Return the layers that take what stays on the edge: the text embedding needs the token ids."""
        return (self.key_map(config).embedding,)

    def parts(self, config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
        """Return the parts that `ldt.freeze` can name -> their pipeline layers."""
        keys = self.key_map(config)
        return {
            VISION: tuple(range(keys.merger)),
            "merger": (keys.merger,),
            **ModelFamily.parts(self, config),
        }

    def batches(self, config: PreTrainedConfig) -> Callable[[Any], Any]:
        """Return what reads the batches of a model with this config."""
        return VisionBatches(config)

    def layers(self, config: PreTrainedConfig) -> list[LayerSpec]:
        """Return the pipeline layers of a checked config. Nothing is allocated until a layer is built."""
        vision, text = config.vision_config, config.text_config
        windows, positions = WindowMemo(vision), PositionMemo(text, self.rotary_class)
        embedding, output = tie_or_not(
            TextEmbedding, text, tied=config.tie_word_embeddings, image_token_id=config.image_token_id
        )
        return [
            LayerSpec(PatchEmbedding, vision, memo=windows),
            *(LayerSpec(VisionBlock, vision, index, memo=windows) for index in range(vision.depth)),
            LayerSpec(PatchMerger, vision, memo=windows),
            embedding,
            *(
                LayerSpec(self.decoder_class, text, index, memo=positions, mask_kind=kind)
                for index, kind in enumerate(self.mask_kinds(text))
            ),
            LayerSpec(self.norm_class, text),
            output,
        ]

    def initializer(self, config: PreTrainedConfig) -> Callable[[int, nn.Module], None]:
        """Return transformers' own weight initialisation: apply it to the index of a layer and every submodule."""
        keys = self.key_map(config)
        with torch.device("meta"):
            model = self.model_class(shallow(config))

        def initialize(layer: int, module: nn.Module) -> None:
            part = model.model.visual if layer < keys.embedding else model
            part._init_weights(module)

        return initialize

    def problems(self, config: PreTrainedConfig) -> Iterator[ConfigProblem]:
        """Yield what a config asks for and the family cannot do."""
        vision, text = config.vision_config, config.text_config
        if vision.depth < 1:
            yield model_problem("vision_config.depth", vision.depth, "at least 1", "correct config.json")
        if vision.out_hidden_size != text.hidden_size:
            expected = f"text_config.hidden_size = {text.hidden_size}, whose tokens the image features replace"
            yield model_problem(
                "vision_config.out_hidden_size", vision.out_hidden_size, expected, "correct config.json"
            )
        for name in ("patch_size", "temporal_patch_size"):
            if not isinstance(getattr(vision, name), int):
                found = getattr(vision, name)
                yield model_problem(f"vision_config.{name}", found, "one whole number", "use square patches")


QWEN2_5_VL = VisionLanguageFamily(
    name="qwen2_5_vl",
    model_class=Qwen2_5_VLForConditionalGeneration,
    decoder_class=Qwen2_5_VLLayer,
    norm_class=Qwen2_5_VLFinalRMSNorm,
    rotary_class=Qwen2_5_VLRotaryEmbedding,
    mask_kinds=lambda text_config: tuple(text_config.layer_types),
)
