"""What a rule about one setting of the JSON is, and the rules that many settings share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What one setting accepts.

    Attributes:
        key: Its path; a dot leads into a section.
        accepts: Whether a value is accepted. Settings that are absent are not asked about.
        expected: What is accepted, in words.
        fix: What to do about another value.
    """

    key: str
    accepts: Callable[[Any], bool]
    expected: str
    fix: str


def is_number(value: object, least: float) -> bool:
    """Whether a value is a finite number of at least `least`; booleans are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value >= least


def is_bool(value: object) -> bool:
    """Whether a value is a boolean."""
    return isinstance(value, bool)


def is_off(value: object) -> bool:
    """Whether a value is false and nothing like it."""
    return value is False


def boolean(key: str) -> Rule:
    """A rule for a switch."""
    return Rule(key=key, accepts=is_bool, expected="true or false, without quotes", fix="write true or false")


def off(key: str, reason: str) -> Rule:
    """A rule for a switch that has to be off, for the reason given."""
    return Rule(key=key, accepts=is_off, expected=f"false ({reason})", fix="set it to false or remove it")


def text(key: str, example: str) -> Rule:
    """A rule for a name."""
    return Rule(
        key=key,
        accepts=lambda value: isinstance(value, str) and bool(value),
        expected="a name in quotes",
        fix=f'write e.g. "{key.rpartition(".")[2]}": "{example}"',
    )


def named_settings(key: str) -> Rule:
    """A rule for a section, which holds settings of its own."""
    return Rule(
        key=key,
        accepts=lambda value: isinstance(value, Mapping),
        expected="an object with named settings",
        fix='write "' + key.rpartition(".")[2] + '": { ... }',
    )
