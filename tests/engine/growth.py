"""What a rank holds after some steps and after many more, each of them with shapes that were never seen before."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

import ds_ldt
from tests.toy import layer_classes


def held_after(settings: dict[str, Any], steps: list[int], remembered: int) -> dict[str, list[Any]]:
    """After each number of steps: live tensors and their bytes, tracked objects, and resident MB."""
    with mock.patch("ds_ldt.runtime.shape_inference.REMEMBERED", remembered):
        module = ds_ldt.LDTPipelineModule(
            [LayerSpec(layer) for layer in layer_classes(4)], settings, loss_fn=nn.functional.mse_loss
        )
        engine, _, _, _ = ds_ldt.initialize(model=module)
    batches = _ever_longer() if dist.get_rank() == 0 else None
    found: dict[str, list[Any]] = {"tensors": [], "bytes": [], "objects": [], "resident_mb": []}
    for step in range(1, max(steps) + 1):
        engine.train_batch(batches)
        if step in steps:
            tensors, size, objects = _alive()
            found["tensors"].append(tensors)
            found["bytes"].append(size)
            found["objects"].append(objects)
            found["resident_mb"].append(_resident_mb())
    engine.destroy()
    return found


def _ever_longer() -> Iterator[tuple[Tensor, Tensor]]:
    length = 1
    while True:
        yield torch.ones(1, length, 4), torch.zeros(1, length, 3)
        length += 1


def _alive() -> tuple[int, int, int]:
    gc.collect()
    everything = gc.get_objects()
    tensors = [thing for thing in everything if type(thing) in (Tensor, nn.Parameter)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return len(tensors), sum(storages.values()), len(everything)


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6
