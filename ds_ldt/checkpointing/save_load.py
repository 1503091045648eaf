"""Checkpoints over two sites that share no disk: each site writes its own half, and both commit together.

A checkpoint directory of a site looks as DeepSpeed's does: ``<dir>/latest`` names a tag and ``<dir>/<tag>/`` holds
``layer_XX-model_states.pt`` (weights, XX the global pipeline layer index), ``mp_rank_PP_model_states.pt`` (optimizer,
scheduler and counters of stage PP) and, in half precision and with ZeRO stage 1, one optimizer shard per replica
instead of the optimizer; on the edge also ``data_replica_EE.pt``, where the training data of replica EE is. The site's
manifest says which run and which save the files are of (:mod:`ds_ldt.checkpointing.manifest`), and
:mod:`ds_ldt.checkpointing.directory` how they get in place.

To load, every rank reads and checks all that it needs; only when all ranks have, anything changes.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import logger
from torch import Tensor
from torch.nn import Module

from ds_ldt.checkpointing import data_position
from ds_ldt.checkpointing.choice import Choice, Survey, choose, common_save
from ds_ldt.checkpointing.directory import CheckpointDirectory
from ds_ldt.checkpointing.disk_space import writing
from ds_ldt.checkpointing.layer_files import layer_file_name
from ds_ldt.checkpointing.manifest import CheckpointManifest, tag_problem
from ds_ldt.checkpointing.optimizer_files import shard_file, stage_file
from ds_ldt.checkpointing.optimizer_states import names_of, whole_state
from ds_ldt.checkpointing.restoration import COUNTERS, Restoration, real_optimizer
from ds_ldt.checkpointing.trainer import Trainer
from ds_ldt.comm.collectives import MAX_TEXT_BYTES, bounded, exchange_text, ranks_where
from ds_ldt.comm.identity import draw_identity
from ds_ldt.errors import CheckpointError

_RESERVED = ("optimizer", "lr_scheduler", "module", *COUNTERS)


def save(
    engine: Trainer,
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
        CheckpointError: the tag cannot be used, ``client_state`` could not be read back, or a rank could not write.
            What was there before is there still, and nothing that is partial is left.
    """
    name = str(tag if tag is not None else f"global_step{engine.global_steps}")
    place = CheckpointDirectory(Path(save_dir), engine.site)
    with bounded("save_checkpoint", engine.grid):
        moment = _agree_on_save(engine, name)
        what = f"write checkpoint {name!r} in {place.root}"
        _together(engine, f"prepare {place.staging(name)}", lambda: place.prepare(name), leaders_only=True)
        _settle_tag(engine, place, name)
        _together(
            engine,
            what,
            lambda: _write_rank_files(engine, place.staging(name), client_state, exclude_frozen_parameters),
            undo=lambda: place.discard(name) if engine.grid.is_site_leader else None,
        )
        manifest = _manifest(engine, name, moment, frozen_excluded=exclude_frozen_parameters)
        _commit(engine, place, manifest)
        if save_latest:
            _together(engine, f"point latest to {name!r}", lambda: place.point_latest(name), leaders_only=True)
        _together(engine, f"finish checkpoint {name!r}", lambda: place.finish(name), leaders_only=True)


