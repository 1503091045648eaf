"""Targets about losses, named values and evaluation, run inside groups of processes."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

import ds_ldt
from tests.engine.cases import initialize, weights_of
from tests.toy import WIDTH, Block, Head, Points, Stem, domain_batches

Batches = Iterator[tuple[Tensor, Tensor]] | None


class CountingBlock(Block):
    """A block that keeps running statistics of what it has seen, and counts in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(WIDTH, affine=False)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        self.statistics(inputs)
        return super().forward(inputs)


class Punished(Head):
    """A head that returns losses instead of predictions: one a step for training, else one for each sample."""

    def forward(self, inputs: Tensor) -> Any:
        losses = super().forward(inputs).square().mean(dim=1)
        return losses.mean() if torch.is_grad_enabled() else list(losses)


def layer_classes(num_layers: int, head: type[nn.Module] = Head) -> list[type[nn.Module]]:
    """The toy model, made of blocks that keep statistics."""
    return [Stem, *[CountingBlock] * (num_layers - 2), head]


def named_loss(outputs: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """The mean square error and two further values: one a tensor, one a number."""
    return nn.functional.mse_loss(outputs, labels), {"size": outputs.abs().mean(), "rows": len(labels)}


def _engine(settings: dict[str, Any], loss_fn: Any, head: type[nn.Module] = Head) -> ds_ldt.LDTPipelineEngine:
    num_layers = sum(map(sum, settings["ldt"]["pipeline_num_layers"]))
    specs = [LayerSpec(layer_class) for layer_class in layer_classes(num_layers, head)]
    module = ds_ldt.LDTPipelineModule(specs, settings, loss_fn)
    return initialize(model=module)


def _batches(engine: ds_ldt.LDTPipelineEngine, size: int) -> Batches:
    if engine.site == "cloud":
        return None
    streams = [domain_batches(Points(96), d, engine.job.num_domains, size) for d in engine.grid.domains]
    return (batch for batches in zip(*streams, strict=True) for batch in batches)


def name_values(settings: dict[str, Any], directory: str) -> dict[str, Any]:
    """Two steps and an evaluation with other micro-batches; what became of the named values."""
    engine = _engine(settings, named_loss)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        losses, named = [], []
        data = _batches(engine, 2)
        for _ in range(2):
            losses.append(engine.train_batch(data).item())
            named.append(engine.get_additional_losses())
    losses.append(engine.eval_batch(_batches(engine, 8), num_micro_batches=3).item())
    named.append(engine.get_additional_losses())
    written = {}
    if engine.global_rank == 0:
        for path in Path(directory).rglob("*.csv"):
            with path.open() as file:
                written[path.stem] = [float(row[1]) for row in list(csv.reader(file))[1:]]
    refused = _disagree(engine) if engine.site == "edge" and engine.grid.num_physical_replicas > 1 else None
    return {"losses": losses, "named": named, "printed": printed.getvalue(), "written": written, "refused": refused}


def _disagree(engine: ds_ldt.LDTPipelineEngine) -> str:
    """Let every edge replica name its value otherwise."""
    engine.executor.results.clear()
    engine.executor.results.keep_named((0, 0), {f"of_{engine.global_rank}": torch.ones(())})
    try:
        engine.executor.results.named_means(engine.grid, engine.device, count=1, what="train_batch")
    except ds_ldt.ConfigError as error:
        return str(error)
    return "no error"


def evaluate(settings: dict[str, Any]) -> dict[str, Any]:
    """Evaluate before, between and after two steps, in every way there is."""
    engine = _engine(settings, nn.functional.mse_loss)
    data = _batches(engine, 2)
    engine.module.train()
    left_alone = True
    found = []
    for step in range(3):
        before, modes = weights_of(engine), [m.training for m in engine.module.modules()]
        iterator, rng = engine.data_iterator, torch.get_rng_state()
        mean, outputs = engine.eval_batch(_batches(engine, 8), return_logits=True, num_micro_batches=3)
        listed = engine.eval_batch(_batches(engine, 3), reduce_output=None, bcast_loss=False, num_micro_batches=1)
        plain = engine.eval_batch(_batches(engine, 3), compute_loss=False, num_micro_batches=1)
        found.append({"mean": mean.item(), "outputs": outputs, "listed": listed, "plain": plain})
        left_alone = (
            left_alone
            and all(torch.equal(weights_of(engine)[i][n], v) for i in before for n, v in before[i].items())
            and modes == [m.training for m in engine.module.modules()]
            and engine.data_iterator is iterator
            and torch.equal(torch.get_rng_state(), rng)
            and not engine.executor.results.losses
            and not engine.executor.results.outputs
            and not engine.executor.inputs
            and not engine.executor.outputs
        )
        if step < 2:
            engine.train_batch(data)
    return {"found": found, "left_alone": left_alone, "weights": weights_of(engine)}


def lists_of_losses(settings: dict[str, Any]) -> dict[str, Any]:
    """A model whose last layer returns losses: a list of them in evaluation."""
    engine = _engine(settings, None, Punished)
    trained = engine.train_batch(_batches(engine, 2)).item()
    mean = engine.eval_batch(_batches(engine, 5), num_micro_batches=2).item()
    listed = engine.eval_batch(_batches(engine, 5), reduce_output=None, num_micro_batches=2)
    return {"trained": trained, "mean": mean, "listed": listed}
