"""The names of weights: Hugging Face key <-> (pipeline layer index, key within the layer). Pure functions.

A decoder model of N decoder layers has N + 3 pipeline layers:

    index 0          embedding      model.embed_tokens.*
    index 1..N       decoder layer  model.layers.{index - 1}.*
    index N + 1      final norm     model.norm.*
    index N + 2      output layer   lm_head.*         (no weights of its own when tied to the embedding)
"""

from __future__ import annotations

import re
from dataclasses import dataclass

EMBEDDING = 0
NUM_LEADING = 1
NUM_TRAILING = 2
TIED_HEAD_KEY = "lm_head.weight"

_EMBEDDING_PREFIX = "model.embed_tokens."
_NORM_PREFIX = "model.norm."
_HEAD_PREFIX = "lm_head."
_DECODER_KEY = re.compile(r"model\.layers\.(0|[1-9]\d*)\.(.+)")
# Old checkpoints carry the rotary frequencies, which every release of transformers recomputes from the config.
_RECOMPUTED = re.compile(r".*\brotary_emb\.inv_freq")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyMap:
    """Which weight belongs to which pipeline layer.

    Attributes:
        num_decoder_layers: N.
        tied: The output layer uses the embedding's weight, and has none of its own.
    """

    num_decoder_layers: int
    tied: bool

    @property
    def embedding(self) -> int:
        """Pipeline index of the text embedding."""
        return EMBEDDING

    @property
    def num_layers(self) -> int:
        """Number of pipeline layers, N + 3."""
        return self.num_decoder_layers + NUM_LEADING + NUM_TRAILING

    @property
    def norm(self) -> int:
        """Pipeline index of the final norm."""
        return self.num_decoder_layers + NUM_LEADING

    @property
    def head(self) -> int:
        """Pipeline index of the output layer."""
        return self.norm + 1

    @property
    def layers_with_weights(self) -> tuple[int, ...]:
        """Pipeline indices of the layers that have weights of their own: all but a tied output layer."""
        return tuple(range(self.head if self.tied else self.num_layers))

    def prefix(self, layer: int) -> str:
        """Return what Hugging Face writes before the keys of a pipeline layer.

        Raises:
            IndexError: There is no such layer.
        """
        if layer == EMBEDDING:
            return _EMBEDDING_PREFIX
        if NUM_LEADING <= layer < self.norm:
            return f"model.layers.{layer - NUM_LEADING}."
        if layer == self.norm:
            return _NORM_PREFIX
        if layer == self.head:
            return _HEAD_PREFIX
        raise IndexError(f"layer {layer} is not one of the {self.num_layers} pipeline layers")

    def hf_key(self, layer: int, key: str) -> str:
        """Return the Hugging Face key of a layer's weight, e.g. (3, "mlp.up_proj.weight") of decoder layer 2."""
        return self.prefix(layer) + key

    def module_name(self, layer: int) -> str:
        """Return the name that a pipeline layer has as a module of the unsplit model."""
        return self.prefix(layer).removesuffix(".")

    def locate(self, hf_key: str) -> tuple[int, str] | None:
        """Return the pipeline layer and the key within it of a Hugging Face key, or None if it belongs to none."""
        for layer, prefix in ((EMBEDDING, _EMBEDDING_PREFIX), (self.norm, _NORM_PREFIX), (self.head, _HEAD_PREFIX)):
            if hf_key.startswith(prefix):
                return layer, hf_key.removeprefix(prefix)
        match = _DECODER_KEY.fullmatch(hf_key)
        if match is None or int(match[1]) >= self.num_decoder_layers:
            return None
        return int(match[1]) + NUM_LEADING, match[2]


def is_recomputed(hf_key: str) -> bool:
    """Tell whether a key on disk may be left out because the model computes its value from the config."""
    return _RECOMPUTED.fullmatch(hf_key) is not None