def load(
    engine: Trainer,
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
        tag: which checkpoint; None for the one that ``latest`` names.
        strict: whether missing or unexpected keys of a layer are an error.
        optimizer_states: whether to restore the optimizer.
        lr_scheduler_states: whether to restore the LR scheduler.
        module_only: restore weights only, and leave the training data where it is.

    Returns:
        ``(path, client_state)``, or ``(None, None)`` with a warning when neither site holds any checkpoint.

    Raises:
        CheckpointError: the sites hold no common checkpoint of that name, it is of another model, a file is missing or
            does not fit. On every rank all is as it was before.
    """
    place = CheckpointDirectory(Path(load_dir), engine.site)
    with bounded("load_checkpoint", engine.grid):
        choice = _choose(engine, place, tag)
        if choice is None:
            logger.warning(f"load_checkpoint: neither site holds a checkpoint; this one has none in {place.root}")
            return None, None
        directory = place.root / choice.tag
        what = f"load checkpoint {choice.tag!r} from {place.root}"
        _together(engine, what, lambda: place.settle(choice.tag, choice.held.save), leaders_only=True)
        restoration = Restoration(
            engine,
            directory,
            strict=strict,
            optimizer=optimizer_states and not module_only,
            scheduler=lr_scheduler_states and not module_only,
            position=not module_only,
        )
        _together(engine, what, restoration.read)
        _together(engine, what, restoration.put_what_can_be_undone, undo=restoration.undo)
        _together(engine, what, restoration.put_tensors)
    engine.module.run = engine.module.run.resuming(restoration.manifest.run)
    return str(directory), {key: v for key, v in restoration.stage_state.items() if key not in _RESERVED}


# -- what the ranks agree on ------------------------------------------------------------------------------------------


def _together(
    engine: Trainer,
    what: str,
    action: Callable[[], object],
    *,
    leaders_only: bool = False,
    undo: Callable[[], object] | None = None,
) -> None:
    """Run an action on every rank (or on the site leaders); if it fails anywhere, undo and fail everywhere."""
    failure: Exception | None = None
    if engine.grid.is_site_leader or not leaders_only:
        try:
            action()
        except Exception as error:  # whatever it is: the other ranks must hear of it, and not wait for their timeout
            failure = error
    failed = ranks_where(failure is not None, engine.grid)
    if failed and undo is not None:
        undo()
    if failure is not None:
        told = str(failure) if isinstance(failure, CheckpointError) else f"{type(failure).__name__}: {failure}"
        raise CheckpointError(f"rank {engine.global_rank} ({engine.site}) could not {what}: {told}") from failure
    if failed:
        raise CheckpointError(
            f"could not {what}: {len(failed)} other rank(s) failed ({', '.join(map(str, failed))}); their messages "
            "say why"
        )


def _agree_on_save(engine: Trainer, name: str) -> dict[str, str]:
    """Let the first rank of the edge draw an identity for a save; every rank has to mean the same tag."""
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    mine = {"tag": name, "save": draw_identity(), "saved_at": now}
    edge, cloud = (json.loads(text) for text in exchange_text(json.dumps(mine), engine.grid))

    def check() -> None:
        problem = tag_problem(name)
        if problem is not None:
            raise CheckpointError(f"tag {name!r}: {problem}. Fix: name the checkpoint by a plain name such as 'best'")
        if edge["tag"] != cloud["tag"]:
            raise CheckpointError(
                f"the edge saves tag {edge['tag']!r} and the cloud {cloud['tag']!r}. Fix: pass the same tag"
            )
        if name != edge["tag"]:
            raise CheckpointError(f"this rank saves tag {name!r}, others {edge['tag']!r}. Fix: pass the same tag")

    _together(engine, "save_checkpoint", check)
    return {"save": edge["save"], "saved_at": edge["saved_at"]}


def _surveys(engine: Trainer, place: CheckpointDirectory, wanted: str | None) -> tuple[Survey, Survey]:
    """What the edge and the cloud hold, on every rank."""
    mine: list[Survey] = []
    _together(engine, f"look into {place.root}", lambda: mine.append(place.survey()), leaders_only=True)
    text = mine[0].as_text(wanted=wanted, max_bytes=MAX_TEXT_BYTES) if mine else "{}"
    edge, cloud = (Survey.from_text(told) for told in exchange_text(text, engine.grid))
    return edge, cloud


def _settle_tag(engine: Trainer, place: CheckpointDirectory, tag: str) -> None:
    """Where an earlier job has ended inside the commit of this tag, keep the save that both sites hold."""
    edge, cloud = _surveys(engine, place, tag)
    held = common_save(edge.tags.get(tag, ()), cloud.tags.get(tag, ()))
    if held is not None:
        what = f"tidy up checkpoint {tag!r} in {place.root}"
        _together(engine, what, lambda: place.settle(tag, held.save), leaders_only=True)


def _choose(engine: Trainer, place: CheckpointDirectory, wanted: str | None) -> Choice | None:
    edge, cloud = _surveys(engine, place, wanted)
    choice = choose(edge, cloud, wanted)
    if choice is not None and choice.newer and wanted is None and engine.grid.is_site_leader:
        logger.warning(
            f"load_checkpoint: loading {choice.tag!r} (step {choice.held.step}), which latest names. Not loaded: "
            f"{', '.join(map(repr, choice.newer))}, which both sites hold and which are of a later step or moment. "
            "Name one with tag= to load it"
        )
    return choice


# -- what a rank writes -----------------------------------------------------------------------------------------------


def _write_rank_files(
    engine: Trainer, staging: Path, client_state: Mapping[str, Any], exclude_frozen_parameters: bool
) -> None:
    _check_client_state(client_state)
    grid, optimizer = engine.grid, real_optimizer(engine)
    names = names_of(engine.module.owned_layers())
    if optimizer is not None and engine.using_sharded_optimizer:
        shard = {"optimizer": {**optimizer.shard(), "names": optimizer.named_sizes(names)}}
        is_bf16 = bool(engine.bfloat16_enabled())
        _write(shard, staging / shard_file(engine.stage_id, grid.data_parallel_id, is_bf16=is_bf16))
    position = data_position.position_of(engine)
    if position is not None:
        _write(position, staging / data_position.file_name(grid.data_parallel_id))
    if grid.data_parallel_id != 0:
        return
    for index, layer in engine.module.owned_layers().items():
        _write(_layer_state(layer, exclude_frozen_parameters), staging / layer_file_name(index))
    is_whole = optimizer is not None and not engine.using_sharded_optimizer
    state = {
        "module": None,
        "optimizer": whole_state(optimizer, names) if is_whole else None,
        "lr_scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
        **{counter: getattr(engine, counter) for counter in COUNTERS},
        **client_state,
    }
    _write(state, staging / stage_file(engine.stage_id))


def _check_client_state(client_state: Mapping[str, Any]) -> None:
    """Refuse what could not be read back: by name, while the script that holds it is still running."""
    if not isinstance(client_state, Mapping):
        raise CheckpointError(f"client_state is of type {type(client_state).__name__}. Fix: pass a dictionary")
    clash = [key for key in client_state if key in _RESERVED]
    if clash:
        raise CheckpointError(f"client_state holds {clash}, which name ds_ldt's own entries. Fix: rename them")
    for key, value in client_state.items():
        buffer = io.BytesIO()
        try:
            torch.save({key: value}, buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except Exception as error:  # pickling runs code of the value's class, which may raise anything
            raise CheckpointError(
                f"client_state[{key!r}] is of type {type(value).__name__}, which could not be read back, as files are "
                "read with weights_only=True. Fix: keep numbers, texts, tensors, and lists, tuples and dicts of them"
            ) from error


def _layer_state(layer: Module, exclude_frozen_parameters: bool) -> dict[str, Tensor]:
    """The weights of a layer, each with storage of its own: a view would take all of its storage to disk."""
    left_out = {name for name, p in layer.named_parameters() if exclude_frozen_parameters and not p.requires_grad}
    return {key: value.detach().cpu().clone() for key, value in layer.state_dict().items() if key not in left_out}


def _write(state: Mapping[str, Any], path: Path) -> None:
    """Write a file durably."""
    with writing(path, _num_bytes(state)), path.open("wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())


def _num_bytes(value: Any) -> int:
    """The bytes of the tensors in a state."""
    if isinstance(value, Tensor):
        return value.nbytes
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return sum(map(_num_bytes, items))


# -- the commit -------------------------------------------------------------------------------------------------------


def _manifest(engine: Trainer, tag: str, moment: Mapping[str, str], *, frozen_excluded: bool) -> CheckpointManifest:
    adapters = engine.module.adapters
    return CheckpointManifest(
        site=engine.site,
        tag=tag,
        run=engine.module.run,
        model=engine.module.fingerprint,
        global_steps=engine.global_steps,
        pipeline_num_layers=engine.module.layout.configured,
        data_parallel_size=engine.grid.num_physical_replicas,
        frozen_excluded=frozen_excluded,
        lora=None if adapters is None else adapters.settings.model_dump(),
        files={},
        **moment,
    )


def _commit(engine: Trainer, place: CheckpointDirectory, manifest: CheckpointManifest) -> None:
    """Put the files of both sites in place; if one site cannot, neither does."""
    made: list[CheckpointManifest] = []

    def commit() -> None:
        made.append(replace(manifest, files=place.content_of_staging(manifest.tag)))
        place.commit(made[0])

    def roll_back() -> None:
        if made:
            place.roll_back(made[0])
        elif engine.grid.is_site_leader:
            place.discard(manifest.tag)

    what = f"commit checkpoint {manifest.tag!r} in {place.root}"
    _together(engine, what, commit, leaders_only=True, undo=roll_back)
