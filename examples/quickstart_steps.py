#!/usr/bin/env python3
"""The small steps of quickstart.sh that are easier in Python; each is a subcommand."""

from __future__ import annotations

import argparse
import json
import socket
import sys
from pathlib import Path
from typing import Any


def make_config(args: argparse.Namespace) -> None:
    """Write the run's JSON: the shipped one, with the number of domains and the layout that fit this model."""
    settings: dict[str, Any] = json.loads(args.base.read_text())
    ldt = settings["ldt"]
    if args.domains is not None:
        ldt["cloud"]["data_parallel_size"] = args.domains
    if not (args.model / "config.json").is_file():
        sys.exit(f"{args.model} holds no config.json")
    layers = json.loads((args.model / "config.json").read_text())["num_hidden_layers"]
    matrix = ldt["pipeline_num_layers"]
    in_cloud = layers - sum(row[0] for row in matrix)
    if len(matrix) != 2 or len(matrix[0]) != 2 or in_cloud < 1:
        sys.exit(
            f"{args.model} has {layers} layers, which {matrix} of {args.base} cannot be stretched to: pass --config"
        )
    matrix[0][1], matrix[1][1] = in_cloud, 0
    settings["steps_per_print"] = 1_000_000  # finetune.py's progress bar shows every step already
    # torch's own AdamW: DeepSpeed's fused one is compiled at first use, which takes longer than this whole run.
    settings["optimizer"]["params"].setdefault("torch_adam", True)
    args.out.write_text(json.dumps(settings, indent=2) + "\n")
    print(f"layout {matrix}, {ldt['cloud']['data_parallel_size']} domain(s) in {args.out}")


def make_hostfile(args: argparse.Namespace) -> None:
    """Write the hostfile of two machines that a configuration asks for."""
    from ds_ldt import load_config

    job = load_config(args.config)
    edge = job.ldt.edge.data_parallel_size
    args.out.write_text(f"edge slots={edge}\ncloud slots={job.world_size - edge}\n")


def trained(args: argparse.Namespace) -> None:
    """Print what a configuration trains: an adapter or the model."""
    from ds_ldt import load_config

    print("model" if load_config(args.config).ldt.lora is None else "adapter")


def free_port(args: argparse.Namespace) -> None:
    """Print a TCP port that is free on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        print(probe.getsockname()[1])


def report(args: argparse.Namespace) -> None:
    """Show what training reached; fail if the held-out loss did not fall."""
    result = json.loads(args.metrics.read_text())
    print("step   loss   grad norm   tokens/s")
    for number, row in enumerate(result["steps"], start=1):
        print(f"{number:4d} {row['loss']:8.4f} {row['grad_norm']:9.3f} {row['tokens_per_s']:10.0f}")
    before, after = result["held_out_before"], result["held_out_after"]
    print(f"held-out loss: {before:.4f} -> {after:.4f}")
    if not after < before:
        sys.exit("The held-out loss did not fall: more --steps, or another learning rate in the configuration")


def generate(args: argparse.Namespace) -> None:
    """Load what was trained the usual way and print how it goes on with a prompt."""
    from transformers import AutoModelForCausalLM

    from ds_ldt.data.texts import load_tokenizer

    for directory, name in ((args.model, "config.json"), (args.adapter, "adapter_config.json")):
        if directory is not None and not (directory / name).is_file():  # what is not here is taken for a hub's name
            sys.exit(f"{directory} holds no {name}")
    tokenizer = load_tokenizer(args.model, setting="--model")
    model = AutoModelForCausalLM.from_pretrained(args.model, local_files_only=True)
    if args.adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, args.adapter, local_files_only=True)
    inputs = tokenizer(args.prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=args.tokens, do_sample=False, repetition_penalty=1.2)
    print(tokenizer.decode(output[0], skip_special_tokens=True))


def main() -> None:
    """Run one step."""
    parser = argparse.ArgumentParser(description=__doc__)
    steps = parser.add_subparsers(required=True, metavar="STEP")

    step = steps.add_parser("config", help="write the run's JSON")
    step.add_argument("--base", type=Path, required=True, help="JSON to start from")
    step.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    step.add_argument("--domains", type=int, help="data-parallel pipelines in the cloud")
    step.add_argument("--out", type=Path, required=True)
    step.set_defaults(run=make_config)

    step = steps.add_parser("hostfile", help="write the hostfile for a JSON")
    step.add_argument("--config", type=Path, required=True)
    step.add_argument("--out", type=Path, required=True)
    step.set_defaults(run=make_hostfile)

    step = steps.add_parser("trained", help="print what a JSON trains")
    step.add_argument("--config", type=Path, required=True)
    step.set_defaults(run=trained)

    step = steps.add_parser("port", help="print a free port")
    step.set_defaults(run=free_port)

    step = steps.add_parser("report", help="show the losses")
    step.add_argument("metrics", type=Path)
    step.set_defaults(run=report)

    step = steps.add_parser("generate", help="let the trained model speak")
    step.add_argument("--model", type=Path, required=True)
    step.add_argument("--adapter", type=Path, help="directory of an adapter for it")
    step.add_argument("--prompt", default="In Python, the with statement is used to")
    step.add_argument("--tokens", type=int, default=40)
    step.set_defaults(run=generate)

    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
