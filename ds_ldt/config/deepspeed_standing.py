"""What is known of one setting of the JSON, and the kinds of value that many settings share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from ds_ldt.config.rules import is_whole


class Standing(Enum):
    """What ds_ldt does with a setting of DeepSpeed."""

    HONOURED = "it does here what DeepSpeed's documentation says"
    HARMLESS = "any value is passed on, and changes nothing here for the reason that is given"
    REFUSED = "only the value that asks for nothing is accepted, or none at all, for the reason that is given"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A kind of value.

    Attributes:
        accepts: Whether a value is of this kind.
        expected: What is accepted, in words.
        example: One that is accepted.
    """

    accepts: Callable[[Any], bool]
    expected: str
    example: Any

    def described(self, expected: str, example: Any) -> Value:
        """Return the same with other words and another example."""
        return replace(self, expected=expected, example=example)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What one setting accepts, and what becomes of it.

    Attributes:
        standing: What ds_ldt does with it.
        why: The reason, for a setting that is not honoured; else what it does, where that needs saying.
        accepts: Whether a value is accepted. Only for settings that are present.
        expected: What is accepted, in words.
        example: A value that is accepted; None where none is.
        fix: What to do about another value; None: write the example.
        keys: The settings of a section, all of them; None for a setting that holds none, or names of the user.
    """

    standing: Standing
    why: str
    accepts: Callable[[Any], bool]
    expected: str
    example: Any
    fix: str | None
    keys: Mapping[str, Setting] | None = None

    def advice(self, name: str) -> str:
        """Return what to do about another value than those accepted; what it quotes is JSON to be pasted.

        Args:
            name: The last part of the path of the setting.
        """
        return self.fix or f"write e.g. {json.dumps(name)}: {json.dumps(self.example)}"


def is_number(value: object, least: float) -> bool:
    """Whether a value is a finite number of at least `least`; booleans are none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return least <= value <= sys.float_info.max


def same(value: object, other: object) -> bool:
    """Whether two values are the same in JSON: 1 and 1.0 are, 1 and true are not."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


BOOLEAN = Value(accepts=lambda value: isinstance(value, bool), expected="true or false, without quotes", example=True)
TEXT = Value(accepts=lambda value: isinstance(value, str), expected="a text in quotes", example="name")
NAME = Value(accepts=lambda value: isinstance(value, str) and bool(value), expected="a name in quotes", example="name")
NAMES = Value(
    accepts=lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    expected="a list of names in quotes",
    example=["name"],
)
OBJECT = Value(accepts=lambda value: isinstance(value, Mapping), expected="an object with named settings", example={})
ANYTHING = Value(accepts=lambda value: True, expected="any value", example=None)


def whole(least: int, unit: str = "", *, most: int | None = None, example: int | None = None) -> Value:
    """A whole number of something."""
    bounds = f">= {least}" if most is None else f"from {least} to {most}"
    return Value(
        accepts=lambda value: is_whole(value, least) and (most is None or value <= most),
        expected=" ".join(filter(None, ("a whole number", unit, bounds))),
        example=max(least, 1) if example is None else example,
    )


def number(least: float, *, most: float = sys.float_info.max) -> Value:
    """A number within bounds."""
    return Value(
        accepts=lambda value: is_number(value, least) and value <= most,
        expected=f"a number >= {least:g}",
        example=least,
    )


def count(unit: str) -> Value:
    """A whole number >= 1 that may be written as 5e8."""
    return Value(
        accepts=lambda value: is_number(value, 1) and float(value).is_integer(),
        expected=f"a whole number of {unit} >= 1, without quotes",
        example=500_000_000,
    )


def one_of(*values: Any, any_case: bool = False) -> Value:
    """One of a few values; with ``any_case`` capitals do not matter."""

    def plain(value: object) -> object:
        return value.lower() if any_case and isinstance(value, str) else value

    return Value(
        accepts=lambda value: any(same(plain(value), plain(known)) for known in values),
        expected=f"one of {', '.join(map(json.dumps, values))}",
        example=values[0],
    )


def or_null(value: Value) -> Value:
    """The same, or null."""
    return Value(
        accepts=lambda found: found is None or value.accepts(found),
        expected=f"{value.expected}, or null",
        example=value.example,
    )


def honoured(value: Value, why: str = "", *, fix: str | None = None) -> Setting:
    """A setting that does what DeepSpeed says it does."""
    return _standing(Standing.HONOURED, value, why, fix)


def harmless(value: Value, why: str) -> Setting:
    """A setting that changes nothing here, for a reason."""
    return _standing(Standing.HARMLESS, value, why)


def _standing(standing: Standing, value: Value, why: str, fix: str | None = None) -> Setting:
    return Setting(
        standing=standing,
        why=why,
        accepts=value.accepts,
        expected=value.expected,
        example=value.example,
        fix="write true or false" if value is BOOLEAN else fix,
    )


def only(*values: Any, why: str, fix: str | None = None) -> Setting:
    """A setting of which only the values are accepted that ask for nothing which is not done."""
    listed = " or ".join(map(json.dumps, values))
    return Setting(
        standing=Standing.REFUSED,
        why=why,
        accepts=lambda value: any(same(value, accepted) for accepted in values),
        expected=f"{listed} ({why})",
        example=values[0],
        fix=fix or (f"set it to {listed} or remove it" if values in ((False,), (True,)) else "remove it"),
    )


def refused(why: str, *, fix: str = "remove it", expected: str = "no such key") -> Setting:
    """A setting that is not accepted with any value."""
    return Setting(
        standing=Standing.REFUSED,
        why=why,
        accepts=lambda value: False,
        expected=f"{expected} ({why})",
        example=None,
        fix=fix,
    )


def section(keys: Mapping[str, Setting], *, example: Mapping[str, Any] | None = None) -> Setting:
    """An object all of whose settings are known."""
    return replace(honoured(OBJECT.described(OBJECT.expected, example or {})), keys=keys)


def no_offload(keys: Mapping[str, Setting]) -> Setting:
    """An object that may be written as long as its "device" is "none"."""

    def is_none(value: object) -> bool:
        return value is None or (isinstance(value, Mapping) and value.get("device", "none") == "none")

    value = Value(accepts=is_none, expected="no offload (it is not supported yet; allowed: null)", example=None)
    return replace(honoured(value, "nothing is offloaded", fix="remove it"), keys=keys)


def alike(setting: Setting, *names: str) -> dict[str, Setting]:
    """The same for several names."""
    return dict.fromkeys(names, setting)


def flattened(keys: Mapping[str, Setting], prefix: str = "") -> dict[str, Setting]:
    """Every setting of a section by its path; a dot leads into a section."""
    found = {}
    for name, setting in keys.items():
        found[prefix + name] = setting
        found.update(flattened(setting.keys or {}, f"{prefix}{name}."))
    return found
