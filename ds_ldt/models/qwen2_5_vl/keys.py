"""The names of a Qwen2.5-VL model's weights. Pure functions.

A model of N_v vision blocks and N decoder layers has N_v + N + 5 pipeline layers:

    index 0                    patch embedding   visual.patch_embed.*
    index 1..N_v               vision block      visual.blocks.{index - 1}.*
    index N_v + 1              patch merger      visual.merger.*
    index N_v + 2              text embedding    model.embed_tokens.*
    index N_v + 3..N_v + N + 2 decoder layer     model.layers.{index - N_v - 3}.*
    index N_v + N + 3          final norm        model.norm.*
    index N_v + N + 4          output layer      lm_head.*    (no weights of its own when tied to the embedding)

These are the names of the published files, which transformers still writes. Its modules, and files saved by way of
them, say `model.visual.` for `visual.` and `model.language_model.` for `model.`; both are read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ds_ldt.models.weight_names import KeyMap

PATCH_EMBEDDING = 0
NUM_LEADING = 1
NUM_BETWEEN = 2

_PATCH_PREFIX = "visual.patch_embed."
_MERGER_PREFIX = "visual.merger."
_BLOCK_KEY = re.compile(r"visual\.blocks\.(0|[1-9]\d*)\.(.+)")
_MODULE_PREFIXES = (("model.visual.", "visual."), ("model.language_model.", "model."))


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionLanguageKeyMap(KeyMap):
    """Which weight belongs to which pipeline layer of a model with a vision encoder.

    Attributes:
        num_vision_blocks: N_v.
    """

    num_vision_blocks: int

    @property
    def merger(self) -> int:
        """Pipeline index of the patch merger."""
        return self.num_vision_blocks + NUM_LEADING

    @property
    def embedding(self) -> int:
        """Pipeline index of the text embedding."""
        return self.merger + 1

    @property
    def num_layers(self) -> int:
        """Number of pipeline layers, N_v + N + 5."""
        return self.embedding + self._text.num_layers

    @property
    def norm(self) -> int:
        """Pipeline index of the final norm."""
        return self.embedding + self._text.norm

    def prefix(self, layer: int) -> str:
        """Return what Hugging Face writes before the keys of a pipeline layer.

        Raises:
            IndexError: There is no such layer.
        """
        if layer == PATCH_EMBEDDING:
            return _PATCH_PREFIX
        if NUM_LEADING <= layer < self.merger:
            return f"visual.blocks.{layer - NUM_LEADING}."
        if layer == self.merger:
            return _MERGER_PREFIX
        if layer < self.embedding or layer >= self.num_layers:
            raise IndexError(f"layer {layer} is not one of the {self.num_layers} pipeline layers")
        return self._text.prefix(layer - self.embedding)

    def module_name(self, layer: int) -> str:
        """Return the name that a pipeline layer has as a module of the unsplit model."""
        published = self.prefix(layer)
        for written, shorter in _MODULE_PREFIXES:
            if published.startswith(shorter):
                return (written + published.removeprefix(shorter)).removesuffix(".")
        return published.removesuffix(".")

    def locate(self, hf_key: str) -> tuple[int, str] | None:
        """Return the pipeline layer and the key within it of a Hugging Face key, or None if it belongs to none."""
        for written, published in _MODULE_PREFIXES:
            if hf_key.startswith(written):
                hf_key = published + hf_key.removeprefix(written)
                break
        for layer, prefix in ((PATCH_EMBEDDING, _PATCH_PREFIX), (self.merger, _MERGER_PREFIX)):
            if hf_key.startswith(prefix):
                return layer, hf_key.removeprefix(prefix)
        match = _BLOCK_KEY.fullmatch(hf_key)
        if match is not None:
            block = int(match[1])
            return (block + NUM_LEADING, match[2]) if block < self.num_vision_blocks else None
        place = self._text.locate(hf_key)
        return None if place is None else (place[0] + self.embedding, place[1])

    @property
    def _text(self) -> KeyMap:
        """The names of the language model alone, whose layers follow those of the vision encoder."""
        return KeyMap(num_decoder_layers=self.num_decoder_layers, tied=self.tied)
