"""Values on the command line, read and checked."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable

_HIGHEST_PORT = 65535
_LONGEST_WAIT_S = 604800.0


def at_least(least: int) -> Callable[[str], int]:
    """Return what reads a whole number.

    Args:
        least: The least that is accepted.
    """

    def whole_number(text: str) -> int:
        if not text.strip().removeprefix("+").isdecimal() or int(text) < least:
            raise ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
        return int(text)

    return whole_number


def tokens(text: str) -> int:
    """Read a length in tokens.

    Raises:
        ArgumentTypeError: It is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no number of tokens, expected at least 1")
    return int(text)


def port(text: str) -> int:
    """Read a TCP port.

    Raises:
        ArgumentTypeError: It is none.
    """
    if not text.isdecimal() or not 1 <= int(text) <= _HIGHEST_PORT:
        raise ArgumentTypeError(f"{text!r} is no TCP port, expected 1..{_HIGHEST_PORT}")
    return int(text)


def seconds(text: str) -> float:
    """Read a time in seconds, up to a week.

    Raises:
        ArgumentTypeError: It is none.
    """
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= _LONGEST_WAIT_S:
        raise ArgumentTypeError(f"{text!r} is no number of seconds > 0 and <= {_LONGEST_WAIT_S:g}")
    return number
