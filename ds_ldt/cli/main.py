"""The command `ds-ldt`; `python -m ds_ldt.cli` is the same program.

Each subcommand is a module of this package with its arguments and its work. The docstring of that module is its help:
the first line in `ds-ldt --help`, all of it in `ds-ldt NAME --help`.
"""

from __future__ import annotations

import sys
from argparse import ArgumentError, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from typing import Protocol

from ds_ldt import __version__
from ds_ldt.cli import check, convert, draw, export, plan
from ds_ldt.comm.reach import exit_past_helpers
from ds_ldt.errors import LDTError

_DESCRIPTION = """Fine-tune a model that is split between an edge and a cloud: plan, draw, convert, check, export.

`ds-ldt COMMAND --help` says more about a command. plan and draw answer without importing torch.
"""

_EPILOG = """Exit status: 0; 1 if something is wrong with the input, as a message on stderr then says;
2 if the command line is wrong.
"""


class Command(Protocol):
    """A module with a subcommand."""

    __doc__: str | None

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the arguments of the command."""

    def run(self, options: Namespace) -> str:
        """Run the command; return what it prints."""


COMMANDS: dict[str, Command] = {"plan": plan, "draw": draw, "convert": convert, "check": check, "export": export}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    Args:
        arguments: The command line without the program's name; None takes the process's own.

    Raises:
        SystemExit: With status 2 if the command line is wrong, with 0 after `--help`.
    """
    parser = ArgumentParser(
        prog="ds-ldt", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"ds_ldt {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        about = command.__doc__ or ""
        subparser = subparsers.add_parser(
            name, help=about.partition("\n")[0], description=about, formatter_class=RawDescriptionHelpFormatter
        )
        command.add_arguments(subparser)
        subparser.set_defaults(parser=subparser, run=command.run)
    options = parser.parse_args(arguments)
    status = _run(options, name="ds-ldt")
    if arguments is None:
        exit_past_helpers(status)
    return status


def run_script(command: Command, arguments: Sequence[str] | None, *, name: str) -> int:
    """Run one command as a script of its own and return its exit status.

    Args:
        command: The command.
        arguments: As for `main`.
        name: What its messages begin with.

    Raises:
        SystemExit: As for `main`.
    """
    parser = ArgumentParser(
        description=command.__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False
    )
    command.add_arguments(parser)
    parser.set_defaults(parser=parser, run=command.run)
    return _run(parser.parse_args(arguments), name=name)


def _run(options: Namespace, *, name: str) -> int:
    try:
        sys.stdout.write(options.run(options))
        sys.stdout.flush()
    except ArgumentError as error:
        options.parser.error(str(error))
    except BrokenPipeError:
        return 1
    except (LDTError, OSError) as error:
        sys.stderr.write(f"{name}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
