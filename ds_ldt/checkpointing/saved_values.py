"""What goes into a checkpoint besides weights, and whether it can be read back.

Files are read with ``torch.load(weights_only=True)``, which runs no code of theirs and so makes objects of a few
classes only. What holds others would be written and never loaded again: it is refused while the script that holds it
still runs. Numbers of numpy, as a scheduler's formula leaves them, are written as those of Python.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ds_ldt.errors import CheckpointError

_PLAIN_MODULES = ("builtins", "torch", "torch.nn.parameter")


def check_client_state(client_state: Any, reserved: tuple[str, ...]) -> None:
    """Check the caller's own values.

    Args:
        client_state: as passed to ``save_checkpoint``.
        reserved: keys of the file that are taken.

    Raises:
        CheckpointError: it is no mapping, has a key that is taken, or a value that could not be read back.
    """
    if not isinstance(client_state, Mapping):
        raise CheckpointError(f"client_state is of type {type(client_state).__name__}. Fix: pass a dictionary")
    clash = [key for key in client_state if key in reserved]
    if clash:
        raise CheckpointError(f"client_state holds {clash}, which name ds_ldt's own entries. Fix: rename them")
    for key, value in client_state.items():
        try:
            _write_and_read({key: value})
        except Exception as error:  # pickling runs code of the value's class, which may raise anything
            raise CheckpointError(
                f"client_state[{key!r}] is of type {type(value).__name__}, which could not be read back, as files are "
                "read with weights_only=True. Fix: keep numbers, texts, tensors, and lists, tuples and dicts of them"
            ) from error


def readable(state: Any, owner: object) -> Any:
    """Return a state with numbers of numpy made plain.

    Args:
        state: what ``state_dict()`` of an optimizer or a scheduler returned, or what was made of it.
        owner: that optimizer or scheduler.

    Raises:
        CheckpointError: it holds a value that could not be read back.
    """
    plain = tree_map(lambda leaf: leaf.item() if isinstance(leaf, np.generic) else leaf, state)
    for leaf in tree_leaves(plain):
        if isinstance(leaf, Tensor | int | float | str | type(None)) and type(leaf).__module__ in _PLAIN_MODULES:
            continue
        try:
            _write_and_read(leaf)
        except Exception as error:  # as above
            raise CheckpointError(
                f"the state of {type(owner).__name__} holds {leaf!r} of type {type(leaf).__name__}, which could not "
                "be read back, as files are read with weights_only=True. Fix: let its state_dict() return numbers, "
                "texts, tensors, and lists, tuples and dicts of them"
            ) from error
    return plain


def num_bytes(value: Any) -> int:
    """Return the bytes of the tensors in a state."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _write_and_read(value: Any) -> None:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True)
