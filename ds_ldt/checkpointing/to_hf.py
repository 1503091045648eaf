"""Layer files of two sites -> Hugging Face directory."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Set
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ds_ldt.checkpointing.further_files import FurtherFiles, further_files, is_further_file
from ds_ldt.checkpointing.halves import Halves, open_halves
from ds_ldt.checkpointing.hf_weights import INDEX_FILE, raise_listing
from ds_ldt.checkpointing.layer_files import LayerFiles, layer_file_name, shape_problems, write_text
from ds_ldt.checkpointing.shards import DEFAULT_MAX_SHARD_SIZE, ShardWriter, parse_size
from ds_ldt.checkpointing.staging import StagedDirectory, check_apart
from ds_ldt.comm.wire import dtype_name
from ds_ldt.errors import CheckpointError
from ds_ldt.models.family import ModelFamily
from ds_ldt.models.registry import CONFIG_FILE, checked_config, family_of, read_hf_config
from ds_ldt.models.weight_names import KeyMap

PathLike = str | os.PathLike[str]

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_DTYPE_KEYS = ("dtype", "torch_dtype")


def convert_to_hf(
    edge: PathLike,
    cloud: PathLike,
    out: PathLike,
    *,
    hf_config: PathLike | None = None,
    max_shard_size: str | int = DEFAULT_MAX_SHARD_SIZE,
    overwrite: bool = False,
) -> list[str]:
    """Join the layer files of both sites into a model that transformers loads.

    Values and dtypes are kept. A tied output layer has no file and none is written; config.json keeps its flag.

    Args:
        edge: Layer files of the edge: a converted directory, or a checkpoint directory of the engine.
        cloud: The same for the cloud. It may be the same checkpoint directory, if both sites saved into one.
        out: Directory to write.
        hf_config: Directory of the model that was trained: its config.json is compared with what was trained, and what
            lies beside its weights is copied. By default the edge's directory.
        max_shard_size: Largest file of weights, e.g. "5GB". One such file at most is held in memory.
        overwrite: Replace a model that `out` holds.

    Returns:
        The names of the files with weights.

    Raises:
        ConfigError: The model or the size is not supported.
        CheckpointError: Layers or weights are missing, surplus, damaged or of the wrong shape; the directories are not
            of one model or one save, hold adapters, or are of another model than config.json; or `out` may not be
            written, or has no space.
    """
    shard_size = parse_size(max_shard_size)
    halves = open_halves(Path(edge), Path(cloud))
    _check_whole(halves)
    config_directory = halves.edge.directory if hf_config is None else Path(hf_config)
    if hf_config is None and not (config_directory / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{config_directory} has no {CONFIG_FILE}. Fix: name the original model with --hf-config."
        )
    check_apart([Path(out), config_directory])
    check_apart([Path(out), Path(edge)])
    check_apart([Path(out), Path(cloud)])
    config = checked_config(read_hf_config(config_directory))
    halves.check_config(config, config_directory)
    family = family_of(config)
    holders = _assign(halves, family.key_map(config))
    beside = _beside_weights(halves, config_directory)

    with staged_model(Path(out), beside, overwrite=overwrite, num_bytes=halves.num_bytes) as staged:
        writer = ShardWriter(staged.path, shard_size)
        dtypes = _write_weights(writer, holders, family, config)
        names = writer.finish()
        _write_config(config_directory / CONFIG_FILE, staged.path / CONFIG_FILE, dtypes)
        beside.log()
        beside.copy(staged.path)
        staged.commit()
    return names


def _beside_weights(halves: Halves, config_directory: Path) -> FurtherFiles:
    """What goes beside the weights: from the model named, then from the edge's converted layers."""
    return further_files([config_directory, *([halves.edge.directory] if halves.edge.manifest is not None else [])])


def staged_model(target: Path, beside: FurtherFiles, *, overwrite: bool, num_bytes: int) -> StagedDirectory:
    """Return a directory aside for a Hugging Face model.

    Args:
        target: The directory to write.
        beside: The files that will be put beside the weights.
        overwrite: Replace a model that the target holds.
        num_bytes: Size of the weights.
    """

    def is_ours(directory: Path, name: str) -> bool:
        is_weights = name in (CONFIG_FILE, INDEX_FILE) or _WEIGHTS.fullmatch(name) is not None
        return is_weights or name in beside.paths or is_further_file(directory, name)

    return StagedDirectory(target, is_ours=is_ours, overwrite=overwrite, needed_bytes=num_bytes + beside.num_bytes)


