"""Are the optimizer and the scheduler of the JSON there, and do they take what it gives them?

DeepSpeed looks both up by name when the engine is made: a misspelt one ends the job on each rank with an
``AttributeError`` or a ``TypeError``, long after process groups were built. Here it is a ``ConfigError`` before.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

from ds_ldt.config import JobConfig
from ds_ldt.deepspeed_settings import shards_optimizer
from ds_ldt.errors import Absent, ConfigProblem
from ds_ldt.optimizer import ELEMENTWISE
from ds_ldt.spelling import unknown_key

# DeepSpeed's own switches among the parameters of Adam and AdamW, beside those of torch's or its own class.
_ADAM = frozenset({"adam", "adamw"})
_ADAM_SWITCHES = frozenset({"torch_adam", "adam_w_mode", "fp32_optimizer_states"})

_FLAT = frozenset(name.lower() for name in ELEMENTWISE) | {"lion"}
"""Names in the JSON of optimizers that may be given slices of flattened parameters."""

_SPARSE = frozenset({"SparseAdam"})


def recipe_problems(job: JobConfig) -> Iterator[ConfigProblem]:
    """Yield what is wrong with the "optimizer" and "scheduler" sections, as far as names and parameters can tell."""
    optimizer, scheduler = (job.deepspeed.get(section) or {} for section in ("optimizer", "scheduler"))
    if "type" in optimizer:
        yield from _optimizer_problems(optimizer["type"], optimizer.get("params") or {}, flat=_is_flat(job.deepspeed))
    if "type" in scheduler:
        yield from _scheduler_problems(scheduler["type"], scheduler.get("params") or {})


def _optimizer_problems(name: str, params: Mapping[str, Any], *, flat: bool) -> Iterator[ConfigProblem]:
    key, theirs = "optimizer.type", name.lower() in DEEPSPEED_OPTIMIZERS
    torch_names = _subclasses(torch.optim, torch.optim.Optimizer)
    if not theirs and name not in torch_names:
        yield _unknown_name(
            key, name, [*DEEPSPEED_OPTIMIZERS, *torch_names], "an optimizer of DeepSpeed or torch.optim"
        )
    elif name.lower() == "muon" and theirs:
        yield ConfigProblem(
            key=key,
            found=name,
            expected="an optimizer that needs no marks on the weights, which DeepSpeed's Muon does",
            fix='use e.g. "AdamW", or pass an optimizer of your own to ds_ldt.initialize',
        )
    elif name in _SPARSE:
        yield ConfigProblem(
            key=key, found=name, expected="an optimizer of dense gradients, which all are", fix='use e.g. "Adam"'
        )
    elif flat and name.lower() not in _FLAT:
        yield ConfigProblem(
            key=key,
            found=name,
            expected="an optimizer that treats each number of a parameter on its own: with fp16, bf16 or ZeRO stage 1 "
            "it is given slices of flattened parameters",
            fix='use e.g. "AdamW", train in fp32 with ZeRO stage 0, or set zero_allow_untested_optimizer to true',
        )
    elif name.lower() in _ADAM:
        if params.get("torch_adam"):
            yield from _unknown_params("optimizer", torch.optim.AdamW, params, also=_ADAM_SWITCHES)
    elif not theirs:
        yield from _class_problems("optimizer", getattr(torch.optim, name), params)


def _scheduler_problems(name: str, params: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    torch_names = _subclasses(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
    if name in lr_schedules.VALID_LR_SCHEDULES:
        yield from _class_problems("scheduler", getattr(lr_schedules, name), params)
    elif name in torch_names:
        yield from _class_problems("scheduler", getattr(torch.optim.lr_scheduler, name), params)
    else:
        known = [*lr_schedules.VALID_LR_SCHEDULES, *torch_names]
        yield _unknown_name("scheduler.type", name, known, "a scheduler of DeepSpeed or torch.optim.lr_scheduler")


def _unknown_name(key: str, name: str, known: Sequence[str], expected: str) -> ConfigProblem:
    by_lower = {other.lower(): other for other in known}
    near = [by_lower[other] for other in get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)]
    fix = f'did you mean "{near[0]}"' if near else f"use one of {', '.join(known)}"
    return ConfigProblem(key=key, found=name, expected=expected, fix=fix)


def _is_flat(settings: Mapping[str, Any]) -> bool:
    """Whether the optimizer is given slices of flattened parameters that somebody has to vouch for."""
    if settings.get("zero_allow_untested_optimizer") is True:
        return False
    return shards_optimizer(settings)


def _subclasses(module: Any, base: type) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, base) and value is not base and not name.startswith("_")
    ]


_SUPPLIED = ("params", "optimizer")
"""What DeepSpeed passes itself."""


def _class_problems(section: str, cls: Any, params: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    wanted = [name for name, parameter in _parameters(cls.step).items() if parameter.default is parameter.empty]
    if wanted:
        yield ConfigProblem(
            key=f"{section}.type",
            found=cls.__name__,
            expected=f"one whose step() needs no arguments; this one asks for {', '.join(wanted)}",
            fix="choose another",
        )
        return
    yield from _unknown_params(section, cls, params)
    for name, parameter in _parameters(cls.__init__).items():
        if name not in (*_SUPPLIED, *params) and parameter.default is parameter.empty:
            yield ConfigProblem(
                key=f"{section}.params.{name}",
                found=Absent(),
                expected=f"a value: {cls.__name__} has no default for it",
                fix=f"add it to {section}.params",
            )


def _unknown_params(
    section: str, cls: Any, params: Mapping[str, Any], *, also: frozenset[str] = frozenset()
) -> Iterator[ConfigProblem]:
    known = {name for name in _parameters(cls.__init__) if name not in _SUPPLIED} | also
    for name, value in params.items():
        if name not in known:
            yield unknown_key(f"{section}.params.{name}", value, known=known, owner=cls.__name__)


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    """The named parameters of a method, without ``self``."""
    named = inspect.signature(function).parameters.values()
    return {p.name: p for p in named if p.name != "self" and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
