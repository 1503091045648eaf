"""Layer files of two sites -> Hugging Face directory."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ds_ldt.conversion.directories import EDGE_ONLY_FILES, StagedDirectory, check_apart, copy_files
from ds_ldt.conversion.shards import DEFAULT_MAX_SHARD_SIZE, ShardWriter, parse_size
from ds_ldt.errors import CheckpointError
from ds_ldt.models.family import ModelFamily
from ds_ldt.models.hf_files import INDEX_FILE, raise_listing
from ds_ldt.models.keys import KeyMap
from ds_ldt.models.layer_files import LayerFiles, Site, layer_file_name, shape_problems, write_text
from ds_ldt.models.registry import CONFIG_FILE, checked_config, family_of, read_hf_config

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
        hf_config: Directory with config.json, and the tokenizer if the edge's directory has none. By default the
            edge's directory.
        max_shard_size: Largest file of weights, e.g. "5GB". One such file at most is held in memory.
        overwrite: Replace a model that `out` holds.

    Returns:
        The names of the files with weights.

    Raises:
        ConfigError: The model or the size is not supported.
        CheckpointError: Layers or weights are missing, surplus, damaged or of the wrong shape, or the directories do
            not belong together; or `out` may not be written.
    """
    shard_size = parse_size(max_shard_size)
    sites = open_sites(Path(edge), Path(cloud))
    config_directory = sites["edge"].directory if hf_config is None else Path(hf_config)
    if hf_config is None and not (config_directory / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{config_directory} has no {CONFIG_FILE}. Fix: name the original model with --hf-config."
        )
    check_apart([Path(out), config_directory])
    check_apart([Path(out), Path(edge)])
    check_apart([Path(out), Path(cloud)])
    config = checked_config(read_hf_config(config_directory))
    family = family_of(config)
    holders = _assign(sites, family, family.key_map(config))

    with StagedDirectory(Path(out), is_ours=is_model_file, overwrite=overwrite) as staged:
        writer = ShardWriter(staged.path, shard_size)
        dtypes = _write_weights(writer, holders, family, config)
        names = writer.finish()
        _write_config(config_directory / CONFIG_FILE, staged.path / CONFIG_FILE, dtypes)
        copy_files(EDGE_ONLY_FILES, [config_directory, sites["edge"].directory], staged.path)
        staged.commit()
    return names


def open_sites(edge: Path, cloud: Path) -> dict[Site, LayerFiles]:
    """Open both directories and check that they belong together."""
    sites: dict[Site, LayerFiles] = {"edge": LayerFiles(edge), "cloud": LayerFiles(cloud)}
    for site, files in sites.items():
        if files.manifest is not None and files.manifest.site != site:
            raise CheckpointError(
                f"{files.directory} holds the layers of the {files.manifest.site}, but was given as the {site}'s. "
                "Fix: swap the directories."
            )
    tags = {site: files.tag for site, files in sites.items() if files.tag is not None}
    if len(set(tags.values())) > 1:
        raise CheckpointError(
            f"The sites' checkpoints are of different moments: the edge's latest tag is {tags['edge']!r}, the cloud's "
            f"{tags['cloud']!r}. Fix: name the directories of one tag that both have, e.g. {sites['edge'].directory}."
        )
    return sites


def _assign(sites: dict[Site, LayerFiles], family: ModelFamily, keys: KeyMap) -> dict[int, LayerFiles]:
    """Return which directory holds each layer; every layer must be in exactly one, and fit the config."""
    problems: list[str] = []
    holders: dict[int, LayerFiles] = {}
    for files in sites.values():
        manifest = files.manifest
        found = (manifest.family, manifest.num_layers, manifest.tied) if manifest else None
        if found not in (None, (family.name, keys.num_layers, keys.tied)):
            problems.append(
                f"{files.directory} was converted from another model: family, pipeline layers and tied embedding are "
                f"{found}, the config asks for {(family.name, keys.num_layers, keys.tied)}"
            )
        for layer, path in files.paths.items():
            if layer >= keys.num_layers:
                problems.append(f"unexpected: {path} (the model has pipeline layers 0 to {keys.num_layers - 1})")
            elif holders.setdefault(layer, files).paths[layer] != path:
                problems.append(f"twice: {holders[layer].paths[layer]} and {path}")
    for layer in keys.layers_with_weights:
        if layer not in holders:
            problems.append(f"missing: {layer_file_name(layer)}, which holds {keys.prefix(layer)}*")
    places = " and ".join(dict.fromkeys(str(files.directory) for files in sites.values()))
    note = f" (the tied output layer {keys.head} needs no file)" if keys.tied else ""
    raise_listing(f"{places} do not make one whole model{note}", problems)
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
        problems += [f"{files.paths[layer]}: {problem}" for problem in shape_problems(shapes[layer], state)]
        for key, tensor in state.items():
            dtypes.add(tensor.dtype)
            if not problems:
                writer.add(keys.hf_key(layer, key), tensor)
    raise_listing("The layer files do not fit the model of config.json", problems)
    return {dtype for dtype in dtypes if dtype.is_floating_point}


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
        name = str(next(iter(dtypes))).removeprefix("torch.")
        content = json.loads(text)
        stale = [key for key in _DTYPE_KEYS if content.get(key) not in (None, name)]
        if stale:
            text = json.dumps({**content, **dict.fromkeys(stale, name)}, indent=2) + "\n"
    write_text(destination, text)


def is_model_file(_: Path, name: str) -> bool:
    """Tell whether a file is part of a Hugging Face model, and so may be replaced by one."""
    return name in (CONFIG_FILE, INDEX_FILE, *EDGE_ONLY_FILES) or _WEIGHTS.fullmatch(name) is not None
