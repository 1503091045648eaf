#!/usr/bin/env python3
"""Split a Hugging Face model into the layer files of the edge and of the cloud.

    python checkpoint/hf_to_ds_ldt.py --hf MODEL --config CONFIG.json --out-edge EDGE --out-cloud CLOUD

Each site then gets its own directory: the edge's layers, tokenizer and config.json go to the edge, the cloud's layers
and config.json to the cloud. Leave out --out-edge or --out-cloud to write one site only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ds_ldt.checkpointing.from_hf import convert_to_layers
from ds_ldt.errors import LDTError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--hf", required=True, metavar="DIR", help="Hugging Face model (safetensors)")
    parser.add_argument("--config", required=True, metavar="JSON", help='DeepSpeed JSON with the "ldt" section')
    parser.add_argument("--out-edge", metavar="DIR", help="directory to write for the edge")
    parser.add_argument("--out-cloud", metavar="DIR", help="directory to write for the cloud")
    parser.add_argument("--overwrite", action="store_true", help="replace what an earlier conversion wrote")
    options = parser.parse_args(arguments)
    if options.out_edge is None and options.out_cloud is None:
        parser.error("at least one of --out-edge and --out-cloud is required")
    try:
        manifests = convert_to_layers(
            options.hf,
            config=options.config,
            edge=options.out_edge,
            cloud=options.out_cloud,
            overwrite=options.overwrite,
        )
    except (LDTError, OSError) as error:
        print(f"hf_to_ds_ldt: {error}", file=sys.stderr)
        return 1
    for site, manifest in manifests.items():
        directory = options.out_edge if site == "edge" else options.out_cloud
        print(f"{site}: layers {sorted(manifest.layers)} of {manifest.num_layers} in {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
