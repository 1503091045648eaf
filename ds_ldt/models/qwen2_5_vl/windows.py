"""What vision blocks need besides hidden states, rebuilt from the grids of the images: it does not cross the link.

A *grid* is (frames, patch rows, patch columns) of one image. Patches of a micro-batch lie one after another, and are
brought into the order of the attention windows right after the patch embedding; the merger brings them back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionRotaryEmbedding
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from ds_ldt.models.attention import identity


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTables:
    """The tables of one micro-batch of N patches, of which U are merged into one (U = spatial_merge_size squared).

    Attributes:
        rotary: cos and sin, each (N, D) float32, in window order.
        image_ends: (frames + 1,) int32, where the patches of each frame begin and end: full attention.
        window_ends: (windows + 1,) int32, the same for each window.
        order: (N / U,) int64, the merged patches in window order.
        order_back: (N / U,) int64, its inverse.
    """

    rotary: tuple[Tensor, Tensor]
    image_ends: Tensor
    window_ends: Tensor
    order: Tensor
    order_back: Tensor


class WindowMemo:
    """The tables of the micro-batch that was seen last, shared by the vision layers of one process.

    It holds one entry, keyed on the storage of the grids, as `AttentionMemo` does and for the same reasons.

    Args:
        config: The vision config.

    Attributes:
        num_builds: How often an entry was built since the start.
    """

    def __init__(self, config: Any) -> None:
        self.num_builds = 0
        self._config = config
        self._rotary: Any = None
        self._key: tuple[object, ...] | None = None
        self._held: Tensor | None = None
        self._tables: WindowTables | None = None

    def look_up(self, hidden: Tensor, grid_thw: Tensor) -> WindowTables:
        """Return the tables of a micro-batch.

        Args:
            hidden: (N, C); only its device matters.
            grid_thw: (images, 3), any integer dtype.
        """
        key = (identity(grid_thw), hidden.device, torch.is_inference_mode_enabled())
        if self._tables is None or key != self._key:
            self._tables = self._build(hidden, grid_thw.long())
            self._key, self._held = key, grid_thw
            self.num_builds += 1
        return self._tables

    def into_windows(self, values: Tensor, order: Tensor) -> Tensor:
        """Reorder patches (N, C), U at a time."""
        unit = self._config.spatial_merge_size**2
        return values.unflatten(0, (-1, unit))[order].flatten(0, 1)

    @torch.no_grad()
    def _build(self, hidden: Tensor, grid_thw: Tensor) -> WindowTables:
        config = self._config
        if self._rotary is None:
            with torch.device("cpu"), torch.inference_mode(False):
                self._rotary = Qwen2_5_VLVisionRotaryEmbedding(config)
        order, window_ends = get_vision_window_index(
            grid_thw,
            spatial_merge_size=config.spatial_merge_size,
            window_size=config.window_size,
            patch_size=config.patch_size,
        )
        order = order.to(hidden.device)
        self._rotary.to(device=hidden.device)
        cos, sin = self._rotary(hidden, get_vision_position_ids(grid_thw, config.spatial_merge_size))
        return WindowTables(
            rotary=(self.into_windows(cos, order), self.into_windows(sin, order)),
            image_ends=get_vision_cu_seqlens(grid_thw),
            window_ends=window_ends,
            order=order,
            order_back=torch.argsort(order),
        )
