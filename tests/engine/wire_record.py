"""Targets that record everything a process sends, below every layer of ds_ldt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

import ds_ldt
from tests.engine.cases import initialize
from tests.models.tiny import tiny_config

SENDING = ("isend", "send", "all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce", "gather")


@contextmanager
def recorded(sent: list[tuple[str, Tensor]]) -> Iterator[None]:
    """Copy every tensor that goes into a sending function of torch.distributed."""
    with ExitStack() as stack:
        for name in SENDING:
            original = getattr(distributed_c10d, name)

            def record(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
                for value in (*args, *kwargs.values()):
                    if isinstance(value, Tensor):
                        sent.append((name, value.detach().clone()))
                return original(*args, **kwargs)

            stack.enter_context(mock.patch.object(distributed_c10d, name, record))
            stack.enter_context(mock.patch.object(dist, name, record))
        yield


def num_bytes_of(sent: list[tuple[str, Tensor]]) -> int:
    """Bytes of all recorded messages from one rank to another."""
    return sum(tensor.numel() * tensor.element_size() for name, tensor in sent if name == "isend")


def batches() -> tuple[list[dict[str, Tensor]], set[int]]:
    """Eight micro-batches whose ids and labels are numbers that nothing else in a run is; and those numbers."""
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(5000, 9000, (8, 2, 9), generator=generator)
    labels = torch.randint(5000, 9000, (8, 2, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[::2, 0, :3] = 0
    rows = [{"input_ids": i, "labels": y, "attention_mask": m} for i, y, m in zip(ids, labels, mask, strict=True)]
    return rows, set(ids.flatten().tolist()) | set(labels.flatten().tolist())


def train_and_record(settings: dict[str, Any]) -> dict[str, Any]:
    """Train, evaluate and ask a tiny language model; which numbers of samples and answers has this rank sent?"""
    sent: list[tuple[str, Tensor]] = []
    rows, numbers = batches()
    with recorded(sent):
        module = ds_ldt.models.from_pretrained(tiny_config("llama", vocab_size=9000), config=settings)
        engine = initialize(model=module)
        loss_fn = module.loss_fn
        module.loss_fn = lambda outputs, labels: (loss_fn(outputs, labels), {"named": 7777})
        data = iter(rows) if dist.get_rank() == 0 else None
        losses = [engine.train_batch(data).item(), engine.train_batch().item()]
        losses.append(engine.eval_batch(iter(rows) if dist.get_rank() == 0 else None).item())
        prompts = {"input_ids": rows[0]["input_ids"], "attention_mask": rows[0]["attention_mask"]}
        answers = engine.generate(**prompts if dist.get_rank() == 0 else {}, max_new_tokens=4)
    assert (answers is None) == (engine.get_additional_losses() is None) == (engine.site == "cloud")
    numbers |= {7777} if answers is None else {7777, *answers.flatten().tolist()} - set(range(5000))
    values = torch.tensor(sorted(numbers), dtype=torch.float64)
    found = [
        (name, str(tensor.dtype), tuple(tensor.shape))
        for name, tensor in sent
        if bool(torch.isin(tensor.double(), values).any())
    ]
    return {
        "losses": losses,
        "found": found,
        "num_sent": len(sent),
        "num_bytes": (num_bytes_of(sent), engine.transport.bytes_sent.total()),
        "dtypes": sorted({str(tensor.dtype) for _, tensor in sent}),
        "control": _finds_itself(values),
    }


def _finds_itself(values: Tensor) -> bool:
    """The search would see an id that was sent as a float, in the middle of other numbers."""
    hidden = torch.randn(3, 4)
    hidden[1, 2] = float(values[5])
    return bool(torch.isin(hidden.double(), values).any())
