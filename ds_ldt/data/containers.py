"""Tensors inside containers: whatever a collate function of torch or transformers may return.

torch's own tree mapping takes tuples, lists, named tuples, ``dict``, ``OrderedDict``, ``defaultdict``, ``deque`` and
what transformers registers with it (``ModelOutput``). It goes by exact types, and its registry is one for the whole
process, so nothing is registered here: other mappings (``BatchEncoding`` is a ``UserDict``), other sequences and
dataclasses come back as leaves and are taken apart by what they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

Chosen = Callable[[Any], bool]
"""Whether a value is to be replaced as a whole."""


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return a copy of nested containers with every tensor replaced; all else is the same object in it.

    Args:
        function: Tensor -> what takes its place.
        value: A tensor, a container or anything else.
    """
    return _map(function, _is_tensor, value)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors inside nested containers, in order."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(keep, value)
    return found


def to_device(value: Any, device: torch.device) -> Any:
    """Return nested containers with their tensors on a device, apart from any graph; the originals stay as they are.

    Objects that are no containers but have a method ``to`` move themselves.
    """

    def move(item: Any) -> Any:
        return item.detach().to(device) if isinstance(item, Tensor) else item.to(device)

    return _map(move, _can_move, value)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _can_move(value: Any) -> bool:
    return isinstance(value, Tensor) or (
        callable(getattr(value, "to", None)) and not isinstance(value, Mapping | type)
    )


def _map(function: Callable[[Any], Any], chosen: Chosen, value: Any) -> Any:
    return tree_map(partial(_at_leaf, function, chosen), value, is_leaf=chosen)


def _at_leaf(function: Callable[[Any], Any], chosen: Chosen, leaf: Any) -> Any:
    """Replace what is chosen; take apart the containers that torch's trees do not know."""
    if chosen(leaf):
        return function(leaf)
    if isinstance(leaf, Mapping):
        parts: dict[Any, Any] = dict(leaf)
    elif isinstance(leaf, Sequence) and not isinstance(leaf, str | bytes | bytearray):
        parts = dict(enumerate(leaf))
    elif is_dataclass(leaf) and not isinstance(leaf, type):
        parts = {field.name: getattr(leaf, field.name) for field in fields(leaf) if hasattr(leaf, field.name)}
    else:
        return leaf
    mapped = {key: _map(function, chosen, item) for key, item in parts.items()}
    return leaf if all(mapped[key] is item for key, item in parts.items()) else _rebuilt(leaf, mapped)


def _rebuilt(container: Any, parts: dict[Any, Any]) -> Any:
    """Return a container of the same type with other parts; a plain one where that type cannot be made of them."""
    clone: Any
    if isinstance(container, MutableMapping):  # a copy keeps what it has besides its items, as in torch's own collate
        clone = copy.copy(container)
        clone.update(parts)
        return clone
    if is_dataclass(container):
        clone = copy.copy(container)
        for name, part in parts.items():
            object.__setattr__(clone, name, part)  # a frozen one too: nobody else has the copy
        return clone
    plain: Any = parts if isinstance(container, Mapping) else list(parts.values())
    try:
        return type(container)(plain)
    except TypeError:
        return plain
