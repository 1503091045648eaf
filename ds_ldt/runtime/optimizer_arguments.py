"""Do the classes of optimizers and schedulers take the values that the JSON has for them?

Neither torch nor DeepSpeed looks at the type of most arguments: the text "false" is as good as true to them. So values
are compared with the signature of their class first. Then the class is tried on a single number: what its constructor
objects to (a negative rate, a momentum that Nesterov needs) names its setting, and so does a schedule that gives no
usable learning rate. The first steps that a schedule runs at a rate of 0 are counted.
"""

from __future__ import annotations

import collections.abc
import copy
import inspect
import json
import types
import typing
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from math import isfinite
from operator import or_
from typing import Any, Literal, Union, get_args, get_origin

import torch
from deepspeed.accelerator import get_accelerator
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import nn

from ds_ldt.errors import ConfigProblem

_TRIED_STEPS = 3
_MOST_STEPS = 10_000

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


# --- compared with the signature ------------------------------------------------------------------------------------


def _types_of(cls: type) -> dict[str, Any]:
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


def _takes_number_or_list(kind: Any) -> bool:
    """Return whether an argument may be a number or a list of them, one for each parameter group."""
    return float in _choices(kind) and list[float] in _choices(kind)


def value_problems(section: str, cls: type, params: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """Yield the values that a class does not take, by its signature.

    Args:
        section: "optimizer" or "scheduler".
        cls: The class.
        params: Arguments by name; those that it does not know are passed over.
    """
    kinds, parameters = _types_of(cls), named_parameters(cls.__init__)  # type: ignore[misc]
    for name, value in params.items():
        if name in kinds:
            problem = value_problem(f"{section}.params.{name}", value, kinds[name], parameters[name].default)
            if problem is not None:
                yield problem


def value_problem(key: str, value: object, kind: Any, default: object) -> ConfigProblem | None:
    """Return what is wrong with the value of an argument, if anything.

    Args:
        key: Path of the setting.
        value: The value of the JSON, or of a dictionary that a script has made.
        kind: What the argument may be (see :func:`_types_of`).
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
        return _mismatch(key, value, kind, default, error)
    return None


def _mismatch(key: str, value: object, kind: Any, default: object, error: ValidationError) -> ConfigProblem:
    places = {part for finding in error.errors() for part in finding["loc"] if isinstance(part, int)}
    found = value
    if isinstance(value, list | tuple) and len(places) == 1 and max(places) < len(value):
        (place,) = places
        key, found = f"{key}[{place}]", value[place]
        items = [get_args(choice)[0] for choice in _choices(kind) if get_origin(choice) in (list, tuple)]
        words = " or ".join(dict.fromkeys(_words(item) for one in items for item in _choices(one)))
    else:
        words = " or ".join(_words(choice) for choice in _choices(kind))
    name, example = key.rpartition(".")[2].partition("[")[0], _example_of(kind, default)
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
        others = [one for one in get_args(annotation) if one is not torch.Tensor]
        return reduce(or_, map(_in_json, others))
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


def _example_of(kind: Any, default: object) -> Any:
    """Return a value to paste, the default if there is one; None where JSON has no such value.

    Args:
        kind: What the argument may be (see :func:`_types_of`).
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


# --- tried on a single number ---------------------------------------------------------------------------------------


def optimizer_problem(cls: Any, params: Mapping[str, Any]) -> ConfigProblem | None:
    """Return what an optimizer of torch objects to, with the setting that it is about.

    Args:
        cls: The class.
        params: Its arguments, each of a type that it takes.
    """
    error = _objection(cls, params)
    if error is None:
        return None
    culprits = [name for name in params if _objection(cls, {n: v for n, v in params.items() if n != name}) is None]
    key = f"optimizer.params.{culprits[0]}" if culprits else "optimizer.params"
    return ConfigProblem(
        key=key,
        found=params[culprits[0]] if culprits else dict(params),
        expected=f"what {cls.__name__} takes, which says: {_first_line(error)}",
        fix="write a value that it takes, or remove the key",
    )


def scheduler_problem(cls: Any, params: Mapping[str, Any], optimizers: list[Any]) -> ConfigProblem | None:
    """Return what a scheduler objects to, or that its first learning rates are unusable.

    Args:
        cls: The class.
        params: Its arguments, each of a type that it takes.
        optimizers: Makers of optimizers, called with parameter groups; it is enough that it works with one of them.
    """
    complaints = [_complaint(cls, params, make) for make in optimizers]
    if None in complaints:
        return None
    culprits = [name for name in params if _complaint(cls, _without(cls, params, name), optimizers[0]) is None]
    name = culprits[0] if culprits else None
    return ConfigProblem(
        key="scheduler.params" if name is None else f"scheduler.params.{name}",
        found=dict(params) if name is None else params[name],
        expected=f"{'values that make' if name is None else 'a value that makes'} a schedule; {complaints[0]}",
        fix="correct the value that this is about" if name is None else "write a value that it takes",
    )


def steps_without_learning(scheduler: Any, optimizer: torch.optim.Optimizer) -> int:
    """Count the steps that a schedule runs at a learning rate of 0 from where it is, before it leaves that.

    Args:
        scheduler: Any scheduler with ``step()``; it is left as it is.
        optimizer: The optimizer whose groups it changes; they are left as they are.

    Returns:
        A number of steps, 0 where the count cannot be made (a schedule that needs the loss, or cannot be copied).
    """
    stand_in = torch.optim.SGD([{"params": [_number()]} for _ in optimizer.param_groups], lr=0.0)
    for group, original in zip(stand_in.param_groups, optimizer.param_groups, strict=True):
        group.update({name: value for name, value in original.items() if name != "params"})
    try:
        with _quietly():
            tried = copy.deepcopy(scheduler, {id(optimizer): stand_in})
            steps = 0
            while steps < _MOST_STEPS and all(float(group["lr"]) == 0 for group in stand_in.param_groups):
                tried.step()
                steps += 1
    except Exception:  # noqa: BLE001 - schedulers of users may do anything; this is but a remark in the log
        return 0
    return steps


def _without(cls: Any, params: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the parameters of a schedule with the default of one of them, or a usual value where it has none."""
    default = named_parameters(cls.__init__)[name].default
    others = {other: value for other, value in params.items() if other != name}
    return (
        others
        if default is not inspect.Parameter.empty
        else {**others, name: _example_of(_types_of(cls)[name], default)}
    )


def _complaint(cls: Any, params: Mapping[str, Any], make: Any) -> str | None:
    """Return what is wrong with a schedule, tried for a few steps; it may be over before these are."""
    kinds, step = _types_of(cls), 1
    listed = [len(v) for n, v in params.items() if isinstance(v, list | tuple) and _takes_number_or_list(kinds[n])]
    try:
        with _quietly():
            optimizer = make([{"params": [_number()]} for _ in range(max([1, *listed]))])
            scheduler = cls(optimizer, **params)
            for step in range(1, _TRIED_STEPS + 1):
                rates = [complex(group["lr"]) for group in optimizer.param_groups]
                if any(rate.imag or not isfinite(rate.real) or rate.real < 0 for rate in rates):
                    return f"it gives step {step} a learning rate of {rates[0].real:g}"
                scheduler.step()
    except Exception as error:  # noqa: BLE001 - constructors raise what they like; all mean the same to the user
        return f"{cls.__name__} says: {_first_line(error)}" if step == 1 else None
    return None


def _objection(cls: Any, params: Mapping[str, Any]) -> Exception | None:
    known = named_parameters(cls.__init__)
    try:
        with _quietly():
            number = _number()
            optimizer = cls([number], **{name: value for name, value in params.items() if name in known})
            if get_accelerator().device_name() == "cpu":  # some switches show in a step only, and on their device
                number.grad = torch.zeros_like(number)
                optimizer.step()
    except Exception as error:  # noqa: BLE001 - constructors raise what they like; all mean the same to the user
        return error
    return None


def _number() -> nn.Parameter:
    return nn.Parameter(torch.zeros(1, 1))


@contextmanager
def _quietly() -> Iterator[None]:
    """Without torch's warning that the optimizer was not stepped before its schedule."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _first_line(error: Exception) -> str:
    said = error.args[0] if isinstance(error, KeyError) and error.args else error  # its text quotes what it was given
    return (str(said).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")
