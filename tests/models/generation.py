"""Target of `test_generation`, run on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import ds_ldt
from tests.engine.cases import initialize
from tests.models.tiny import batch_of


def generate(source: str, config: dict[str, Any], cases: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Let a replica answer its own prompts of every case, and see whether anything else has changed.

    Args:
        source: a Hugging Face directory.
        config: the configuration.
        cases: for each case the arguments of each replica.
    """
    torch.set_num_threads(1)
    module = ds_ldt.models.from_pretrained(source, config=config)
    engine = initialize(model=module, config=config)
    replica = dist.get_rank() if engine.site == "edge" else None
    engine.data_iterator = iter([])
    engine.module.train()
    before = (engine.data_iterator, torch.get_rng_state())
    answers = [_answer(engine, {} if replica is None else arguments[replica]) for arguments in cases]
    kept = engine.data_iterator is before[0] and torch.equal(torch.get_rng_state(), before[1])
    modes = all(m.training for m in engine.module.modules())
    losses = {}
    for labels in (True, False):  # evaluation without a loss needs no labels
        batch = batch_of("left")
        if not labels:
            del batch["labels"]
        batches = iter([batch] * engine.job.slice_size) if replica is not None else None
        found = engine.eval_batch(batches, num_micro_batches=1, compute_loss=labels)
        losses[labels] = float(found) if labels else found
    return {"answers": answers, "kept": kept and modes, "loss": losses[True], "outputs": losses[False]}


def answer_all(source: str, configs: list[dict[str, Any]], cases: list[dict[str, Any]]) -> list[list[Any]]:
    """For each configuration the answers to every case, of a single edge replica."""
    torch.set_num_threads(1)
    found = []
    for config in configs:
        engine = initialize(model=ds_ldt.models.from_pretrained(source, config=config), config=config)
        found.append([_answer(engine, case if engine.site == "edge" else {}) for case in cases])
    return found


def _answer(engine: ds_ldt.LDTPipelineEngine, arguments: dict[str, Any]) -> Any:
    try:
        return engine.generate(**arguments)
    except ds_ldt.LDTError as error:
        return f"{type(error).__name__}: {error}"
