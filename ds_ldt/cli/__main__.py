"""`python -m ds_ldt.cli` is the same program as `ds-ldt`."""

from ds_ldt.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
