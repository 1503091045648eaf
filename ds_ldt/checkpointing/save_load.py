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

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
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
from ds_ldt.checkpointing.manifest import MAX_TAG_BYTES, CheckpointManifest, tag_problem
from ds_ldt.checkpointing.optimizer_files import shard_file, stage_file
from ds_ldt.checkpointing.optimizer_states import names_of, whole_state
from ds_ldt.checkpointing.restoration import COUNTERS, Restoration, real_optimizer
from ds_ldt.checkpointing.saved_values import check_client_state, num_bytes, readable
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
        moment = _agree_on_save(engine, name, save_latest=save_latest)
        what = f"write checkpoint {name!r} in {place.root}"
        discard = partial(place.discard, name) if engine.grid.is_site_leader else None
        prepare = f"prepare {place.staging(name)}"
        _together(engine, prepare, lambda: place.prepare(name), leaders_only=True, undo=discard)
        _settle_tag(engine, place, name)
        _together(
            engine,
            what,
            lambda: _write_rank_files(engine, place.staging(name), client_state, exclude_frozen_parameters),
            undo=discard,
        )
        manifest = _manifest(engine, name, moment, frozen_excluded=exclude_frozen_parameters)
        _commit(engine, place, manifest)
        _together(engine, f"finish checkpoint {name!r}", lambda: place.finish(name), leaders_only=True)
        if save_latest:
            _together(engine, f"point latest to {name!r}", lambda: place.point_latest(name), leaders_only=True)


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
    wanted = None if tag is None else str(tag)
    asked = {
        "tag": wanted,
        "load_module_strict": bool(strict),
        "load_optimizer_states": bool(optimizer_states),
        "load_lr_scheduler_states": bool(lr_scheduler_states),
        "load_module_only": bool(module_only),
    }
    with bounded("load_checkpoint", engine.grid):
        _agree_on_call(engine, "load_checkpoint", asked)
        choice = _choose(engine, place, wanted)
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
        try:
            undo()
        except Exception as error:  # what failed first is what has to be told
            logger.error(f"ds_ldt: could not take back what was done to {what}: {type(error).__name__}: {error}")
    if failure is not None:
        told = str(failure) if isinstance(failure, CheckpointError) else f"{type(failure).__name__}: {failure}"
        raise CheckpointError(f"rank {engine.global_rank} ({engine.site}) could not {what}: {told}") from failure
    if failed:
        raise CheckpointError(
            f"could not {what}: {len(failed)} other rank(s) failed ({', '.join(map(str, failed))}); their messages "
            "say why"
        )


def _agree_on_save(engine: Trainer, name: str, *, save_latest: bool) -> dict[str, str]:
    """Let the first rank of the edge draw an identity for a save; every rank has to mean the same tag."""
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    drawn = {"save": draw_identity(), "saved_at": now}
    edge = _agree_on_call(engine, "save_checkpoint", {"tag": name, "save_latest": bool(save_latest)}, drawn)
    return {key: edge[key] for key in drawn}


def _agree_on_call(
    engine: Trainer, call: str, arguments: Mapping[str, Any], drawn: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Check that every rank passes the same; return what the first rank of the edge passes and draws.

    Otherwise one site would load or save another checkpoint than the other, or wait for it.
    """
    tag = arguments["tag"]
    mine = {**arguments, "tag": tag if tag is None else tag[: MAX_TAG_BYTES + 1]}  # a longer one is refused
    edge, cloud = (json.loads(text) for text in exchange_text(json.dumps({**mine, **(drawn or {})}), engine.grid))

    def check() -> None:
        problem = tag_problem(tag) if tag is not None else None
        if problem is not None:
            raise CheckpointError(
                f"tag {mine['tag']!r}: {problem}. Fix: name the checkpoint by a plain name such as 'best'"
            )
        for key, value in mine.items():
            does = f"{call.removesuffix('_checkpoint')}s" if key == "tag" else "passes"
            if edge[key] != cloud[key]:
                raise CheckpointError(
                    f"the edge {does} {key} {edge[key]!r} and the cloud {cloud[key]!r}. Fix: pass the same {key}"
                )
            if value != edge[key]:
                raise CheckpointError(
                    f"this rank {does} {key} {value!r}, others {edge[key]!r}. Fix: pass the same {key}"
                )

    _together(engine, call, check)
    return dict(edge)


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
    choice = choose(edge, cloud, wanted)  # the same on every rank, an error too
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
    check_client_state(client_state, _RESERVED)
    grid, optimizer, scheduler = engine.grid, real_optimizer(engine), engine.lr_scheduler
    names = names_of(engine.module.owned_layers())
    if optimizer is not None and engine.using_sharded_optimizer:
        kept = readable(optimizer.shard(), optimizer.optimizer)
        shard = {"optimizer": {**kept, "names": optimizer.named_sizes(names)}}
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
        "optimizer": readable(whole_state(optimizer, names), optimizer) if is_whole else None,
        "lr_scheduler": None if scheduler is None else readable(scheduler.state_dict(), scheduler),
        **{counter: getattr(engine, counter) for counter in COUNTERS},
        **client_state,
    }
    _write(state, staging / stage_file(engine.stage_id))


def _layer_state(layer: Module, exclude_frozen_parameters: bool) -> dict[str, Tensor]:
    """The weights of a layer, each with storage of its own: a view would take all of its storage to disk."""
    left_out = {name for name, p in layer.named_parameters() if exclude_frozen_parameters and not p.requires_grad}
    state = {key: value for key, value in layer.state_dict().items() if key not in left_out}
    others = [key for key, value in state.items() if not isinstance(value, Tensor)]
    if others:
        raise CheckpointError(
            f"a layer of {type(layer).__name__} keeps {', '.join(others)}, which is no tensor, and layer files hold "
            "tensors. Fix: let get_extra_state() return a tensor, or pass the value in client_state"
        )
    return {key: value.detach().cpu().clone() for key, value in state.items()}


def _write(state: Mapping[str, Any], path: Path) -> None:
    """Write a file durably."""
    with writing(path, num_bytes(state)), path.open("wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())


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
