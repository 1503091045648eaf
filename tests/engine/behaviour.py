"""Targets about single promises of the engine, run inside groups of processes."""

from __future__ import annotations

import contextlib
import csv
import gc
import io
import os
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import MethodType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

import ds_ldt
from ds_ldt.comm import groups as streams
from tests.engine.cases import initialize, toy_engine, toy_module, train_steps, weights_of
from tests.engine.scenarios import SCENARIOS
from tests.toy import Points, domain_batches


def on_edge() -> bool:
    """Whether this rank is an edge rank (E = 1 in every case of this module unless said otherwise)."""
    return dist.get_rank() == 0


def train_scenario(name: str, settings: dict[str, Any], steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train one of `SCENARIOS`."""
    scenario = SCENARIOS[name]
    module = ds_ldt.LDTPipelineModule(
        layers=[LayerSpec(layer_class, *arguments) for layer_class, arguments in scenario.layers],
        config=settings,
        loss_fn=nn.functional.mse_loss,
        wire=scenario.wire,
        **options,
    )
    data = scenario.dataset() if dist.get_rank() < module.job.num_replicas else None
    engine = initialize(model=module, training_data=data, collate_fn=scenario.collate)
    return _train(engine, steps)


def train_without_slice_scaling(settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """Negative control: an edge replica that sums over its domains instead of averaging."""
    with mock.patch("ds_ldt.runtime.stepping.scale_for_slice"):
        return _train(toy_engine(settings), steps)


def train_with_stock_clipping(settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """Negative control: DeepSpeed's own clipping, which sees one stage."""
    engine = toy_engine(settings)
    engine.clip_fp32_gradients = MethodType(DeepSpeedEngine.clip_fp32_gradients, engine)
    return _train(engine, steps)


def _train(engine: ds_ldt.LDTPipelineEngine, steps: int) -> dict[str, Any]:
    return {**train_steps(engine, steps), "weights": weights_of(engine)}


class Numbered(Points):
    """Sample i is (i, i, i, i) and its label is i."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.inputs = torch.arange(size, dtype=torch.float32)[:, None].repeat(1, 4)
        self.targets = torch.arange(size, dtype=torch.float32)[:, None].repeat(1, 4)


class Scale(nn.Module):
    """A factor of 1 that is trained (with learning rate 0 it stays 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.factor


def count_label_mismatches(settings: dict[str, Any], steps: int) -> tuple[int, int, float]:
    """(mismatches, comparisons, last loss): outputs must meet the labels of their own sample."""
    seen: list[bool] = []

    def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
        seen.append(torch.equal(outputs, labels))
        return (outputs - labels).abs().sum()

    num_layers = sum(map(sum, settings["ldt"]["pipeline_num_layers"]))
    module = ds_ldt.LDTPipelineModule([LayerSpec(Scale)] * num_layers, settings, loss_fn)
    data = Numbered(64) if dist.get_rank() < module.job.num_replicas else None
    engine = initialize(model=module, training_data=data)
    loss = [engine.train_batch().item() for _ in range(steps)][-1]
    return seen.count(False), len(seen), loss


def run_out_of_data(settings: dict[str, Any], num_batches: list[int]) -> dict[str, Any]:
    """Train from iterators, one for each edge replica, that end inside a step; afterwards the ranks can still talk."""
    engine = toy_engine(settings)
    is_edge = dist.get_rank() < len(num_batches)
    batches = _batches(settings, num_batches[dist.get_rank()]) if is_edge else None
    losses, ended = [], False
    try:
        for _ in range(50):
            losses.append(engine.train_batch(data_iter=batches).item())
    except StopIteration:
        ended = True
    dist.barrier()
    more = engine.train_batch(data_iter=_batches(settings, 100) if is_edge else None).item()
    return {"ended": ended, "steps": len(losses), "more": more}


def _batches(settings: dict[str, Any], count: int, seed: int = 7, size: int | None = None) -> Iterator[Any]:
    micro_batch_size = size or settings["train_micro_batch_size_per_gpu"]
    stream = domain_batches(Points(64, seed), 0, 1, micro_batch_size)
    return iter([next(stream) for _ in range(count)])


def edge_without_data(settings: dict[str, Any]) -> str:
    """train_batch with no data anywhere: the message on this rank."""
    module = toy_module(settings)
    engine = initialize(model=module)
    try:
        engine.train_batch()
    except ds_ldt.LDTError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def as_bf16(batch: Any) -> Any:
    """Inputs as the layers of a bf16 model expect them."""
    return batch[0].bfloat16(), batch[1].bfloat16()


def train_bf16(settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train the toy model in bf16."""
    return _train(toy_engine(settings, batch_fn=as_bf16), steps)


def evaluate_between_steps(settings: dict[str, Any], bf16: bool) -> dict[str, Any]:
    """eval, train, eval, eval, eval, train: losses, and what evaluation must leave alone."""
    engine = toy_engine(settings, batch_fn=as_bf16 if bf16 else None)
    engine.module.train()
    trained_before = engine.data_iterator

    def evaluate(count: int, size: int | None = None) -> float:
        nonlocal rng_kept
        iterator = _batches(settings, count, seed=3, size=size) if on_edge() else None
        rng = torch.get_rng_state()
        loss = engine.eval_batch(iterator, num_micro_batches=count).item()
        rng_kept = rng_kept and torch.equal(rng, torch.get_rng_state())
        if iterator is not None:
            assert next(iterator, None) is None, "evaluation drew another number of micro-batches"
        return loss

    rng_kept = True
    losses = [evaluate(3)]
    losses.append(engine.train_batch().item())
    losses += [evaluate(1), evaluate(4)]
    mode_kept = engine.module.training
    losses += [evaluate(2, size=8), engine.train_batch().item()]
    return {
        "losses": losses,
        "rng_kept": rng_kept,
        "mode_kept": mode_kept,
        "iterator_kept": engine.data_iterator is trained_before,
    }


def evaluate_for_outputs(settings: dict[str, Any]) -> dict[str, Any]:
    """What eval_batch returns besides the mean."""
    engine = toy_engine(settings)
    mean, logits = engine.eval_batch(_batches(settings, 3) if on_edge() else None, True, num_micro_batches=3)
    listed = engine.eval_batch(_batches(settings, 3) if on_edge() else None, reduce_output=None, num_micro_batches=3)
    return {"mean": mean.item(), "logits": logits, "listed": listed}


def train_with_monitor(settings: dict[str, Any], steps: int, directory: str) -> dict[str, Any]:
    """Train with the CSV monitor on; rank 0 reads back what was written."""
    engine = toy_engine(settings)
    losses = [engine.train_batch().item() for _ in range(steps)]
    written = {}
    for path in sorted(Path(directory).rglob("*.csv")):
        with path.open() as file:
            written[path.name] = [float(row[1]) for row in list(csv.reader(file))[1:]]
    dist.barrier()
    return {"losses": losses, "written": written, "lr": engine.get_lr()}


def train_and_capture(settings: dict[str, Any], steps: int) -> tuple[str, list[float]]:
    """What a rank prints while it trains, and the losses."""
    engine = toy_engine(settings)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        losses = [engine.train_batch().item() for _ in range(steps)]
    return output.getvalue(), losses


def train_traced(settings: dict[str, Any], steps: int) -> tuple[list[float], dict[int, list[str]]]:
    """Train with `ldt.trace` on; the losses and the orders of all ranks as planned."""
    engine = toy_engine(settings)
    losses = [engine.train_batch().item() for _ in range(steps)]
    orders = engine._train_schedule().plan.orders()
    return losses, {rank: [str(compute) for compute in order] for rank, order in orders.items()}


def count_live_buffers(settings: dict[str, Any]) -> int:
    """Most payloads that this rank held at once during a step."""
    engine = toy_engine(settings)
    executor, peak = engine.executor, 0

    def counting(handler: Any) -> Any:
        def handle(key: Any, channel: Any) -> None:
            nonlocal peak
            handler(key, channel)
            peak = max(peak, len(executor.inputs) + len(executor.outputs))

        return handle

    executor.handlers = {kind: counting(handler) for kind, handler in executor.handlers.items()}
    engine.train_batch()
    assert not any((executor.inputs, executor.outputs, executor.output_grads, executor.losses))
    return peak


def update_length(settings: dict[str, Any]) -> float:
    """Squared length of the first update of this rank's weights (counted on one replica of each stage)."""
    engine = toy_engine(settings)
    before = weights_of(engine)
    engine.train_batch()
    if engine.grid.data_parallel_id != 0:
        return 0.0
    after = weights_of(engine)
    return sum(
        float(((after[index][name] - value) ** 2).sum()) for index in before for name, value in before[index].items()
    )


def train_frozen(settings: dict[str, Any], steps: int, frozen: list[int]) -> dict[str, Any]:
    """Train with the layers of some stages frozen; which layers changed."""
    module = toy_module(settings)
    if module.stage_id in frozen:
        module.requires_grad_(False)
    data = Points(96) if on_edge() else None
    engine = initialize(model=module, training_data=data)
    before = weights_of(engine)
    losses = [engine.train_batch().item() for _ in range(steps)]
    after = weights_of(engine)
    changed = any(not torch.equal(after[i][n], v) for i in before for n, v in before[i].items())
    kinds = [i.name for i in _instructions(engine)]
    return {"losses": losses, "changed": changed, "stage": engine.stage_id, "gradients": kinds.count("SendGrad")}


def _instructions(engine: ds_ldt.LDTPipelineEngine) -> list[Any]:
    return [instruction for step in engine._train_schedule().steps() for instruction in step]


class TiedLinear(nn.Module):
    """A square matrix used at both ends of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) + 0.1 * torch.randn(4, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(inputs @ self.weight)


def transposed(tied: TiedLinear, inputs: Tensor) -> Tensor:
    """The tail's use of the tied matrix."""
    return inputs @ tied.weight.t()


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.tanh(self.linear(inputs))


def train_tied(settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train a model whose first and last layer are one tensor."""
    return _train(tied_engine(settings), steps)


def tied_engine(settings: dict[str, Any]) -> ds_ldt.LDTPipelineEngine:
    """An engine for that model."""
    tied = [
        ds_ldt.TiedLayerSpec("matrix", TiedLinear),
        *[LayerSpec(Square)] * 4,
        ds_ldt.TiedLayerSpec("matrix", TiedLinear, forward_fn=transposed),
    ]
    module = ds_ldt.LDTPipelineModule(tied, settings, loss_fn=lambda y, t: ((y[:, :3] - t) ** 2).mean())
    data = Points(96) if dist.get_rank() < module.job.num_replicas else None
    engine = initialize(model=module, training_data=data)
    return engine


def garbage_remains(settings: dict[str, Any]) -> int:
    """Outputs of the head that are still alive after a step (a leak would keep one per micro-batch)."""
    engine = toy_engine(settings)
    kept: list[Any] = []
    engine.module.register_forward_hook(lambda module, args, output: kept.append(weakref.ref(output)))
    engine.train_batch()
    gc.collect()
    return sum(reference() is not None for reference in kept)


def left_behind(settings: dict[str, Any], directory: str) -> dict[str, Any]:
    """Threads and open files of this process before and after engines were made, used and destroyed; and what a
    destroyed engine says."""

    def open_now() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    def told(action: Any) -> str:
        try:
            action()
        except ds_ldt.LDTError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    before, engines = open_now(), []
    for _ in range(3):
        engines.append(toy_engine(settings))
        engines[-1].train_batch()
        twice = told(lambda: ds_ldt.initialize(model=engines[-1].module))
        working = open_now()
        engines[-1].destroy()
    engines[-1].destroy()
    last = engines[-1]
    return {
        "before": before,
        "working": working,
        "after": open_now(),
        "told": [
            told(last.train_batch),
            told(lambda: last.save_checkpoint(directory)),
            told(lambda: ds_ldt.initialize(model=last.module)),
            twice,
        ],
    }


def destroy_one(settings: dict[str, Any]) -> list[tuple[float, str]]:
    """For each rank: it destroys its engine while all others go on; seconds, and what this rank is told."""
    found = []
    for alone in range(dist.get_world_size()):
        engine = toy_engine(settings)
        engine.train_batch()
        begin, told = time.monotonic(), ""
        try:
            with mock.patch.object(streams, "_FAREWELL_S", 1.0):
                engine.destroy() if dist.get_rank() == alone else engine.train_batch()
        except ds_ldt.LDTError as error:
            told = f"{type(error).__name__}: {error}"
        found.append((time.monotonic() - begin, told))
        engine.destroy()
    return found


def destroy_after_failure(settings: dict[str, Any]) -> float:
    """Seconds that the end of an engine takes where rank 0 has given up, as after a failed step."""
    engine = toy_engine(settings)
    engine.train_batch()
    if on_edge():
        engine.transport.abort()
    begin = time.monotonic()
    engine.destroy()
    return time.monotonic() - begin
