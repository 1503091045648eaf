"""Targets about the start of a job: what is logged, and settings that are to change nothing."""

from __future__ import annotations

import contextlib
import io
import logging
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.utils import logger
from torch import nn

import ds_ldt
from tests.engine.cases import initialize, toy_engine, toy_module, train_steps
from tests.toy import Points


class Said(contextlib.AbstractContextManager["Said"]):
    """Keeps what ds_ldt prints and what DeepSpeed's logger is given, from warnings on."""

    def __enter__(self) -> Said:
        self.output = io.StringIO()
        self.handler = logging.StreamHandler(self.output)
        logger.addHandler(self.handler)
        self.printed = contextlib.redirect_stdout(self.output)
        self.printed.__enter__()
        return self

    def __exit__(self, *reason: Any) -> None:
        self.printed.__exit__(*reason)
        logger.removeHandler(self.handler)

    @property
    def texts(self) -> list[str]:
        """The lines of ds_ldt, without what DeepSpeed puts before them."""
        lines = self.output.getvalue().splitlines()
        return [f"ds_ldt: {line.partition('ds_ldt: ')[2]}" for line in lines if "ds_ldt: " in line]


def logged_at_start(cases: dict[str, dict[str, Any]], steps: int) -> dict[str, dict[str, Any]]:
    """For each configuration what ds_ldt logs when an engine is made, and in which steps a weight changes."""
    found = {}
    for name, settings in cases.items():
        options = {"parts": {"first": [0]}} if settings["ldt"].get("freeze") else {}
        with Said() as said:
            engine = toy_engine(settings, **options)
        found[name] = {
            "texts": said.texts,
            "changed": [_changes(engine) for _ in range(steps)],
            "sizes": {
                index: sum(p.numel() for p in layer.parameters())
                for index, layer in engine.module.owned_layers().items()
            },
        }
        engine.destroy()
    return found


def _changes(engine: ds_ldt.LDTPipelineEngine) -> bool:
    before = [p.detach().clone() for p in engine.module.parameters()]
    engine.train_batch()
    after = engine.module.parameters()
    return not all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def schedules_of_the_script(settings: dict[str, Any]) -> list[str]:
    """What is logged of a schedule that the script brings, and of one that cannot be looked at."""

    class Odd:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        def step(self) -> None:
            raise OSError("not now")

        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot be copied")

    texts = []
    for make in (lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: max(0.0, step - 3.0)), Odd):
        module = toy_module(settings)
        optimizer = torch.optim.SGD([{"params": [p]} for p in module.parameters()], lr=0.1)
        scheduler = make(optimizer)
        rates = [group["lr"] for group in optimizer.param_groups]
        data = Points(32) if dist.get_rank() == 0 else None
        with Said() as said:
            initialize(model=module, optimizer=optimizer, lr_scheduler=scheduler, training_data=data)
        assert [group["lr"] for group in optimizer.param_groups] == rates, "looking at it changed the optimizer"
        texts += [text for text in said.texts if "learning rate of 0" in text]
    return texts


def parameters_of_tied_layers(settings: dict[str, Any]) -> list[str]:
    """What is logged of the number of parameters of a model whose ends are tied."""
    tied = [TiedLayerSpec("ends", nn.Linear, 8, 8) for _ in range(2)]
    module = ds_ldt.LDTPipelineModule(
        layers=[tied[0], LayerSpec(nn.Linear, 8, 8), tied[1]], config=settings, loss_fn=nn.functional.mse_loss
    )
    with Said() as said:
        initialize(model=module)
    return [text for text in said.texts if text.startswith("ds_ldt: the model")]


def losses_of(cases: dict[str, dict[str, Any]], steps: int) -> dict[str, dict[str, list[float]]]:
    """Losses and norms of each configuration."""
    found = {}
    for name, settings in cases.items():
        dtype = torch.bfloat16 if "bf16" in settings else torch.float32
        engine = toy_engine(settings, batch_fn=lambda batch, dtype=dtype: (batch[0].to(dtype), batch[1].to(dtype)))
        found[name] = train_steps(engine, steps)
        engine.destroy()

    return found
