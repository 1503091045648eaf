"""Targets that the engine tests run inside groups of processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import nn

import ds_ldt
from tests.harness import when_done
from tests.toy import Points, layer_classes

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"type": "SGD", "params": {"lr": 0.1}},
    "AdamW": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True, "weight_decay": 0.1}},
}


def layout(num_stages: int, num_chunks: int) -> list[list[int]]:
    """A matrix of the given size: two layers on the head and on the tail, one in every other cell (toy models)."""
    matrix = [[1] * num_stages for _ in range(num_chunks)]
    matrix[0][0] = 2
    matrix[-1] = [2] + [0] * (num_stages - 1)
    return matrix


def config(
    matrix: list[list[int]],
    *,
    num_domains: int = 1,
    num_replicas: int = 1,
    num_micro_batches: int = 4,
    micro_batch_size: int = 2,
    optimizer: str | None = "SGD",
    gradient_clipping: float = 0.0,
    timeout_s: float = 60,
    ldt: dict[str, Any] | None = None,
    **deepspeed: Any,
) -> dict[str, Any]:
    """A configuration as a user would write it."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": num_micro_batches,
        "gradient_clipping": gradient_clipping,
        "steps_per_print": 1000,
        "ldt": {
            "pipeline_num_layers": matrix,
            "edge": {"data_parallel_size": num_replicas},
            "cloud": {"data_parallel_size": num_domains},
            "timeout_s": timeout_s,
            **(ldt or {}),
        },
        **deepspeed,
    }
    if optimizer is not None:
        settings["optimizer"] = OPTIMIZERS[optimizer]
    return settings


def toy_module(settings: dict[str, Any], **options: Any) -> ds_ldt.LDTPipelineModule:
    """The toy model split as configured."""
    num_layers = sum(map(sum, settings["ldt"]["pipeline_num_layers"]))
    options.setdefault("loss_fn", nn.functional.mse_loss)
    return ds_ldt.LDTPipelineModule(
        layers=[LayerSpec(layer_class) for layer_class in layer_classes(num_layers)], config=settings, **options
    )


def initialize(**options: Any) -> ds_ldt.LDTPipelineEngine:
    """`ds_ldt.initialize` for tests: the engine is destroyed when the target of the test has returned."""
    engine, _, _, _ = ds_ldt.initialize(**options)
    when_done(engine.destroy)
    return engine


def toy_engine(settings: dict[str, Any], *, dataset_size: int = 96, **options: Any) -> ds_ldt.LDTPipelineEngine:
    """An engine for the toy model with its data set; in the cloud the data set explodes when it is touched."""
    module = toy_module(settings, **options)
    data = Points(dataset_size) if dist.get_rank() < settings["ldt"]["edge"]["data_parallel_size"] else Untouchable()
    return initialize(model=module, config=settings, training_data=data)


class Untouchable:
    """A data set that must never be opened."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"the cloud touched its training_data ({name})")

    def __len__(self) -> int:
        raise AssertionError("the cloud touched its training_data (len)")

    def __bool__(self) -> bool:
        raise AssertionError("the cloud touched its training_data (bool)")


def weights_of(engine: ds_ldt.LDTPipelineEngine) -> dict[int, dict[str, torch.Tensor]]:
    """This rank's weights by global layer index."""
    return {
        index: {name: value.detach().clone() for name, value in layer.state_dict().items()}
        for index, layer in engine.module.owned_layers().items()
    }


def train_steps(engine: ds_ldt.LDTPipelineEngine, steps: int) -> dict[str, list[float]]:
    """The losses and gradient norms of some training steps."""
    losses, norms = [], []
    for _ in range(steps):
        losses.append(engine.train_batch().item())
        norms.append(float(engine.get_global_grad_norm()))
    return {"losses": losses, "norms": norms}


def train(settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train the toy model; what every rank saw."""
    engine = toy_engine(settings)
    seen = train_steps(engine, steps)
    engine.destroy()
    return {**seen, "weights": weights_of(engine), "stage": engine.stage_id}


def train_many(cases: list[tuple[dict[str, Any], int]]) -> list[dict[str, Any]]:
    """Several trainings one after the other in the same processes."""
    return [train(settings, steps) for settings, steps in cases]
