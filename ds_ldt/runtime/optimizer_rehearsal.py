"""The optimizer and the scheduler of the JSON, tried on a single number before any process group exists.

What their constructors object to (a negative rate, a momentum that Nesterov needs) then names its setting, and so does
a schedule that gives no usable learning rate. The first steps that a schedule runs at a rate of 0 are counted.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter
from math import isfinite
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_ldt.errors import ConfigProblem
from ds_ldt.runtime.optimizer_signatures import example_of, named_parameters, takes_number_or_list, types_of

_TRIED_STEPS = 3
_MOST_STEPS = 10_000


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
    return others if default is not Parameter.empty else {**others, name: example_of(types_of(cls)[name], default)}


def _complaint(cls: Any, params: Mapping[str, Any], make: Any) -> str | None:
    """Return what is wrong with a schedule, tried for a few steps; it may be over before these are."""
    kinds, step = types_of(cls), 1
    listed = [len(v) for n, v in params.items() if isinstance(v, list | tuple) and takes_number_or_list(kinds[n])]
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
