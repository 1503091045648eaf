"""Tiny random Qwen2.5-VL models and the batches to run them on."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ds_ldt.data.conversations import ImageTextProcessor

IMAGE, VIDEO, START, END = 50, 51, 52, 53
VOCABULARY = 61
MERGE = 2
PATCH_NUMBERS = 3 * 2 * 4 * 4
SMALL, LARGE = (1, 4, 6), (1, 10, 6)
"""Grids: the second is wider than a window of 4 x 4 patches in both directions, and fills none."""

KINDS = ("one image", "two sizes", "text only", "mixed", "left", "right")


def tiny_vl_config(*, vision: dict[str, Any] | None = None, text: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A config of a few thousand parameters: 4 vision blocks, of which 1 and 3 see everything, 3 decoder layers."""
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1]},
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "initializer_range": 0.2,
            **(text or {}),
        },
        vision_config={
            "depth": 4,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "patch_size": 4,
            "temporal_patch_size": 2,
            "spatial_merge_size": MERGE,
            "window_size": 16,
            "out_hidden_size": 24,
            "fullatt_block_indexes": [1, 3],
            "initializer_range": 0.2,
            **(vision or {}),
        },
        **{
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "vision_start_token_id": START,
            "vision_end_token_id": END,
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            **changes,
        },
    )


def vl_batch(rows: list[list[tuple[int, int, int]]], *, padding: str = "right", seed: int = 1) -> dict[str, Tensor]:
    """A batch as the processor makes it: a row of text for each list of grids, with an image for each grid in it.

    Args:
        rows: The grids of the images of each row.
        padding: Where shorter rows are padded.
        seed: Of ids and pixels.
    """
    generator = torch.Generator().manual_seed(seed)

    def text(length: int) -> list[int]:
        return torch.randint(3, IMAGE, (length,), generator=generator).tolist()

    ids = []
    for number, grids in enumerate(rows):
        row = text(2 + number % 2)
        for frames, height, width in grids:
            row += [START, *[IMAGE] * (frames * height * width // MERGE**2), END, *text(1)]
        ids.append(row + text(4))
    longest = max(map(len, ids))
    left = padding == "left"
    gaps = [[0] * (longest - len(row)) for row in ids]
    padded = torch.tensor([gap + row if left else row + gap for row, gap in zip(ids, gaps, strict=True)])
    ones = [[1] * len(row) for row in ids]
    mask = torch.tensor([gap + row if left else row + gap for row, gap in zip(ones, gaps, strict=True)])
    batch = {"input_ids": padded, "attention_mask": mask, "mm_token_type_ids": (padded == IMAGE).int()}
    is_target = (mask == 1) & (padded < IMAGE)
    batch["labels"] = padded.masked_fill(~is_target, -100)
    grids = [grid for row in rows for grid in row]
    if grids:
        batch["image_grid_thw"] = torch.tensor(grids)
        num_patches = int(batch["image_grid_thw"].prod(-1).sum())
        batch["pixel_values"] = torch.randn(num_patches, PATCH_NUMBERS, generator=generator)
    return batch


def vl_batch_of(kind: str, *, seed: int = 1) -> dict[str, Tensor]:
    """A batch of one of `KINDS`."""
    rows: dict[str, list[list[tuple[int, int, int]]]] = {
        "one image": [[SMALL], [SMALL]],
        "two sizes": [[SMALL, LARGE]],
        "text only": [[], []],
        "mixed": [[LARGE], [], [SMALL, SMALL]],
        "left": [[SMALL], [], [LARGE, SMALL]],
        "right": [[SMALL], [], [LARGE, SMALL]],
    }
    return vl_batch(rows[kind], padding="left" if kind == "left" else "right", seed=seed)


TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou see.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen2.5-VL's way of writing a conversation, in short."""

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def tiny_processor(*, max_pixels: int = 4096) -> ImageTextProcessor:
    """A processor for patches of 4 x 4 pixels, whose tokens are bytes and the special ones of Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([], trainer)
    return ImageTextProcessor(
        image_processor=Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=max_pixels),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token=SPECIAL[0],
            eos_token=SPECIAL[2],
            additional_special_tokens=list(SPECIAL[1:]),
        ),
        chat_template=TEMPLATE,
    )
