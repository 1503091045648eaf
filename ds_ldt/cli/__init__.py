"""What can be typed: the subcommands of `ds-ldt`."""
