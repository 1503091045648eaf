#!/usr/bin/env python3
"""Fine-tune a language model over an edge and a cloud: the script to copy and change.

Every rank of both sites runs it, started by run_edge.sh and run_cloud.sh. Each site gives its own --model (the layer
files it holds) and its own --save. The text and the tokenizer are opened on the edge alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from deepspeed import comm
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from tqdm import tqdm

import ds_ldt


class Blocks(Dataset[dict[str, Tensor]]):
    """Rows of token ids (N, S) int64 as samples. Labels are the ids themselves: the loss shifts them."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def read_rows(args: argparse.Namespace) -> Tensor:
    """Return the text as token ids (N, sequence length). Called on the edge only."""
    from transformers import AutoTokenizer

    if args.text is None:
        from pydoc_data.topics import topics  # Python's own reference manual, 465k characters of prose

        text = "\n\n".join(topics.values())
    else:
        text = args.text.read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(args.tokenizer or args.model)(text, verbose=False)["input_ids"]
    rows = len(ids) // args.sequence_length
    return torch.tensor(ids[: rows * args.sequence_length]).view(rows, args.sequence_length)


def in_turn(samples: Blocks, engine: ds_ldt.LDTPipelineEngine) -> Iterator[dict[str, Tensor]]:
    """Yield what this replica reads in an evaluation: for each micro-batch index, one micro-batch per domain."""
    size, domains = engine.train_micro_batch_size_per_gpu(), engine.job.num_domains
    for start in range(0, len(samples), size * domains):
        for domain in engine.grid.domains:
            first = start + domain * size
            yield default_collate([samples[index] for index in range(first, first + size)])


def train(engine: ds_ldt.LDTPipelineEngine, held_out: Blocks | None, args: argparse.Namespace) -> dict[str, object]:
    """Measure the held-out loss, train, measure again; return what was reached."""

    def measure() -> float:
        batches = in_turn(held_out, engine) if held_out is not None else None
        return float(engine.eval_batch(batches, num_micro_batches=args.eval_micro_batches))

    before, steps = measure(), []
    tokens = engine.train_batch_size() * args.sequence_length
    with tqdm(total=args.steps, desc="fine-tuning", unit="step", disable=engine.global_rank != 0) as bar:
        for _ in range(args.steps):
            started = time.monotonic()
            loss = float(engine.train_batch())
            norm, rate = float(engine.get_global_grad_norm()), tokens / (time.monotonic() - started)
            steps.append({"loss": loss, "grad_norm": norm, "tokens_per_s": rate})
            bar.set_postfix_str(f"loss {loss:.4f}, grad norm {norm:.3f}, {rate:.0f} tokens/s", refresh=False)
            bar.update()
    return {"held_out_before": before, "held_out_after": measure(), "tokens_per_step": tokens, "steps": steps}


def main() -> None:
    """Build this rank's part of the model, train it, save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help='DeepSpeed JSON with the "ldt" section')
    parser.add_argument(
        "--model", type=Path, required=True, help="this site's layer files, or a Hugging Face directory"
    )
    parser.add_argument("--save", type=Path, required=True, help="directory for this site's part of the checkpoint")
    parser.add_argument("--text", type=Path, help="edge: a text file (default: Python's reference manual)")
    parser.add_argument("--tokenizer", type=Path, help="edge: directory of the tokenizer (default: --model)")
    parser.add_argument("--steps", type=int, default=10, help="default: 10")
    parser.add_argument("--sequence_length", type=int, default=128, help="tokens per sample (default: 128)")
    parser.add_argument("--eval_micro_batches", type=int, default=4, help="held-out ones per domain (default: 4)")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # added by the launcher
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    module = ds_ldt.models.from_pretrained(args.model, config=args.config, seed=args.seed)
    job = module.job
    training = held_out = None
    if module.mpu().site == "edge":  # the cloud has neither text nor tokenizer
        rows = read_rows(args)
        kept_back = args.eval_micro_batches * job.micro_batch_size * job.num_domains
        if len(rows) < kept_back + job.train_batch_size:
            sys.exit(f"The text gives {len(rows)} samples, a step and {kept_back} held-out ones need more: see --text")
        training, held_out = Blocks(rows[:-kept_back]), Blocks(rows[-kept_back:])
    engine, _, _, _ = ds_ldt.initialize(model=module, config=job, training_data=training, collate_fn=default_collate)
    result = train(engine, held_out, args)
    engine.save_checkpoint(args.save)
    if engine.global_rank == 0:
        print(
            f"held-out loss {result['held_out_before']:.4f} before and {result['held_out_after']:.4f} after training"
        )
        (args.save / "metrics.json").write_text(json.dumps(result, indent=1) + "\n")
    engine.destroy()
    comm.destroy_process_group()


if __name__ == "__main__":
    main()
