"""The work that every row of the benchmark does: cells that take a set time and carry a real activation.

A cell of layers sleeps for its forward and its backward, so that a rank costs no core and two cores carry them all. It
sleeps once for all of its layers: waking up costs a fraction of a millisecond, which would count as work. The
backward has two halves, the gradient of the input and that of the weight, each an autograd node of its own: schedules
that split the backward can put the second off, the others run one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

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


class _Input(torch.autograd.Function):
    """Takes time forward, and backward for the gradient of the input."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, forward_s: float, backward_s: float) -> Tensor:
        begin = time.monotonic()
        ctx.seconds = backward_s
        outputs = inputs.view_as(inputs)
        Stopwatch.sleep(forward_s, begin)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        Stopwatch.sleep(ctx.seconds, time.monotonic())
        return grads[0], None, None


class _Weight(torch.autograd.Function):
    """Takes time backward, for the gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, backward_s: float) -> Tensor:
        ctx.seconds = backward_s
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        Stopwatch.sleep(ctx.seconds, time.monotonic())
        return grads[0], None


class TimedCell(nn.Module):
    """Adds a weight to its input; the backward takes twice the time of the forward.

    Args:
        setup: says how long a layer takes.
        count: how many layers it stands for.
        first: the first cell of a model has no gradient of its input to compute: all of its backward is for the
            weight.
    """

    def __init__(self, setup: Setup, count: int, first: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.forward_s = count * setup.layer_s
        self.input_s = 0.0 if first else self.forward_s
        self.weight_s = 2 * self.forward_s - self.input_s

    def forward(self, inputs: Tensor) -> Tensor:
        seconds = 0.0 if inputs.is_meta else self.forward_s
        # The sum is where the two ways part, backwards: torch's zero-bubble schedule runs each from there, and once.
        return _Input.apply(inputs, seconds, self.input_s) + _Weight.apply(self.weight, self.weight_s)


def micro_batches(setup: Setup) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless micro-batches (inputs, labels)."""
    batch = torch.ones(setup.batch_shape)
    while True:
        yield batch, torch.zeros_like(batch)
