"""Models that send more than one float tensor, each a past fault of a comparable project.

A scenario is used twice: the children split it, the parent trains it unsplit as the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ds_ldt.comm.wire import WireTensor
from tests.toy import WIDTH, Block, Head, Points, Stem

HIDDEN = WireTensor(name="hidden", dtype="float", gradient=True)


class OnFirst(nn.Module):
    """Applies `Block` to one place of the tuple and passes the rest on."""

    place = 0

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        changed = self.mix(self.block(inputs[self.place]), inputs)
        return (*inputs[: self.place], changed, *inputs[self.place + 1 :])

    def mix(self, hidden: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        return hidden


class IntFirstStem(nn.Module):
    """S01: an int64 tensor of another size stands before the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Stem()

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return (inputs > 0).long().repeat(1, 3), self.stem(inputs)


class IntFirstBlock(OnFirst):
    place = 1

    def mix(self, hidden: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        return hidden * (1.0 + 0.1 * inputs[0].float().mean(1, keepdim=True))


class TupleHead(nn.Module):
    place = 0

    def __init__(self) -> None:
        super().__init__()
        self.head = Head()

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return self.head(inputs[self.place])


class IntFirstHead(TupleHead):
    place = 1


class RotaryStem(nn.Module):
    """S02: a float tensor that carries no gradient accompanies the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Stem()

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.stem(inputs), torch.cos(inputs.sum(1, keepdim=True)).repeat(1, WIDTH)


class RotaryBlock(OnFirst):
    def mix(self, hidden: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        return hidden * inputs[1]


class EverythingStem(nn.Module):
    """S04: activations, a bool mask, int positions and a float bias that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Stem()
        self.bias = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        size = inputs.shape[0]
        positions = torch.arange(WIDTH, dtype=torch.int32, device=inputs.device).expand(size, WIDTH)
        mask = (inputs.sum(1, keepdim=True) > 0).expand(size, WIDTH)
        return self.stem(inputs), mask, positions.contiguous(), self.bias.expand(size, WIDTH).contiguous()


class EverythingBlock(OnFirst):
    def mix(self, hidden: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        _, mask, positions, bias = inputs
        return torch.where(mask, hidden + bias, hidden - bias) * (1.0 + 0.01 * positions.float())


class GrowingBlock(nn.Module):
    """Every boundary has a width of its own: shapes must be traced, not assumed."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.linear(inputs))


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """S05: samples of different lengths; a micro-batch is padded to its own longest."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        length = 2 + (index * 5) % 7
        return torch.randn(length, 4, generator=generator), torch.randn(3, generator=generator)


def pad(samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(B, longest, 4) and (B, 3)."""
    inputs = nn.utils.rnn.pad_sequence([sample for sample, _ in samples], batch_first=True)
    return inputs, torch.stack([target for _, target in samples])


def shapes_after_stem(inputs: Tensor, local: Any, boundary: int) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
    """What the head of S05 sends, said instead of traced."""
    return ((torch.float32, (*inputs.shape[:-1], WIDTH)),)


def wrong_shapes_after_stem(
    inputs: Tensor, local: Any, boundary: int
) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
    """One row more than the head will send."""
    return ((torch.float32, (inputs.shape[0] + 1, *inputs.shape[1:-1], WIDTH)),)


class PooledHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = Head()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(inputs.mean(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Layers, what they declare to send, and data."""

    layers: list[tuple[type[nn.Module], tuple[int, ...]]]
    matrix: list[list[int]]
    wire: tuple[WireTensor, ...] = (HIDDEN,)
    dataset: Callable[[], Dataset[Any]] = lambda: Points(96)
    collate: Callable[[Any], Any] | None = None


def _tuple(stem: type[nn.Module], block: type[nn.Module], head: type[nn.Module]) -> list[Any]:
    return [(stem, ()), (block, ()), (block, ()), (block, ()), (block, ()), (head, ())]


_THREE = [[2, 1, 1], [2, 0, 0]]

SCENARIOS = {
    "S01": Scenario(
        layers=_tuple(IntFirstStem, IntFirstBlock, IntFirstHead),
        matrix=_THREE,
        wire=(WireTensor(name="signs", dtype="int64", ndim=2), HIDDEN),
    ),
    "S02": Scenario(
        layers=_tuple(RotaryStem, RotaryBlock, TupleHead),
        matrix=_THREE,
        wire=(HIDDEN, WireTensor(name="cosine", dtype="float")),
    ),
    "S04": Scenario(
        layers=_tuple(EverythingStem, EverythingBlock, TupleHead),
        matrix=_THREE,
        wire=(
            HIDDEN,
            WireTensor(name="mask", dtype="bool"),
            WireTensor(name="positions", dtype="int32"),
            WireTensor(name="bias", dtype="float", gradient=True),
        ),
    ),
    "S05": Scenario(
        layers=[(Stem, ()), (Block, ()), (Block, ()), (Block, ()), (Block, ()), (PooledHead, ())],
        matrix=_THREE,
        dataset=Sequences,
        collate=pad,
    ),
    "widths": Scenario(
        layers=[(GrowingBlock, (4, 6)), (GrowingBlock, (6, 10)), (GrowingBlock, (10, 7)), (GrowingBlock, (7, 3))],
        matrix=[[1, 1, 1], [1, 0, 0]],
    ),
}
