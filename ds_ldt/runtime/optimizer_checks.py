"""Are the optimizer and the scheduler of the JSON there, and do they take what it gives them?

DeepSpeed looks both up by name when the engine is made: a misspelt one ends the job on each rank with an
``AttributeError`` or a ``TypeError``, long after process groups were built, and a text in the place of a boolean does
not even end it. Here it is a ``ConfigError`` before.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

from ds_ldt.config.deepspeed_settings import shards_optimizer
from ds_ldt.config.messages import unknown_key
from ds_ldt.config.schema import JobConfig
from ds_ldt.errors import Absent, ConfigProblem
from ds_ldt.runtime.optimizer import ELEMENTWISE
from ds_ldt.runtime.optimizer_arguments import (
    named_parameters,
    optimizer_problem,
    required_parameters,
    scheduler_problem,
    value_problem,
    value_problems,
)

# DeepSpeed's own switches among the parameters of Adam and AdamW, beside those of torch's or its own class.
_ADAM = frozenset({"adam", "adamw"})
_ADAM_SWITCHES = frozenset({"torch_adam", "adam_w_mode", "fp32_optimizer_states"})
_WITHOUT_AMSGRAD = frozenset({"adam", "adamw", "lamb"})
_WARMUP_TYPES = (lr_schedules.WARMUP_LOG_RATE, lr_schedules.WARMUP_LINEAR_RATE)

_CLASSES = {
    "adam": ("deepspeed.ops.adam", "FusedAdam"),
    "adamw": ("deepspeed.ops.adam", "FusedAdam"),
    "adagrad": ("torch.optim", "Adagrad"),
    "lamb": ("deepspeed.ops.lamb", "FusedLamb"),
    "lion": ("deepspeed.ops.lion", "FusedLion"),
    "muadam": ("mup", "MuAdam"),
    "muadamw": ("mup", "MuAdamW"),
    "musgd": ("mup", "MuSGD"),
}
"""Module and class of the optimizers that DeepSpeed has names for; without offload it has no others."""

_FLAT = frozenset(name.lower() for name in ELEMENTWISE) | {"lion"}
"""Names in the JSON of optimizers that may be given slices of flattened parameters."""

_SPARSE = frozenset({"SparseAdam"})
_UNUSABLE = _SPARSE | {"LBFGS", "Muon"}
_ADAM_CLASSES = {name: "Adam" for name in ("fusedadam", "cpuadam", "deepspeedcpuadam", "onebitadam", "zerooneadam")}
"""Names in lower case of classes, and of optimizers that DeepSpeed had once -> the name to write."""
_MADE_OF_OBJECTS = frozenset({"LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau"})
_CLOSE_NAMES = 0.7


def recipe_problems(job: JobConfig) -> Iterator[ConfigProblem]:
    """Yield what is wrong with the "optimizer" and "scheduler" sections: names, parameters and their values."""
    optimizer, scheduler = (job.deepspeed.get(section) or {} for section in ("optimizer", "scheduler"))
    problems: list[ConfigProblem] = []
    if "type" in optimizer:
        name, params = optimizer["type"], optimizer.get("params") or {}
        problems += _optimizer_problems(name, params, flat=_is_flat(job.deepspeed))
        if not problems:
            problems += _values_problems(name, params)
    yield from problems
    if "type" in scheduler:
        trials = [] if problems else list(_trials(optimizer))
        yield from _scheduler_problems(scheduler["type"], scheduler.get("params") or {}, trials)


def _optimizer_problems(name: str, params: Mapping[str, Any], *, flat: bool) -> Iterator[ConfigProblem]:
    key, theirs = "optimizer.type", name.lower() in DEEPSPEED_OPTIMIZERS
    torch_names = _subclasses(torch.optim, torch.optim.Optimizer)
    if not theirs and name not in torch_names:
        known = [one for one in {**dict.fromkeys(torch_names), "Lamb": None, "Lion": None} if one not in _UNUSABLE]
        yield _unknown_name(key, name, known, "an optimizer of DeepSpeed or torch.optim", also=_ADAM_CLASSES)
    elif name.lower() == "muon" and theirs:
        yield ConfigProblem(
            key=key,
            found=name,
            expected="an optimizer that needs no marks on the weights, which DeepSpeed's Muon does",
            fix='use e.g. "AdamW", or pass an optimizer of your own to ds_ldt.initialize',
        )
    elif name.lower().startswith("mu") and theirs and find_spec("mup") is None:
        yield ConfigProblem(
            key=key,
            found=name,
            expected="an optimizer that is installed; this one is in the package mup",
            fix='use e.g. "AdamW", or install mup on both sites',
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
    else:
        cls = optimizer_class(name, params)
        also = _ADAM_SWITCHES if name.lower() in _ADAM else frozenset()
        yield from _class_problems("optimizer", cls, params, also=also)


def optimizer_class(name: str, params: Mapping[str, Any]) -> Any:
    """Return the class that DeepSpeed would make for a name it knows, or that torch has.

    Args:
        name: ``optimizer.type``, which is known.
        params: ``optimizer.params``; torch_adam and adam_w_mode choose between classes.
    """
    lower = name.lower()
    if lower in _ADAM and params.get("torch_adam") is True:
        decoupled = lower == "adamw" or params.get("adam_w_mode", True)
        return torch.optim.AdamW if decoupled else torch.optim.Adam
    module, attribute = _CLASSES.get(lower, ("torch.optim", name))
    return getattr(importlib.import_module(module), attribute)


def _values_problems(name: str, params: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """Yield the values of an optimizer that are of another type or out of their range."""
    lower, cls = name.lower(), optimizer_class(name, params)
    problems = list(value_problems("optimizer", cls, params))
    if lower in _ADAM:
        for switch in sorted(_ADAM_SWITCHES & params.keys() - named_parameters(cls.__init__).keys()):
            found = value_problem(f"optimizer.params.{switch}", params[switch], bool, True)
            problems += [] if found is None else [found]
    if not problems:
        problems += _range_problems(params)
    if problems:
        yield from problems
    elif lower in _ADAM and params.get("fp32_optimizer_states") is False:
        yield ConfigProblem(
            key="optimizer.params.fp32_optimizer_states",
            found=False,
            expected="true: moments are fp32, and DeepSpeed reads it where the optimizer is offloaded alone",
            fix="remove it",
        )
    elif lower == "adamw" and params.get("adam_w_mode") is False:
        yield ConfigProblem(
            key="optimizer.params.adam_w_mode",
            found=False,
            expected="true beside AdamW: DeepSpeed decouples its weight decay whatever this says",
            fix='write "type": "Adam" for weight decay that is added to the gradient, or remove it',
        )
    elif lower in _WITHOUT_AMSGRAD and params.get("amsgrad") and not cls.__module__.startswith("torch"):
        yield ConfigProblem(
            key="optimizer.params.amsgrad",
            found=True,
            expected=f"false: DeepSpeed's {cls.__name__} has no such variant",
            fix='remove it, or write "torch_adam": true beside it' if lower in _ADAM else "remove it",
        )
    elif cls.__module__.startswith("torch"):
        problem = optimizer_problem(cls, params)
        yield from [] if problem is None else [problem]
    else:
        yield from _operator_problems(name, cls)


def _operator_problems(name: str, cls: type) -> Iterator[ConfigProblem]:
    """Yield that DeepSpeed has no operator of an optimizer of its own for the accelerator of this machine."""
    accelerator = get_accelerator()
    builder = accelerator.get_op_builder(f"{cls.__name__}Builder")
    if builder is None or builder.__name__ == "NotImplementedBuilder":
        yield ConfigProblem(
            key="optimizer.type",
            found=name,
            expected=f"an optimizer that DeepSpeed can build for {accelerator.device_name()}, which it cannot for "
            f"its {cls.__name__}",
            fix='use e.g. "AdamW", or pass an optimizer of your own to ds_ldt.initialize',
        )


def _range_problems(params: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """Yield numbers that no optimizer makes sense with; DeepSpeed's own train with them."""
    for name in ("lr", "eps", "weight_decay", "momentum"):
        value = params.get(name)
        if isinstance(value, int | float) and value < 0:
            yield ConfigProblem(
                key=f"optimizer.params.{name}",
                found=value,
                expected="a number >= 0",
                fix=f'write e.g. "{name}": 0.001',
            )
    betas = params.get("betas")
    for index, value in enumerate(betas if isinstance(betas, list | tuple) else ()):
        if isinstance(value, int | float) and not 0 <= value < 1:
            yield ConfigProblem(
                key=f"optimizer.params.betas[{index}]",
                found=value,
                expected="a number >= 0 and < 1",
                fix='write e.g. "betas": [0.9, 0.999]',
            )


