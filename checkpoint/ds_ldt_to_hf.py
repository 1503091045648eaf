#!/usr/bin/env python3
"""Join the layer files of the edge and the cloud into a Hugging Face model.

    python checkpoint/ds_ldt_to_hf.py --edge EDGE --cloud CLOUD --hf-config MODEL --out OUT

EDGE and CLOUD are directories written by hf_to_ds_ldt.py, or checkpoint directories of the engine (the tag that their
`latest` file names is read). Run it where both are at hand, as a rule on the edge: the result is the whole model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ds_ldt.conversion import convert_to_hf
from ds_ldt.conversion.shards import DEFAULT_MAX_SHARD_SIZE
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
        "--max-shard-size", default=DEFAULT_MAX_SHARD_SIZE, metavar="SIZE", help="e.g. 5GB (default: %(default)s)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the model that the directory holds")
    options = parser.parse_args(arguments)
    try:
        names = convert_to_hf(
            options.edge,
            options.cloud,
            options.out,
            hf_config=options.hf_config,
            max_shard_size=options.max_shard_size,
            overwrite=options.overwrite,
        )
    except (LDTError, OSError) as error:
        print(f"ds_ldt_to_hf: {error}", file=sys.stderr)
        return 1
    print(f"wrote {len(names)} file{'s' * (len(names) > 1)} of weights to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
