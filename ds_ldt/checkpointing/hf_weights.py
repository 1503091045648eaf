"""Reads the weights of a Hugging Face model directory, one tensor at a time."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ds_ldt.errors import CheckpointError
from ds_ldt.models.weight_names import TIED_HEAD_KEY, KeyMap, is_recomputed

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

Shapes = Mapping[int, Mapping[str, tuple[int, ...]]]


class HFWeights:
    """The safetensors files of one directory, single or sharded.

    Only headers are read before a tensor is asked for, and only of the files that hold the layers asked for.

    Args:
        directory: A Hugging Face model directory.
        keys: Where each weight belongs.

    Attributes:
        files: Hugging Face key -> name of the file that holds it.

    Raises:
        CheckpointError: There are no safetensors files, or the index or a file cannot be read.
    """

    def __init__(self, directory: str | os.PathLike[str], keys: KeyMap) -> None:
        self.directory = Path(directory)
        self.keys = keys
        self._open: dict[str, Any] = {}
        self._names: dict[str, frozenset[str]] = {}
        self.files = self._list_files()
        self._places = self._locate()

    def get(self, layer: int, key: str) -> Tensor:
        """Read one weight of a pipeline layer.

        Raises:
            CheckpointError: It is missing or cannot be read.
        """
        return self._get(self._hf_key(layer, key))

    def layer(self, layer: int) -> dict[str, Tensor]:
        """Read all weights of a pipeline layer: key within the layer -> tensor, dtype as stored."""
        return {key: self.get(at, key) for at, key in self._places if at == layer and not is_recomputed(key)}

    @property
    def places(self) -> list[tuple[int, str]]:
        """Every weight of the model that is here, as (pipeline layer, key within it), sorted.

        Not among them are a tied output layer, which copies the embedding, and what the config determines.
        """
        held = set(self.keys.layers_with_weights)
        return sorted((layer, key) for layer, key in self._places if layer in held and not is_recomputed(key))

    def ends(self, layer: int, key: str, num_bytes: int) -> tuple[list[Tensor], torch.dtype, tuple[int, ...]]:
        """Read the first and the last rows of a weight.

        Args:
            layer: Pipeline layer.
            key: Key within it.
            num_bytes: Least size of either part; a weight that is not larger than two of them comes whole.

        Returns:
            The parts, and dtype and shape of the weight.

        Raises:
            CheckpointError: It cannot be read.
        """
        hf_key = self._hf_key(layer, key)
        view = self._handle(hf_key).get_slice(hf_key)
        shape = tuple(view.get_shape())
        if not shape or 0 in shape:
            whole = self._get(hf_key)
            return [whole], whole.dtype, shape
        row = view[:1]
        rows = -(-num_bytes // row.nbytes)
        parts = [view[:]] if 2 * rows >= shape[0] else [view[:rows], view[shape[0] - rows :]]
        return parts, row.dtype, shape

    def num_bytes(self, layers: Iterable[int]) -> int:
        """Return the size of the weights of pipeline layers, without reading them.

        Raises:
            CheckpointError: A file cannot be read.
        """
        wanted, total = set(layers), 0
        for layer, key in self.places:
            if layer in wanted:
                (first, *_), _, shape = self.ends(layer, key, 1)
                total += math.prod(shape) * first.itemsize
        return total

    def check(self, expected: Shapes) -> None:
        """Compare keys and shapes with those of the model, for the pipeline layers in `expected`.

        Raises:
            CheckpointError: Weights are missing, of another shape, or (in any layer) belong to no layer of the model.
                All of them are listed.
        """
        problems = [
            self._problem_of(layer, key, shape) for layer in expected for key, shape in expected[layer].items()
        ]
        problems += [self._surplus(hf_key, expected) for hf_key in sorted(self.files)]
        raise_listing(f"{self.directory} does not fit the model of its config.json", problems)
        if self.keys.embedding in expected:
            self._check_tied_copy()

    def _hf_key(self, layer: int, key: str) -> str:
        """Return what the directory calls a weight: a family may know several names of it."""
        return self._places.get((layer, key)) or self.keys.hf_key(layer, key)

    def _locate(self) -> dict[tuple[int, str], str]:
        """Return where each weight of the model is found: (pipeline layer, key within it) -> its name here."""
        places: dict[tuple[int, str], str] = {}
        twice: list[str] = []
        for hf_key in sorted(self.files):
            place = self.keys.locate(hf_key)
            if place is not None and places.setdefault(place, hf_key) != hf_key:
                twice.append(f"{places[place]} and {hf_key} are the same weight")
        raise_listing(f"{self.directory} holds weights twice", twice)
        return places

    def _problem_of(self, layer: int, key: str, shape: tuple[int, ...]) -> str | None:
        hf_key = self._hf_key(layer, key)
        if hf_key not in self.files:
            hint = " (set tie_word_embeddings if the embedding serves as output layer)" * (hf_key == TIED_HEAD_KEY)
            return f"missing: {hf_key}{hint}"
        found = tuple(self._handle(hf_key).get_slice(hf_key).get_shape())
        return None if found == shape else f"shape of {hf_key}: {found}, the config asks for {shape}"

    def _surplus(self, hf_key: str, expected: Shapes) -> str | None:
        if is_recomputed(hf_key) or (self.keys.tied and hf_key == TIED_HEAD_KEY):
            return None
        place = self.keys.locate(hf_key)
        if place is None or (place[0] in expected and place[1] not in expected[place[0]]):
            return f"unexpected: {hf_key}"
        return None

    def _check_tied_copy(self) -> None:
        """A tied output layer may be on disk as well, but only as a copy of the embedding."""
        if not self.keys.tied or TIED_HEAD_KEY not in self.files:
            return
        if not torch.equal(self._get(TIED_HEAD_KEY), self.get(self.keys.embedding, "weight")):
            raise CheckpointError(
                f"{self.directory / self.files[TIED_HEAD_KEY]}: {TIED_HEAD_KEY} differs from the embedding, although "
                "config.json says tie_word_embeddings: true. Fix: set it to false if the output layer "
                f"has its own weight, or remove {TIED_HEAD_KEY} if it does not."
            )

    def _list_files(self) -> dict[str, str]:
        """Map every key to its file. Like transformers, prefer the single file to an index beside it."""
        if (self.directory / SINGLE_FILE).is_file():
            self._file(SINGLE_FILE)
            return dict.fromkeys(self._names[SINGLE_FILE], SINGLE_FILE)
        index = self.directory / INDEX_FILE
        if not index.is_file():
            raise CheckpointError(
                f"{self.directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}. Fix: name a model saved as "
                "safetensors (pickled weights can be converted by loading and saving them with transformers)."
            )
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {str(key): str(name) for key, name in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise CheckpointError(f"{index} is not an index of safetensors files: {error}") from error
        outside = sorted({name for name in files.values() if Path(name).name != name})
        raise_listing(f"{index} names files outside its directory", outside)
        return files

    def _get(self, hf_key: str) -> Tensor:
        if hf_key not in self.files:
            raise CheckpointError(f"{self.directory} has no {hf_key}")
        try:
            tensor: Tensor = self._handle(hf_key).get_tensor(hf_key)
        except SafetensorError as error:
            raise CheckpointError(f"{self.directory / self.files[hf_key]}: cannot read {hf_key}: {error}") from error
        return tensor

    def _handle(self, hf_key: str) -> Any:
        name = self.files[hf_key]
        handle = self._file(name)
        if hf_key not in self._names[name]:
            raise CheckpointError(
                f"{self.directory / self.files[hf_key]} has no {hf_key}, though {INDEX_FILE} says so"
            )
        return handle

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self.directory / name
            try:
                handle = safe_open(path, framework="pt", device="cpu")
                self._open[name], self._names[name] = handle, frozenset(handle.keys())
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is missing or damaged: {error}") from error
        return self._open[name]


def raise_listing(heading: str, problems: list[str | None] | list[str]) -> None:
    """Raise one CheckpointError that lists all problems, if there are any (None counts as none)."""
    found = [problem for problem in problems if problem]
    if found:
        raise CheckpointError(f"{heading}:" + "".join(f"\n  {problem}" for problem in found))
