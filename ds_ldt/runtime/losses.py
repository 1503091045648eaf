"""What the tail makes of a step: losses, further named values, outputs. They stay on the edge, but for the mean loss.

A loss function returns the loss alone, or ``(loss, {"name": value})``. Named values are averaged as the loss is: over
all micro-batches and domains, weighted by targets where the loss is. With several edge replicas that takes one small
message among them, which also proves that they speak of the same names; nothing of it crosses the link.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ldt.comm.collectives import bounded
from ds_ldt.comm.grid import LDTPipelineGrid
from ds_ldt.errors import Absent, ConfigError
from ds_ldt.runtime.micro_batches import MicroBatchKey

MAX_NAMED = 30
"""Most named values beside the loss: they and the digest of their names travel in one message of fixed size."""

RESERVED = frozenset({"loss", "train_loss", "eval_loss", "lr", "loss_scale"})
"""Names that the monitor has another use for."""

_DIGEST_SIZE = 2

Named = dict[str, Tensor]
"""Name -> float32 scalar."""


class Results:
    """The results of the step that is running, by micro-batch and domain; empty in the cloud.

    Attributes:
        losses: a loss each; what the last layer returned where no loss is computed.
        outputs: what the last layer returned, where it is wanted.
    """

    def __init__(self) -> None:
        self.losses: dict[MicroBatchKey, Any] = {}
        self.outputs: dict[MicroBatchKey, Any] = {}
        self._named: dict[MicroBatchKey, Named] = {}

    def clear(self) -> None:
        """Forget the step before."""
        for values in (self.losses, self.outputs, self._named):
            values.clear()

    def keep_named(self, place: MicroBatchKey, named: Named) -> None:
        """Keep the named values of a micro-batch, already weighted.

        Raises:
            ConfigError: other micro-batches of the step had other names.
        """
        self._named[place] = named
        first = next(iter(self._named.values()))
        if first.keys() != named.keys():
            raise _other_names(
                f"{_listed(named)} for micro-batch {place[0]} of domain {place[1]}, {_listed(first)} before it"
            )

    def total(self, device: torch.device) -> Tensor:
        """Sum of the losses, each the mean of its elements, in the order they were drawn: float32, shape (1,)."""
        total = torch.zeros(1, dtype=torch.float32, device=device)
        for place in sorted(self.losses):
            total += _mean(self.losses[place])
        return total

    def named_means(self, grid: LDTPipelineGrid, device: torch.device, *, count: int, what: str) -> Named | None:
        """Means of the named values over the whole global batch. Every edge replica calls it, and no cloud rank.

        Args:
            grid: the group of the edge replicas.
            device: where that group reduces tensors.
            count: micro-batches of all domains together.
            what: the call that the user made, for errors.

        Returns:
            Name -> mean, the same on every replica; None if there are no names.

        Raises:
            ConfigError: on every replica: their names differ.
            LinkError: a replica is gone or silent.
        """
        names = list(next(iter(self._named.values()), {}))
        sums = torch.zeros(MAX_NAMED, dtype=torch.float32, device=device)
        for place in sorted(self._named):
            for index, name in enumerate(names):
                sums[index] += self._named[place][name].to(sums.device)
        if grid.num_physical_replicas > 1:
            sums = _sum_over_replicas(sums, names, grid, what)
        return {name: sums[index] / count for index, name in enumerate(names)} or None


def _sum_over_replicas(sums: Tensor, names: list[str], grid: LDTPipelineGrid, what: str) -> Tensor:
    order = sorted(range(len(names)), key=names.__getitem__)  # replicas may name the same values in another order
    digest = hashlib.sha256("\0".join(names[index] for index in order).encode()).digest()
    numbers = [int.from_bytes(digest[3 * i : 3 * i + 3], "big") for i in range(_DIGEST_SIZE)]  # exact in float32
    mine = torch.cat([torch.tensor(numbers, dtype=torch.float32, device=sums.device), sums[order], sums[len(names) :]])
    everyone = [torch.empty_like(mine) for _ in range(grid.num_physical_replicas)]
    with bounded(f"{what} (named values beside the loss)", grid):
        dist.all_gather(everyone, mine, group=grid.dp_proc_group)
    table = torch.stack(everyone)
    if not bool((table[:, :_DIGEST_SIZE] == mine[:_DIGEST_SIZE]).all()):
        raise _other_names(f"{_listed(names)} on edge replica {grid.data_parallel_id}, others on another replica")
    summed = torch.zeros_like(sums)
    summed[[*order, *range(len(names), MAX_NAMED)]] = table[:, _DIGEST_SIZE:].sum(dim=0)
    return summed


def split_loss(found: Any, additional: Mapping[str, Any] | None = None, *, training: bool) -> tuple[Any, Named]:
    """Take apart what a loss function has returned.

    Args:
        found: a loss, or a pair of a loss and a mapping from names to numbers or tensors of one element.
        additional: further values, as DeepSpeed asks a pipeline module for them.
        training: whether a backward pass starts at it. If none does, a loss may also be a tensor of any shape, or a
            list or tuple of tensors (a loss for each sample).

    Returns:
        The loss and the named values, as float32 scalars without a graph.

    Raises:
        ConfigError: it is nothing of that kind.
    """
    named = dict(additional or {})
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping):
        found, named = found[0], {**named, **found[1]}
    is_tensor = isinstance(found, Tensor)
    is_list = isinstance(found, list | tuple) and bool(found) and all(isinstance(one, Tensor) for one in found)
    if not (is_tensor and (found.numel() == 1 or not training)) and not (is_list and not training):
        shape = f"a tensor of shape {tuple(found.shape)}" if is_tensor else type(found).__name__
        raise ConfigError.of(
            "loss_fn",
            found=Absent(shape),
            expected="a tensor of one element" if training else "a tensor, or a list of tensors",
            fix="return the mean loss of the micro-batch, or a pair of it and a dictionary of further values",
        )
    if len(named) > MAX_NAMED:
        raise ConfigError.of(
            "loss_fn", found=Absent(f"{len(named)} named values"), expected=f"at most {MAX_NAMED}", fix="return fewer"
        )
    return found, {_name(name): _scalar(name, value) for name, value in named.items()}


def weighted(value: Any, weight: float) -> Any:
    """Scale a loss, a list of losses or a named value.

    Without any weight there is no value and no gradient either: it may be the mean over nothing, which is no number.
    """
    if isinstance(value, list | tuple):
        return [weighted(one, weight) for one in value]
    if weight == 0.0:
        return torch.zeros_like(value, requires_grad=False)
    return value if weight == 1.0 else value * weight


def _mean(loss: Any) -> Tensor:
    if isinstance(loss, Tensor):
        return loss.float().mean()
    return torch.stack([one.float().mean() for one in loss]).mean()


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name or name in RESERVED:
        raise ConfigError.of(
            "loss_fn",
            found=name,
            expected=f"names that are text and none of {', '.join(sorted(RESERVED))}",
            fix="give the value another name",
        )
    return name


def _scalar(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().float().reshape(())
    if isinstance(value, int | float):
        return torch.tensor(float(value))
    found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise ConfigError.of(
        f"loss_fn ({name})",
        found=Absent(found),
        expected="a number or a tensor of one element",
        fix="return its mean",
    )


def _other_names(found: str) -> ConfigError:
    return ConfigError.of(
        "loss_fn",
        found=Absent(found),
        expected="values of the same names for all micro-batches of a step, on every edge replica",
        fix="return every name each time",
    )


def _listed(names: Any) -> str:
    return "[" + ", ".join(names) + "]" if names else "no names"
