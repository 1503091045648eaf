"""Checkpoints over two sites that share no disk: each site writes its own half, and both commit together.

A checkpoint directory of a site looks as DeepSpeed's does: ``<dir>/latest`` names the newest tag and ``<dir>/<tag>/``
holds ``layer_XX-model_states.pt`` (weights, XX the global pipeline layer index), ``mp_rank_PP_model_states.pt``
(optimizer, scheduler and counters of stage PP) and, in half precision and with ZeRO stage 1, one optimizer shard per
replica instead of the optimizer; on the edge also ``data_replica_EE.pt``, where the training data of replica EE is.
Files are written aside, moved into place once every rank of both sites has written all of its own, and the site's
manifest ``ldt_checkpoint_<site>.json`` comes last: a tag without it is not a checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.utils import logger
from torch.nn import Module

from ds_ldt import data_position
from ds_ldt.errors import CheckpointError
from ds_ldt.reduce import MAX_TEXT_BYTES, bounded, exchange_text, sum_over_sites

if TYPE_CHECKING:
    from ds_ldt.engine import LDTPipelineEngine

FORMAT = 1
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_RESERVED = ("optimizer", "lr_scheduler", "module", *_COUNTERS)


def manifest_name(site: str) -> str:
    """File name of a site's manifest inside a tag directory; its presence commits the tag."""
    return f"ldt_checkpoint_{site}.json"


def save(
    engine: LDTPipelineEngine,
    save_dir: str | os.PathLike[str],
    tag: str | None,
    client_state: Mapping[str, Any],
    *,
    save_latest: bool,
    exclude_frozen_parameters: bool,
) -> None:
    """Write this rank's part of a checkpoint and commit it together with all ranks of both sites.

    Args:
        engine: the engine whose state is saved.
        save_dir: directory of this site; the sites may use the same or different ones.
        tag: name of the checkpoint, the same on every rank; default ``global_step<N>``.
        client_state: the caller's own values, of types that ``torch.load(weights_only=True)`` accepts.
        save_latest: also point ``latest`` to it.
        exclude_frozen_parameters: leave parameters that are not trained out of the layer files.

    Raises:
        CheckpointError: a rank could not write; nothing of an earlier checkpoint is lost.
    """
    name = str(tag if tag is not None else f"global_step{engine.global_steps}")
    root = Path(save_dir)
    staging = root / f".{name}.{engine.site}.partial"
    with bounded("save_checkpoint", engine.grid):
        _agree_on_tag(engine, name)
        _together(engine, f"prepare {staging}", lambda: _prepare(root, staging, engine.site), leaders_only=True)
        _together(
            engine,
            f"write checkpoint {name!r} in {root}",
            lambda: _write_rank_files(engine, staging, client_state, exclude_frozen_parameters),
        )
        _together(
            engine,
            f"commit checkpoint {name!r} in {root}",
            lambda: _commit(engine, staging, root / name, frozen_excluded=exclude_frozen_parameters),
            leaders_only=True,
        )
        if save_latest:
            _together(engine, f"point latest to {name!r}", lambda: _write_latest(root, name), leaders_only=True)