def _trials(optimizer: Mapping[str, Any]) -> Iterator[Any]:
    """Yield makers of optimizers on which a schedule can be tried: the one of the JSON where torch has it."""
    params = optimizer.get("params") or {}
    if "type" in optimizer:
        cls = optimizer_class(optimizer["type"], params)
        if cls.__module__.startswith("torch"):
            known = named_parameters(cls.__init__)
            yield partial(cls, **{name: value for name, value in params.items() if name in known})
            return
    rate = params.get("lr", 0.001)
    yield partial(torch.optim.AdamW, lr=rate)
    yield partial(torch.optim.SGD, lr=rate, momentum=0.9)


def _scheduler_problems(name: str, params: Mapping[str, Any], trials: Sequence[Any]) -> Iterator[ConfigProblem]:
    torch_names = _subclasses(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
    if name in lr_schedules.VALID_LR_SCHEDULES:
        cls = getattr(lr_schedules, name)
    elif name in torch_names:
        cls = getattr(torch.optim.lr_scheduler, name)
    else:
        known = [one for one in (*lr_schedules.VALID_LR_SCHEDULES, *torch_names) if one not in _MADE_OF_OBJECTS]
        yield _unknown_name("scheduler.type", name, known, "a scheduler of DeepSpeed or torch.optim.lr_scheduler")
        return
    problems = list(_class_problems("scheduler", cls, params)) or list(value_problems("scheduler", cls, params))
    kind = params.get("warmup_type")
    if not problems and kind is not None and kind not in _WARMUP_TYPES:  # DeepSpeed warns, and takes the first
        problems.append(
            ConfigProblem(
                key="scheduler.params.warmup_type",
                found=kind,
                expected=f"one of {', '.join(map(json.dumps, _WARMUP_TYPES))}",
                fix=f'write e.g. "warmup_type": "{_WARMUP_TYPES[-1]}"',
            )
        )
    if not problems and trials:
        found = scheduler_problem(cls, params, list(trials))
        problems += [] if found is None else [found]
    yield from problems


def _unknown_name(
    key: str, name: str, known: Sequence[str], expected: str, *, also: Mapping[str, str] | None = None
) -> ConfigProblem:
    by_lower = {**{other.lower(): other for other in known}, **(also or {})}
    cutoff = 0.6 if also is None else _CLOSE_NAMES  # names of optimizers all look alike
    near = [by_lower[other] for other in get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)]
    fix = f'did you mean "{near[0]}"' if near else f"use one of {', '.join(known)}"
    return ConfigProblem(key=key, found=name, expected=expected, fix=fix)


def _is_flat(settings: Mapping[str, Any]) -> bool:
    """Whether the optimizer is given slices of flattened parameters and has to be known to work with them."""
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


def _class_problems(
    section: str, cls: Any, params: Mapping[str, Any], *, also: frozenset[str] = frozenset()
) -> Iterator[ConfigProblem]:
    wanted = required_parameters(cls.step)
    if wanted:
        yield ConfigProblem(
            key=f"{section}.type",
            found=cls.__name__,
            expected=f"one whose step() needs no arguments; this one asks for {', '.join(wanted)}",
            fix="choose another",
        )
        return
    parameters = named_parameters(cls.__init__)
    known = parameters.keys() - set(_SUPPLIED) | also
    is_open = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(cls.__init__).parameters.values())
    for name, value in params.items():
        if name not in known and not is_open:
            yield unknown_key(f"{section}.params.{name}", value, known=known, owner=cls.__name__)
    for name, parameter in parameters.items():
        if name not in (*_SUPPLIED, *params) and parameter.default is parameter.empty:
            yield ConfigProblem(
                key=f"{section}.params.{name}",
                found=Absent(),
                expected=f"a value: {cls.__name__} has no default for it",
                fix=f"add it to {section}.params",
            )
