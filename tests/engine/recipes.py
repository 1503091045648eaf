"""Targets that train the toy model by many recipes: optimizers and schedulers of the JSON and of the caller."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import ds_ldt
from tests.engine.cases import initialize, toy_module, weights_of
from tests.toy import Points

DECAYING: dict[str, float] = {"lr": 0.05, "momentum": 0.9}
DECAYS = (0.5, 0.0)
"""Weight decay of matrices and of everything else."""


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
    if source == "groups":  # matrices and vectors apart, and a group without anything
        parts = [[p for p in module.parameters() if (p.ndim > 1) == matrices] for matrices in (True, False)]
        groups = [{"params": part, "weight_decay": decay} for part, decay in zip(parts, DECAYS, strict=True)]
        return {"optimizer": torch.optim.SGD([*groups, {"params": []}], lr=0.05)}
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


def optimizers_that_do_not_fit(settings: dict[str, Any], adapters: dict[str, Any]) -> dict[str, str]:
    """What this rank is told of each optimizer that the edge or the cloud brings; "accepted" if nothing."""
    module, is_edge = toy_module(settings), dist.get_rank() == 0
    everything = list(module.parameters())
    copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in everything]
    given: dict[str, dict[str, Any]] = {
        "one lacks a bias, there": {"optimizer": sgd(everything if is_edge else everything[:-1])},
        "callable takes matrices only": {"optimizer": lambda given: sgd([p for p in given if p.ndim > 1])},
        "listed for the JSON": {"model_parameters": everything[1:]},
        "another module's": {"optimizer": sgd(copies)},
        "one more": {"optimizer": sgd([*everything, torch.nn.Parameter(torch.zeros(7))])},
    }
    found = {name: _told(module, options) for name, options in given.items()}
    bare = toy_module({name: value for name, value in settings.items() if name != "optimizer"})
    found["none there"] = _told(bare, {"optimizer": sgd(bare.parameters()) if is_edge else None})
    everything[0].requires_grad_(False)
    found["frozen is left out"] = _told(module, {"optimizer": sgd(everything[1:])})
    module = toy_module({**settings, "ldt": {**settings["ldt"], "lora": adapters}})
    early = sgd(module.parameters())
    found["before adapters"] = _told(module, {"optimizer": early})
    module.inject_adapters()
    trained = [p for p in module.parameters() if p.requires_grad]
    found["after adapters"] = _told(module, {"optimizer": sgd, "model_parameters": trained})
    return found


def arguments_that_do_not_fit(settings: dict[str, Any]) -> dict[str, str]:
    """What this rank is told of each object that a script passes; "accepted" if nothing."""
    schedules, warm = torch.optim.lr_scheduler, {"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, 0.2]}}

    def told(make: Any, **more: Any) -> str:
        module = toy_module({**settings, **more})
        return _told(module, make(module))

    def with_schedule(make: Any) -> Any:
        def both(module: Any) -> dict[str, Any]:
            optimizer = sgd(module.parameters())
            return {"optimizer": optimizer, "lr_scheduler": make(optimizer)}

        return both

    def in_groups(module: Any) -> dict[str, Any]:
        matrices = [{"params": [p for p in module.parameters() if (p.ndim > 1) == wanted]} for wanted in (True, False)]
        return {"model_parameters": matrices}

    return {
        "waits for a loss": told(with_schedule(schedules.ReduceLROnPlateau)),
        "another's schedule": told(lambda module: {"lr_scheduler": schedules.StepLR(sgd(module.parameters()), 1)}),
        "asks for a closure": told(lambda module: {"optimizer": torch.optim.LBFGS(module.parameters())}),
        "name of an optimizer": told(lambda module: {"optimizer": "AdamW"}),
        "name of a schedule": told(lambda module: {"lr_scheduler": "WarmupLR"}),
        "no function": told(lambda module: {"collate_fn": "default_collate"}),
        "two rates, one group": told(lambda module: {}, scheduler=warm),
        "two rates, two groups": told(in_groups, scheduler=warm),
        "asks for an increment": told(with_schedule(Counting)),
        "class": told(lambda module: {"optimizer": torch.optim.AdamW}),
        "loader on the edge": told(lambda module: {"training_data": torch.utils.data.DataLoader([1])}),
    }


class Counting:
    """A schedule as Megatron's: it is told how many samples a step took."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.samples = optimizer, 0

    def step(self, increment: int) -> None:
        self.samples += increment


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer over these."""
    return torch.optim.SGD(parameters, lr=0.1)


def _told(module: ds_ldt.LDTPipelineModule, options: dict[str, Any]) -> str:
    try:
        engine = ds_ldt.initialize(model=module, **options)[0]
    except ds_ldt.ConfigError as error:
        return str(error)
    engine.destroy()
    return "accepted"
