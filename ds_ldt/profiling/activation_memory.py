"""Counts what a rank keeps of a micro-batch until its backward pass, in bytes of distinct storages."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ds_ldt.plan import Channel, Handlers, Key, Kind


class HeldBytes:
    """Bytes of the storages behind some tensors; views of one storage count once, and as all of it.

    Works on real tensors as on fake ones and on those of the meta device.

    Args:
        excluded: tensors whose storages do not count, such as parameters.
    """

    def __init__(self, excluded: Iterable[Tensor] = ()) -> None:
        self._excluded = frozenset(_identity(tensor) for tensor in excluded)
        self._sizes: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes counted so far."""
        return sum(self._sizes.values())

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that are kept; what shares a storage that is counted adds nothing."""
        for tensor in tensors:
            name = _identity(tensor)
            if name not in self._excluded:
                self._sizes[name] = tensor.untyped_storage().nbytes()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Around a forward pass: count what autograd saves for the backward pass.

        What a checkpoint leaves out is not saved, and not counted.
        """
        with saved_tensors_hooks(self._pack, _as_it_is):
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        self.add((tensor,))
        return tensor


class ActivationMeter:
    """Measures in one training step what each micro-batch in flight takes on each virtual stage of this rank.

    Attributes:
        num_bytes: virtual stage -> bytes of the largest micro-batch measured: what autograd saved, and the inputs and
            outputs that the engine holds, without the parameters.
    """

    def __init__(self) -> None:
        self.num_bytes: dict[int, int] = {}

    def wrap(self, handlers: Handlers, module: nn.Module, payloads: Callable[[Key], Iterable[Tensor]]) -> Handlers:
        """Make handlers for a training step that do the same and count in the forward passes.

        Args:
            handlers: those of the step.
            module: whose parameters and buffers do not count.
            payloads: key -> the inputs and outputs that are held of a micro-batch after its forward pass.
        """
        excluded, forward = (*module.parameters(), *module.buffers()), handlers[Kind.FORWARD_PASS]

        def counted(key: Key, channel: Channel | None) -> None:
            held = HeldBytes(excluded)
            with held.counting():
                forward(key, channel)
            held.add(payloads(key))
            self.num_bytes[key.virtual_stage] = max(held.num_bytes, self.num_bytes.get(key.virtual_stage, 0))

        return {**handlers, Kind.FORWARD_PASS: counted}


def _identity(tensor: Tensor) -> int:
    """What tells storages apart that are alive; the data pointer is 0 for all that hold no data."""
    return tensor.untyped_storage()._cdata


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class LiveBytes(TorchDispatchMode):
    """Follows the bytes of all storages that operations make inside the context, until they are freed.

    Attributes:
        now: bytes that are alive.
        peak: the most that were alive at once since :meth:`restart`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and look at what it returns."""
        result = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self.follow, result)
        return result

    def follow(self, tensor: Tensor) -> None:
        """Count a tensor that was there before, unless its storage is counted."""
        storage = tensor.untyped_storage()
        name, size = storage._cdata, storage.nbytes()
        if name in self._alive:
            return
        self._alive.add(name)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, name, size)

    def restart(self) -> int:
        """Forget the peak so far; return the bytes that are alive."""
        self.peak = self.now
        return self.now

    def _freed(self, name: int, size: int) -> None:
        self._alive.discard(name)
        self.now -= size
