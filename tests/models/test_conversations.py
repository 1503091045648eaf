"""Conversations about images become batches in which only what the assistant says is a target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ds_ldt.data.conversations import ConversationCollator, ImageTextProcessor
from ds_ldt.errors import ConfigError, SampleError
from ds_ldt.models import checked_config, count_targets
from ds_ldt.models.qwen2_5_vl import VisionBatches
from tests.models.tiny_vl import tiny_processor, tiny_vl_config


@pytest.fixture(scope="module")
def processor() -> ImageTextProcessor:
    return tiny_processor()


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def sample(image: Any, *turns: str) -> dict[str, Any]:
    speakers = ("human", "gpt")
    conversations = [{"from": speakers[n % 2], "value": value} for n, value in enumerate(turns)]
    return {"conversations": conversations} if image is None else {"image": image, "conversations": conversations}


ONE = sample(picture(16, 24), "<image>\nWhat is it?", "A cat.", "And what colour?", "Red <|im|>, I think.\n\nYes.")
NONE = sample(None, "Hello", "Hi.")
TWO = sample([picture(16, 16, 1), picture(40, 24, 2)], "Compare <image> with\n<image>", "Same.")


def spoken(processor: ImageTextProcessor, batch: dict[str, torch.Tensor]) -> list[str]:
    """The targets of each row as text."""
    tokenizer = processor.tokenizer
    return [tokenizer.decode(row[row != -100]) for row in batch["labels"]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_targets_are_what_the_assistant_says_and_the_end_of_its_turn(side: str) -> None:
    processor = tiny_processor()
    processor.tokenizer.padding_side = side
    batch = ConversationCollator(processor)([ONE, NONE, TWO])
    assert spoken(processor, batch) == [
        "A cat.<|im_end|>Red <|im|>, I think.\n\nYes.<|im_end|>",
        "Hi.<|im_end|>",
        "Same.<|im_end|>",
    ]
    targets = batch["labels"] != -100
    assert torch.equal(batch["labels"][targets], batch["input_ids"][targets])
    assert bool(batch["attention_mask"][targets].all())
    assert bool(batch["attention_mask"][:, 0 if side == "right" else -1].all())


def test_ids_are_those_of_the_processor(processor: ImageTextProcessor) -> None:
    batch = ConversationCollator(processor)([TWO])
    text = (
        "<|im_start|>system\nYou see.<|im_end|>\n<|im_start|>user\n"
        "Compare <|vision_start|><|image_pad|><|vision_end|> with<|vision_start|><|image_pad|><|vision_end|>"
        "<|im_end|>\n<|im_start|>assistant\nSame.<|im_end|>\n"
    )
    wanted = processor(text=[text], images=TWO["image"], return_tensors="pt")
    for name in ("input_ids", "mm_token_type_ids", "pixel_values", "image_grid_thw"):
        assert torch.equal(batch[name], wanted[name]), name
    assert batch["image_grid_thw"].tolist() == [[1, 4, 4], [1, 10, 6]]


def test_batch_is_one_that_the_model_takes(processor: ImageTextProcessor) -> None:
    ids = {"image_token_id": processor.image_token_id, "video_token_id": processor.video_token_id}
    config = tiny_vl_config(text={"vocab_size": len(processor.tokenizer)}, **ids)
    read, collate = VisionBatches(checked_config(config)), ConversationCollator(processor)
    (pixels, grids), labels, (ids, _, mask) = read(collate([ONE, NONE, TWO]))
    assert (len(grids), len(pixels)) == (3, 24 + 16 + 60)
    assert ids.shape == mask.shape == labels.shape
    assert count_targets(labels) > 20
    assert read(collate([NONE]))[0][1].tolist() == [[1, 2, 2]]


def test_paths_are_read_within_the_folder(processor: ImageTextProcessor, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for place in ("images/a.png", "outside.png"):
        picture(16, 24).save(tmp_path / place)
    collate = ConversationCollator(processor, image_folder=tmp_path / "images")
    found = collate([sample("a.png", "<image>What?", "That.")])
    wanted = collate([sample(picture(16, 24), "<image>What?", "That.")])
    assert torch.equal(found["pixel_values"], wanted["pixel_values"])
    for path in ("../outside.png", "none.png", str(tmp_path / "outside.png"), "."):
        with pytest.raises(ConfigError, match=r"sample\.image: found .* expected a file in"):
            collate([sample(path, "<image>What?", "That.")])
    with pytest.raises(ConfigError, match="found a path, expected image_folder="):
        ConversationCollator(processor)([sample("a.png", "<image>What?", "That.")])


@pytest.mark.parametrize("side", ["left", "right"])
def test_long_conversations_are_cut_and_images_are_not(side: str) -> None:
    processor = tiny_processor()
    processor.tokenizer.padding_side = side
    whole = ConversationCollator(processor)([ONE, NONE, TWO])
    real = whole["attention_mask"].bool()
    longest = int(real.sum(1).max())
    images_end = max(
        int(row[real[n]].nonzero().max()) + 1 for n, row in enumerate(whole["mm_token_type_ids"]) if n - 1
    )
    for max_length in (images_end, longest - 1, longest, longest + 9):
        cut = ConversationCollator(processor, max_length=max_length)([ONE, NONE, TWO])
        assert cut["input_ids"].shape == (3, min(max_length, longest))
        is_kept = cut["attention_mask"].bool()
        for name in ("input_ids", "mm_token_type_ids", "labels"):
            assert cut[name].dtype == whole[name].dtype
            for row in range(3):
                assert torch.equal(cut[name][row][is_kept[row]], whole[name][row][real[row]][:max_length])
        assert bool((cut["labels"][~is_kept] == -100).all())
        assert bool(is_kept[:, 0 if side == "right" else -1].all())
        assert torch.equal(cut["pixel_values"], whole["pixel_values"])
    with pytest.raises(
        ConfigError, match=rf"row 2: sample\.image: .* ends at token {images_end}, .* = {images_end - 1} tokens"
    ):
        ConversationCollator(processor, max_length=images_end - 1)([ONE, NONE, TWO])
    with pytest.raises(ConfigError, match=r"collator\.max_length: found 0"):
        ConversationCollator(processor, max_length=0)


CAT = picture(16, 24)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no conversation": ({"image": CAT}, "sample.conversations"),
    "an empty conversation": ({"conversations": []}, "sample.conversations: found none"),
    "a text as conversation": ({"conversations": "Hello"}, "sample.conversations: found str"),
    "a list as sample": ([{"from": "human", "value": "x"}], "sample.conversations: found list"),
    "nothing as sample": (None, "sample.conversations: found nothing"),
    "a turn that is no mapping": ({"conversations": ["Hello"]}, "sample.conversations[0]: found str"),
    "unknown speaker": (
        {"conversations": [{"from": "cat", "value": "x"}]},
        'sample.conversations[0].from: found "cat"',
    ),
    "no text": ({"conversations": [{"from": "human", "value": 3}]}, "sample.conversations[0].value: found 3"),
    "more marks": (sample(CAT, "<image> and <image>?", "That."), "found 1 images and 2 places"),
    "no mark": (sample(CAT, "What?", "That."), "found 1 images and 0 places"),
    "no image": (sample(None, "<image>What?", "That."), "found 0 images and 1 places"),
    "placeholder as text": (sample(CAT, "<image> or <|image_pad|>?", "That."), "found 1 images and 2 places"),
    "answer with a mark": (sample(CAT, "What?", "<image>"), "<image> in the turns of the human only"),
}


@pytest.mark.parametrize("wrong, fragment", WRONG.values(), ids=WRONG)
def test_malformed_sample_is_refused_by_name(
    processor: ImageTextProcessor, wrong: dict[str, Any], fragment: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        ConversationCollator(processor)([ONE, wrong])
    assert str(raised.value).startswith("Unusable sample: row 1: sample.")
    assert fragment in str(raised.value)


def bad_picture(kind: str, folder: Path) -> str:
    """A picture in the folder that cannot be used; its name."""
    path = folder / f"{kind}.png"
    if kind == "wide":
        picture(2, 600).save(path)
    elif kind == "truncated":
        picture(64, 64).save(path)
        path.write_bytes(path.read_bytes()[:2000])
    elif kind == "text":
        path.write_text("not a picture")
    elif kind == "empty":
        path.touch()
    return path.name


@pytest.mark.parametrize(
    "kind, reason",
    [
        ("wide", "which the image processor refuses (ValueError: absolute aspect ratio must be smaller than 200"),
        ("truncated", "which cannot be read (OSError: "),
        ("text", "which cannot be read (UnidentifiedImageError: "),
        ("empty", "which cannot be read (UnidentifiedImageError: "),
        ("missing", "expected a file in"),
    ],
)
@pytest.mark.parametrize("place", [0, 2])
def test_S62_a_bad_picture_names_row_field_and_file(
    processor: ImageTextProcessor, tmp_path: Path, kind: str, reason: str, place: int
) -> None:
    picture(16, 24).save(tmp_path / "good.png")
    name = bad_picture(kind, tmp_path)
    rows = [sample("good.png", "<image>What?", "That."), NONE]
    rows.insert(place, sample(["good.png", name], "<image>and<image>?", "That."))
    with pytest.raises(SampleError) as raised:
        ConversationCollator(processor, image_folder=tmp_path)(rows)
    assert f'Unusable sample: row {place}: sample.image: found "{name}"' in str(raised.value)
    assert reason in str(raised.value)
    assert raised.value.row == place


def test_S62_a_bad_picture_that_a_sample_brings_itself_is_named_by_its_number(processor: ImageTextProcessor) -> None:
    wide = sample([CAT, picture(1, 300)], "<image>and<image>?", "That.")
    with pytest.raises(SampleError, match=r"row 1: sample\.image: found number 1, which the image processor refuses"):
        ConversationCollator(processor)([ONE, wide])


def of(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"conversations": [{"from": speaker, "value": value} for speaker, value in turns]}


@pytest.mark.parametrize("answer", ["Hello.", "A cat.", "B", "  spaced ", "", "<|im|>"])
def test_S63_the_assistant_may_speak_first_as_the_template_renders_it(
    processor: ImageTextProcessor, answer: str
) -> None:
    batch = ConversationCollator(processor)(
        [
            of(("gpt", answer), ("human", "Hi"), ("gpt", "Yes.")),
            of(("system", "You see."), ("gpt", answer), ("gpt", "Again.")),
            of(("human", "Hi"), ("gpt", answer)),
        ]
    )
    first = f"{answer}<|im_end|>"
    assert spoken(processor, batch) == [first + "Yes.<|im_end|>", first + "Again.<|im_end|>", first]


def test_S63_a_template_that_wants_the_user_first_refuses_by_sample(processor: ImageTextProcessor) -> None:
    strict = tiny_processor()
    strict.chat_template = (
        "{% if messages[0]['role'] == 'assistant' %}{{ raise_exception('roles must alternate') }}{% endif %}"
        + strict.chat_template
    )
    with pytest.raises(SampleError) as raised:
        ConversationCollator(strict)([NONE, of(("gpt", "Hello."), ("human", "Hi"))])
    text = str(raised.value)
    assert "row 1: sample.conversations: found turns of assistant, user, which the chat template refuses" in text
    assert "roles must alternate" in text


def test_template_that_rewrites_the_past_is_refused() -> None:
    processor = tiny_processor()
    processor.chat_template = "{{ messages | length }}:" + processor.chat_template
    with pytest.raises(ConfigError, match=r"processor\.chat_template.*start of a conversation"):
        ConversationCollator(processor)([ONE])


def test_processor_without_a_chat_template_is_refused() -> None:
    processor = tiny_processor()
    processor.chat_template = None
    with pytest.raises(ConfigError, match=r"processor\.chat_template"):
        ConversationCollator(processor)


def test_processor_is_read_from_a_directory_without_a_video_part(
    processor: ImageTextProcessor, tmp_path: Path
) -> None:
    processor.save_pretrained(tmp_path)
    again = ImageTextProcessor.from_pretrained(tmp_path)
    found, wanted = (ConversationCollator(one)([ONE]) for one in (again, processor))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("name", ["video", "videos", "images", "audio"])
def test_S62_media_that_would_be_left_out_are_refused_by_field(processor: ImageTextProcessor, name: str) -> None:
    said = of(("human", "What is it?"), ("gpt", "A cat."))
    collate = ConversationCollator(processor)
    with pytest.raises(SampleError, match=rf"row 1: sample\.{name}: found a field that nothing is made of"):
        collate([said, {**said, name: ["cat.mp4"]}])
    assert collate([{**said, name: None}])["input_ids"].shape[0] == 1


@pytest.mark.parametrize("options", [{"max_length": "5"}, {"max_length": 2.5}, {"image_folder": "no/such/folder"}])
def test_a_collator_that_cannot_work_is_refused_when_it_is_made(
    processor: ImageTextProcessor, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=rf"collator\.{next(iter(options))}: found"):
        ConversationCollator(processor, **options)
