"""What a batch of images and text becomes, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_ldt.errors import ConfigError
from ds_ldt.models import checked_config
from ds_ldt.models.qwen2_5_vl import VisionBatches
from tests.models.tiny import tiny_model
from tests.models.tiny_vl import END, IMAGE, PATCH_NUMBERS, START, VIDEO, tiny_vl_config, vl_batch_of

Batch = dict[str, Any]


@pytest.fixture(scope="module")
def read() -> VisionBatches:
    return VisionBatches(checked_config(tiny_vl_config()))


def test_batch_becomes_inputs_labels_and_what_stays_local(read: VisionBatches) -> None:
    batch = vl_batch_of("left")
    (pixels, grids), labels, (ids, positions, mask) = read(batch)
    assert torch.equal(pixels, batch["pixel_values"])
    assert torch.equal(grids, batch["image_grid_thw"].int())
    assert [t.dtype for t in (grids, ids, positions, mask)] == [torch.int32, torch.int64, torch.int32, torch.bool]
    assert torch.equal(labels, batch["labels"])
    assert torch.equal(ids, batch["input_ids"])
    assert torch.equal(mask, batch["attention_mask"].bool())
    assert positions.shape == (3, *ids.shape)


def test_positions_are_those_of_transformers(read: VisionBatches) -> None:
    batch = vl_batch_of("mixed")
    wanted, _ = tiny_model(tiny_vl_config()).model.get_rope_index(
        batch["input_ids"], batch["mm_token_type_ids"], batch["image_grid_thw"], attention_mask=batch["attention_mask"]
    )
    assert torch.equal(read(batch)[2][1], wanted.int())
    assert not torch.equal(wanted[1], wanted[2])


def test_types_are_found_where_the_batch_has_none(read: VisionBatches) -> None:
    batch = vl_batch_of("right")
    without = {name: value for name, value in batch.items() if name != "mm_token_type_ids"}
    assert torch.equal(read(without)[2][1], read(batch)[2][1])


def test_batch_without_images_has_one_placeholder(read: VisionBatches) -> None:
    (pixels, grids), _, (ids, positions, _) = read(vl_batch_of("text only"))
    assert grids.tolist() == [[1, 2, 2]]
    assert pixels.shape == (4, PATCH_NUMBERS)
    assert not pixels.any()
    assert torch.equal(positions, torch.arange(ids.shape[1], dtype=torch.int32).expand(3, *ids.shape))


def test_mask_of_ones_is_dropped(read: VisionBatches) -> None:
    assert len(read(vl_batch_of("two sizes"))[2]) == 2


def changed(**changes: Any) -> Callable[[Batch], Batch]:
    return lambda batch: {**batch, **changes}


def row(*ids: int) -> Tensor:
    return torch.tensor([ids])


def with_ids(ids: Tensor) -> Callable[[Batch], Batch]:
    return lambda batch: {"input_ids": ids, **{k: batch[k] for k in ("pixel_values", "image_grid_thw")}}


WRONG: dict[str, tuple[Callable[[Batch], Batch], list[str]]] = {
    "video": (changed(pixel_values_videos=torch.ones(4, 4)), ["batch.pixel_values_videos", "a video", "as images"]),
    "video tokens": (with_ids(row(5, VIDEO, 5)), ["batch.input_ids", "found video tokens"]),
    "S66, ids beyond the vocabulary": (with_ids(row(5, 61, 5)), ["row 0: batch.input_ids: found 61 at position 1"]),
    "S66, a negative id": (
        with_ids(row(5, 5, -1)),
        ["row 0: batch.input_ids: found -1 at position 2", "from 0 to 60"],
    ),
    "S66, labels of -1": (
        changed(labels=-(vl_batch_of("two sizes")["mm_token_type_ids"]).long()),
        ["batch.labels: found -1", "-100 for"],
    ),
    "no pixels": (changed(pixel_values=None), ["batch.pixel_values", "found nothing", "shape (84, 96)"]),
    "no grids": (changed(image_grid_thw=None), ["batch.image_grid_thw", "a tensor"]),
    "patches": (changed(pixel_values=torch.ones(80, 96)), ["batch.pixel_values", "shape (80, 96)", "(84, 96)"]),
    "grid form": (changed(image_grid_thw=torch.ones(3, 2).long()), ["batch.image_grid_thw", "shape (3, 2)"]),
    "too few tokens": (with_ids(row(START, *[IMAGE] * 5, END)), ["runs of [5] image tokens", "[6, 15]"]),
    "images not apart": (
        with_ids(row(START, *[IMAGE] * 21, END)),
        ["runs of [21] image tokens", "between other tokens"],
    ),
    "images swapped": (
        with_ids(row(START, *[IMAGE] * 15, END, START, *[IMAGE] * 6, END)),
        ["runs of [15, 6] image tokens", "[6, 15]"],
    ),
    "odd grid": (changed(image_grid_thw=torch.tensor([[1, 3, 8], [1, 10, 6]])), ["one run for each image"]),
    "positions": (changed(position_ids=torch.zeros(1, 5).long()), ["batch.position_ids", "time, height and width"]),
    "unknown": (changed(captions=torch.ones(1)), ["batch.captions", "pixel_values"]),
}


@pytest.mark.parametrize("change, fragments", WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused_by_name(
    read: VisionBatches, change: Callable[[Batch], Batch], fragments: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        read(change(vl_batch_of("two sizes")))
    assert [fragment for fragment in fragments if fragment not in str(raised.value)] == []


@pytest.mark.parametrize(
    "changes, fragment",
    [
        ({"vision": {"out_hidden_size": 32}}, "model.vision_config.out_hidden_size: found 32, expected text_config"),
        ({"vision": {"patch_size": [4, 4]}}, "model.vision_config.patch_size"),
        ({"architectures": ["Qwen2_5_VLModel"]}, "Qwen2_5_VLForConditionalGeneration"),
        ({"text": {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 1}}, "model.sliding_window"),
    ],
)
def test_config_that_cannot_be_split_is_refused_by_name(changes: dict[str, Any], fragment: str) -> None:
    with pytest.raises(ConfigError) as raised:
        checked_config(tiny_vl_config(**changes))
    assert fragment in str(raised.value)
