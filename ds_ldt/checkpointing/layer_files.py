"""Layer files: one file of weights for each pipeline layer, in a directory for each site.

    layer_00-model_states.pt      torch.save of the layer's state dict; DeepSpeed's own naming, the number being the
    layer_01-model_states.pt      global pipeline layer index
    manifest.json                 what the files hold (format version 2, see `Manifest`)
    config.json                   the model's Hugging Face config

A checkpoint written by the engine has the same layer files in `<directory>/<tag>/`, `<directory>/latest` naming the
tag, and in place of manifest.json one of its own (:mod:`ds_ldt.checkpointing.manifest`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_ldt.checkpointing.manifest import LATEST_FILE, CheckpointManifest, check_content, manifest_name
from ds_ldt.comm.identity import ModelFingerprint
from ds_ldt.comm.wire import dtype_name
from ds_ldt.errors import CheckpointError
from ds_ldt.topology.ranks import Site

MANIFEST_FILE = "manifest.json"
FORMAT = "ds_ldt layer files"
VERSION = 2

State = dict[str, Tensor]

_MAX_NAME_BYTES = 240
_LAYER_FILE = re.compile(r"layer_(\d{2,})(?:-model_(\d{2,}))?-model_states\.pt")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEntry:
    """What the manifest says of one layer file.

    Attributes:
        file: Name of the file.
        tensors: Key within the layer -> `{"shape": [...], "dtype": "bfloat16"}`.
        sha256: `digest` of the weights.
    """

    file: str
    tensors: dict[str, dict[str, Any]]
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of `manifest.json`.

    Attributes:
        site: The site that the directory is for.
        family: Name of the model family.
        pipeline_num_layers: The V x P matrix by which layers were given to sites, or one for each modality.
        num_layers: Number of pipeline layers of the whole model.
        tied: The output layer is tied to the embedding and has no file.
        model: The model that was converted; the same in the manifests of both sites.
        layers: Pipeline layer index -> entry, only the layers of this site.
        other_files: Further files in the directory that belong to it (config.json, tokenizer files).
        format: Always `FORMAT`.
        version: `VERSION` of the format.
    """

    site: Site
    family: str
    pipeline_num_layers: list[list[int]] | dict[str, list[list[int]]]
    num_layers: int
    tied: bool
    model: ModelFingerprint
    layers: dict[int, LayerEntry]
    other_files: list[str] = field(default_factory=list)
    format: str = FORMAT
    version: int = VERSION

    def write(self, directory: Path) -> None:
        """Write `manifest.json`."""
        content = asdict(self) | {"model": self.model.as_json()}
        write_text(directory / MANIFEST_FILE, json.dumps(content, indent=2) + "\n")

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read `manifest.json`.

        Raises:
            CheckpointError: It is missing, is not one of ours or is of another version.
        """
        path = directory / MANIFEST_FILE
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.get("format") != FORMAT:
                raise CheckpointError(f"{path} does not describe {FORMAT}")
            if content.get("version") != VERSION:
                raise CheckpointError(
                    f"{path} has format version {content.get('version')}, expected {VERSION}. Fix: convert the model "
                    "again."
                )
            if "model" not in content:
                raise CheckpointError(
                    f"{path} does not say of which model the layers are: an earlier ds_ldt wrote it. Fix: convert the "
                    "model again."
                )
            layers = {int(layer): LayerEntry(**entry) for layer, entry in content.pop("layers").items()}
            model = ModelFingerprint.from_json(content.pop("model"))
            return cls(layers=layers, model=model, **content)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path} is missing or damaged: {error}") from error


class LayerFiles:
    """The layer files of one directory: as converted, or as the engine saved them. A manifest says which they are.

    Args:
        directory: The directory, or a checkpoint directory whose `latest` names the tag to read.
        site: Whose half of a checkpoint is meant; both sites may have saved into one directory. None: the directory
            has to be a converted one.

    Attributes:
        directory: Where the layer files are.
        tag: The tag that `latest` names, None where no `latest` was followed.
        manifest: The manifest of a converted directory, else None.
        checkpoint: The manifest of a checkpoint, else None.
        paths: Pipeline layer index -> path, of the files that the manifest names.

    Raises:
        CheckpointError: There are no layer files, or no manifest says what they are, or the manifest and the files
            disagree, or they are split over tensor-parallel ranks.
    """

    def __init__(self, directory: str | os.PathLike[str], site: Site | None = None) -> None:
        self.tag = _latest_tag(Path(directory))
        self.directory = Path(directory, self.tag or "")
        self.manifest: Manifest | None = None
        self.checkpoint: CheckpointManifest | None = None
        if (self.directory / MANIFEST_FILE).is_file():
            self.manifest = Manifest.read(self.directory)
            self.paths = _layer_paths(self.directory, (path.name for path in self.directory.iterdir()))
            self._check_manifest(self.manifest)
        elif site is not None and (self.directory / manifest_name(site)).is_file():
            self.checkpoint = CheckpointManifest.read(self.directory, site)
            self.paths = _layer_paths(self.directory, self.checkpoint.files)
        else:
            raise CheckpointError(_not_described(self.directory, site))

    @property
    def model(self) -> ModelFingerprint | None:
        """The model before its training; None if that is not known (a model that was given as a list of layers)."""
        if self.manifest is not None:
            return self.manifest.model
        return None if self.checkpoint is None else self.checkpoint.model

    @property
    def num_bytes(self) -> int:
        """Size of the layer files.

        Raises:
            CheckpointError: One is missing.
        """
        missing = [str(path) for path in self.paths.values() if not path.is_file()]
        if missing:
            raise CheckpointError(f"missing, though its manifest names it: {', '.join(missing)}. Fix: copy it again")
        return sum(path.stat().st_size for path in self.paths.values())

    def read(self, layer: int) -> State:
        """Read one layer and check it against the manifest.

        Raises:
            CheckpointError: The file is damaged or is not the one that the manifest describes.
        """
        path = self.paths[layer]
        if self.checkpoint is not None:
            check_content(self.directory, self.checkpoint.files, path.name)
            _check_sums(path)
        state = read_layer(path)
        if self.manifest is not None:
            self._check_described(path, state, self.manifest.layers[layer])
        return state

    def _check_described(self, path: Path, state: State, entry: LayerEntry) -> None:
        found = describe(path.name, state)
        if found.tensors == entry.tensors and found.sha256 == entry.sha256:
            return
        keys = found.tensors.keys() | entry.tensors.keys()
        changed = sorted(key for key in keys if found.tensors.get(key) != entry.tensors.get(key))
        what = f"shape, dtype or presence of {', '.join(changed)}" if changed else "the values of its tensors"
        raise CheckpointError(
            f"{path} is not the file that {MANIFEST_FILE} describes: {what} changed since it was written. "
            "Fix: copy the directory again, or convert the model again."
        )

    def _check_manifest(self, manifest: Manifest) -> None:
        missing = [manifest.layers[layer].file for layer in sorted(manifest.layers.keys() - self.paths.keys())]
        surplus = [self.paths[layer].name for layer in sorted(self.paths.keys() - manifest.layers.keys())]
        problems = [f"missing: {name}" for name in missing] + [f"not in the manifest: {name}" for name in surplus]
        if problems:
            listing = "".join(f"\n  {problem}" for problem in problems)
            raise CheckpointError(f"{self.directory} does not hold what its {MANIFEST_FILE} describes:{listing}")


def layer_file_name(layer: int) -> str:
    """Return the name of a layer's file, as DeepSpeed's `PipelineModule.ckpt_layer_path` gives it."""
    return f"layer_{layer:02d}-model_states.pt"


def is_layer_file(name: str) -> bool:
    """Tell whether a file name is that of a layer file."""
    return _LAYER_FILE.fullmatch(name) is not None


def write_layer(directory: Path, layer: int, state: Mapping[str, Tensor]) -> LayerEntry:
    """Write one layer file, durably, and return its manifest entry. dtypes and values are kept as they are."""
    path = directory / layer_file_name(layer)
    # A tensor that is a view would take its whole storage with it to disk.
    own = {key: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for key, tensor in state.items()}
    with path.open("wb") as stream:
        torch.save(own, stream)
        stream.flush()
        os.fsync(stream.fileno())
    return describe(path.name, own)


def read_layer(path: Path) -> State:
    """Read one layer file; nothing but tensors is unpickled.

    Raises:
        CheckpointError: It is missing or damaged, or holds something other than named tensors.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zip, pickle and OS errors alike mean that the file cannot be used
        reason = str(error).strip().splitlines()
        raise CheckpointError(
            f"{path} is missing or damaged: {reason[0] if reason else type(error).__name__}"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"{path} does not hold the state dict of a layer")
    return dict(state)


