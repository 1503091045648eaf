"""Targets that train the toy model by many recipes: optimizers and schedulers of the JSON and of the caller."""

from __future__ import annotations

from typing import Any

import torch

import ds_ldt
from tests.engine.cases import initialize, toy_module, weights_of
from tests.toy import Points

DECAYING: dict[str, float] = {"lr": 0.05, "momentum": 0.9}


def train_by_all(cases: list[tuple[dict[str, Any], str]], steps: int) -> list[dict[str, Any]]:
    """Each case is a configuration and who brings the recipe: "json", "instance" or "callable"."""
    return [_train(settings, source, steps) for settings, source in cases]


def _train(settings: dict[str, Any], source: str, steps: int) -> dict[str, Any]:
    module = toy_module(settings)
    data = Points(96) if module.mpu().site == "edge" else None
    engine = initialize(model=module, training_data=data, **_recipe(source, module))
    losses, norms, rates = [], [], []
    for _ in range(steps):
        losses.append(engine.train_batch().item())
        norms.append(engine.get_global_grad_norm())
        rates.append(engine.get_lr()[0])
    result = {"losses": losses, "norms": norms, "rates": rates, "weights": weights_of(engine)}
    engine.destroy()
    return result


def _recipe(source: str, module: ds_ldt.LDTPipelineModule) -> dict[str, Any]:
    if source == "instance":
        optimizer = torch.optim.SGD(module.parameters(), **DECAYING)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}
    if source == "callable":
        return {
            "optimizer": lambda parameters: torch.optim.SGD(parameters, **DECAYING),
            "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        }
    return {}


def compiled_equals_eager(settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """Losses of the same training, layers as they are and compiled one by one."""
    runs: dict[str, Any] = {}
    for name in ("eager", "compiled"):
        module = toy_module(settings)
        data = Points(96) if module.mpu().site == "edge" else None
        engine = initialize(model=module, training_data=data)
        if name == "compiled":
            engine.compile(backend="eager")
        runs[name] = [engine.train_batch().item() for _ in range(steps)]
        runs[f"{name} layers"] = [
            getattr(layer, "_compiled_call_impl", None) is not None for layer in engine.module.owned_layers().values()
        ]
        engine.destroy()
    return runs
