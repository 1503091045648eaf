"""What pydantic finds wrong with the "ldt" section, in the words of this package."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import get_args

from pydantic import BaseModel, ValidationError

from ds_ldt.config.spelling import unknown_key
from ds_ldt.errors import Absent, ConfigError, ConfigProblem


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
