"""The pipeline layers of Qwen2.5-VL, made of the modules of transformers.

The layers in order, and the tuple that each takes:

    patch embedding   (pixel values (N, X), grids (images, 3) int32)
    vision blocks     (hidden states (N, C), grids)
    patch merger      the same
    text embedding    image features (N / U, H); and (token ids (B, S), position_ids (3, B, S) int32 [, mask (B, S)]),
                      which never left the edge
    decoder layers    (hidden states (B, S, H), position_ids [, mask])
    norm, output      hidden states alone

N patches of X numbers each, in all images of the micro-batch; U patches are merged into one. Up to the merger the
patches are in window order.

Blocks and decoder layers return what they are given on the meta device: they change no shape.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionPatchEmbed,
    Qwen2_5_VLDecoderLayer,
    Qwen2_5_VLPatchMerger,
    Qwen2_5_VLRMSNorm,
    Qwen2_5_VLVisionBlock,
)

from ds_ldt.models.attention import AttentionMemo
from ds_ldt.models.causal_lm import DecoderMixin, FinalNormMixin, TokenEmbedding
from ds_ldt.models.qwen2_5_vl.windows import WindowMemo

TEXT_AXES = 3
"""Rows of position ids: time, height and width. A fourth row in front counts tokens and marks packed sequences."""


class PatchEmbedding(Qwen2_5_VisionPatchEmbed):
    """Pipeline layer 0: pixel values become hidden states in window order. The pixels go no further."""

    def __init__(self, config: Any, *, memo: WindowMemo) -> None:
        super().__init__(
            patch_size=config.patch_size,
            temporal_patch_size=config.temporal_patch_size,
            in_channels=config.in_channels,
            embed_dim=config.hidden_size,
        )
        self.memo = memo

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Embed the patches of a micro-batch."""
        pixels, grid_thw = inputs
        hidden = super().forward(pixels)
        if not hidden.is_meta:
            hidden = self.memo.into_windows(hidden, self.memo.look_up(hidden, grid_thw).order)
        return hidden, grid_thw


class VisionBlock(Qwen2_5_VLVisionBlock):
    """A vision block of the pipeline. Its global index decides whether it sees its window or the whole image."""

    def __init__(self, config: Any, index: int, *, memo: WindowMemo) -> None:
        super().__init__(config)
        self.memo = memo
        self.sees_all = index in config.fullatt_block_indexes

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run the block on `(hidden, grids)` and pass the grids on as they came."""
        hidden, grid_thw = inputs
        if hidden.is_meta:
            return inputs
        tables = self.memo.look_up(hidden, grid_thw)
        ends = tables.image_ends if self.sees_all else tables.window_ends
        return super().forward(hidden, cu_seqlens=ends, position_embeddings=tables.rotary), grid_thw


class PatchMerger(Qwen2_5_VLPatchMerger):
    """Merges U patches into one feature of the language model's width, back in the order of the image."""

    def __init__(self, config: Any, *, memo: WindowMemo) -> None:
        super().__init__(
            dim=config.out_hidden_size, context_dim=config.hidden_size, spatial_merge_size=config.spatial_merge_size
        )
        self.memo = memo

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Turn `(hidden (N, C), grids)` into features (N / U, H)."""
        hidden, grid_thw = inputs
        features: Tensor = super().forward(hidden)
        if not features.is_meta:
            features = features[self.memo.look_up(hidden, grid_thw).order_back]
        return features


class TextEmbedding(TokenEmbedding):
    """Embeds the tokens and puts the image features where the image tokens are. The ids go no further.

    A micro-batch without images has the features of a placeholder grid, which no token takes. They are part of the
    graph all the same, so that every vision parameter gets a gradient, of zero.
    """

    def __init__(self, config: Any, *, image_token_id: int) -> None:
        super().__init__(config)
        self.image_token_id = image_token_id

    def forward(self, features: Tensor, local: tuple[Tensor, ...]) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Turn features and `(token ids, position_ids[, mask])` into `(hidden, position_ids[, mask])`."""
        input_ids, *rest = local
        embedded = nn.Embedding.forward(self, input_ids)
        is_image = (input_ids == self.image_token_id).unsqueeze(-1)
        return embedded.masked_scatter(is_image, features.to(embedded.dtype)), *rest


class Qwen2_5_VLLayer(DecoderMixin, Qwen2_5_VLDecoderLayer):  # noqa: N801 - transformers' own spelling
    """A Qwen2.5-VL decoder layer of the pipeline."""

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run the layer on `(hidden, position_ids[, mask])` and pass all but `hidden` on as they came."""
        return inputs if inputs[0].is_meta else super().forward(inputs)


class Qwen2_5_VLFinalRMSNorm(FinalNormMixin, Qwen2_5_VLRMSNorm):  # noqa: N801 - transformers' own spelling
    """Qwen2.5-VL's final norm as a pipeline layer."""


class PositionMemo(AttentionMemo):
    """`AttentionMemo` for position ids (3, B, S), or (4, B, S) where packed sequences are to be kept apart."""

    def rotary_positions(self, position_ids: Tensor) -> Tensor:
        """Return time, height and width of every token, (3, B, S)."""
        return position_ids[-TEXT_AXES:]

    def mask_positions(self, position_ids: Tensor) -> Tensor | None:
        """Return the token count of every token (B, S), if there is one."""
        return position_ids[0] if len(position_ids) > TEXT_AXES else None
