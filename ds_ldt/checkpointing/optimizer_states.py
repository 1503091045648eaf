"""Optimizer states in checkpoints, kept by layer and name of a parameter, so that any layout can load them.

What an optimizer remembers of a parameter does not depend on which stage, chunk or replica held it. So a checkpoint
says which parameters a state is of. A run with another layout, or another number of replicas, takes from the files of
its site what its own parameters need:

- kept whole (fp32, ZeRO stage 0): ``{"names": [[(layer, name), ...] of each parameter group], "groups": [settings of
  each group], "states": {layer: {name: state}}}`` in the file of the stage;
- sharded (half precision, ZeRO stage 1): each replica has a slice of the flat buffer of each group, and ``"names"``
  says which parameters make up the buffer, in order, with their sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ds_ldt.errors import CheckpointError, enumerated

Name = tuple[int, str]
"""Global index of a pipeline layer, and the name of a parameter within it."""

_WITHOUT = "or load with load_optimizer_states=False"


def names_of(owned: Mapping[int, nn.Module]) -> dict[int, Name]:
    """Name the parameters of a rank: ``id`` of a parameter -> its layer and its name within it.

    Args:
        owned: layers by their global index; a tied one once.
    """
    return {
        id(parameter): (index, name) for index, layer in owned.items() for name, parameter in layer.named_parameters()
    }


# -- kept whole -------------------------------------------------------------------------------------------------------


def whole_state(optimizer: torch.optim.Optimizer, names: Mapping[int, Name]) -> dict[str, Any]:
    """Return what a checkpoint keeps of an optimizer whose states are whole."""
    state, grouped = optimizer.state_dict(), _grouped(optimizer, names)
    states: dict[int, dict[str, Any]] = {}
    for number, (layer, name) in enumerate(name for group in grouped for name in group):
        if number in state["state"]:
            states.setdefault(layer, {})[name] = state["state"][number]
    return {"names": grouped, "groups": [_settings(group) for group in state["param_groups"]], "states": states}


def whole_for(
    optimizer: torch.optim.Optimizer, names: Mapping[int, Name], saved: Iterable[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Make the state dict that this rank's optimizer loads.

    Args:
        optimizer: this rank's.
        names: of :func:`names_of`.
        saved: what :func:`whole_state` returned on the stages of this site, as a checkpoint keeps it; read on only
            while something is missing.

    Returns:
        What ``optimizer.load_state_dict`` takes; None where nothing here was trained when it was saved, or is now.

    Raises:
        CheckpointError: a parameter that is trained here was not when it was saved, or in another group.
    """
    grouped = _grouped(optimizer, names)
    wanted = {name: group for group, members in enumerate(grouped) for name in members}
    trained = {names[id(p)] for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    states: dict[Name, Any] = {}
    groups: list[dict[str, Any]] | None = None
    found: set[Name] = set()
    for source in saved:
        there = {tuple(name): group for group, members in enumerate(source["names"]) for name in members}
        shared = there.keys() & wanted.keys()
        if not shared:
            continue
        _check_groups({name: (there[name], wanted[name]) for name in shared}, len(source["groups"]), len(grouped))
        groups = groups or source["groups"]
        found |= shared
        states |= {
            (layer, name): _copied(source["states"][layer][name])
            for layer, name in shared
            if name in source["states"].get(layer, {})
        }
        if trained <= found:
            break
    _check_found(trained - found)
    if groups is None:
        return None
    numbers = {name: number for number, name in enumerate(name for group in grouped for name in group)}
    return {
        "state": {number: states[name] for name, number in numbers.items() if name in states},
        "param_groups": [
            {**settings, "params": [numbers[name] for name in members]}
            for settings, members in zip(groups, grouped, strict=True)
        ],
    }


def _grouped(optimizer: torch.optim.Optimizer, names: Mapping[int, Name]) -> list[list[Name]]:
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state that does not depend on the file that it is mapped from."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


# -- sharded ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A parameter in the flat buffer of its group.

    Attributes:
        name: Which one.
        start: Where it begins, in numbers.
        size: How many numbers it has.
    """

    name: Name
    start: int
    size: int


def pieces_of(members: Iterable[tuple[Name, int]]) -> list[Piece]:
    """Lay parameters out one after the other, given their sizes."""
    pieces: list[Piece] = []
    start = 0
    for name, size in members:
        pieces.append(Piece(name=name, start=start, size=size))
        start += size
    return pieces


class ShardedStage:
    """The shards of one stage in a checkpoint, of all replicas that it had.

    Nothing but headers is read before :meth:`span` is asked for numbers.

    Args:
        shards: what :meth:`ds_ldt.runtime.optimizer.LDTShardedOptimizer.shard` returned, in the order of the replicas.
        before_reading: called with the number of a replica before numbers of its shard are read for the first time.
    """

    def __init__(
        self, shards: Sequence[Mapping[str, Any]], before_reading: Callable[[int], None] | None = None
    ) -> None:
        self._shards = shards
        self._check = cache(before_reading) if before_reading is not None else None
        self.names: list[list[tuple[Name, int]]] = [
            [((int(layer), str(name)), int(size)) for layer, name, size in members] for members in shards[0]["names"]
        ]

    @cached_property
    def places(self) -> dict[Name, tuple[int, Piece]]:
        """Parameter -> its group, and its place in the buffer of that."""
        return {piece.name: (group, piece) for group, members in enumerate(self.names) for piece in pieces_of(members)}

    @property
    def first(self) -> Mapping[str, Any]:
        """The shard of the first replica; what is not sliced is the same in all."""
        return self._shards[0]

    def entries(self, group: int) -> dict[str, Any]:
        """What the optimizer of the first replica remembers of a group."""
        return dict(self.first["base"]["state"].get(group, {}))

    def is_sliced(self, group: int, key: str) -> bool:
        """Whether an entry has a number for each number of a parameter."""
        value = self.first["base"]["state"][group][key]
        return isinstance(value, Tensor) and value.shape == self.first["fp32_partitions"][group].shape

    def dtype(self, group: int, key: str | None) -> torch.dtype:
        """The dtype of the master weights (no key) or of a sliced entry."""
        return self._flat(0, group, key).dtype

    def span(self, group: int, key: str | None, start: int, stop: int) -> Tensor:
        """Read numbers of the flat buffer of a group.

        Args:
            group: index of the group.
            key: an entry of the optimizer's state that is sliced; None for the master weights.
            start: the first number.
            stop: the one behind the last.
        """
        size = self.first["fp32_partitions"][group].numel()
        parts = []
        for replica in range(start // size, -(-stop // size)):
            if self._check is not None:
                self._check(replica)
            offset = replica * size
            parts.append(self._flat(replica, group, key)[max(start - offset, 0) : min(stop - offset, size)])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _flat(self, replica: int, group: int, key: str | None) -> Tensor:
        shard = self._shards[replica]
        flat: Tensor = shard["fp32_partitions"][group] if key is None else shard["base"]["state"][group][key]
        return flat


def shard_for(
    groups: Sequence[Sequence[tuple[Name, int]]], slices: Sequence[tuple[int, int]], saved: Iterable[ShardedStage]
) -> dict[str, Any] | None:
    """Make the shard of one replica out of the shards of any number of stages and replicas.

    Args:
        groups: the parameters of this stage and their sizes, in the order of the flat buffer of each group.
        slices: the slice of each group's buffer that is this replica's, as (start, stop), padding included.
        saved: the stages of this site in a checkpoint; read on only while something is missing.

    Returns:
        What :meth:`ds_ldt.runtime.optimizer.LDTShardedOptimizer.load_shard` takes; None where nothing here is trained.

    Raises:
        CheckpointError: a parameter that is trained here was not when it was saved, or in another group, or has
            another size; or the stages are not of one moment.
    """
    wanted = {name: (group, size) for group, members in enumerate(groups) for name, size in members}
    sources: dict[Name, ShardedStage] = {}
    if not wanted:
        return None
    for stage in saved:
        shared = stage.places.keys() & wanted.keys()
        sources |= dict.fromkeys(shared, stage)
        _check_groups(
            {name: (stage.places[name][0], wanted[name][0]) for name in shared}, len(stage.names), len(groups)
        )
        _check_sizes({name: (stage.places[name][1].size, wanted[name][1]) for name in shared})
        if len(sources) == len(wanted):
            break
    _check_found(wanted.keys() - sources.keys())
    first = next(iter(sources.values())).first
    state: dict[int, dict[str, Any]] = {}
    partitions = []
    for group, members in enumerate(groups):
        pieces = [(piece, sources[piece.name]) for piece in pieces_of(members)]
        state[group] = _group_state(group, slices[group], pieces)
        partitions.append(_filled(group, None, slices[group], pieces))
    return {
        "base": {
            "state": {group: entries for group, entries in state.items() if entries},
            "param_groups": first["base"]["param_groups"],
        },
        "fp32_partitions": partitions,
        "loss_scaler": first["loss_scaler"],
    }


def _group_state(group: int, bounds: tuple[int, int], pieces: Sequence[tuple[Piece, ShardedStage]]) -> dict[str, Any]:
    stages = list({id(stage): stage for _, stage in pieces}.values())
    if not stages:
        return {}
    entries: dict[str, Any] = {}
    for key, value in stages[0].entries(group).items():
        if stages[0].is_sliced(group, key):
            entries[key] = _filled(group, key, bounds, pieces)
            continue
        entries[key] = value
        if any(not _equal(stage.entries(group).get(key), value) for stage in stages[1:]):
            raise CheckpointError(
                f"the optimizer states of the stages of a checkpoint differ in {key!r}: they are not of one moment. "
                f"Fix: load it with the layout that it was saved with, {_WITHOUT}"
            )
    return entries


def _filled(
    group: int, key: str | None, bounds: tuple[int, int], pieces: Sequence[tuple[Piece, ShardedStage]]
) -> Tensor:
    """The slice of a flat buffer that lies between two bounds; padding is zero."""
    start, stop = bounds
    target = torch.zeros(stop - start, dtype=pieces[0][1].dtype(group, key) if pieces else torch.float32)
    for piece, stage in pieces:
        low, high = max(piece.start, start), min(piece.start + piece.size, stop)
        if low < high:
            shift = stage.places[piece.name][1].start - piece.start
            target[low - start : high - start] = stage.span(group, key, low + shift, high + shift)
    return target


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


# -- both -------------------------------------------------------------------------------------------------------------


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _check_groups(places: Mapping[Name, tuple[int, int]], num_saved: int, num_here: int) -> None:
    if num_saved != num_here:
        raise CheckpointError(
            f"the optimizer was saved with {num_saved} parameter groups, here are {num_here}. Fix: group the "
            f"parameters as they were, {_WITHOUT}"
        )
    moved = sorted(name for name, (saved, here) in places.items() if saved != here)
    if moved:
        raise CheckpointError(
            f"{_listed(moved)} was in another parameter group of the optimizer when it was saved. Fix: group the "
            f"parameters as they were, {_WITHOUT}"
        )


def _check_sizes(sizes: Mapping[Name, tuple[int, int]]) -> None:
    wrong = sorted(name for name, (saved, here) in sizes.items() if saved != here)
    if wrong:
        raise CheckpointError(
            f"the optimizer's state of {_listed(wrong)} has another size than the parameter. Fix: load it into the "
            f"model that it was saved from, {_WITHOUT}"
        )


def _check_found(missing: Iterable[Name]) -> None:
    names = sorted(missing)
    if names:
        raise CheckpointError(
            f"the checkpoint holds no optimizer state of {_listed(names)}: it was not trained, or on the other site. "
            f"Fix: train what was trained then, {_WITHOUT}"
        )


def _listed(names: Sequence[Name]) -> str:
    return enumerated([f"layer {layer} {name}" for layer, name in names], most=3)
