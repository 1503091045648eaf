#!/usr/bin/env python3
"""Train a small vision-language model over an edge and a cloud on real photographs: the script to copy and change.

Every rank of both sites runs it, started by finetune_vl.sh, or by run_edge.sh and run_cloud.sh. Photographs, questions
and answers are opened on the edge alone. The model has the architecture of Qwen2.5-VL, random weights and a vocabulary
of bytes, so that nothing has to be downloaded; it learns the answers by heart within minutes. For a model of your own
give from_pretrained its directory, and the collator ImageTextProcessor.from_pretrained and your data.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import Qwen2_5_VLConfig

import ds_ldt
from ds_ldt.cli.arguments import at_least

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TOKENS = {
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
}
NUM_BYTES = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PATCH = 14
QUESTION = "<image>\nWhat is in the picture?"
ANSWERS = {
    "astronaut": "A woman in an orange space suit, smiling.",
    "brick": "A wall of bricks.",
    "camera": "A man with a camera on a tripod.",
    "chelsea": "The face of a cat.",
    "coffee": "A cup of coffee with a spoon.",
    "grass": "Grass, seen from above.",
    "gravel": "Gravel, seen from above.",
    "rocket": "A rocket at night.",
}
"""Photographs that the scikit-image package brings along, all CC0 or in the public domain, and what they show."""


def small_config(settings: ds_ldt.JobConfig) -> Qwen2_5_VLConfig:
    """Return the config of a model of about a million parameters, as deep as the layout says."""
    matrices = settings.ldt.configured_layers
    if not isinstance(matrices, dict):
        sys.exit(
            "ldt.pipeline_num_layers is one matrix: this model needs one for its vision_encoder and its text_decoder"
        )
    depths = {name: sum(map(sum, matrix)) for name, matrix in matrices.items()}
    vocabulary = NUM_BYTES + len(SPECIAL_TOKENS)
    ids = {f"{name}_token_id": SPECIAL_TOKENS.index(token) for name, token in TOKENS.items()}
    return Qwen2_5_VLConfig(
        vision_config={
            "depth": depths["vision_encoder"],
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 128,
            "patch_size": PATCH,
            "fullatt_block_indexes": list(range(1, depths["vision_encoder"], 2)),
        },
        text_config={
            "vocab_size": vocabulary,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": depths["text_decoder"],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
            "pad_token_id": 0,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        tie_word_embeddings=True,
        **ids,
    )


def byte_processor(image_size: int) -> Any:
    """Return a processor whose tokens are bytes and the special ones. Called on the edge only."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from ds_ldt.data.conversations import ImageTextProcessor

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([], trainer)
    return ImageTextProcessor(
        image_processor=Qwen2VLImageProcessorPil(patch_size=PATCH, min_pixels=56 * 56, max_pixels=image_size**2),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token=SPECIAL_TOKENS[0],
            eos_token=SPECIAL_TOKENS[2],
            additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        ),
        chat_template=CHAT_TEMPLATE,
    )


class Photographs(Dataset[dict[str, Any]]):
    """Crops of photographs, with a question and its answer, in the form of LLaVA's data sets. Edge only.

    Args:
        first: Number of the first crop; crops of other numbers are other crops.
        count: How many there are.
    """

    def __init__(self, first: int, count: int) -> None:
        import skimage.data

        self.images = {name: getattr(skimage.data, name)() for name in ANSWERS}
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        number = self.first + index
        name = list(ANSWERS)[number % len(ANSWERS)]
        image = self.images[name]
        # between 7/10 and the whole of the photograph in each direction, so that sizes differ
        draw = torch.rand(4, generator=torch.Generator().manual_seed(number)).tolist()
        spans = []
        for size, share, place in zip(image.shape, draw[:2], draw[2:], strict=False):
            length = int(size * (0.7 + 0.3 * share))
            start = int((size - length) * place)
            spans.append(slice(start, start + length))
        crop = image[tuple(spans)]
        if crop.ndim == 2:
            crop = crop[..., None].repeat(3, axis=-1)
        turns = [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWERS[name]}]
        return {"image": crop, "conversations": turns}


