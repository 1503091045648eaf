"""Reading a JSON configuration file strictly: no repeated keys, no NaN, an object at the top."""

from __future__ import annotations

import json
from collections import Counter
from os import PathLike
from pathlib import Path
from typing import Any

from ds_ldt.errors import Absent, ConfigError


class _RepeatedKeyError(ValueError):
    """A key stands twice in one object; JSON readers would keep the last one in silence."""


class _NotANumberError(ValueError):
    """NaN or Infinity, which Python writes and JSON does not have."""


def read_json(path: str | PathLike[str], *, what: str = "config file") -> dict[str, Any]:
    """Return the object that a JSON file holds. A byte order mark at its beginning is dropped.

    Args:
        path: The file.
        what: What errors call it.

    Raises:
        ConfigError: The file is missing, unreadable, not JSON, or not an object; or a key is repeated.
    """
    where = f"{what} {path}"
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError.of(
            where, found=Absent("bytes that are not UTF-8"), expected="JSON", fix="save it as UTF-8"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ConfigError.of(
            where,
            found=Absent(f"no readable file ({getattr(error, 'strerror', None) or error})"),
            expected="a JSON file that this process can read",
            fix="correct the path; each site reads its own copy of the file"
            if what == "config file"
            else "correct the path",
        ) from None
    try:
        content = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise _not_json(where, f"{error.msg} at {place}", f"correct the text at {place}") from None
    except _RepeatedKeyError as error:
        raise _not_json(where, f"the key {error} more than once in one object", "keep one of them") from None
    except _NotANumberError as error:
        raise _not_json(where, f"the constant {error}", "write a number") from None
    except ValueError as error:  # Python reads no whole number of thousands of digits
        raise _not_json(where, f"a number that cannot be read: {error}".split(";")[0], "write a smaller one") from None
    except RecursionError:
        raise _not_json(where, "objects nested too deeply to be read", "remove the nesting") from None
    if not isinstance(content, dict):
        raise ConfigError.of(where, found=content, expected="a JSON object", fix="put the settings in { ... }")
    return content


def _not_json(where: str, found: str, fix: str) -> ConfigError:
    return ConfigError.of(
        where,
        found=Absent(found),
        expected="JSON (no comments, no trailing commas, each key once)",
        fix=fix,
    )


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    repeated = [key for key, times in Counter(key for key, _ in pairs).items() if times > 1]
    if repeated:
        raise _RepeatedKeyError(", ".join(f'"{key}"' for key in repeated))
    return dict(pairs)


def _refuse_constant(name: str) -> float:
    raise _NotANumberError(name)