def load(
    engine: LDTPipelineEngine,
    load_dir: str | os.PathLike[str],
    tag: str | None,
    *,
    strict: bool,
    optimizer_states: bool,
    lr_scheduler_states: bool,
    module_only: bool,
) -> tuple[str | None, dict[str, Any] | None]:
    """Load this rank's part of a checkpoint that both sites hold.

    Args:
        engine: the engine to restore.
        load_dir: directory of this site.
        tag: which checkpoint; None for the newest tag that both sites have committed.
        strict: whether missing or unexpected keys of a layer are an error.
        optimizer_states: whether to restore the optimizer.
        lr_scheduler_states: whether to restore the LR scheduler.
        module_only: restore weights only, and leave the training data where it is.

    Returns:
        ``(path, client_state)``, or ``(None, None)`` with a warning when neither site holds any checkpoint.

    Raises:
        CheckpointError: the sites hold no common tag, a file is missing or does not fit the model.
    """
    root = Path(load_dir)
    with bounded("load_checkpoint", engine.grid):
        name = _common_tag(engine, root, tag)
        if name is None:
            logger.warning(f"load_checkpoint: neither site holds a checkpoint; this one has none in {root}")
            return None, None
        loaded: dict[str, Any] = {}
        _together(
            engine,
            f"load checkpoint {name!r} from {root}",
            lambda: loaded.update(
                _read_rank_files(engine, root / name, strict, optimizer=optimizer_states and not module_only)
            ),
        )
        _together(
            engine,
            f"restore checkpoint {name!r} from {root}",
            lambda: _restore(
                engine,
                loaded,
                optimizer=optimizer_states and not module_only,
                scheduler=lr_scheduler_states,
                counters=not module_only,
            ),
        )
        if not module_only:
            what = f"restore the position of the data of checkpoint {name!r}"
            _together(engine, what, lambda: data_position.restore(engine, root / name))
    return str(root / name), {key: value for key, value in loaded.items() if key not in _RESERVED}


def committed_tags(root: Path, site: str) -> dict[str, int]:
    """The tags that a site has committed in a directory, with the training step of each."""
    found = {}
    for manifest in sorted(root.glob(f"*/{manifest_name(site)}")):
        found[manifest.parent.name] = int(json.loads(manifest.read_text())["global_steps"])
    return found


def _agree_on_tag(engine: LDTPipelineEngine, name: str) -> None:
    names = exchange_text(name, engine.grid)
    if len(set(names)) > 1:
        raise CheckpointError(
            f"save_checkpoint: the edge saves tag {names[0]!r} and the cloud {names[1]!r}. Fix: pass the same tag"
        )


def _together(
    engine: LDTPipelineEngine, what: str, action: Callable[[], object], *, leaders_only: bool = False
) -> None:
    """Run an action on every rank (or on the site leaders); if it fails anywhere, fail everywhere."""
    failure: Exception | None = None
    if engine.grid.is_site_leader or not leaders_only:
        try:
            action()
        except (OSError, RuntimeError, ValueError, KeyError, CheckpointError) as error:
            failure = error
    failed = torch.tensor([int(failure is not None)], dtype=torch.int32, device=engine.device)
    count = int(sum_over_sites(failed, engine.grid))
    if failure is not None:
        raise CheckpointError(f"rank {engine.global_rank} ({engine.site}) could not {what}: {failure}") from failure
    if count:
        raise CheckpointError(f"could not {what}: {count} other rank(s) failed; their messages say why")


def _prepare(root: Path, staging: Path, site: str) -> None:
    _put_back(root, site)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)


def _write_rank_files(
    engine: LDTPipelineEngine, staging: Path, client_state: Mapping[str, Any], exclude_frozen_parameters: bool
) -> None:
    clash = [key for key in client_state if key in _RESERVED]
    if clash:
        raise CheckpointError(f"client_state holds {clash}, which name ds_ldt's own entries. Fix: rename them")
    if engine.using_sharded_optimizer:
        shard = {"optimizer": engine.optimizer.shard()}
        _write(shard, staging / _shard_name(engine, engine.grid.data_parallel_id))
    position = data_position.position_of(engine)
    if position is not None:
        _write(position, staging / data_position.file_name(engine.grid.data_parallel_id))
    if engine.grid.data_parallel_id != 0:
        return
    engine.module.save_state_dict(
        str(staging), checkpoint_engine=engine.checkpoint_engine, exclude_frozen_params=exclude_frozen_parameters
    )
    optimizer = engine.optimizer
    state = {
        "module": None,
        "optimizer": optimizer.state_dict() if optimizer is not None and not engine.using_sharded_optimizer else None,
        "lr_scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
        **{counter: getattr(engine, counter) for counter in _COUNTERS},
        **client_state,
    }
    _write(state, staging / f"mp_rank_{engine.stage_id:02d}_model_states.pt")


