"""The work that every row of the benchmark does: cells that take a set time and carry a real activation.

A cell of layers sleeps for its forward and its backward, so that a rank costs no core and two cores carry them all. It
sleeps once for all of its layers: waking up costs a fraction of a millisecond, which would count as work. The
backward has two halves, the gradient of the input and that of the weight, each an autograd node of its own: schedules
that split the backward can put the second off, the others run one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ds_ldt.runtime.weight_gradients import WeightLedger
from tests.benchmarks.setting import Setup


class Stopwatch:
    """How long the cells of this process have worked: the proof that every row does the same work.

    A sleep ends late by up to some hundred microseconds, with what else the machine does. The next one is shorter by
    that much, so that cells take their set time on average.
    """

    worked_s = 0.0
    _late_s = 0.0

    @classmethod
    def sleep(cls, seconds: float, begin: float) -> None:
        """Work until some seconds after `begin`."""
        if seconds > 0:
            cls.worked_s += seconds
            until = begin + seconds - cls._late_s
            time.sleep(max(0.0, until - time.monotonic()))
            cls._late_s = time.monotonic() - until


class _Half(torch.autograd.Function):
    """Hands a tensor on, and takes time backward: for the gradient of the input, or for that of the weight."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, backward_s: float) -> Tensor:
        ctx.seconds = backward_s
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        Stopwatch.sleep(ctx.seconds, time.monotonic())
        return grads[0], None


class TimedLedger(WeightLedger):
    """A ledger of ds_ldt in which a weight gradient takes the time that its cell has set for it."""

    def settle(self, key: Hashable) -> list[Tensor]:
        """Make the weight gradients that were put off under a key."""
        begin = time.monotonic()
        weights = super().settle(key)
        Stopwatch.sleep(sum(weight.seconds for weight in weights), begin)
        return weights


class TimedCell(nn.Module):
    """Adds a weight to its input; the backward takes twice the time of the forward.

    Args:
        setup: says how long a layer takes.
        count: how many layers it stands for.
        first: the first cell of a model has no gradient of its input to compute: all of its backward is for the
            weight.
        later: the weight is that of a linear layer, whose gradient ds_ldt can put off until a `TimedLedger` makes it.
    """

    def __init__(self, setup: Setup, count: int, first: bool = False, later: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 1))
        self.register_buffer("one", torch.ones(1, 1))
        self.forward_s = count * setup.layer_s
        self.input_s = 0.0 if first else self.forward_s
        self.weight.seconds = 2 * self.forward_s - self.input_s
        self.later = later

    def forward(self, inputs: Tensor) -> Tensor:
        begin = time.monotonic()
        # The sum is where the two ways part, backwards: torch's zero-bubble schedule runs each from there, and once.
        weight = linear(self.one, self.weight) if self.later else _Half.apply(self.weight, self.weight.seconds)
        outputs = _Half.apply(inputs, self.input_s) + weight
        Stopwatch.sleep(0.0 if inputs.is_meta else self.forward_s, begin)
        return outputs


def micro_batches(setup: Setup) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless micro-batches (inputs, labels)."""
    batch = torch.ones(setup.batch_shape)
    while True:
        yield batch, torch.zeros_like(batch)
