"""Does a class take the values that the JSON has for it? Compared with its signature, before it is called.

Neither torch nor DeepSpeed looks at the type of most arguments: the text "false" is as good as true to them.
"""

from __future__ import annotations

import collections.abc
import inspect
import json
import types
import typing
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import or_
from typing import Any, Literal, Union, get_args, get_origin

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from ds_ldt.errors import ConfigProblem

_STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
_NAMED = {**vars(collections.abc), **vars(typing)}
_WORDS = {
    bool: "true or false, without quotes",
    float: "a number, without quotes",
    int: "a whole number, without quotes, decimal point or exponent",
    str: "a text in quotes",
    type(None): "null",
}
_EXAMPLES: Mapping[Any, Any] = {bool: True, float: 0.1, int: 10, str: "name"}
_LISTS = (list, collections.abc.Iterable, collections.abc.Sequence)


def named_parameters(function: Any) -> dict[str, inspect.Parameter]:
    """Return the named parameters of a function or method, without ``self``."""
    named = inspect.signature(function).parameters.values()
    return {p.name: p for p in named if p.name != "self" and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}


def required_parameters(function: Any) -> list[str]:
    """Return the names of the parameters that a function or method has no default for, without ``self``."""
    return [name for name, parameter in named_parameters(function).items() if parameter.default is parameter.empty]


def types_of(cls: type) -> dict[str, Any]:
    """Return what each argument of a class may be, by its annotation, or by its default where it has none.

    A number is meant where the default is one, whole or not. DeepSpeed's schedulers take a list of numbers, one for
    each parameter group, wherever they are annotated to take one.
    """
    try:
        hints = typing.get_type_hints(cls.__init__, localns=_NAMED)  # type: ignore[misc]
    except NameError:
        hints = {}
    found = {}
    for name, parameter in named_parameters(cls.__init__).items():  # type: ignore[misc]
        kind = _in_json(hints[name]) if name in hints else _of_default(parameter.default)
        if parameter.default is None:
            kind = kind | None
        if cls.__module__.startswith("deepspeed.runtime.lr_schedules") and float in _choices(kind):
            kind = kind | list[float]
        found[name] = kind
    return found


def takes_number_or_list(kind: Any) -> bool:
    """Return whether an argument may be a number or a list of them, one for each parameter group."""
    return float in _choices(kind) and list[float] in _choices(kind)


def value_problem(key: str, value: object, kind: Any, default: object) -> ConfigProblem | None:
    """Return what is wrong with the value of an argument, if anything.

    Args:
        key: Path of the setting.
        value: The value of the JSON, or of a dictionary that a script has made.
        kind: What the argument may be (see :func:`types_of`).
        default: The default of the argument, for the advice.
    """
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = None
    try:
        adapter = TypeAdapter(kind, config=_STRICT)
        if text is None:
            adapter.validate_python(value)
        else:
            adapter.validate_json(text)
    except ValidationError as error:
        return _problem(key, value, kind, default, error)
    return None


def _problem(key: str, value: object, kind: Any, default: object, error: ValidationError) -> ConfigProblem:
    places = {part for finding in error.errors() for part in finding["loc"] if isinstance(part, int)}
    found = value
    if isinstance(value, list | tuple) and len(places) == 1 and max(places) < len(value):
        (place,) = places
        key, found = f"{key}[{place}]", value[place]
        items = [get_args(choice)[0] for choice in _choices(kind) if get_origin(choice) in (list, tuple)]
        words = " or ".join(dict.fromkeys(_words(item) for one in items for item in _choices(one)))
    else:
        words = " or ".join(_words(choice) for choice in _choices(kind))
    name, example = key.rpartition(".")[2].partition("[")[0], example_of(kind, default)
    if example is not None:
        fix = f"write e.g. {json.dumps(name)}: {json.dumps(example)}"
    elif default is inspect.Parameter.empty and key.startswith("scheduler."):
        fix = "make the scheduler in your script, and give it to ds_ldt.initialize(lr_scheduler=...)"
    else:
        fix = "remove it"
    return ConfigProblem(key=key, found=found, expected=words, fix=fix)


def _in_json(annotation: Any) -> Any:
    """Return an annotation without what JSON cannot hold, as far as something is left."""
    if get_origin(annotation) in (Union, types.UnionType):
        kept = [one for one in get_args(annotation) if one is not torch.Tensor]
        return reduce(or_, map(_in_json, kept))
    if get_origin(annotation) is tuple:
        return types.GenericAlias(tuple, tuple(_in_json(one) for one in get_args(annotation)))
    if get_origin(annotation) in _LISTS:
        return types.GenericAlias(list, (_in_json(get_args(annotation)[0]),))
    return annotation


def _of_default(default: object) -> Any:
    if isinstance(default, bool):
        return bool
    if isinstance(default, str):
        return str
    if isinstance(default, tuple | list):
        return types.GenericAlias(tuple, (float,) * len(default))
    if default is inspect.Parameter.empty:
        return float | list[float]
    return float


def _choices(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(json.dumps, get_args(kind)))}"
    if get_origin(kind) is tuple:
        return f"a list of {len(get_args(kind))} numbers, without quotes"
    if get_origin(kind) is list:
        return "a list of numbers, without quotes" if get_args(kind)[0] in (int, float) else "a list"
    return _WORDS.get(kind, f"a {getattr(kind, '__name__', kind)}, which JSON cannot hold")


def example_of(kind: Any, default: object) -> Any:
    """Return a value to paste, the default if there is one; None where JSON has no such value.

    Args:
        kind: What the argument may be (see :func:`types_of`).
        default: The default of the argument.
    """
    if isinstance(default, bool | int | float | str | list | tuple):
        return default
    for choice in _choices(kind):
        if get_origin(choice) is Literal:
            return get_args(choice)[0]
        if get_origin(choice) is list and get_args(choice)[0] in _EXAMPLES:
            return [_EXAMPLES[get_args(choice)[0]]]
        if choice in _EXAMPLES:
            return _EXAMPLES[choice]
    return None


def value_problems(section: str, cls: type, params: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """Yield the values that a class does not take, by its signature.

    Args:
        section: "optimizer" or "scheduler".
        cls: The class.
        params: Arguments by name; those that it does not know are passed over.
    """
    kinds, parameters = types_of(cls), named_parameters(cls.__init__)  # type: ignore[misc]
    for name, value in params.items():
        if name in kinds:
            problem = value_problem(f"{section}.params.{name}", value, kinds[name], parameters[name].default)
            if problem is not None:
                yield problem
