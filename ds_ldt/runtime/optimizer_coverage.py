"""Does the optimizer hold what the module trains? Asked once, before the first step, and answered on every rank alike.

An optimizer holds the tensors that it was made from. Made before adapters were put in, or from another module, it
would train nothing, or not all, and nobody would notice: the loss is still computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from deepspeed.runtime.utils import is_optimized_parameter
from torch import nn

from ds_ldt.comm.collectives import bounded, ranks_where
from ds_ldt.comm.grid import LDTPipelineGrid
from ds_ldt.errors import Absent, ConfigError, ConfigProblem
from ds_ldt.runtime.module import LDTPipelineModule

_KEY = "optimizer"
_SHOWN = 4


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
            found=Absent(f"one without {_listed(missing)}"),
            expected="one that holds every parameter of the module that is trained",
            fix=_fix_missing(module, missing),
        )
    foreign = [f"a tensor of shape {tuple(parameter.shape)}" for parameter in held if id(parameter) not in own]
    if foreign:
        yield ConfigProblem(
            key=_KEY,
            found=Absent(f"one with {_listed(foreign)} that the module does not have"),
            expected="one made from parameters of this rank's module",
            fix="make it from module.parameters(), after the module is complete",
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
            found=Absent(f"none on {_ranks(without)}, and one on the others"),
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
    problems = list(coverage_problems(module, groups))
    with bounded("ds_ldt.initialize", grid):
        wrong = ranks_where(bool(problems), grid)
    if problems:
        raise ConfigError.from_problems(problems)
    if wrong:
        raise ConfigError.of(
            _KEY,
            found=Absent(f"one on {_ranks(wrong)} that does not hold exactly what is trained there"),
            expected="one that does, on every rank",
            fix="see the message there, which names the parameters",
        )


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


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
