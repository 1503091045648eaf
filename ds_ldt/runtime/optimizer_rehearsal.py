"""The optimizer and the scheduler of the JSON, tried on a single number before any process group exists.

What their constructors object to (a negative rate, a momentum that Nesterov needs) then names its setting, and so does
a schedule that gives no usable learning rate. The first steps that a schedule runs at a rate of 0 are counted.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from typing import Any

import torch
from torch import nn

from ds_ldt.errors import ConfigProblem
from ds_ldt.runtime.optimizer_signatures import named_parameters, takes_number_or_list, types_of

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
    problems = [_schedule_problem(cls, params, make) for make in optimizers]
    return None if None in problems else problems[0]


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


def _schedule_problem(cls: Any, params: Mapping[str, Any], make: Any) -> ConfigProblem | None:
    kinds = types_of(cls)
    listed = [len(v) for n, v in params.items() if isinstance(v, list | tuple) and takes_number_or_list(kinds[n])]
    try:
        with _quietly():
            optimizer = make([{"params": [_number()]} for _ in range(max([1, *listed]))])
            scheduler = cls(optimizer, **params)
            for step in range(1, _TRIED_STEPS + 1):
                rates = [complex(group["lr"]) for group in optimizer.param_groups]
                if any(rate.imag or not isfinite(rate.real) or rate.real < 0 for rate in rates):
                    return _unusable(params, f"it gives step {step} a learning rate of {rates[0].real:g}")
                scheduler.step()
    except Exception as error:  # noqa: BLE001 - constructors raise what they like; all mean the same to the user
        return _unusable(params, f"{cls.__name__} says: {_first_line(error)}")
    return None


def _unusable(params: Mapping[str, Any], reason: str) -> ConfigProblem:
    return ConfigProblem(
        key="scheduler.params",
        found=dict(params),
        expected=f"values that make a schedule; {reason}",
        fix="correct the value that this is about",
    )


def _objection(cls: Any, params: Mapping[str, Any]) -> Exception | None:
    known = named_parameters(cls.__init__)
    try:
        with _quietly():
            cls([_number()], **{name: value for name, value in params.items() if name in known})
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
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
