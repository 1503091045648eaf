"""Targets of `test_vl_end_to_end`, run on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

import ds_ldt
from ds_ldt.models import family_of, read_hf_config
from examples import finetune_vl
from tests.engine.cases import initialize
from tests.engine.split_backward import Counting
from tests.engine.wire_record import num_bytes_of, recorded
from tests.models.lora_cases import trained
from tests.models.tiny_vl import vl_batch_of

STEPS = 5
PIXELS_FROM = 20_000.0
IDS_FROM = 5_000
"""Pixels and ids of a marked batch are numbers from here on, which nothing else in a run is."""


def batches(kinds: list[str], *, marked: bool, steps: int = STEPS) -> Iterator[dict[str, Tensor]]:
    """The micro-batches of all steps: the same kinds in every step, of other content."""
    for step in range(steps):
        for place, kind in enumerate(kinds):
            batch = vl_batch_of(kind, seed=17 * step + place)
            yield _marked(batch) if marked else batch


def _marked(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Move ids and pixels to where they can be recognised; the padding stays 0."""
    changed = dict(batch)
    for name, none in (("input_ids", 0), ("labels", -100)):
        changed[name] = torch.where(batch[name] == none, none, batch[name] + IDS_FROM)
    if "pixel_values" in batch:
        changed["pixel_values"] = batch["pixel_values"].mul(100).round().add(PIXELS_FROM)
    return changed


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Train a saved model; return losses, norms, weights by Hugging Face key, and what was sent of marked batches."""
    torch.set_num_threads(1)
    kinds, marked, settings = case["kinds"], case["marked"], case["settings"]
    sent: list[tuple[str, Tensor]] = []
    with recorded(sent) if marked else nullcontext():
        module = ds_ldt.models.from_pretrained(case["model"], config=settings)
        engine = initialize(model=module, config=settings)
        engine.executor.ledger = Counting()
        adapters = trained(engine, case["model"]) if "lora" in settings["ldt"] else {}
        data = batches(kinds, marked=marked) if engine.site == "edge" else None
        losses, norms = [], []
        for _ in range(STEPS):
            losses.append(float(engine.train_batch(data)))
            norms.append(float(engine.get_global_grad_norm()))
        held_out = batches(kinds, marked=marked, steps=1) if engine.site == "edge" else None
        losses.append(float(engine.eval_batch(held_out)))
    config = read_hf_config(case["model"])
    keys = family_of(config).key_map(config)
    weights = {
        keys.hf_key(index, key): tensor.detach().clone()
        for index, layer in module.owned_layers().items()
        for key, tensor in layer.state_dict().items()
    }
    after = trained(engine, case["model"]) if adapters else {}
    refused, bytes_sent = told(engine.generate), engine.transport.bytes_sent.total()
    engine.destroy()
    found = [(name, str(t.dtype), tuple(t.shape)) for name, t in sent if holds(t, kinds)]
    return {
        "losses": losses,
        "norms": norms,
        "weights": weights,
        "adapters": adapters,
        "after": after,
        "late": engine.executor.ledger.made,
        "refused": refused,
        "found": found,
        "num_sent": len(sent),
        "num_bytes": (num_bytes_of(sent), bytes_sent),
    }


def told(action: Callable[[], object]) -> str:
    """The error that an action raises."""
    try:
        action()
    except ds_ldt.LDTError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def holds(tensor: Tensor, kinds: list[str]) -> bool:
    """Whether any pixel, id or label of the marked batches is in a tensor, as a value."""
    return bool(torch.isin(tensor.double(), secrets(kinds)).any())


def secrets(kinds: list[str]) -> Tensor:
    """Every pixel, id and label of the marked batches, as float64."""
    found = [
        batch[name].double().flatten()
        for batch in batches(kinds, marked=True)
        for name in ("input_ids", "labels", "pixel_values")
        if name in batch
    ]
    values = torch.cat(found).unique()
    return values[values >= IDS_FROM]


def train_many(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several trainings one after the other in the same processes."""
    return [train(case) for case in cases]


def run_example(*words: str) -> dict[str, Any]:
    """What examples/finetune_vl.py does, in a process group that is there already."""
    torch.set_num_threads(1)
    return finetune_vl.finetune(finetune_vl.arguments(list(words)))
