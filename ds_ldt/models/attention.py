"""What decoder layers need besides hidden states, rebuilt from position ids: rotary cos/sin and attention masks.

These tensors do not cross the link. The first decoder layer of a chunk builds them for its micro-batch and the layers
after it find them here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

FULL = "full_attention"
SLIDING = "sliding_attention"

MASK_FUNCTIONS: dict[str, Callable[..., Tensor | None]] = {
    FULL: create_causal_mask,
    SLIDING: create_sliding_window_causal_mask,
}


class AttentionMemo:
    """Rotary tables and masks of the micro-batch that was seen last, shared by the decoder layers of one process.

    It holds one entry. The entry is keyed on the storage of `position_ids` and of the padding mask, not on the tensor
    objects, because activation checkpointing hands the same storage over in new objects. A message therefore has to
    be received into a fresh buffer: what gloo writes into an old one leaves no trace that the key could see.

    The rotary module is kept here and not in the layers, so that no `.to(bfloat16)` can round its frequencies.

    Attributes:
        num_builds: How often an entry was built since the start.
    """

    def __init__(self, config: Any, rotary_class: Callable[..., Any]) -> None:
        self.num_builds = 0
        self._config = config
        self._rotary_class = rotary_class
        self._rotary: Any = None
        self._key: tuple[object, ...] | None = None
        # Keeps the keyed storage alive, so that its address cannot come to mean another tensor.
        self._held: tuple[Tensor | None, ...] = ()
        self._positions = torch.empty(0)
        self._rotary_tables: tuple[Tensor, Tensor] | None = None
        self._masks: dict[str, Tensor | None] = {}

    def clear(self) -> None:
        """Let go of the tensors of the last micro-batch."""
        self._key, self._held, self._rotary_tables = None, (), None
        self._masks = {}

    def look_up(
        self, hidden: Tensor, position_ids: Tensor, padding_mask: Tensor | None, kind: str
    ) -> tuple[Tensor | None, tuple[Tensor, Tensor], Tensor | None]:
        """Return what one decoder layer needs, building it if this micro-batch is not the last one seen.

        Args:
            hidden: (B, S, H); only its shape, dtype and device matter.
            position_ids: (B, S), or what a subclass takes; any integer dtype.
            padding_mask: (B, S), true where a token is real; None if all are.
            kind: Which mask the layer wants: `full_attention` or `sliding_attention`.

        Returns:
            `mask_positions` of the position ids, int64; rotary cos and sin, each (B, S, D) in the dtype of `hidden`;
            the mask as the attention implementation wants it, None for plain causal attention.
        """
        key = (
            identity(position_ids),
            identity(padding_mask),
            (hidden.dtype, hidden.device, *hidden.shape[:2]),
            torch.is_inference_mode_enabled(),
        )
        if key != self._key or hidden.is_meta or self._rotary_tables is None:
            self.clear()
            self._positions = position_ids.long()
            self._rotary_tables = self._build_rotary(hidden)
            self._key, self._held = key, (position_ids, padding_mask)
            self.num_builds += 1
        if kind not in self._masks:
            self._masks[kind] = self._build_mask(hidden, padding_mask, kind)
        return self.mask_positions(self._positions), self._rotary_tables, self._masks[kind]

    def rotary_positions(self, position_ids: Tensor) -> Tensor:
        """Return what the rotary module is given of the position ids."""
        return position_ids

    def mask_positions(self, position_ids: Tensor) -> Tensor | None:
        """Return the positions (B, S) by which packed sequences are told apart, None if they are not to be."""
        return position_ids

    @torch.no_grad()
    def _build_rotary(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        rotary = self._rotary
        # "dynamic" frequencies depend on the longest sequence seen so far. Ranks see micro-batches in different
        # orders, so each micro-batch starts afresh and depends on its own length only.
        if rotary is None or "dynamic" in self._config.rope_parameters["rope_type"]:
            with torch.device("cpu"), torch.inference_mode(False):
                rotary = self._rotary = self._rotary_class(config=self._config)
        if hidden.is_meta:
            width = 2 * rotary.inv_freq.numel()
            table = hidden.new_empty(*hidden.shape[:2], width)
            return table, table
        rotary.to(device=hidden.device)
        cos, sin = rotary(hidden, self.rotary_positions(self._positions))
        return cos, sin

    @torch.no_grad()
    def _build_mask(self, hidden: Tensor, padding_mask: Tensor | None, kind: str) -> Tensor | None:
        if hidden.is_meta or isinstance(hidden, FakeTensor):  # masks change no shape, and building one reads values
            return None
        return MASK_FUNCTIONS[kind](
            config=self._config,
            inputs_embeds=hidden,
            attention_mask=padding_mask,
            cache=None,
            position_ids=self.mask_positions(self._positions),
        )


def identity(tensor: Tensor | None) -> tuple[object, ...] | None:
    """Return what stays equal exactly as long as the tensor's values do, while its storage is alive."""
    if tensor is None:
        return None
    version = 0 if tensor.is_inference() else tensor._version
    # A fake tensor has no data, but a storage of its own.
    where = tensor.untyped_storage()._cdata if isinstance(tensor, FakeTensor) else tensor.data_ptr()
    return where, tuple(tensor.shape), tensor.stride(), tensor.dtype, version
