"""Checkpoints of two sites that trained adapters -> an adapter directory of PEFT, or a model with it merged in."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ds_ldt.checkpoint_manifest import manifest_name
from ds_ldt.conversion.directories import EDGE_ONLY_FILES, StagedDirectory, check_apart, copy_files
from ds_ldt.conversion.to_hf import is_model_file, open_sites
from ds_ldt.errors import CheckpointError
from ds_ldt.lora import ADAPTER, lora_config
from ds_ldt.lora_settings import LoraSettings
from ds_ldt.models.family import ModelFamily
from ds_ldt.models.hf_files import raise_listing
from ds_ldt.models.layer_files import LayerFiles, Site, shape_problems
from ds_ldt.models.registry import checked_config, family_of, read_hf_config

PathLike = str | os.PathLike[str]

_ADAPTER_FILE = re.compile(r"adapter_config\.json|adapter_model\.safetensors|README\.md")


def export_adapter(
    edge: PathLike, cloud: PathLike, out: PathLike, *, hf_config: PathLike, overwrite: bool = False
) -> list[str]:
    """Join the adapters of both sites into a directory that `PeftModel.from_pretrained` loads.

    PEFT itself writes it: adapter_config.json and adapter_model.safetensors.

    Args:
        edge: Checkpoint directory of the edge, or a tag directory in it.
        cloud: The same for the cloud.
        out: Directory to write.
        hf_config: Directory of the base model; its config.json is read and its path is recorded in the adapter.
        overwrite: Replace an adapter that `out` holds.

    Returns:
        The names of the adapter's tensors.

    Raises:
        CheckpointError: The checkpoints hold no adapters, not the same ones, or not all of them; or `out` may not be
            written.
        ConfigError: The base model is not supported.
    """
    from peft import get_peft_model

    sites = open_sites(Path(edge), Path(cloud))
    settings = _settings_of(sites)
    check_apart([Path(out), Path(edge), Path(hf_config)])
    check_apart([Path(out), Path(cloud)])
    model_config = checked_config(read_hf_config(hf_config))
    family = family_of(model_config)
    with torch.device("meta"):
        base: PreTrainedModel = family.model_class(model_config)
    base.name_or_path = str(hf_config)
    model: Any = get_peft_model(base, lora_config(settings, task_type="CAUSAL_LM"), ADAPTER)
    state = _trained_state(sites, family, model)
    with StagedDirectory(Path(out), is_ours=_is_ours, overwrite=overwrite) as staged:
        model.save_pretrained(staged.path, state_dict=state, save_embedding_layers=False)
        staged.commit()
    return sorted(state)


def merge_adapter(base: PathLike, adapter: PathLike, out: PathLike, *, overwrite: bool = False) -> None:
    """Write a base model with an adapter merged into its weights: a plain Hugging Face directory.

    The whole model is in memory meanwhile. PEFT merges, in the dtype of the base model.

    Args:
        base: Directory of the base model.
        adapter: Directory written by `export_adapter`.
        out: Directory to write.
        overwrite: Replace a model that `out` holds.

    Raises:
        CheckpointError: `out` may not be written, or the adapter cannot be merged.
        ConfigError: The base model is not supported.
    """
    from peft import PeftModel

    check_apart([Path(base), Path(adapter), Path(out)])
    family = family_of(checked_config(read_hf_config(base)))
    with StagedDirectory(Path(out), is_ours=is_model_file, overwrite=overwrite) as staged:
        model = family.model_class.from_pretrained(base, dtype="auto", local_files_only=True)
        try:
            merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
        except RuntimeError as error:  # e.g. a bias of an adapter over a layer that has none
            raise CheckpointError(f"PEFT cannot merge {adapter}: {error} Fix: use it as an adapter") from error
        merged.save_pretrained(staged.path)
        copy_files(EDGE_ONLY_FILES, [Path(base)], staged.path)
        staged.commit()


def _settings_of(sites: dict[Site, LayerFiles]) -> LoraSettings:
    """Read from the manifests of both sites which adapters were trained."""
    found: dict[Site, Any] = {}
    for site, files in sites.items():
        path = files.directory / manifest_name(site)
        try:
            found[site] = json.loads(path.read_text(encoding="utf-8")).get("lora")
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} is missing or damaged: {error}. Fix: name a checkpoint directory"
            ) from error
        if found[site] is None:
            raise CheckpointError(f"{path} says of no adapters: it was saved without ldt.lora. Fix: export the model")
    if found["edge"] != found["cloud"]:
        raise CheckpointError("The sites' checkpoints are of different adapters. Fix: name those of one run")
    return LoraSettings.model_validate(found["edge"])


def _trained_state(sites: dict[Site, LayerFiles], family: ModelFamily, model: Any) -> dict[str, Tensor]:
    """Collect what was trained under the names of the whole PEFT model; frozen weights are left where they are."""
    keys, prefix = family.key_map(model.config), "base_model.model."
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    frozen |= {name for name, _ in model.named_buffers()}
    state: dict[str, Tensor] = {}
    for files in sites.values():
        for layer in files.paths:
            if layer < keys.num_layers:
                named = {f"{prefix}{keys.module_name(layer)}.{key}": t for key, t in files.read(layer).items()}
                state |= {name: tensor for name, tensor in named.items() if name not in frozen}
    places = " and ".join(dict.fromkeys(str(files.directory) for files in sites.values()))
    raise_listing(f"{places} do not hold the adapters of this model", shape_problems(shapes, state))
    return state


def _is_ours(_: Path, name: str) -> bool:
    return _ADAPTER_FILE.fullmatch(name) is not None
