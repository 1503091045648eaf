"""Join the layer files of the edge and of the cloud into a Hugging Face model.

    ds-ldt export --edge EDGE --cloud CLOUD --hf-config MODEL --out OUT
    ds-ldt export --edge EDGE --cloud CLOUD --hf-config MODEL --out OUT --adapter
    ds-ldt export --edge EDGE --cloud CLOUD --hf-config MODEL --out OUT --merge

With --adapter what `ldt.lora` trained becomes an adapter directory of PEFT; with --merge it becomes a whole model, the
weights of MODEL with the adapter merged in.

EDGE and CLOUD are directories that `ds-ldt convert` wrote, or checkpoint directories of the engine (the tag that their
`latest` file names is read), or tag directories in those. They have to be of one save, or converted from one model.
MODEL has to be the model that was trained. Run it where both halves are at hand, as a rule on the edge: the result is
the whole model.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from argparse import ArgumentError, ArgumentParser, Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ds_ldt.errors import Absent, ConfigError


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the command.

    Args:
        parser: Its parser.
    """
    parser.add_argument("--edge", required=True, metavar="DIR", help="layer files of the edge")
    parser.add_argument("--cloud", required=True, metavar="DIR", help="layer files of the cloud")
    parser.add_argument("--out", required=True, metavar="DIR", help="directory to write")
    parser.add_argument(
        "--hf-config", metavar="DIR", help="directory with config.json and tokenizer (default: that of the edge)"
    )
    parser.add_argument("--max-shard-size", metavar="SIZE", help="largest file of weights (default: 5GB)")
    parser.add_argument("--overwrite", action="store_true", help="replace the model that the directory holds")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--adapter", action="store_true", help="write an adapter directory of PEFT")
    kind.add_argument("--merge", action="store_true", help="write the model in --hf-config with the adapter merged in")


def run(options: Namespace) -> str:
    """Run the command; return what it prints.

    Args:
        options: The command line.

    Raises:
        ArgumentError: Two options do not go together.
        LDTError: The halves or the model are wrong, or the directory may not be written.
        OSError: A file cannot be read or written.
    """
    if (options.adapter or options.merge) and options.hf_config is None:
        raise ArgumentError(None, "--adapter and --merge need --hf-config, the base model")
    if options.adapter and options.max_shard_size is not None:
        raise ArgumentError(None, "--max-shard-size has no meaning with --adapter: PEFT reads one file")
    halves = {"edge": options.edge, "cloud": options.cloud, "hf_config": options.hf_config}
    target = {"overwrite": options.overwrite}
    if options.max_shard_size:
        target["max_shard_size"] = options.max_shard_size
    write = _write_adapter if options.adapter else _write_merged if options.merge else _write_model
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed greets
        what = write(halves, options.out, target)
    return f"wrote {what} to {options.out}\n"


def _check_peft() -> None:
    """Say at once that adapters need an extra that is not installed."""
    if find_spec("peft") is None:
        raise ConfigError.of(
            "--adapter and --merge",
            found=Absent("no PEFT"),
            expected="the package peft",
            fix="pip install ds_ldt[lora]",
        )


def _write_model(halves: dict[str, Any], out: str, target: dict[str, Any]) -> str:
    from ds_ldt.checkpointing.to_hf import convert_to_hf

    names = convert_to_hf(**halves, out=out, **target)
    return f"{len(names)} file{'s' * (len(names) > 1)} of weights"


def _write_adapter(halves: dict[str, Any], out: str, target: dict[str, Any]) -> str:
    _check_peft()
    from ds_ldt.checkpointing.adapter import export_adapter

    return f"an adapter of {len(export_adapter(**halves, out=out, **target))} tensors"


def _write_merged(halves: dict[str, Any], out: str, target: dict[str, Any]) -> str:
    _check_peft()
    from ds_ldt.checkpointing.adapter import export_adapter, merge_adapter

    with tempfile.TemporaryDirectory() as folder:
        adapter = Path(folder, "adapter")
        export_adapter(**halves, out=adapter)
        merge_adapter(halves["hf_config"], adapter, out, **target)
    return "the model with the adapter merged in"