def in_turn(engine: ds_ldt.LDTPipelineEngine, samples: Photographs, collate: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Yield held-out micro-batches, one after another."""
    size = engine.train_micro_batch_size_per_gpu()
    for start in itertools.count(0, size):
        yield collate([samples[index % len(samples)] for index in range(start, start + size)])


def train(
    engine: ds_ldt.LDTPipelineEngine, held_out: Photographs | None, collate: Any, args: argparse.Namespace
) -> dict[str, Any]:
    """Measure the held-out loss, train, measure again, and save now and then; return the losses."""

    def measure() -> float:
        batches = in_turn(engine, held_out, collate) if held_out is not None else None
        return float(engine.eval_batch(batches))

    engine.agree_on({f"--{name}": getattr(args, name) for name in ("steps", "eval_every")})
    saver = ds_ldt.Saver(
        engine, args.save, every=args.save_every, keep=args.keep, resume=args.resume, setting="--save"
    )
    result = saver.state or {"held_out_before": measure(), "losses": [], "evaluations": []}
    done = engine.global_steps
    with tqdm(total=args.steps, initial=done, desc="fine-tuning", unit="step", disable=engine.global_rank != 0) as bar:
        for step in range(done + 1, args.steps + 1):
            result["losses"].append(float(engine.train_batch()))
            bar.set_postfix_str(f"loss {result['losses'][-1]:.4f}", refresh=False)
            bar.update()
            if args.eval_every and step % args.eval_every == 0:
                loss = measure()
                result["evaluations"].append({"step": step, "held_out": loss})
                if not bar.disable:
                    bar.write(f"step {step}: held-out loss {loss:.4f}")
            saver.save_if_due(result)
    saver.save(result)
    return {**result, "held_out_after": measure()}


def finetune(args: argparse.Namespace) -> dict[str, Any]:
    """Read the data, build this rank's part of the model and train it; return the losses."""
    torch.manual_seed(args.seed)
    job = ds_ldt.load_config(args.config)
    training = held_out = collate = None
    if ds_ldt.site_of_this_rank(job) == "edge":  # the cloud has neither photographs nor a tokenizer
        from ds_ldt.data.conversations import ConversationCollator

        with ds_ldt.preparing_data(job):  # with more data the cloud would wait for as long as it takes
            collate = ConversationCollator(byte_processor(args.image_size))
            training, held_out = Photographs(0, 64 * len(ANSWERS)), Photographs(10_000, len(ANSWERS))
    module = ds_ldt.models.from_pretrained(small_config(job), config=job, seed=args.seed)
    engine, _, _, _ = ds_ldt.initialize(model=module, config=job, training_data=training, collate_fn=collate)
    if engine.global_rank == 0:
        print(module.wire.describe())
    result = train(engine, held_out, collate, args)
    if engine.global_rank == 0:
        losses = result["losses"]
        print(f"loss {losses[0]:.4f} in the first step and {losses[-1]:.4f} in step {len(losses)}")
        before, after = result["held_out_before"], result["held_out_after"]
        print(f"held-out loss {before:.4f} before and {after:.4f} after training")
        if args.save is not None:
            (args.save / "metrics.json").write_text(json.dumps(result, indent=1) + "\n")
    engine.destroy()
    return result


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    default = Path(__file__).resolve().parent.parent / "ds_configs/vl_photographs.json"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", type=Path, default=default, help='DeepSpeed JSON with the "ldt" section')
    parser.add_argument("--save", type=Path, help="directory for this site's part of the checkpoint (default: none)")
    parser.add_argument("--save_every", type=at_least(1), metavar="N", help="save every N steps, not just at the end")
    parser.add_argument("--keep", type=at_least(1), metavar="N", help="keep the last N checkpoints (default: all)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --save, if any")
    parser.add_argument("--steps", type=at_least(1), default=120, help="in all, resumed ones included (default: 120)")
    parser.add_argument("--eval_every", type=at_least(1), metavar="N", help="evaluate every N steps as well")
    parser.add_argument(
        "--image_size", type=at_least(56), default=112, help="pixels of a square image, at most (default: 112)"
    )
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # added by the launcher
    args = parser.parse_args(words)
    if args.save is None and (args.resume or args.save_every or args.keep):
        parser.error("--save_every, --keep and --resume need --save")
    return args


if __name__ == "__main__":
    finetune(arguments())
    comm.destroy_process_group()