def _check_whole(halves: Halves) -> None:
    """Check that the halves are of a whole model, and not of what was trained of it alone."""
    checkpoint = halves.checkpoint
    if checkpoint is not None and checkpoint.lora is not None:
        raise CheckpointError(
            f"{halves.places} hold adapters (ldt.lora), not a whole model: checkpoint {checkpoint}. Fix: give "
            "--adapter to export the adapter for PEFT, or --merge for the model in --hf-config with it merged in"
        )


def _assign(halves: Halves, keys: KeyMap) -> dict[int, LayerFiles]:
    """Return which directory holds each layer; every layer must be in exactly one, and fit the config."""
    problems: list[str] = []
    holders: dict[int, LayerFiles] = {}
    for files in halves.both:
        for layer, path in files.paths.items():
            if layer >= keys.num_layers:
                problems.append(f"unexpected: {path} (the model has pipeline layers 0 to {keys.num_layers - 1})")
            elif holders.setdefault(layer, files).paths[layer] != path:
                problems.append(f"twice: {holders[layer].paths[layer]} and {path}")
    for layer in keys.layers_with_weights:
        if layer not in holders:
            problems.append(f"missing: {layer_file_name(layer)}, which holds {keys.prefix(layer)}*")
    note = f" (the tied output layer {keys.head} needs no file)" if keys.tied else ""
    raise_listing(f"{halves.places} do not make one whole model{note}", problems)
    return holders


def _write_weights(
    writer: ShardWriter, holders: dict[int, LayerFiles], family: ModelFamily, config: PreTrainedConfig
) -> set[torch.dtype]:
    """Pass all layers to the writer, one at a time; return the floating dtypes seen."""
    keys, shapes = family.key_map(config), family.expected_shapes(config)
    dtypes: set[torch.dtype] = set()
    problems: list[str] = []
    for layer, files in sorted(holders.items()):
        state = files.read(layer)
        if layer not in shapes:
            problems += _tied_copy_problems(files.paths[layer], state, holders[keys.embedding].read(keys.embedding))
            continue
        _check_frozen(files, layer, shapes[layer].keys() - state.keys())
        problems += [f"{files.paths[layer]}: {problem}" for problem in shape_problems(shapes[layer], state)]
        for key, tensor in state.items():
            dtypes.add(tensor.dtype)
            if not problems:
                writer.add(keys.hf_key(layer, key), tensor)
    raise_listing("The layer files do not fit the model of config.json", problems)
    return {dtype for dtype in dtypes if dtype.is_floating_point}


def _check_frozen(files: LayerFiles, layer: int, missing: Set[str]) -> None:
    """Say it in one line if weights are missing because they were left out when the checkpoint was saved."""
    if missing and files.checkpoint is not None and files.checkpoint.frozen_excluded:
        raise CheckpointError(
            f"{files.paths[layer]} lacks {len(missing)} weights: checkpoint {files.checkpoint} was saved without "
            "frozen parameters and is no whole model. Fix: save with exclude_frozen_parameters=False"
        )


def _tied_copy_problems(path: Path, state: dict[str, Tensor], embedding: dict[str, Tensor]) -> list[str]:
    """A file of a tied output layer is superfluous; it must at least be a copy of the embedding."""
    weight = state.get("weight")
    if state.keys() == {"weight"} and weight is not None and torch.equal(weight, embedding["weight"]):
        return []
    return [f"{path} differs from the embedding, although config.json says tie_word_embeddings: true"]


def _write_config(source: Path, destination: Path, dtypes: set[torch.dtype]) -> None:
    """Copy config.json, byte for byte unless the weights changed dtype: transformers would cast them on loading."""
    text = source.read_text(encoding="utf-8")
    if len(dtypes) == 1:
        name = dtype_name(next(iter(dtypes)))
        content = json.loads(text)
        stale = [key for key in _DTYPE_KEYS if content.get(key) not in (None, name)]
        if stale:
            text = json.dumps({**content, **dict.fromkeys(stale, name)}, indent=2) + "\n"
    write_text(destination, text)
