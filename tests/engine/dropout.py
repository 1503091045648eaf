"""Targets about random numbers in layers, run inside groups of processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import nn
from transformers import DataCollatorWithFlattening

import ds_ldt
from tests.engine.cases import initialize, weights_of
from tests.models.tiny import batch_of, samples_of, tiny_config
from tests.toy import DroppingBlock, Head, Points, Stem

ATTENTION_DROPOUT = 0.3


def dynamic_batches() -> list[Any]:
    """Four micro-batches of other sizes and lengths; the third has three samples packed into one row."""
    return [
        batch_of("left"),
        {name: values[:2] for name, values in batch_of("plain").items()},
        DataCollatorWithFlattening()(samples_of(4, 9, 2)),
        {name: values[2:, 4:] for name, values in batch_of("ignored").items()},
    ]


def dropping_layers(num_layers: int) -> list[type[nn.Module]]:
    """Stem, blocks with dropout, head: `num_layers` in all."""
    return [Stem, *[DroppingBlock] * (num_layers - 2), Head]


def dropping_module(settings: dict[str, Any]) -> ds_ldt.LDTPipelineModule:
    """These layers, split as configured."""
    num_layers = sum(map(sum, settings["ldt"]["pipeline_num_layers"]))
    layers = [LayerSpec(layer_class) for layer_class in dropping_layers(num_layers)]
    return ds_ldt.LDTPipelineModule(layers, settings, nn.functional.mse_loss)


def dropping_engine(settings: dict[str, Any]) -> ds_ldt.LDTPipelineEngine:
    """An engine for them."""
    module = dropping_module(settings)
    data = Points(96) if dist.get_rank() < module.job.num_replicas else None
    return initialize(model=module, training_data=data, shuffle_seed=3)


def train_dropping(runs: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """Train them as configured, several times; the generator of the user must stay where it is."""
    found = []
    for settings in runs:
        engine = dropping_engine(settings)
        losses, norms = [], []
        if engine.site == "edge":
            engine.training_dataloader.loader.generator = torch.Generator()  # to begin an epoch takes a number too
        for step in range(steps):
            torch.manual_seed(step)  # whatever the user does with it, masks stay the same
            drawn = torch.rand(5)
            torch.manual_seed(step)
            losses.append(engine.train_batch().item())
            norms.append(engine.get_global_grad_norm())
            assert torch.equal(torch.rand(5), drawn), "a step has drawn from the generator of the user"
        found.append({"losses": losses, "norms": norms, "weights": weights_of(engine)})
    return found


def train_attention_dropout(settings: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """One step of a tiny Llama whose attention drops, on micro-batches of other sizes and lengths."""
    config = tiny_config("llama", attention_dropout=ATTENTION_DROPOUT)
    module = ds_ldt.models.from_pretrained(config, config=settings, seed=5, **options)
    engine = initialize(model=module, config=settings)
    data = iter(dynamic_batches()) if dist.get_rank() == 0 else None
    loss = engine.train_batch(data).item()
    return {"losses": [loss], "norms": [engine.get_global_grad_norm()], "weights": weights_of(engine)}
