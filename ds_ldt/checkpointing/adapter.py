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

from ds_ldt.checkpointing.further_files import further_files
from ds_ldt.checkpointing.halves import Halves, check_adapter_base, open_halves
from ds_ldt.checkpointing.hf_weights import raise_listing
from ds_ldt.checkpointing.layer_files import shape_problems, write_text
from ds_ldt.checkpointing.manifest import CheckpointManifest
from ds_ldt.checkpointing.shards import DEFAULT_MAX_SHARD_SIZE, parse_size
from ds_ldt.checkpointing.staging import StagedDirectory, check_apart
from ds_ldt.checkpointing.to_hf import staged_model
from ds_ldt.comm.identity import ModelFingerprint
from ds_ldt.config.lora import LoraSettings
from ds_ldt.errors import CheckpointError
from ds_ldt.models.family import ModelFamily
from ds_ldt.models.lora import ADAPTER, lora_config
from ds_ldt.models.registry import checked_config, family_of, read_hf_config

PathLike = str | os.PathLike[str]

ORIGIN_FILE = "ds_ldt_adapter.json"
"""Beside PEFT's own files: on which model the adapter was trained, by which run."""

_ORIGIN_FORMAT = 1
_ADAPTER_FILE = re.compile(r"adapter_config\.json|adapter_model\.safetensors|README\.md|ds_ldt_adapter\.json")


def export_adapter(
    edge: PathLike, cloud: PathLike, out: PathLike, *, hf_config: PathLike, overwrite: bool = False
) -> list[str]:
    """Join the adapters of both sites into a directory that `PeftModel.from_pretrained` loads.

    PEFT itself writes it: adapter_config.json and adapter_model.safetensors. ds_ldt_adapter.json beside them says on
    which model it was trained, and by which run.

    Args:
        edge: Checkpoint directory of the edge, or a tag directory in it.
        cloud: The same for the cloud.
        out: Directory to write.
        hf_config: Directory of the base model. Its config.json, and its weights if it holds any, are compared with
            what the adapter was trained on. Its absolute path is recorded in the adapter.
        overwrite: Replace an adapter that `out` holds.

    Returns:
        The names of the adapter's tensors.

    Raises:
        CheckpointError: The checkpoints hold no adapters, or not all of them, or are not of one save; they were
            trained on another base model; or `out` may not be written, or has no space.
        ConfigError: The base model is not supported.
    """
    from peft import get_peft_model

    halves = open_halves(Path(edge), Path(cloud))
    checkpoint = _checkpoint_of(halves)
    check_apart([Path(out), Path(edge), Path(hf_config)])
    check_apart([Path(out), Path(cloud)])
    model_config = checked_config(read_hf_config(hf_config))
    halves.check_base(model_config, Path(hf_config))
    family = family_of(model_config)
    with torch.device("meta"):
        base: PreTrainedModel = family.model_class(model_config)
    base.name_or_path = str(Path(hf_config).absolute())
    settings = LoraSettings.model_validate(checkpoint.lora)
    model: Any = get_peft_model(base, lora_config(settings, task_type="CAUSAL_LM"), ADAPTER)
    state = _trained_state(halves, family, model)
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    with StagedDirectory(Path(out), is_ours=_is_ours, overwrite=overwrite, needed_bytes=num_bytes) as staged:
        model.save_pretrained(staged.path, state_dict=state, save_embedding_layers=False)
        write_text(staged.path / ORIGIN_FILE, json.dumps(_origin(checkpoint), indent=2) + "\n")
        staged.commit()
    return sorted(state)


def merge_adapter(
    base: PathLike,
    adapter: PathLike,
    out: PathLike,
    *,
    max_shard_size: str | int = DEFAULT_MAX_SHARD_SIZE,
    overwrite: bool = False,
) -> None:
    """Write a base model with an adapter merged into its weights: a plain Hugging Face directory.

    The whole model is in memory meanwhile. PEFT merges, in the dtype of the base model.

    Args:
        base: Directory of the base model.
        adapter: Directory written by `export_adapter`, or another one of PEFT.
        out: Directory to write.
        max_shard_size: Largest file of weights, e.g. "5GB".
        overwrite: Replace a model that `out` holds.

    Raises:
        CheckpointError: `out` may not be written, or has no space; the adapter cannot be merged, or was trained on
            another model.
        ConfigError: The base model or the size is not supported.
    """
    from peft import PeftModel

    shard_size = parse_size(max_shard_size)
    check_apart([Path(base), Path(adapter), Path(out)])
    config = checked_config(read_hf_config(base))
    trained_on = _trained_on(Path(adapter))
    if trained_on is not None:
        check_adapter_base(trained_on, Path(adapter), config, Path(base))
    beside = further_files([Path(base)])
    num_bytes = sum(path.stat().st_size for path in Path(base).glob("*.safetensors"))
    with staged_model(Path(out), beside, overwrite=overwrite, num_bytes=num_bytes) as staged:
        model = family_of(config).model_class.from_pretrained(base, dtype="auto", local_files_only=True)
        try:
            merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
        except RuntimeError as error:  # e.g. a bias of an adapter over a layer that has none
            raise CheckpointError(f"PEFT cannot merge {adapter}: {error} Fix: use it as an adapter") from error
        merged.save_pretrained(staged.path, max_shard_size=shard_size)
        beside.log()
        beside.copy(staged.path)
        staged.commit()


def _checkpoint_of(halves: Halves) -> CheckpointManifest:
    """Return the manifest of a checkpoint of adapters."""
    if halves.checkpoint is None or halves.checkpoint.lora is None:
        what = "converted layers" if halves.checkpoint is None else f"checkpoint {halves.checkpoint}"
        raise CheckpointError(
            f"{halves.places} hold no adapters: {what}, saved without ldt.lora. Fix: export the model, without "
            "--adapter and --merge; or name the checkpoint directories of a run with ldt.lora"
        )
    return halves.checkpoint


def _origin(checkpoint: CheckpointManifest) -> dict[str, Any]:
    """Return the content of `ORIGIN_FILE`."""
    content = checkpoint.as_json()
    return {"format": _ORIGIN_FORMAT} | {key: content[key] for key in ("model", "run", "save", "tag", "global_steps")}


def _trained_on(adapter: Path) -> ModelFingerprint | None:
    """Return the model on which an adapter was trained; None if that is not known, as of adapters made elsewhere."""
    path = adapter / ORIGIN_FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _ORIGIN_FORMAT:
            raise CheckpointError(f"{path} has format {content['format']}, expected {_ORIGIN_FORMAT}")
        return None if content["model"] is None else ModelFingerprint.from_json(content["model"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}. Fix: export the adapter again") from error


def _trained_state(halves: Halves, family: ModelFamily, model: Any) -> dict[str, Tensor]:
    """Collect what was trained under the names of the whole PEFT model; frozen weights are left where they are."""
    keys, prefix = family.key_map(model.config), "base_model.model."
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    frozen |= {name for name, _ in model.named_buffers()}
    state: dict[str, Tensor] = {}
    for files in halves.both:
        for layer in files.paths:
            if layer < keys.num_layers:
                named = {f"{prefix}{keys.module_name(layer)}.{key}": t for key, t in files.read(layer).items()}
                state |= {name: tensor for name, tensor in named.items() if name not in frozen}
    raise_listing(f"{halves.places} do not hold the adapters of this model", shape_problems(shapes, state))
    return state


def _is_ours(_: Path, name: str) -> bool:
    return _ADAPTER_FILE.fullmatch(name) is not None
