"""Do the arguments of ``ds_ldt.initialize`` fit the module? Checked on every rank, which all end alike.

The optimizer above all: it holds the tensors that it was made from. Made before adapters were put in, or from another
module, it would train nothing, or not all, and nobody would notice, because the loss is still computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deepspeed.runtime.utils import is_optimized_parameter
from torch import nn
from torch.optim import Optimizer

from ds_ldt.comm.collectives import bounded, ranks_where
from ds_ldt.comm.grid import LDTPipelineGrid
from ds_ldt.comm.waits import ranks
from ds_ldt.data.sampling import data_problems
from ds_ldt.errors import Absent, ConfigError, ConfigProblem, enumerated
from ds_ldt.runtime.module import LDTPipelineModule
from ds_ldt.runtime.optimizer_arguments import required_parameters

_KEY = "optimizer"
_SHOWN = 4
_OF_GROUPS = ("_lr", "_mom", "_momentum")
"""How the parameters of schedules end that may be one number for each group."""


def coverage_problems(module: LDTPipelineModule, groups: Sequence[dict[str, Any]]) -> Iterator[ConfigProblem]:
    """Yield what an optimizer lacks of a module, and what it holds besides. Frozen parameters may be in it or not.

    Args:
        module: the layers of a rank, its adapters put in.
        groups: the parameter groups of the optimizer.
    """
    held = [parameter for group in groups for parameter in group["params"]]
    places, own = {id(parameter) for parameter in held}, {id(parameter) for parameter in module.parameters()}
    missing = [
        name
        for name, parameter in module.named_parameters()
        if is_optimized_parameter(parameter) and id(parameter) not in places
    ]
    if missing:
        yield ConfigProblem(
            key=_KEY,
            found=Absent(f"one without {enumerated(missing, most=_SHOWN)}"),
            expected="one that holds every parameter of the module that is trained",
            fix=_fix_missing(module, missing),
        )
    foreign = [f"a tensor of shape {tuple(parameter.shape)}" for parameter in held if id(parameter) not in own]
    if foreign:
        yield ConfigProblem(
            key=_KEY,
            found=Absent(f"one with {enumerated(foreign, most=_SHOWN)} that the module does not have"),
            expected="one made from parameters of this rank's module",
            fix="make it from module.parameters(), after the module is complete",
        )


def argument_problems(
    arguments: Mapping[str, Any], params: Mapping[str, Any], *, on_edge: bool
) -> Iterator[ConfigProblem]:
    """Yield which objects of a script cannot do what they are passed for, before anything is made of them.

    Args:
        arguments: what :func:`ds_ldt.initialize` was given, by name.
        params: ``scheduler.params`` of the JSON.
        on_edge: whether this is the edge, which alone looks at ``training_data``.
    """
    optimizer, schedule, collate = (arguments.get(name) for name in ("optimizer", "lr_scheduler", "collate_fn"))
    for name, value, cls in (("optimizer", optimizer, Optimizer), ("lr_scheduler", schedule, None)):
        is_made = isinstance(value, cls) if cls else hasattr(value, "step") and not isinstance(value, type)
        if value is None or (callable(value) and not is_made):
            continue
        if not is_made:
            expected = f"{'an optimizer' if cls else 'a scheduler'}, or a function that makes one"
            yield _problem(name, type(value).__name__, expected, "make it in the script, or name it in the JSON")
            continue
        # DeepSpeed gives a schedule the size of a batch where its step() takes something, as Megatron's does.
        known = () if cls else ("increment",)
        wanted = [each for each in required_parameters(value.step) if each not in known]
        if wanted:
            expected = f"one whose step() needs no arguments; this one asks for {', '.join(wanted)}"
            yield _problem(name, type(value).__name__, expected, f"take another {name}")
    of_schedule = getattr(schedule, "optimizer", None)
    if isinstance(of_schedule, Optimizer) and of_schedule is not optimizer and not isinstance(schedule, type):
        expected = "a schedule of the optimizer that is trained with; this one changes another, and so nothing"
        yield _problem("lr_scheduler", type(schedule).__name__, expected, "pass a function that makes it of one")
    if collate is not None and not callable(collate):
        yield _problem("collate_fn", type(collate).__name__, "a function of a list of samples", "pass one")
    if on_edge and arguments.get("training_data") is not None:
        yield from data_problems(arguments["training_data"])
    if schedule is None:
        yield from _length_problems(params, optimizer, arguments.get("model_parameters"))


def _length_problems(params: Mapping[str, Any], optimizer: Any, parameters: Any) -> Iterator[ConfigProblem]:
    """Yield lists of learning rates that are not as long as there are groups of parameters."""
    if isinstance(optimizer, Optimizer):
        count = len(optimizer.param_groups)
    elif optimizer is None and (parameters is None or isinstance(parameters, list | tuple)):
        count = len(parameters) if parameters and isinstance(parameters[0], dict) else 1
    else:
        return
    for name, value in params.items():
        if isinstance(value, list | tuple) and name.endswith(_OF_GROUPS) and len(value) != count:
            yield ConfigProblem(
                key=f"scheduler.params.{name}",
                found=value,
                expected=f"a number, or a list of {count}: one for each group of parameters",
                fix="write one number, or pass model_parameters= in as many groups",
            )


def _problem(name: str, found: str, expected: str, fix: str) -> ConfigProblem:
    return ConfigProblem(key=name, found=Absent(found), expected=expected, fix=fix)


def agree_on_arguments(module: LDTPipelineModule, arguments: Mapping[str, Any]) -> None:
    """Fail on every rank if the arguments of any cannot be used; every rank calls it.

    Args:
        module: the layers of a rank.
        arguments: as for :func:`argument_problems`.

    Raises:
        ConfigError: on every rank: what is wrong with its own arguments, or else on which ranks something is.
        LinkError: not every rank called it within ``ldt.timeout_s``.
    """
    grid, params = module.mpu(), module.job.deepspeed.get("scheduler", {}).get("params", {})
    wrong = _ranks_at_fault(list(argument_problems(arguments, params, on_edge=grid.site == "edge")), grid)
    if wrong:
        raise ConfigError.of(
            "ds_ldt.initialize",
            found=Absent(f"arguments on {ranks(wrong)} that cannot be used"),
            expected="arguments on every rank that can",
            fix="see the message there, which names them",
        )


def agree_that_all_have_one(has_one: bool, grid: LDTPipelineGrid) -> None:
    """Compare whether ranks have an optimizer at all; every rank calls it.

    Args:
        has_one: whether the caller or the JSON gives one to this rank.
        grid: the groups.

    Raises:
        ConfigError: on every rank, if some have one and some have none.
        LinkError: not every rank called it within ``ldt.timeout_s``.
    """
    with bounded("ds_ldt.initialize", grid):
        without = ranks_where(not has_one, grid)
    if 0 < len(without) < grid.world_size:
        raise ConfigError.of(
            _KEY,
            found=Absent(f"none on {ranks(without)}, and one on the others"),
            expected="one on every rank of both sites, or on none",
            fix="pass optimizer= on every rank, or name one in the JSON",
        )


def agree_on_coverage(module: LDTPipelineModule, groups: Sequence[dict[str, Any]], grid: LDTPipelineGrid) -> None:
    """Check the optimizers of all ranks; every rank calls it.

    Args:
        module: as for :func:`coverage_problems`.
        groups: as for :func:`coverage_problems`.
        grid: the groups of processes.

    Raises:
        ConfigError: on every rank, if the optimizer of any does not fit its module; each says what is wrong with its
            own, or else on which rank something is.
        LinkError: not every rank called it within ``ldt.timeout_s``.
    """
    wrong = _ranks_at_fault(list(coverage_problems(module, groups)), grid)
    if wrong:
        raise ConfigError.of(
            _KEY,
            found=Absent(f"one on {ranks(wrong)} that does not hold exactly what is trained there"),
            expected="one that does, on every rank",
            fix="see the message there, which names the parameters",
        )


def _ranks_at_fault(problems: list[ConfigProblem], grid: LDTPipelineGrid) -> list[int]:
    """Raise the problems of this rank; where it has none, return the ranks that do. Every rank calls it."""
    with bounded("ds_ldt.initialize", grid):
        wrong = ranks_where(bool(problems), grid)
    if problems:
        raise ConfigError.from_problems(problems)
    return wrong


def given_parameters(module: nn.Module, parameters: Any) -> list[Any] | None:
    """Return what a caller wants optimized, as a list; None for everything there is.

    A rank that trains nothing, as one without adapters, has an empty list if it lists what is trained. No optimizer
    takes that, so its frozen parameters stand in, of which no gradient comes.

    Args:
        module: the layers of a rank.
        parameters: tensors, named tensors or groups; None for all.
    """
    given = None if parameters is None else list(parameters)
    trains = any(is_optimized_parameter(parameter) for parameter in module.parameters())
    return None if given == [] and not trains else given


def _fix_missing(module: LDTPipelineModule, missing: Sequence[str]) -> str:
    if module.adapters is not None:
        return (
            "call module.inject_adapters() before you make the optimizer, or pass a callable: "
            "optimizer=lambda parameters: ..."
        )
    more = "them" if len(missing) > 1 else "it"
    return f"add {more} to a parameter group, or take {more} out of training with requires_grad_(False) or ldt.freeze"
