#!/usr/bin/env python3
"""`ds-ldt convert` as a script: split a Hugging Face model into the layer files of the edge and of the cloud.

python checkpoint/hf_to_ds_ldt.py --hf MODEL --config CONFIG.json --out-edge EDGE --out-cloud CLOUD
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ds_ldt.cli import convert
from ds_ldt.cli.main import run_script


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    return run_script(convert, arguments, name="hf_to_ds_ldt")


if __name__ == "__main__":
    sys.exit(main())
