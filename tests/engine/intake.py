"""Targets about what the edge draws: containers of every kind, samples and functions of the user's that fail."""

from __future__ import annotations

import multiprocessing
import time
from collections import OrderedDict, UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate
from transformers import BatchEncoding, BatchFeature
from transformers.utils import ModelOutput

import ds_ldt
from tests.engine.cases import initialize, toy_module, train_steps, weights_of
from tests.models.tiny import tiny_config
from tests.toy import Points, Stem, layer_classes

# --- containers ---------------------------------------------------------------------------------------------------


class Two(NamedTuple):
    left: Any
    right: Any
    absent: Any = None


@dataclass
class TwoOutput(ModelOutput):
    left: Any = None
    right: Any = None


@dataclass(frozen=True, slots=True)
class TwoFields:
    left: Any
    right: Any


class Halves(nn.Module):
    """`Stem` for samples that come in two halves, in whatever container."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Stem().linear

    def forward(self, inputs: Any) -> Tensor:
        if isinstance(inputs, Mapping):
            halves = [inputs["left"], inputs["right"]]
        elif hasattr(inputs, "left"):
            halves = [inputs.left, inputs.right]
        else:
            halves = list(inputs)
        halves = [half[0] if isinstance(half, list | tuple) else half for half in halves]
        return torch.tanh(self.linear(torch.cat(halves, dim=1)))


def halves(point: Tensor) -> dict[str, Tensor]:
    return {"left": point[..., :2], "right": point[..., 2:]}


IN_SAMPLES: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda point: (point[:2], point[2:]),
    "list": lambda point: [point[:2], point[2:]],
    "nested": lambda point: (point[:2], (point[2:],)),
    "namedtuple": lambda point: Two(point[:2], point[2:], point[:1]),
    "dict": halves,
    "OrderedDict": lambda point: OrderedDict(halves(point)),
}
"""What a sample holds its inputs in; torch's default collate does the rest."""

IN_BATCHES: dict[str, Callable[[Tensor], Any]] = {
    "namedtuple with a gap": lambda points: Two(points[:, :2], points[:, 2:]),
    "UserDict": lambda points: UserDict(halves(points)),
    "BatchEncoding": lambda points: BatchEncoding(halves(points)),
    "BatchFeature": lambda points: BatchFeature(halves(points)),
    "ModelOutput": lambda points: TwoOutput(**halves(points)),
    "dataclass": lambda points: TwoFields(**halves(points)),
}
"""What a collate function of the user's makes of the inputs."""


class In:
    """Points whose inputs come in a container."""

    def __init__(self, size: int, make: Callable[[Tensor], Any]) -> None:
        self.points = Points(size)
        self.make = make

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        inputs, labels = self.points[index]
        return self.make(inputs), labels


class Watched(Tensor):
    """A tensor that tells when it, or what it was made of, goes to a device."""

    moved: list[str] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to:
            cls.moved.append(str(args[1]))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(cls) if func in (Tensor.detach, Tensor.__getitem__) else result


def train_containers(settings: dict[str, Any], steps: int, checkpointed: bool) -> dict[str, dict[str, Any]]:
    """Train on the same samples in every container; for each what a rank saw, and how many tensors were moved."""
    found = {}
    for name in (*IN_SAMPLES, *IN_BATCHES):
        Watched.moved = []
        engine = _engine_for(name, settings, checkpointed)
        found[name] = {**train_steps(engine, steps), "weights": weights_of(engine), "moved": len(Watched.moved)}
        engine.destroy()
    return found


def _engine_for(name: str, settings: dict[str, Any], checkpointed: bool) -> ds_ldt.LDTPipelineEngine:
    make = IN_BATCHES.get(name)

    def collate(samples: list[Any]) -> Any:
        inputs, labels = default_collate(samples)
        watched = inputs.as_subclass(Watched)
        return make(watched), BatchEncoding({"targets": labels.as_subclass(Watched)})

    def loss_fn(outputs: Tensor, labels: Any) -> Tensor:
        targets = labels["targets"] if isinstance(labels, Mapping) else labels
        return nn.functional.mse_loss(outputs, targets.as_subclass(Tensor))

    num_layers = sum(map(sum, settings["ldt"]["pipeline_num_layers"]))
    layers = [Halves, *layer_classes(num_layers)[1:]]
    options = {"activation_checkpoint_interval": 1} if checkpointed else {}
    module = ds_ldt.LDTPipelineModule([LayerSpec(layer) for layer in layers], settings, loss_fn, **options)
    data = None
    if module.mpu().site == "edge":
        data = Points(96) if make is not None else In(96, IN_SAMPLES[name])
    return initialize(model=module, training_data=data, collate_fn=None if make is None else collate)


# --- failures -----------------------------------------------------------------------------------------------------

BAD = 5
SECRET = "grandmother.png"


class Photographs(Points):
    """Points of which one cannot be read."""

    def __init__(self, size: int, bad: Exception) -> None:
        super().__init__(size)
        self.bad = bad

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == BAD:
            raise self.bad
        return super().__getitem__(index)


def is_bad(tensor: Tensor) -> bool:
    """Whether the bad point is among those of a micro-batch."""
    bad = Points(96)
    return any(torch.equal(row, bad.inputs[BAD]) or torch.equal(row, bad.targets[BAD]) for row in tensor)


def end_on_bad(batch: Any) -> Any:
    return next(iter([])) if is_bad(batch[0]) else batch


