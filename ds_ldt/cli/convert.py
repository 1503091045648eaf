"""Split a Hugging Face model into the layer files of the edge and of the cloud.

    ds-ldt convert --hf MODEL --config CONFIG.json --out-edge EDGE --out-cloud CLOUD

Each site then gets its own directory: the edge's layers, tokenizer and config.json go to the edge, the cloud's layers
and config.json to the cloud. Leave out --out-edge or --out-cloud to write one site only.
"""

from __future__ import annotations

import contextlib
import sys
from argparse import ArgumentError, ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the command.

    Args:
        parser: Its parser.
    """
    parser.add_argument("--hf", required=True, metavar="DIR", help="Hugging Face model (safetensors)")
    parser.add_argument("--config", required=True, metavar="JSON", help='DeepSpeed JSON with the "ldt" section')
    parser.add_argument("--out-edge", metavar="DIR", help="directory to write for the edge")
    parser.add_argument("--out-cloud", metavar="DIR", help="directory to write for the cloud")
    parser.add_argument("--overwrite", action="store_true", help="replace what an earlier conversion wrote")


def run(options: Namespace) -> str:
    """Run the command; return what it prints.

    Args:
        options: The command line.

    Raises:
        ArgumentError: No directory is named.
        LDTError: The model or the configuration is wrong, or a directory may not be written.
        OSError: A file cannot be read or written.
    """
    if options.out_edge is None and options.out_cloud is None:
        raise ArgumentError(None, "at least one of --out-edge and --out-cloud is required")
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed greets
        from ds_ldt.checkpointing.from_hf import convert_to_layers

        manifests = convert_to_layers(
            options.hf,
            config=options.config,
            edge=options.out_edge,
            cloud=options.out_cloud,
            overwrite=options.overwrite,
        )
    directories = {"edge": options.out_edge, "cloud": options.out_cloud}
    lines = (
        f"{site}: layers {sorted(manifest.layers)} of {manifest.num_layers} in {directories[site]}\n"
        for site, manifest in manifests.items()
    )
    return "".join(lines)