def _shard_name(engine: LDTPipelineEngine, replica: int) -> str:
    prefix = "bf16_" if engine.bfloat16_enabled() else ""
    return f"{prefix}zero_pp_rank_{replica}_mp_rank_{engine.stage_id:02d}_optim_states.pt"


def _write(state: Mapping[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())


def _commit(engine: LDTPipelineEngine, staging: Path, target: Path, *, frozen_excluded: bool) -> None:
    """Move the files of this site into the tag directory, its manifest last.

    An earlier checkpoint of the same tag is put aside until the new one is complete; :func:`_put_back` returns it if
    this process ends in between.
    """
    target.mkdir(parents=True, exist_ok=True)
    manifest = target / manifest_name(engine.site)
    previous = _aside(target, engine.site)
    if manifest.is_file():
        _move([manifest.name, *json.loads(manifest.read_text())["files"]], target, previous)
    files = sorted(path.name for path in staging.iterdir())
    _move(files, staging, target)
    staging.rmdir()
    content = {
        "format": FORMAT,
        "site": engine.site,
        "global_steps": engine.global_steps,
        "pipeline_num_layers": engine.module.layout.configured,
        "data_parallel_size": engine.grid.num_physical_replicas,
        "frozen_excluded": frozen_excluded,
        "lora": None if engine.module.adapters is None else engine.module.adapters.settings.model_dump(),
        "files": files,
    }
    _replace_text(manifest, json.dumps(content, indent=2) + "\n")
    shutil.rmtree(previous, ignore_errors=True)


def _aside(target: Path, site: str) -> Path:
    return target.with_name(f".{target.name}.{site}.previous")


def _move(names: Iterable[str], source: Path, destination: Path) -> None:
    """Move files; the order matters where the first or the last is a manifest."""
    destination.mkdir(exist_ok=True)
    for name in names:
        os.replace(source / name, destination / name)


def _put_back(root: Path, site: str) -> None:
    """Return checkpoints that were put aside by a commit which did not come to its end."""
    for previous in root.glob(f".*.{site}.previous"):
        target = root / previous.name.removeprefix(".").removesuffix(f".{site}.previous")
        manifest = previous / manifest_name(site)
        if not (target / manifest.name).is_file() and manifest.is_file():
            names = [path.name for path in previous.iterdir() if path != manifest]
            _move([*names, manifest.name], previous, target)
        shutil.rmtree(previous)


def _write_latest(root: Path, name: str) -> None:
    _replace_text(root / "latest", name)


def _replace_text(path: Path, text: str) -> None:
    aside = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _common_tag(engine: LDTPipelineEngine, root: Path, wanted: str | None) -> str | None:
    """The wanted tag if both sites hold it, else the newest that both hold."""
    mine: dict[str, int] = {}
    if engine.grid.is_site_leader:
        _put_back(root, engine.site)
        mine = committed_tags(root, engine.site)
    edge, cloud = (dict(json.loads(text)) for text in exchange_text(_newest(mine), engine.grid))
    if not edge and not cloud and wanted is None:
        return None
    common = {tag: step for tag, step in edge.items() if cloud.get(tag) == step and wanted in (None, tag)}
    if not common:
        asked = f"tag {wanted!r}" if wanted is not None else "a common tag"
        raise CheckpointError(
            f"load_checkpoint: no committed checkpoint with {asked} on both sites: the edge holds {sorted(edge)}, "
            f"the cloud holds {sorted(cloud)}. Fix: name a tag that both hold, or the directory where it is"
        )
    return max(common, key=lambda tag: (common[tag], tag))


def _newest(tags: Mapping[str, int]) -> str:
    """As many of the newest tags as fit into a text that the sites exchange."""
    kept = dict(sorted(tags.items(), key=lambda item: item[1]))
    while len(json.dumps(kept).encode()) > MAX_TEXT_BYTES:
        del kept[next(iter(kept))]
    return json.dumps(kept)


def _read_rank_files(engine: LDTPipelineEngine, directory: Path, strict: bool, *, optimizer: bool) -> dict[str, Any]:
    """Load the layers of this rank into the module; return its other state."""
    manifest = json.loads((directory / manifest_name(engine.site)).read_text())
    frozen_excluded = bool(manifest.get("frozen_excluded", False))
    for index, layer in engine.module.owned_layers().items():
        path = directory / f"layer_{index:02d}-model_states.pt"
        if not path.is_file() and not layer.state_dict():
            continue
        _load_layer(layer, path, strict=strict, frozen_excluded=frozen_excluded)
    state = _read(directory / f"mp_rank_{engine.stage_id:02d}_model_states.pt")
    if optimizer and engine.optimizer is not None:
        num_shards = int(manifest["data_parallel_size"])
        state["optimizer"] = _optimizer_state(engine, directory, state["optimizer"], num_shards=num_shards)
    return state


def _optimizer_state(engine: LDTPipelineEngine, directory: Path, whole: Any, *, num_shards: int) -> Any:
    """The optimizer state for this rank, cut anew where the stage had another number of replicas when it was saved."""
    is_sharded = any(directory.glob(f"*zero_pp_rank_*_mp_rank_{engine.stage_id:02d}_optim_states.pt"))
    if is_sharded != engine.using_sharded_optimizer and (is_sharded or whole is not None):
        raise CheckpointError(
            f"the optimizer state in {directory} is {'sharded' if is_sharded else 'whole'}, while this run keeps it "
            f"{'whole' if is_sharded else 'sharded'} (fp16, bf16 and ZeRO stage 1 shard it). Fix: load with the "
            "precision and the ZeRO stage that it was saved with, or with load_optimizer_states=False"
        )
    if not engine.using_sharded_optimizer:
        return whole
    mine = engine.grid.data_parallel_id
    if num_shards == engine.grid.num_physical_replicas:
        return _read(directory / _shard_name(engine, mine))["optimizer"]
    shards = [_read(directory / _shard_name(engine, replica))["optimizer"] for replica in range(num_shards)]
    return engine.optimizer.recut(shards)


def _load_layer(layer: Module, path: Path, *, strict: bool, frozen_excluded: bool) -> None:
    """Load a layer; frozen parameters may be missing exactly where the checkpoint was saved without them."""
    missing, unexpected = layer.load_state_dict(_read(path), strict=False)
    if not strict:
        return
    frozen = {name for name, parameter in layer.named_parameters() if not parameter.requires_grad}
    wrong = [f"missing: {key}" for key in missing if not (frozen_excluded and key in frozen)]
    wrong += [f"unexpected: {key}" for key in unexpected]
    if wrong:
        raise CheckpointError(
            f"{path} does not fit the layer: {', '.join(wrong)}. Fix: give ldt.lora and ldt.freeze as they were when "
            "it was saved, or pass load_module_strict=False"
        )


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _restore(
    engine: LDTPipelineEngine, state: Mapping[str, Any], *, optimizer: bool, scheduler: bool, counters: bool
) -> None:
    if engine.using_sharded_optimizer:
        engine.optimizer.refresh_fp32_params()
    if optimizer and engine.optimizer is not None and state["optimizer"] is not None:
        if engine.using_sharded_optimizer:
            engine.optimizer.load_shard(state["optimizer"])
        else:
            engine.optimizer.load_state_dict(state["optimizer"])
    if scheduler and counters and engine.lr_scheduler is not None and state["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
    if counters:
        for counter in _COUNTERS:
            setattr(engine, counter, state[counter])
