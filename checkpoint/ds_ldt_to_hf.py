#!/usr/bin/env python3
"""Join the layer files of the edge and the cloud into a Hugging Face model.

    python checkpoint/ds_ldt_to_hf.py --edge EDGE --cloud CLOUD --hf-config MODEL --out OUT

    python checkpoint/ds_ldt_to_hf.py --edge EDGE --cloud CLOUD --hf-config MODEL --out OUT --adapter
    python checkpoint/ds_ldt_to_hf.py --edge EDGE --cloud CLOUD --hf-config MODEL --out OUT --merge

With --adapter what `ldt.lora` trained becomes an adapter directory of PEFT; with --merge it becomes a whole model, the
weights of MODEL with the adapter merged in.

EDGE and CLOUD are directories written by hf_to_ds_ldt.py, or checkpoint directories of the engine (the tag that their
`latest` file names is read), or tag directories in those. They have to be of one save, or converted from one model.
MODEL has to be the model that was trained. Run it where both halves are at hand, as a rule on the edge: the result is
the whole model.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ds_ldt.checkpointing.adapter import export_adapter, merge_adapter
from ds_ldt.checkpointing.shards import DEFAULT_MAX_SHARD_SIZE
from ds_ldt.checkpointing.to_hf import convert_to_hf
from ds_ldt.errors import LDTError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--edge", required=True, metavar="DIR", help="layer files of the edge")
    parser.add_argument("--cloud", required=True, metavar="DIR", help="layer files of the cloud")
    parser.add_argument("--out", required=True, metavar="DIR", help="directory to write")
    parser.add_argument(
        "--hf-config", metavar="DIR", help="directory with config.json and tokenizer (default: that of the edge)"
    )
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", help=f"largest file of weights (default: {DEFAULT_MAX_SHARD_SIZE})"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the model that the directory holds")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--adapter", action="store_true", help="write an adapter directory of PEFT")
    kind.add_argument("--merge", action="store_true", help="write the model in --hf-config with the adapter merged in")
    options = parser.parse_args(arguments)
    if (options.adapter or options.merge) and options.hf_config is None:
        parser.error("--adapter and --merge need --hf-config, the base model")
    if options.adapter and options.max_shard_size is not None:
        parser.error("--max-shard-size has no meaning with --adapter: PEFT reads one file")
    shard_size = options.max_shard_size or DEFAULT_MAX_SHARD_SIZE
    try:
        if options.adapter or options.merge:
            print(f"wrote {_write_adapter(options, shard_size)} to {options.out}")
            return 0
        names = convert_to_hf(
            options.edge,
            options.cloud,
            options.out,
            hf_config=options.hf_config,
            max_shard_size=shard_size,
            overwrite=options.overwrite,
        )
    except (LDTError, OSError) as error:
        print(f"ds_ldt_to_hf: {error}", file=sys.stderr)
        return 1
    print(f"wrote {len(names)} file{'s' * (len(names) > 1)} of weights to {options.out}")
    return 0


def _write_adapter(options: argparse.Namespace, shard_size: str) -> str:
    """Write the adapter, or the model with it; return what was written."""
    sites = {"edge": options.edge, "cloud": options.cloud, "hf_config": options.hf_config}
    if options.adapter:
        return f"an adapter of {len(export_adapter(**sites, out=options.out, overwrite=options.overwrite))} tensors"
    with tempfile.TemporaryDirectory() as folder:
        adapter = Path(folder, "adapter")
        export_adapter(**sites, out=adapter)
        merge_adapter(options.hf_config, adapter, options.out, max_shard_size=shard_size, overwrite=options.overwrite)
    return "the model with the adapter merged in"


if __name__ == "__main__":
    sys.exit(main())
