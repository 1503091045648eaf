"""What is wrong with a section of the JSON, in the words of this package: pydantic's findings, and misspelt keys."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from ds_ldt.errors import Absent, ConfigError, ConfigProblem

_LISTED_AT_MOST = 12


class Section(BaseModel):
    """A JSON object in which every key is known and no value is converted in silence."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def translated(
    error: ValidationError, root: type[BaseModel], *, elsewhere: Mapping[str, str] | None = None
) -> Iterator[ConfigProblem]:
    """Yield pydantic's findings in the form of this package, one per setting.

    Args:
        error: What pydantic raised.
        root: The "ldt" section.
        elsewhere: Names of settings -> their paths, for hints.
    """
    for finding in error.errors(include_url=False):
        cause = finding.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            yield from cause.problems
            continue
        path = finding["loc"]
        section, field_path = _field(path, root)
        name = str(field_path[-1])
        key = ".".join(map(str, ("ldt", *field_path)))
        if name not in section.model_fields:
            yield unknown_key(
                key, finding["input"], known=section.model_fields, owner="this section", elsewhere=elsewhere
            )
            continue
        field = section.model_fields[name]
        yield ConfigProblem(
            key=key,
            found=Absent() if finding["type"] == "missing" else finding["input"],
            expected=str(field.description),
            fix=f'write e.g. "{name}": {json.dumps((field.examples or [None])[0])}',
        )


def _field(path: tuple[int | str, ...], root: type[BaseModel]) -> tuple[type[BaseModel], tuple[int | str, ...]]:
    """Return the section that a pydantic path leads into, and the path without what follows its field."""
    section = root
    for depth, name in enumerate(path):
        inner = _section_of(section.model_fields[str(name)].annotation) if name in section.model_fields else None
        if depth + 1 == len(path) or inner is None:
            return section, path[: depth + 1]
        section = inner
    return section, path


def _section_of(annotation: object) -> type[BaseModel] | None:
    """Return the section that a field holds, also where it may be left out."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def paths_of(root: type[BaseModel], prefix: str) -> list[str]:
    """Return the path of every setting of a section and of the sections inside it.

    Args:
        root: The section.
        prefix: Its path, with a dot at the end.
    """
    found = []
    for name, field in root.model_fields.items():
        inner = _section_of(field.annotation)
        found += [prefix + name, *(paths_of(inner, f"{prefix}{name}.") if inner is not None else ())]
    return found


def unknown_key(
    key: str,
    found: object,
    *,
    known: Iterable[str],
    owner: str,
    elsewhere: Mapping[str, str] | None = None,
    unwanted: Mapping[str, str] | None = None,
) -> ConfigProblem:
    """Return the problem of a key that is not known.

    Args:
        key: Path of the key; the last part is compared with `known`.
        found: Its value.
        known: The keys that are.
        owner: What knows them, e.g. "DeepSpeed".
        elsewhere: Keys of other sections -> their paths: a key that is spelt like one of them belongs there.
        unwanted: Keys that would be refused -> what is said of each: none of them is suggested.
    """
    names, unwanted = sorted(known), unwanted or {}
    spelled = key.rpartition(".")[2]
    listed = f", which are {', '.join(names)}" if len(names) <= _LISTED_AT_MOST else ""
    path = (elsewhere or {}).get(spelled)
    near = nearest(spelled, [*names, *unwanted])
    if path is not None:
        fix = f"move it to {path}, or remove it"
    elif near is None:
        fix = "remove it"
    elif near in unwanted:
        fix = f'remove it. If "{near}" was meant: {unwanted[near]}'
    else:
        fix = f'did you mean "{near}"? Rename it or remove it'
    return ConfigProblem(key=key, found=found, expected=f"one of the keys of {owner}{listed}", fix=fix)


def nearest(spelled: str, names: Iterable[str]) -> str | None:
    """Return the name that is spelt most like another, or None; capitals do not matter."""
    # "LDT" and "Train_Batch_Size" are near misses too.
    by_lower = {name.lower(): name for name in names}
    found = get_close_matches(spelled.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None