def describe(file: str, state: Mapping[str, Tensor]) -> LayerEntry:
    """Return the manifest entry of a layer's weights."""
    tensors = {
        key: {"shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype)} for key, tensor in sorted(state.items())
    }
    return LayerEntry(file=file, tensors=tensors, sha256=digest(state))


def digest(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a layer's weights, independent of how `torch.save` packs them.

    Hashed are, for each key in sorted order: "<key> <dtype> <dim>x<dim>..." and a newline in UTF-8, then the values in
    row-major order as the machine stores them (little-endian).
    """
    hashed = hashlib.sha256()
    for key, tensor in sorted(state.items()):
        shape = "x".join(map(str, tensor.shape))
        hashed.update(f"{key} {dtype_name(tensor.dtype)} {shape}\n".encode())
        if tensor.numel():
            hashed.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def shape_problems(expected: Mapping[str, tuple[int, ...]], state: Mapping[str, Tensor]) -> list[str]:
    """Return, one text each, what is missing from, of another shape in, or unexpected in a layer's weights."""
    problems = [f"missing: {key}" for key in expected if key not in state]
    problems += [
        f"shape of {key}: {tuple(tensor.shape)}, the model has {expected[key]}"
        for key, tensor in state.items()
        if key in expected and tuple(tensor.shape) != expected[key]
    ]
    return problems + [f"unexpected: {key}" for key in state if key not in expected]


def write_text(path: Path, text: str) -> None:
    """Write a text file durably."""
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def read_latest(directory: Path) -> str | None:
    """Return the tag that `latest` names, None without that file; what somebody made of it may be no tag."""
    path = directory / LATEST_FILE
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return file.read(_MAX_NAME_BYTES).decode("utf-8-sig", errors="replace").strip()


def _latest_tag(directory: Path) -> str | None:
    """Return the tag that `latest` names where an engine has written checkpoints."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory")
    latest = directory / LATEST_FILE
    tag = None if (directory / MANIFEST_FILE).is_file() else read_latest(directory)
    if tag is None:
        return None
    if not tag or Path(tag).name != tag or not (directory / tag).is_dir():
        raise CheckpointError(f"{latest} names the tag {tag!r}, but there is no directory of that name beside it")
    return tag


def _layer_paths(directory: Path, names: Iterable[str]) -> dict[int, Path]:
    paths: dict[int, Path] = {}
    for name in sorted(names):
        match, path = _LAYER_FILE.fullmatch(name), directory / name
        if match is None:
            continue
        if int(match[2] or 0) != 0:
            raise CheckpointError(
                f"{path} belongs to tensor-parallel rank {int(match[2])}. Layer files that are split over "
                "tensor-parallel ranks cannot be read yet. Fix: save with tensor_parallel_size 1."
            )
        other = paths.setdefault(int(match[1]), path)
        if other != path:
            raise CheckpointError(f"{other} and {path} are both layer {int(match[1])}. Fix: remove the stale one.")
    return dict(sorted(paths.items()))


def _not_described(directory: Path, site: Site | None) -> str:
    """Say what is wrong with a directory in which no manifest says what its layer files are."""
    other: Site = "cloud" if site == "edge" else "edge"
    if site is not None and (directory / manifest_name(other)).is_file():
        return (
            f"{directory} holds the {other}'s half of a checkpoint only, but was given as the {site}'s. Fix: swap the "
            f"directories, or name the one that the {site} saved into."
        )
    tags = sorted(path.parent.name for path in directory.glob(f"[!.]*/{manifest_name(site or other)}"))
    if tags:
        return (
            f"{directory} has no file `{LATEST_FILE}` that names a tag. Fix: name the directory of one of its tags: "
            f"{', '.join(tags)}."
        )
    if any(is_layer_file(path.name) for path in directory.iterdir()):
        described = MANIFEST_FILE if site is None else f"{MANIFEST_FILE} or {manifest_name(site)}"
        return (
            f"{directory} holds layer files and no {described} that says of which model they are and when they were "
            "saved. Fix: copy the directory again, whole."
        )
    return (
        f"{directory} holds no layer files (layer_XX-model_states.pt). Fix: name a directory written by "
        f"ds-ldt convert, or a checkpoint directory of the engine with its `{LATEST_FILE}` file."
    )


def _check_sums(path: Path) -> None:
    """Compare the content of a file of `torch.save` with its checksums, which torch does not look at."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (OSError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} is missing or damaged: {error}") from error
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: {damaged} in it has another checksum. Fix: copy it again")
