"""Tiny models on disk, and what is in directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tests.models.tiny import tiny_config, tiny_model

MATRIX = [[1, 2], [1, 0]]
THREE_CHUNKS = [[1, 1], [1, 1], [1, 0]]
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "ldt": {"pipeline_num_layers": MATRIX},
}


def save_model(
    directory: Path,
    *,
    family: str = "qwen2",
    dtype: torch.dtype = torch.float32,
    sharded: bool = False,
    **changes: Any,
) -> Path:
    """Save a tiny model of 4 decoder layers as transformers does, with something like a tokenizer beside it."""
    model = tiny_model(tiny_config(family, **{"num_hidden_layers": 4, **changes})).to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(directory, max_shard_size="10KB" if sharded else "1GB")
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    (directory / "tokenizer_config.json").write_text("{}")
    return directory


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """All tensors of the safetensors files in a directory."""
    found: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            assert file.metadata()["format"] == "pt"
            assert not found.keys() & file.keys()
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    return found


def rewrite(directory: Path, change: Any) -> None:
    """Change the tensors of a single-file model in place; `change` gets the dictionary."""
    tensors = tensors_of(directory)
    change(tensors)
    save_file({key: t.contiguous() for key, t in tensors.items()}, directory / "model.safetensors", {"format": "pt"})


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file in place."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def assert_same_tensors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Same keys, dtypes, shapes and bits."""
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[key].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), key
