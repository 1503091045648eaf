"""Target of `test_lora`, run on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ds_ldt
from ds_ldt.models import family_of, read_hf_config
from tests.models.tiny import batch_of

KINDS = ("plain", "left", "packed", "ignored")
STEPS = 4
HALF = 2


def batches(steps: range) -> Iterator[dict[str, Tensor]]:
    """The micro-batches of some steps, of other content in each."""
    for step in steps:
        for place, kind in enumerate(KINDS):
            yield batch_of(kind, seed=17 * step + place)


def train_all(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train several models one after the other in the same processes."""
    torch.set_num_threads(1)
    return [train(case) for case in cases]


def engine_of(case: dict[str, Any], seed: int) -> ds_ldt.LDTPipelineEngine:
    """An engine for the case; the seed decides with which adapters it starts."""
    module = ds_ldt.models.from_pretrained(case["model"], config=case["settings"], seed=seed)
    return ds_ldt.initialize(model=module, config=case["settings"])[0]


def trained(engine: ds_ldt.LDTPipelineEngine, model: str) -> dict[str, Tensor]:
    """What this rank trains, by the name that PEFT gives it in the whole model."""
    config = read_hf_config(model)
    keys = family_of(config).key_map(config)
    return {
        f"base_model.model.{keys.module_name(index)}.{key}": parameter.detach().clone()
        for index, layer in engine.module.owned_layers().items()
        for key, parameter in layer.named_parameters()
        if parameter.requires_grad
    }


def drawn_by(engine: ds_ldt.LDTPipelineEngine, steps: range) -> Iterator[dict[str, Tensor]] | None:
    """The micro-batches that this rank draws: on each edge replica those of its domains, in the cloud none."""
    if engine.site != "edge":
        return None
    domains, num_domains = engine.grid.domains, engine.job.num_domains
    return (batch for place, batch in enumerate(batches(steps)) if place % num_domains in domains)


def answer(engine: ds_ldt.LDTPipelineEngine, case: dict[str, Any]) -> Tensor | None:
    """Prompts of this edge replica and what the model answers to them; None in the cloud."""
    return engine.generate(**(case["prompts"][engine.grid.data_parallel_id] if engine.site == "edge" else {}))


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Train, save half way; load that into an engine with other adapters and train the second half again.

    The masks of dropout depend on the seed, so there the second engine has that of the first.
    """
    engine = engine_of(case, 1234)
    site_directory = str(Path(case["save_to"], engine.site))
    before = trained(engine, case["model"])
    losses, norms = [], []
    for step in range(STEPS):
        if step == HALF:
            answer(engine, case)  # leaves no trace in the steps that follow
            engine.save_checkpoint(site_directory)
        losses.append(float(engine.train_batch(drawn_by(engine, range(step, step + 1)))))
        norms.append(float(engine.get_global_grad_norm()))
    logits = None
    if case["evaluate"]:
        _, logits = engine.eval_batch(drawn_by(engine, range(1)), return_logits=True)
    answered = answer(engine, case)
    engine.save_checkpoint(site_directory)

    resumed, after_resumed = None, {}
    if case["resume"]:
        again = engine_of(case, case["resume_seed"])
        again.load_checkpoint(site_directory, tag=f"global_step{HALF}")
        data = drawn_by(again, range(HALF, STEPS))
        resumed = [float(again.train_batch(data)) for _ in range(HALF, STEPS)]
        after_resumed = trained(again, case["model"])
        again.destroy()
    instructions = [type(command).__name__ for commands in engine._train_schedule().steps() for command in commands]
    found = {
        "losses": losses,
        "norms": norms,
        "resumed": resumed,
        "before": before,
        "after": trained(engine, case["model"]),
        "after_resumed": after_resumed,
        "frozen": sum(not p.requires_grad for p in engine.module.parameters()),
        "gradient_boundaries": engine.executor.gradient_boundaries,
        "gradients_sent": instructions.count("SendGrad"),
        "logits": logits,
        "answer": answered,
    }
    engine.destroy()
    return found