def refuse_bad(batch: Any) -> Any:
    if is_bad(batch[0]):
        raise LookupError(SECRET)
    return batch


def collate_to_the_end(samples: list[Any]) -> Any:
    return end_on_bad(default_collate(samples))


def collate_refusing(samples: list[Any]) -> Any:
    return refuse_bad(default_collate(samples))


def losing(outputs: Tensor, labels: Tensor) -> Tensor:
    """A loss function that ends on the bad point."""
    return next(iter([])) if is_bad(labels) else nn.functional.mse_loss(outputs, labels)


def shapes_to_the_end(inputs: Tensor, local: Any, boundary: int) -> Any:
    return next(iter([])) if is_bad(inputs) else None


def counting_to_the_end(labels: Tensor) -> int:
    return next(iter([])) if is_bad(labels) else 1


FAILURES: dict[str, dict[str, Any]] = {
    "missing file": {"data": Photographs(96, FileNotFoundError(SECRET))},
    "data set ends": {"data": Photographs(96, StopIteration(SECRET))},
    "collate_fn ends": {"collate_fn": collate_to_the_end},
    "collate_fn raises": {"collate_fn": collate_refusing},
    "batch_fn ends": {"batch_fn": end_on_bad},
    "batch_fn raises": {"batch_fn": refuse_bad},
    "sent_shapes ends": {"sent_shapes": shapes_to_the_end},
    "count_targets ends": {"count_targets": counting_to_the_end, "loss_reduction": "token"},
    "loss_fn ends": {"loss_fn": losing},
}


def fail_in_turn(settings: dict[str, Any], names: list[str]) -> dict[str, tuple[str, str, float]]:
    """For each failure the class of what a rank is told, the text, and the seconds that it took."""
    return {name: _fail(settings, **FAILURES[name]) for name in names}


def _fail(
    settings: dict[str, Any], *, data: Any = None, collate_fn: Any = None, **options: Any
) -> tuple[str, str, float]:
    module = toy_module(settings, **options)
    edge = module.mpu().site == "edge"
    engine = initialize(model=module, training_data=(data or Points(96)) if edge else None, collate_fn=collate_fn)
    begin = time.monotonic()
    try:
        for _ in range(3):
            engine.train_batch()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    finally:
        engine.destroy()
    return "no error", "", 0.0


def refuse_tokens(settings: dict[str, Any], rows: list[Any], own_iterator: bool) -> list[tuple[str, str]]:
    """What a rank is told of data sets of token ids in each of which one row, or all, cannot be used."""
    found = []
    for changes in rows:
        module = ds_ldt.models.from_pretrained(tiny_config("llama"), config=settings)
        ran: list[Any] = []
        module.register_forward_hook(lambda *_, ran=ran: ran.append(1))
        data = _tokens(changes) if module.mpu().site == "edge" else None
        batches = iter(DataLoader(data, batch_size=2)) if own_iterator and data is not None else None
        engine = initialize(model=module, training_data=None if own_iterator else data)
        try:
            engine.train_batch(batches)
        except ds_ldt.LDTError as error:
            found.append((type(error).__name__, str(error)))
        else:
            found.append(("no error", ""))
        assert not ran, "a layer ran before the samples of the step were looked at"
        engine.destroy()
    return found


def _tokens(changes: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """Eight rows of six tokens, that of `BAD` with these changes."""
    rows = [{"input_ids": torch.arange(3, 9), "labels": torch.arange(3, 9)} for _ in range(8)]
    for field, value in changes.items():
        if isinstance(value, int):
            rows[BAD][field] = rows[BAD][field].clone()
            rows[BAD][field][2] = value
        else:
            rows[BAD][field] = torch.tensor(value)
    return rows


# --- workers ------------------------------------------------------------------------------------------------------


def workers_of_engines(settings: dict[str, Any]) -> list[tuple[int, int]]:
    """Processes that read ahead while an engine trains and after it is destroyed, for each way to give it data."""
    # A rank of the harness is a daemon, which may have no children, and one that a fork server has made. No user's is.
    process, method = multiprocessing.current_process(), multiprocessing.get_start_method()
    process._config["daemon"] = False
    multiprocessing.set_start_method("fork", force=True)
    try:
        return [_workers(settings, way) for way in ("held", "replaced", "loader", "failed")]
    finally:
        process._config["daemon"] = True
        multiprocessing.set_start_method(method, force=True)


def _workers(settings: dict[str, Any], way: str) -> tuple[int, int]:
    module = toy_module(settings)
    edge = module.mpu().site == "edge"
    data = Photographs(96, OSError(SECRET)) if way == "failed" else Points(96)
    is_own = way == "loader"
    engine, _, dataloader, _ = ds_ldt.initialize(
        model=module, training_data=data if edge and not is_own else None, num_workers=0 if is_own else 2
    )
    if is_own and edge:
        engine.set_dataloader(DataLoader(Points(96), batch_size=2, num_workers=2))
    kept = None
    try:
        engine.train_batch()
    except ds_ldt.LDTError as error:
        kept = error  # as a caller does who reports it after it has cleaned up
    if way == "replaced":
        engine.train_batch(iter(DataLoader(Points(96), batch_size=2)) if edge else None)
    before = len(multiprocessing.active_children())
    engine.destroy()
    after = len(multiprocessing.active_children())
    assert (kept is not None) == (way == "failed")
    assert (dataloader is None) == (is_own or not edge)
    return before, after
