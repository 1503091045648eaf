"""From a collated batch of images and text to what enters the pipeline. Runs on the edge only."""

from __future__ import annotations

import copy
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from ds_ldt.errors import Absent
from ds_ldt.models.batch import (
    batch_problem,
    check_range,
    fields_of,
    input_ids_of,
    like_ids,
    mask_matters,
    shape_of,
    tensor_of,
)
from ds_ldt.models.qwen2_5_vl.layers import TEXT_AXES

IMAGE = 1
"""The type of an image token in `mm_token_type_ids`; 0 is text."""

_TEXT_FIELDS = ("input_ids", "attention_mask", "position_ids", "labels")
_IMAGE_FIELDS = ("pixel_values", "image_grid_thw", "mm_token_type_ids")
_VIDEO_FIELDS = ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts")

Tensors = tuple[Tensor, ...]


class VisionBatches:
    """Reads the batches of one model.

    Args:
        config: The checked config of the model.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        self._image_token_id: int = config.image_token_id
        self._video_token_id: int = config.video_token_id
        self._vocab_size: int = config.text_config.vocab_size
        vision = config.vision_config
        self._merge: int = vision.spatial_merge_size
        self._patch_numbers: int = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        with torch.device("meta"):
            self._model = Qwen2_5_VLModel(shallow(config))  # computes rope indices; its weights are not allocated

    def __call__(self, batch: Any) -> tuple[Tensors, Tensor | None, Tensors]:
        """Turn a collated batch into `(inputs, labels, local)`, the form that a pipeline takes.

        The batch means what it means to `model(**batch, use_cache=False)` of transformers, with two differences:
        a batch without `mm_token_type_ids`, for which transformers would silently use the positions of plain text,
        gets them from its image tokens; and images that do not fit the image tokens one by one are refused.

        Args:
            batch: A mapping with `input_ids` (B, S), and optionally `labels` (B, S), not shifted, `attention_mask`
                (B, S) and `position_ids` (3, B, S) or (4, B, S), the first of four rows marking packed sequences.
                With images in it, also `pixel_values` (N, X) float and `image_grid_thw` (images, 3), as the
                processor of transformers makes them.

        Returns:
            `(pixel values (N, X) float32, grids (images, 3) int32)` for the head; labels (B, S) int64, None if the
            batch has none; `(token ids (B, S) int64, position_ids (3, B, S) int32[, padding mask (B, S) bool])` for
            the text embedding. A batch without images has one grey placeholder image of the least size, which no
            token takes.

        Raises:
            SampleError: The batch holds something that is not supported, its parts do not fit together, or an id or a
                label is out of range.
        """
        fields = fields_of(batch, used=(*_TEXT_FIELDS, *_IMAGE_FIELDS, *_VIDEO_FIELDS))
        input_ids = input_ids_of(fields)
        self._refuse_videos(fields, input_ids)
        labels = like_ids(input_ids, "labels", fields)
        check_range(input_ids, labels, self._vocab_size)
        mask = like_ids(input_ids, "attention_mask", fields)
        types = like_ids(input_ids, "mm_token_type_ids", fields)
        if types is None:
            types = (input_ids == self._image_token_id).int()
        head = self._images(fields, types)
        position_ids = self._positions(fields, input_ids, types, mask)
        local: Tensors = (input_ids.long(), position_ids)
        counted = position_ids[0] if len(position_ids) > TEXT_AXES else None
        if mask is not None and mask_matters(mask.bool(), counted):
            local = (*local, mask.bool())
        return head, None if labels is None else labels.long(), local

    def _refuse_videos(self, fields: dict[str, Any], input_ids: Tensor) -> None:
        given = [name for name in _VIDEO_FIELDS if fields.get(name) is not None]
        if given or bool((input_ids == self._video_token_id).any()):
            found = Absent("a video" if given else "video tokens")
            raise batch_problem(
                given[0] if given else "input_ids", found, "text and images", "give frames of a video as images"
            )

    def _images(self, fields: dict[str, Any], types: Tensor) -> Tensors:
        """Return pixel values and grids, checked against each other and against the image tokens."""
        runs = [len(list(run)) for row in types.tolist() for kind, run in groupby(row) if kind == IMAGE]
        pixels, grids = fields.get("pixel_values"), fields.get("image_grid_thw")
        if pixels is None and grids is None and not runs:
            return self._placeholder(types.device)
        grids = tensor_of("image_grid_thw", grids)
        if grids.ndim != 2 or grids.shape[1] != 3:
            expected = "a tensor of shape (images, 3): frames, patch rows and patch columns of each image"
            raise batch_problem("image_grid_thw", shape_of(grids), expected, "pass on what the processor returns")
        num_patches = int(grids.prod(-1).sum())
        if not isinstance(pixels, Tensor) or tuple(pixels.shape) != (num_patches, self._patch_numbers):
            found = shape_of(pixels) if isinstance(pixels, Tensor) else Absent()
            expected = f"shape {(num_patches, self._patch_numbers)}, a row for each patch of image_grid_thw"
            raise batch_problem("pixel_values", found, expected, "pass on what the processor returns")
        wanted = (grids.prod(-1) // self._merge**2).tolist()
        if runs != wanted or bool((grids[:, 1:] % self._merge).any()):
            found = Absent(f"runs of {runs} image tokens")
            expected = f"one run for each image, here of {wanted} tokens"
            raise batch_problem("input_ids", found, expected, "give each image its placeholder, between other tokens")
        return pixels.float(), grids.int()

    def _placeholder(self, device: torch.device) -> Tensors:
        pixels = torch.zeros(self._merge**2, self._patch_numbers, device=device)
        return pixels, torch.tensor([[1, self._merge, self._merge]], dtype=torch.int32, device=device)

    def _positions(self, fields: dict[str, Any], input_ids: Tensor, types: Tensor, mask: Tensor | None) -> Tensor:
        """Return position ids (3, B, S) int32, those given or those that transformers computes."""
        rows, length = input_ids.shape
        given = fields.get("position_ids")
        if given is not None:
            positions = tensor_of("position_ids", given)
            if tuple(positions.shape) not in ((TEXT_AXES, rows, length), (TEXT_AXES + 1, rows, length)):
                expected = f"shape {(TEXT_AXES, rows, length)}: time, height and width of every token"
                raise batch_problem("position_ids", shape_of(positions), expected, "leave it out to have it computed")
            return positions.int().contiguous()
        if fields.get("image_grid_thw") is None:  # as in transformers: padded or not, text counts from 0
            return torch.arange(length, dtype=torch.int32, device=input_ids.device).repeat(TEXT_AXES, rows, 1)
        positions, _ = self._model.get_rope_index(
            input_ids.long(), types, image_grid_thw=fields["image_grid_thw"], attention_mask=mask
        )
        return positions.int()


def shallow(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of a config with one vision block and one decoder layer, for what does not depend on depth."""
    one_layer = copy.deepcopy(config)
    one_layer.vision_config.depth = 1
    one_layer.text_config.num_hidden_layers = 1
    one_layer.text_config.layer_types = one_layer.text_config.layer_types[:1]
    return one_layer
