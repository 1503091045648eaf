"""A small model as a list of layers, its data, and the oracle: the same model unsplit in one process.

The oracle knows nothing of ds_ldt: plain torch modules, torch's own `DistributedSampler` for the samples of each
domain, and one backward pass per micro-batch with the loss divided by the number of micro-batches of the whole global
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

WIDTH = 8


class Stem(nn.Module):
    """Samples (B, 4) to activations (B, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.linear(inputs))


class Block(nn.Module):
    """A residual layer on activations (B, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.tanh(self.linear(self.norm(inputs)))


class DroppingBlock(Block):
    """A `Block` whose outputs are dropped at random in training, in two places."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = super().forward(nn.functional.dropout(inputs, 0.1, self.training))
        return nn.functional.dropout(hidden, 0.2, self.training)


class Head(nn.Module):
    """Activations (B, WIDTH) to predictions (B, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs)


def layer_classes(num_layers: int) -> list[type[nn.Module]]:
    """Stem, blocks, head: `num_layers` in all."""
    return [Stem, *[Block] * (num_layers - 2), Head]


class Points(Dataset[tuple[Tensor, Tensor]]):
    """`size` samples: four numbers and three targets, the same in every process."""

    def __init__(self, size: int, seed: int = 7) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(size, 4, generator=generator)
        self.targets = torch.randn(size, 3, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a run leaves behind, to be compared: per step the loss and the gradient norm; weights per layer index."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)


def build_unsplit(classes: list[Callable[[], nn.Module]], base_seed: int = 1234) -> nn.Sequential:
    """Every layer under its own seed, as ds_ldt promises to build them."""
    layers = []
    for index, make in enumerate(classes):
        torch.manual_seed(base_seed + index)
        layers.append(make())
    return nn.Sequential(*layers)


class SeededSequential(nn.Sequential):
    """Layers that `train_unsplit` calls, each under a seed of its own wherever it may draw random numbers.

    Args:
        layers: the layers.
        num_micro_batches: per domain and step.
        num_domains: D.
        seed_of: (step, domain, micro-batch, layer) -> seed.
    """

    def __init__(
        self, layers: nn.Sequential, num_micro_batches: int, num_domains: int, seed_of: Callable[..., int]
    ) -> None:
        super().__init__(*layers)
        self.sizes = num_micro_batches, num_domains
        self.seed_of = seed_of
        self.calls = 0

    def forward(self, inputs: Any) -> Any:
        rest, micro_batch = divmod(self.calls, self.sizes[0])
        step, domain = divmod(rest, self.sizes[1])
        self.calls += 1
        for index, layer in enumerate(self):
            torch.manual_seed(self.seed_of(step, domain, micro_batch, index))
            inputs = layer(inputs)
        return inputs


def domain_batches(
    dataset: Dataset[Any],
    domain: int,
    num_domains: int,
    micro_batch_size: int,
    collate: Callable[[Any], Any] | None = None,
) -> Iterator[Any]:
    """Endless micro-batches that data-parallel rank `domain` of `num_domains` would draw."""
    sampler = DistributedSampler(dataset, num_replicas=num_domains, rank=domain, shuffle=False)
    while True:
        yield from DataLoader(dataset, batch_size=micro_batch_size, sampler=sampler, collate_fn=collate)


def train_unsplit(
    model: nn.Module,
    dataset: Dataset[Any],
    *,
    loss_fn: Callable[[Any, Any], Tensor],
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    steps: int,
    num_micro_batches: int,
    num_domains: int,
    micro_batch_size: int,
    gradient_clipping: float = 0.0,
    collate: Callable[[Any], Any] | None = None,
) -> Trace:
    """Train the whole model in this process on the global batches that D domains would take."""
    optimizer = make_optimizer(model.parameters())
    streams = [domain_batches(dataset, d, num_domains, micro_batch_size, collate) for d in range(num_domains)]
    count = num_micro_batches * num_domains
    losses, norms = [], []
    for _ in range(steps):
        total = 0.0
        for stream in streams:
            for _ in range(num_micro_batches):
                inputs, labels = next(stream)
                loss = loss_fn(model(inputs), labels) / count
                loss.backward()
                total += loss.item()
        parameters = [p for p in model.parameters() if p.grad is not None]
        max_norm = gradient_clipping or float("inf")
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    weights = {
        index: {name: value.detach().clone() for name, value in layer.state_dict().items()}
        for index, layer in enumerate(model.children())
    }
    return Trace(losses=losses, grad_norms=norms, weights=weights)
