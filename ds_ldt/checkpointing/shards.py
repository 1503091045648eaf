"""Writes tensors as a Hugging Face model: one safetensors file, or shards with an index."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from ds_ldt.checkpointing.hf_weights import INDEX_FILE, SINGLE_FILE
from ds_ldt.checkpointing.layer_files import write_text
from ds_ldt.errors import ConfigError

DEFAULT_MAX_SHARD_SIZE = "5GB"

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class ShardWriter:
    """Collects tensors and writes a shard whenever the next tensor would make it too large.

    At most one shard is held in memory. A tensor larger than a shard gets one to itself.

    Args:
        directory: An existing directory.
        max_shard_size: Bytes of tensor data per file.
    """

    def __init__(self, directory: Path, max_shard_size: int) -> None:
        self._directory = directory
        self._max_shard_size = max_shard_size
        self._pending: dict[str, Tensor] = {}
        self._pending_size = 0
        self._shards: list[list[str]] = []
        self._total_size = 0

    def add(self, key: str, tensor: Tensor) -> None:
        """Add one tensor; its values are written by a later call or by `finish`."""
        size = tensor.nbytes
        if self._pending and self._pending_size + size > self._max_shard_size:
            self._flush()
        shares = tensor.untyped_storage().nbytes() != size
        self._pending[key] = tensor.clone() if shares else tensor.contiguous()
        self._pending_size += size
        self._total_size += size

    def finish(self) -> list[str]:
        """Write what is left, give the files their final names and write the index if there are several.

        Returns:
            The names of the files with weights.
        """
        self._flush()
        count = len(self._shards)
        names = (
            [SINGLE_FILE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        )
        for number, name in enumerate(names):
            self._part(number).rename(self._directory / name)
        if count > 1:
            weight_map = {key: name for name, keys in zip(names, self._shards, strict=True) for key in keys}
            index = {"metadata": {"total_size": self._total_size}, "weight_map": dict(sorted(weight_map.items()))}
            write_text(self._directory / INDEX_FILE, json.dumps(index, indent=2) + "\n")
        return names

    def _flush(self) -> None:
        path = self._part(len(self._shards))
        # transformers refuses files whose metadata does not name the framework.
        save_file(self._pending, path, metadata={"format": "pt"})
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
        self._shards.append(list(self._pending))
        self._pending, self._pending_size = {}, 0

    def _part(self, number: int) -> Path:
        return self._directory / f"part-{number:05d}"


def parse_size(text: str | int) -> int:
    """Return a size in bytes: a number, or a text such as "5GB" or "200MB" (decimal units, as Hugging Face uses).

    Raises:
        ConfigError: It is not a positive size.
    """
    match = _SIZE.fullmatch(str(text).strip())
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise ConfigError.of("--max-shard-size", found=text, expected='a size such as "5GB"', fix="correct it")
    return size
