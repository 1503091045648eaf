"""Forward passes that leave a module, and the random numbers of the process, as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ds_ldt.runtime.dropout import rng_untouched


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Around forward passes: no gradients, eval mode; afterwards modes, buffers and RNG states are as before.

    Args:
        module: the module; layers may have been in train or eval mode each by itself.
    """
    modes = [(layer, layer.training) for layer in module.modules()]
    module.eval()
    try:
        with torch.no_grad(), rng_untouched(), _buffers_untouched(module):
            yield
    finally:
        for layer, mode in modes:
            layer.training = mode


@contextmanager
def _buffers_untouched(module: nn.Module) -> Iterator[None]:
    """Restore the buffers of a module afterwards: running statistics, counters and whatever else a layer keeps."""
    places = [
        (owner, name, buffer, buffer.detach().clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for owner, name, buffer, before in places:
            owner._buffers[name] = buffer
            buffer.copy_(before)
