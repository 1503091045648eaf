"""Random numbers of the layers: what a layer draws in training depends on its place and not on how the model is split.

Passes outside of training (:func:`evaluating`) leave random numbers, modes and buffers as they were.

Before each layer of each micro-batch runs in training, the generators of CPU and accelerator are seeded from
(base_seed, training step, domain, micro-batch, global index of the layer). So dropout masks are the same for every
number of stages and chunks, every policy and number of edge replicas, after a resume, and when activation
checkpointing runs the layer again. Seeding takes a few microseconds, so every layer is seeded.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The micro-batch that layers draw random numbers for.

    Attributes:
        base_seed: seed of the module.
        step: training steps that were done before this one, those before a resume included.
        domain: domain.
        micro_batch: micro-batch of the domain.
    """

    base_seed: int
    step: int
    domain: int
    micro_batch: int

    def seed_of(self, layer: int) -> int:
        """The seed of a layer for this micro-batch: the first 8 bytes of a blake2b digest, less the sign bit.

        Args:
            layer: global index of the pipeline layer.
        """
        numbers = (self.base_seed % 2**64, self.step, self.domain, self.micro_batch, layer)
        digest = hashlib.blake2b(struct.pack("<5Q", *numbers), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


def seed_generators(seed: int) -> None:
    """Seed the generators that layers draw from: of the CPU and of this rank's accelerator.

    ``torch.manual_seed`` would do the same for every device there is, and takes a hundred times as long.
    """
    torch.default_generator.manual_seed(seed)
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.manual_seed(seed)


@contextmanager
def rng_untouched() -> Iterator[None]:
    """Restore the RNG states of CPU and accelerator afterwards."""
    accelerator = get_accelerator()
    device_state = None if accelerator.device_name() == "cpu" else accelerator.get_rng_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        if device_state is not None:
            accelerator.set_rng_state(device_state)


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
