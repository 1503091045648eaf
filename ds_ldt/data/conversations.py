"""Edge-side collation of conversations about images, in the form that LLaVA's data sets have.

    {"image": "cat.png", "conversations": [{"from": "human", "value": "<image>What is this?"},
                                           {"from": "gpt", "value": "A cat."}]}

`image` may be a list, or absent; `<image>` stands where an image belongs, in the turns of the human only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2_5_VLProcessor
from transformers.image_utils import load_image

from ds_ldt.config.rules import is_whole
from ds_ldt.data.texts import TOKENIZER_FILES, check_directory_with, unreadable
from ds_ldt.errors import Absent, ConfigError, ConfigProblem, SampleError, cause_of, shown
from ds_ldt.models.batch import IGNORE_INDEX

IMAGE_MARK = "<image>"

_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
_LABEL_ROLE = "assistant"
_OTHER_MEDIA = frozenset({"images", "video", "videos", "audio", "audios"})
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class ImageTextProcessor(Qwen2_5_VLProcessor):
    """The processor of transformers without its video part, which alone would need torchvision.

    `ImageTextProcessor.from_pretrained(directory)` reads what is published with a model.

    Args:
        image_processor: Turns images into patches.
        tokenizer: A fast tokenizer.
        chat_template: Jinja template; by default that of the tokenizer.
    """

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template)

    @classmethod
    def from_pretrained(cls, directory: str | Path, *, allow_download: bool = False, **options: Any) -> Self:
        """Read what is published with a model, from a directory of this machine; nothing is asked of a network.

        Args:
            directory: Where it is; a directory written by `ds-ldt convert` for the edge holds it.
            allow_download: Take it for the name of a model on a hub where there is no such directory.
            options: Passed on to transformers.

        Raises:
            ConfigError: There is no such directory, or no image processor and tokenizer in it that can be read.
        """
        if not (allow_download and not os.path.lexists(directory)):
            for names, what in ((_PROCESSOR_FILES, "image processor"), (TOKENIZER_FILES, "tokenizer")):
                check_directory_with(directory, names, what=what, setting="processor")
        options.setdefault("local_files_only", not allow_download)
        options.setdefault("trust_remote_code", False)  # else transformers may ask on the terminal
        try:
            processor: Self = super().from_pretrained(str(directory), **options)
        except Exception as error:  # as for tokenizers, transformers raises many types
            raise unreadable(directory, error, what="processor", setting="processor") from error
        return processor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rendered:
    """A conversation as text, the spans (start, end) of it that the assistant says, its images and their names."""

    text: str
    spans: list[tuple[int, int]]
    images: list[Any]
    names: list[str]


class ConversationCollator:
    """A collate function: conversations about images become a batch. Use it on the edge.

    A label is a token that the assistant says, or the token that ends its turn; everything else is -100. The assistant
    may speak first, if the chat template lets it.

    Args:
        processor: `ImageTextProcessor` or `Qwen2_5_VLProcessor`, with a fast tokenizer and a chat template. Its
            tokenizer's `padding_side` decides where rows are padded.
        image_folder: Where image paths of samples start; they may not lead out of it. None: samples bring images
            themselves (PIL images or arrays (height, width, 3) uint8), and paths are refused.
        max_length: Most tokens of a row, those of its images included; what a conversation says beyond is cut off.
            None for no limit. A conversation with an image beyond the limit is refused: images are not cut.
    """

    def __init__(
        self,
        processor: Qwen2_5_VLProcessor,
        *,
        image_folder: str | Path | None = None,
        max_length: int | None = None,
    ) -> None:
        if getattr(processor, "chat_template", None) is None:
            raise ConfigError.of(
                "processor.chat_template",
                found=Absent(),
                expected="a chat template",
                fix="load the processor of a chat model",
            )
        if not processor.tokenizer.is_fast:
            raise ConfigError.of(
                "processor.tokenizer",
                found=Absent("a slow one"),
                expected="a fast tokenizer",
                fix="load it with use_fast=True",
            )
        if max_length is not None and not is_whole(max_length, 1):
            raise ConfigError.of(
                "collator.max_length", found=max_length, expected="a whole number >= 1, or None", fix="raise it"
            )
        if image_folder is not None and not Path(image_folder).is_dir():
            found = Absent(f'"{image_folder}", which is no directory here')
            raise ConfigError.of("collator.image_folder", found=found, expected="a directory", fix="correct the path")
        self._processor = processor
        self._max_length = max_length
        self._folder = None if image_folder is None else Path(image_folder).resolve()

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Collate samples.

        Returns:
            `input_ids`, `attention_mask`, `mm_token_type_ids` and `labels`, each (B, S) int64; with images in any
            sample also `pixel_values` (N, X) float32 and `image_grid_thw` (images, 3) int64.

        Raises:
            SampleError: A sample is malformed, an image of it cannot be read or processed, its images do not fit its
                text, or an image lies beyond `max_length`. It names the row, the field and the file.
        """
        rendered = [self._row(row, sample) for row, sample in enumerate(samples)]
        encoded = self._encoded(rendered)
        offsets, replaced = encoded.pop("offset_mapping"), encoded.pop("text_replacement_offsets")
        labels = torch.full_like(encoded["input_ids"], IGNORE_INDEX)
        for row, one in enumerate(rendered):
            for start, end in _shifted(one.spans, replaced[row]):
                said = (
                    (offsets[row, :, 0] < end) & (offsets[row, :, 1] > start) & encoded["attention_mask"][row].bool()
                )
                labels[row, said] = encoded["input_ids"][row, said]
        batch: dict[str, Tensor] = {**encoded, "labels": labels}
        return batch if self._max_length is None else self._truncated(batch, self._max_length)

    def _encoded(self, rendered: Sequence[_Rendered]) -> Any:
        """Return what the processor makes of all rows."""
        images = [image for one in rendered for image in one.images]
        try:
            return self._processor(
                text=[one.text for one in rendered],
                images=images or None,
                padding=True,
                return_tensors="pt",
                return_offsets_mapping=True,
                return_text_replacement_offsets=True,
            )
        except Exception as error:  # whatever it raises is about all images at once: find the one
            for row, one in enumerate(rendered):
                for name, image in zip(one.names, one.images, strict=True):
                    self._check_image(row, name, image)
            found = Absent(f"rows that the processor refuses ({cause_of(error)})")
            raise _problem("conversations", found, "text and images that it takes", "correct the samples") from error

    def _check_image(self, row: int, name: str, image: Any) -> None:
        try:
            self._processor.image_processor(images=[image], return_tensors="pt")
        except Exception as error:
            found = Absent(f"{name}, which the image processor refuses ({cause_of(error)})")
            raise _problem("image", found, "a picture that it takes", "remove or replace it", row=row) from error

    def _truncated(self, batch: dict[str, Tensor], max_length: int) -> dict[str, Tensor]:
        """Cut rows down to their first tokens and pad them anew."""
        tokenizer = self._processor.tokenizer
        is_real, is_image = batch["attention_mask"].bool(), batch["mm_token_type_ids"] != 0
        for row, (real, image) in enumerate(zip(is_real, is_image, strict=True)):
            needed = int(image[real].nonzero().max()) + 1 if bool(image.any()) else 0
            if needed > max_length:
                found = Absent(f"an image that ends at token {needed}")
                expected = f"every image within the first max_length = {max_length} tokens"
                raise _problem("image", found, expected, "raise max_length, or give fewer or smaller images", row=row)
        padding = {"input_ids": tokenizer.pad_token_id, "labels": IGNORE_INDEX}
        for name in ("input_ids", "attention_mask", "mm_token_type_ids", "labels"):
            batch[name] = pad_sequence(
                [values[real][:max_length] for values, real in zip(batch[name], is_real, strict=True)],
                batch_first=True,
                padding_value=padding.get(name, 0),
                padding_side=tokenizer.padding_side,
            )
        return batch

    def _row(self, row: int, sample: Any) -> _Rendered:
        """Render a sample; whatever is wrong with it names the row."""
        try:
            return self._render(sample)
        except SampleError as error:
            raise SampleError.of_row(row, error.problems[0]) from error.__cause__

    def _render(self, sample: Any) -> _Rendered:
        messages = _messages(sample)
        images, names = self._images(sample)
        marks = sum(part["type"] == "image" for message in messages for part in message["content"])
        text = self._template(messages)
        if marks != len(images) or text.count(self._processor.image_token) != marks:
            found = Absent(f"{len(images)} images and {text.count(self._processor.image_token)} places for them")
            raise _problem("image", found, f"as many images as times {IMAGE_MARK} in the text", "correct the sample")
        spans = []
        for number, message in enumerate(messages):
            if message["role"] == _LABEL_ROLE:
                with_answer = self._template(messages[: number + 1])
                prompt = self._prompt(messages, number, with_answer)
                if not (with_answer.startswith(prompt) and text.startswith(with_answer)):
                    expected = "a chat template that renders the start of a conversation as the start of its text"
                    raise _problem("processor.chat_template", Absent("another one"), expected, "change the template")
                # the line break that templates put behind a turn is not something the model says
                spans.append((len(prompt), len(with_answer.rstrip())))
        return _Rendered(text=text, spans=spans, images=images, names=names)

    def _prompt(self, messages: list[dict[str, Any]], number: int, with_answer: str) -> str:
        """Return the text before what the assistant says in a turn.

        Before a first turn of the user many templates cannot prompt for an answer. There it is what two conversations
        have in common that differ from the first character of this answer on.
        """
        if any(message["role"] == "user" for message in messages[:number]):
            return self._template(messages[:number], add_generation_prompt=True)
        said = "".join(part["text"] for part in messages[number]["content"]).strip()
        other = {"role": _LABEL_ROLE, "content": _content("B" if said.startswith("A") else "A")}
        return commonprefix([with_answer, self._template([*messages[:number], other])])

    def _template(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> str:
        try:
            text: str = self._processor.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # templates raise what they like
            roles = ", ".join(message["role"] for message in messages)
            found = Absent(f"turns of {roles}, which the chat template refuses ({cause_of(error)})")
            raise _problem("conversations", found, "a conversation that it renders", "correct the sample") from error
        return text

    def _images(self, sample: Mapping[str, Any]) -> tuple[list[Any], list[str]]:
        """Return the images of a sample and what errors call them."""
        given = sample.get("image")
        if given is None:
            return [], []
        listed = list(given) if isinstance(given, list | tuple) else [given]
        names = [shown(str(one)) if isinstance(one, str | Path) else f"number {n}" for n, one in enumerate(listed)]
        return [self._image(image) for image in listed], names

    def _image(self, image: Any) -> Any:
        if not isinstance(image, str | Path):
            return image
        if self._folder is None:
            raise _problem("image", Absent("a path"), "image_folder=, in which it is", "name the folder")
        try:
            path = (self._folder / image).resolve()
            is_there = path.is_relative_to(self._folder) and path.is_file()
            loaded = load_image(str(path)) if is_there else None
        except Exception as error:  # Pillow has an error of its own for each format
            found = Absent(f"{shown(str(image))}, which cannot be read ({cause_of(error)})")
            raise _problem("image", found, "a picture that is whole", "remove or replace the file") from error
        if loaded is None:
            raise _problem("image", str(image), f"a file in {self._folder}", "correct the sample or the folder")
        return loaded


def _messages(sample: Any) -> list[dict[str, Any]]:
    """Return a conversation as chat templates of transformers take it."""
    turns = sample.get("conversations") if isinstance(sample, Mapping) else sample
    if not isinstance(turns, list | tuple) or not turns or not isinstance(sample, Mapping):
        found = Absent() if turns is None else Absent("none" if not turns else type(turns).__name__)
        raise _problem("conversations", found, 'a list of {"from": ..., "value": ...}', "correct the sample")
    for name in _OTHER_MEDIA & sample.keys():
        if sample[name]:
            fix = 'name pictures in "image"; frames of a video can be given as pictures'
            raise _problem(name, Absent("a field that nothing is made of"), 'pictures in "image"', fix)
    messages = []
    for number, turn in enumerate(turns):
        key = f"conversations[{number}]"
        if not isinstance(turn, Mapping):
            found = Absent(type(turn).__name__)
            raise _problem(key, found, 'a mapping {"from": ..., "value": ...}', "correct the sample")
        role, value = _ROLES.get(str(turn.get("from"))), turn.get("value")
        if role is None:
            raise _problem(f"{key}.from", turn.get("from"), f"one of {', '.join(_ROLES)}", "correct the sample")
        if not isinstance(value, str):
            raise _problem(f"{key}.value", value, "a text", "correct the sample")
        if role != "user" and IMAGE_MARK in value:
            expected = f"{IMAGE_MARK} in the turns of the human only"
            raise _problem(key, Absent(f"{IMAGE_MARK} in a turn of {role}"), expected, "move it")
        messages.append({"role": role, "content": _content(value)})
    return messages


def _content(value: str) -> list[dict[str, str]]:
    """Split a turn at its image marks. The line breaks that data sets put around a mark go with it."""
    content: list[dict[str, str]] = []
    for part in re.split(rf"\n?({re.escape(IMAGE_MARK)})\n?", value):
        if part == IMAGE_MARK:
            content.append({"type": "image"})
        elif part:
            content.append({"type": "text", "text": part})
    return content


def _shifted(spans: list[tuple[int, int]], replaced: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Move spans of a text to where they are after its image placeholders were expanded."""
    gains = [(one["span"][1], one["new_span"][1] - one["span"][1]) for one in replaced]

    def moved(position: int) -> int:
        return position + max((gain for end, gain in gains if end <= position), default=0)

    return [(moved(start), moved(end)) for start, end in spans]


def _problem(name: str, found: object, expected: str, fix: str, *, row: int | None = None) -> SampleError:
    key = name if name.startswith("processor.") else f"sample.{name}"
    return SampleError.of_row(row, ConfigProblem(key=key, found=found, expected=expected, fix=fix))
