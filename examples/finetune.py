#!/usr/bin/env python3
"""Fine-tune a language model over an edge and a cloud: the script to copy and change.

Every rank of both sites runs it, started by run_edge.sh and run_cloud.sh. Each site gives its own --model (the layer
files it holds) and its own --save. The text and the tokenizer are opened on the edge alone. What is not said to be for
the edge has to be the same on both sites.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from tqdm import tqdm

import ds_ldt
from ds_ldt.cli.arguments import at_least


class Blocks(Dataset[dict[str, Tensor]]):
    """Rows of token ids (N, S) int64 as samples. Labels are the ids themselves: the loss shifts them."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def read_rows(option: str, path: Path | None, args: argparse.Namespace, *, needed: int) -> Tensor:
    """Return a text as token ids (N, sequence length), of which there have to be so many rows. Edge only."""
    from ds_ldt.data.texts import load_tokenizer, read_text

    tokenizer = load_tokenizer(args.tokenizer or args.model, setting="--tokenizer", allow_download=args.allow_download)
    if path is None:
        from pydoc_data.topics import topics  # Python's own reference manual, 465k characters of prose

        text = "\n\n".join(topics.values())
    else:
        text = read_text(path, setting=option)
    ids, length = tokenizer(text, verbose=False)["input_ids"], args.sequence_length
    rows = len(ids) // length
    if rows < needed:
        sys.exit(
            f"{option}: {path or 'the reference manual'} has {len(ids)} tokens, which make {rows} samples of "
            f"--sequence_length {length}; needed are {needed}. Fix: give more text, or lower one of "
            "--sequence_length, --eval_micro_batches and the batch size of the configuration"
        )
    return torch.tensor(ids[: rows * length]).view(rows, length)


def read_data(args: argparse.Namespace, job: ds_ldt.JobConfig) -> tuple[Blocks, Blocks]:
    """Return the samples to train on and those held out, the last of the text or a text of their own. Edge only."""
    held_out = args.eval_micro_batches * job.micro_batch_size * job.num_domains
    if args.eval_text is None:
        rows = read_rows("--text", args.text, args, needed=held_out + job.train_batch_size)
        return Blocks(rows[:-held_out]), Blocks(rows[-held_out:])
    rows = read_rows("--text", args.text, args, needed=job.train_batch_size)
    return Blocks(rows), Blocks(read_rows("--eval_text", args.eval_text, args, needed=held_out)[:held_out])


def in_turn(samples: Blocks, engine: ds_ldt.LDTPipelineEngine) -> Iterator[dict[str, Tensor]]:
    """Yield what this replica reads in an evaluation: for each micro-batch index, one micro-batch per domain."""
    size, domains = engine.train_micro_batch_size_per_gpu(), engine.job.num_domains
    for start in range(0, len(samples), size * domains):
        for domain in engine.grid.domains:
            first = start + domain * size
            yield default_collate([samples[index] for index in range(first, first + size)])


def train(engine: ds_ldt.LDTPipelineEngine, held_out: Blocks | None, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the held-out loss, train, measure again, and save now and then; return what was reached."""

    def measure() -> float:
        batches = in_turn(held_out, engine) if held_out is not None else None
        return float(engine.eval_batch(batches, num_micro_batches=args.eval_micro_batches))

    same = ("steps", "eval_every", "eval_micro_batches")
    engine.agree_on({f"--{name}": getattr(args, name) for name in same})
    saver = ds_ldt.Saver(
        engine, args.save, every=args.save_every, keep=args.keep, resume=args.resume, setting="--save"
    )
    tokens = engine.train_batch_size() * args.sequence_length
    result = saver.state or {"held_out_before": measure(), "tokens_per_step": tokens, "steps": [], "evaluations": []}
    done = engine.global_steps
    with tqdm(total=args.steps, initial=done, desc="fine-tuning", unit="step", disable=engine.global_rank != 0) as bar:
        for step in range(done + 1, args.steps + 1):
            started = time.monotonic()
            loss = float(engine.train_batch())
            norm, rate = float(engine.get_global_grad_norm()), tokens / (time.monotonic() - started)
            result["steps"].append({"loss": loss, "grad_norm": norm, "tokens_per_s": rate})
            bar.set_postfix_str(f"loss {loss:.4f}, grad norm {norm:.3f}, {rate:.0f} tokens/s", refresh=False)
            bar.update()
            if args.eval_every and step % args.eval_every == 0:
                loss = measure()
                result["evaluations"].append({"step": step, "held_out": loss})
                if not bar.disable:
                    bar.write(f"step {step}: held-out loss {loss:.4f}")
            saver.save_if_due(result)
    saver.save(result)
    return {**result, "held_out_after": measure()}


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", type=Path, required=True, help='DeepSpeed JSON with the "ldt" section')
    parser.add_argument(
        "--model", type=Path, required=True, help="this site's layer files, or a Hugging Face directory"
    )
    parser.add_argument("--save", type=Path, required=True, help="directory for this site's part of the checkpoint")
    parser.add_argument("--save_every", type=at_least(1), metavar="N", help="save every N steps, not just at the end")
    parser.add_argument("--keep", type=at_least(1), metavar="N", help="keep the last N checkpoints (default: all)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --save, if any")
    parser.add_argument("--text", type=Path, help="edge: a text file in UTF-8 (default: Python's reference manual)")
    parser.add_argument("--eval_text", type=Path, help="edge: one to evaluate on (default: the end of --text)")
    parser.add_argument("--tokenizer", type=Path, help="edge: directory of the tokenizer (default: --model)")
    parser.add_argument("--allow_download", action="store_true", help="edge: --tokenizer may name one on a hub")
    parser.add_argument("--steps", type=at_least(1), default=10, help="in all, resumed ones included (default: 10)")
    parser.add_argument(
        "--sequence_length", type=at_least(2), default=128, help="edge: tokens per sample (default: 128)"
    )
    parser.add_argument("--eval_every", type=at_least(1), metavar="N", help="evaluate every N steps as well")
    parser.add_argument(
        "--eval_micro_batches", type=at_least(1), default=4, help="held-out ones per domain (default: 4)"
    )
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # added by the launcher
    return parser.parse_args(words)


def finetune(args: argparse.Namespace) -> dict[str, Any]:
    """Read the data, build this rank's part of the model, train and save it; return what was reached."""
    torch.manual_seed(args.seed)
    job = ds_ldt.load_config(args.config)
    training = held_out = None
    if ds_ldt.site_of_this_rank(job) == "edge":  # the cloud has neither text nor tokenizer
        with ds_ldt.preparing_data(job):  # the cloud waits for as long as it takes
            training, held_out = read_data(args, job)
    module = ds_ldt.models.from_pretrained(args.model, config=job, seed=args.seed)
    engine, _, _, _ = ds_ldt.initialize(model=module, config=job, training_data=training, collate_fn=default_collate)
    result = train(engine, held_out, args)
    if engine.global_rank == 0:
        before, after = result["held_out_before"], result["held_out_after"]
        print(f"held-out loss {before:.4f} before and {after:.4f} after training")
        (args.save / "metrics.json").write_text(json.dumps(result, indent=1) + "\n")
    engine.destroy()
    return result


if __name__ == "__main__":
    finetune(arguments())
    comm.destroy_process_group()
