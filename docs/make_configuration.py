#!/usr/bin/env python3
"""Write the tables of settings in `docs/configuration.md` from the schema of the "ldt" section.

    python docs/make_configuration.py

Keys, defaults and accepted values come from the pydantic fields, meanings from the docstrings of their classes.
`tests/test_docs.py` checks that the page is what this script writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from griffe import Docstring, DocstringSectionKind, Parser
from pydantic import BaseModel

from ds_ldt.config.lora import LoraSettings
from ds_ldt.config.schema import LDTConfig, TraceConfig

PAGE = Path(__file__).resolve().parent / "configuration.md"
TABLES: dict[str, type[BaseModel]] = {"ldt": LDTConfig, "ldt.lora": LoraSettings, "ldt.trace": TraceConfig}
"""Key of each section that has a table of its own -> its class."""

_HEAD = "| key | default | unit and accepted values | meaning |\n|---|---|---|---|\n"


def page(text: str) -> str:
    """Return the page with every table between its marks written anew.

    Args:
        text: The page as it is.

    Raises:
        ValueError: A pair of marks is missing.
    """
    for prefix, section in TABLES.items():
        begin, end = f"<!-- {prefix} begins -->", f"<!-- {prefix} ends -->"
        before, found, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not found or not found_end:
            raise ValueError(f"the page has no lines {begin} and {end}")
        rows = "".join(f"| {' | '.join(map(_escaped, row))} |\n" for row in _rows(section, section, prefix))
        text = f"{before}{begin}\n\n{_HEAD}{rows}\n{end}{after}"
    return text


def _rows(section: type[BaseModel], defaults: Any, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield key, default, accepted values and meaning of every setting of a section and of the sections in it."""
    meanings = _meanings(section)
    for name, field in section.model_fields.items():
        default = field.default if defaults is section else getattr(defaults, name)
        if isinstance(default, BaseModel):
            yield from _rows(type(default), default, f"{prefix}.{name}")
        else:
            shown = "required" if field.is_required() else f"`{json.dumps(default)}`"
            yield f"`{prefix}.{name}`", shown, str(field.description), meanings[name]


def _meanings(section: type[BaseModel]) -> dict[str, str]:
    """Return name -> meaning, from the "Attributes" part of a class's docstring, with None as JSON writes it."""
    parts = Docstring(str(section.__doc__), lineno=1).parse(Parser.google, warnings=False)
    (attributes,) = (part.value for part in parts if part.kind is DocstringSectionKind.attributes)
    return {item.name: " ".join(item.description.split()).replace("None", "`null`") for item in attributes}


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
