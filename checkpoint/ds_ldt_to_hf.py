#!/usr/bin/env python3
"""`ds-ldt export` as a script: join the layer files of the edge and the cloud into a Hugging Face model.

python checkpoint/ds_ldt_to_hf.py --edge EDGE --cloud CLOUD --hf-config MODEL --out OUT [--adapter | --merge]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ds_ldt.cli import export
from ds_ldt.cli.main import run_script


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    return run_script(export, arguments, name="ds_ldt_to_hf")


if __name__ == "__main__":
    sys.exit(main())
