"""The work that every row of the benchmark does: layers that take a set time and carry a real activation.

A layer sleeps for its forward and its backward, so that a rank costs no core and two cores carry them all. The
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
    """How long the layers of this process have worked: the proof that every row does the same work.

    A sleep ends late by up to some hundred microseconds, with what else the machine does. The next one is shorter by
    that much, so that layers take their set time on average.
    """

    worked_s = 0.0
    _late_s = 0.0

    @classmethod
    def sleep(cls, seconds: float) -> None:
        """Work for some seconds."""
        if seconds > 0:
            cls.worked_s += seconds
            begin, wanted = time.monotonic(), seconds - cls._late_s
            time.sleep(max(0.0, wanted))
            cls._late_s = time.monotonic() - begin - wanted


class _Input(torch.autograd.Function):
    """Takes time forward, and backward for the gradient of the input."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.seconds = backward_s
        Stopwatch.sleep(forward_s)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        Stopwatch.sleep(ctx.seconds)
        return grads[0], None, None


class _Weight(torch.autograd.Function):
    """Takes time backward, for the gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, backward_s: float) -> Tensor:
        ctx.seconds = backward_s
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        Stopwatch.sleep(ctx.seconds)
        return grads[0], None


class TimedLayer(nn.Module):
    """Adds a weight to its input; the backward takes twice the time of the forward.

    Args:
        forward_s: seconds of a forward.
        first: the first layer of a model has no gradient of its input to compute: all of its backward is for the
            weight.
    """

    def __init__(self, forward_s: float, first: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.forward_s = forward_s
        self.input_s = 0.0 if first else forward_s
        self.weight_s = 2 * forward_s - self.input_s

    def forward(self, inputs: Tensor) -> Tensor:
        seconds = 0.0 if inputs.is_meta else self.forward_s
        return _Input.apply(inputs, seconds, self.input_s) + _Weight.apply(self.weight, self.weight_s)


class TimedCell(nn.Sequential):
    """Several layers as one, for pipelines that are cut into parts of equally many layers."""

    def __init__(self, setup: Setup, count: int, first: bool = False) -> None:
        super().__init__(*[TimedLayer(setup.layer_s, first and index == 0) for index in range(count)])


def micro_batches(setup: Setup) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless micro-batches (inputs, labels)."""
    batch = torch.ones(setup.batch_shape)
    while True:
        yield batch, torch.zeros_like(batch)
