"""Which keys does DeepSpeed read from its JSON? Found out from DeepSpeed itself, in two ways.

`paths_read` runs DeepSpeed's configuration on dictionaries that note what is asked of them, and looks into the
pydantic model that refuses an unknown key of a section. `names_looked_up` reads the source: the names of all look-ups,
also of those behind a condition.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import deepspeed
from deepspeed.runtime import config as runtime_config
from deepspeed.runtime.config import DeepSpeedConfig
from pydantic import BaseModel, ValidationError

_GETTERS = ("get_scalar_param", "get_list_param", "get_dict_param")
_ROOT = Path(deepspeed.__file__).parent
_NO_KEY = "a key that DeepSpeed does not know"


class Noting(dict[str, Any]):
    """A dictionary that notes the path of every key that is asked for."""

    def __init__(self, content: Mapping[str, Any], noted: set[str], prefix: str = "") -> None:
        super().__init__(content)
        self.noted, self.prefix = noted, prefix

    def _note(self, key: object) -> None:
        self.noted.add(f"{self.prefix}{key}")

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return super().__contains__(key)

    def keys(self) -> Any:
        return _NotingKeys(self)

    def __copy__(self) -> Noting:
        return Noting(dict(self.items()), self.noted, self.prefix)

    def __deepcopy__(self, memo: Any) -> Noting:
        return self.__copy__()


class _NotingKeys:
    def __init__(self, owner: Noting) -> None:
        self.owner = owner

    def __contains__(self, key: object) -> bool:
        return key in self.owner

    def __iter__(self) -> Iterator[str]:
        return iter(list(dict.keys(self.owner)))


def paths_read() -> set[str]:
    """The paths of all keys that DeepSpeed's configuration asks for, down to the innermost section."""
    noted: set[str] = set()
    pending, seen = [""], set()
    while pending:
        prefix = pending.pop()
        if prefix.count(".") > 3:
            continue
        _read(prefix, {}, noted)
        _read(prefix, {_NO_KEY: 1}, noted)
        new = {path for path in noted if path not in seen and not path.endswith(_NO_KEY)}
        seen |= new
        pending += [f"{path}." for path in new]
    noted |= {f"pipeline.{name}" for name in (*runtime_config.get_pipeline_config({}), *pipeline_names())}
    return {path for path in noted if not path.endswith(_NO_KEY)}


def pipeline_names() -> set[str]:
    """The keys of the "pipeline" section, which DeepSpeed copies whole, that its pipeline engine takes out of it."""
    tree = ast.parse((_ROOT / "runtime" / "pipe" / "engine.py").read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        owner = node.value if isinstance(node, ast.Subscript) else getattr(getattr(node, "func", None), "value", None)
        if isinstance(owner, ast.Attribute) and owner.attr == "pipeline":
            found |= {key.value for key in _keys_in(node) if isinstance(key, ast.Constant)}
    return found


def _read(prefix: str, content: Mapping[str, Any], noted: set[str]) -> None:
    """Read a configuration that has one section, at a path; note what is asked for and what its model knows."""
    settings: Any = Noting(content, noted, prefix)
    parts = prefix.split(".")[:-1]
    for depth in range(len(parts) - 1, -1, -1):
        above = ".".join(parts[:depth]) + "." if depth else ""
        settings = Noting({parts[depth]: settings}, noted, above)
    if not prefix:
        settings = Noting({**settings, "train_batch_size": 1}, noted)
    else:
        dict.__setitem__(settings, "train_batch_size", 1)
    try:
        DeepSpeedConfig(settings)
    except ValidationError as error:
        known = next((m for m in _models(BaseModel) if m.__name__ == error.title), None)
        for finding in error.errors() if known is not None else ():
            if finding["type"] == "extra_forbidden":
                above = parts[: len(parts) + 1 - len(finding["loc"])]
                noted |= set(fields_of(known, "".join(f"{part}." for part in above)))
    except Exception:  # noqa: BLE001 - a number where a section is wanted: only what was asked for until then counts
        return


def fields_of(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """The paths of the fields of a model under all of their names, and of the models inside it."""
    for name, field in model.model_fields.items():
        inner = [m for m in _types_in(field.annotation) if isinstance(m, type) and issubclass(m, BaseModel)]
        for known_as in filter(None, (name, field.alias)):
            yield f"{prefix}{known_as}"
            for one in inner:
                yield from fields_of(one, f"{prefix}{known_as}.")


def _types_in(annotation: Any) -> Iterator[Any]:
    yield annotation
    for argument in get_args(annotation):
        yield from _types_in(argument)


def _models(base: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for model in base.__subclasses__():
        yield model
        yield from _models(model)


def config_modules() -> dict[str, Path]:
    """The modules that take DeepSpeed's JSON apart: those that its configuration imports getters or models from."""
    found = {"deepspeed.runtime.config": Path(runtime_config.__file__)}
    for value in vars(runtime_config).values():
        name = getattr(value, "__module__", None) or ""
        is_reader = (callable(value) and "config" in getattr(value, "__name__", "").lower()) or "config" in name
        if is_reader and name.startswith("deepspeed."):
            found[name] = _ROOT.parent / (name.replace(".", "/") + ".py")
    return {name: path for name, path in found.items() if path.is_file()}


def names_looked_up(source: str, module: ModuleType | None) -> set[str]:
    """The names that a source looks up in dictionaries: literals, and constants by their value.

    Args:
        source: The text of a module.
        module: The module, for its constants.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        for key in _keys_in(node):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                found.add(key.value)
            elif isinstance(key, ast.Name) and isinstance(getattr(module, key.id, None), str):
                found.add(getattr(module, key.id))
    return found


def _keys_in(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in ("get", "pop") and node.args:
            yield node.args[0]
        elif isinstance(function, ast.Name) and function.id in _GETTERS and len(node.args) > 1:
            yield node.args[1]
    elif isinstance(node, ast.Subscript):
        yield node.slice
    elif isinstance(node, ast.Compare) and type(node.ops[0]).__name__ in ("In", "NotIn"):
        yield node.left


def all_names_looked_up() -> dict[str, set[str]]:
    """For each module that takes the JSON apart, the names that it looks up."""
    return {
        name: names_looked_up(path.read_text(encoding="utf-8"), importlib.import_module(name))
        for name, path in config_modules().items()
    }
