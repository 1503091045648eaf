"""Targets about checkpoints that must not be loaded, or that go wrong while they are saved or loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import ds_ldt
from ds_ldt.checkpointing.directory import CheckpointDirectory
from ds_ldt.checkpointing.optimizer_files import stage_file
from tests.engine.cases import toy_engine, weights_of
from tests.engine.checkpoints import batch_fn_of, site_directory


def refusal(action: Callable[[], Any]) -> str:
    """What a call is refused with; the ranks go on together."""
    try:
        action()
    except ds_ldt.CheckpointError as error:
        dist.barrier()
        return str(error)
    dist.barrier()
    return "no error"


def state_of(engine: ds_ldt.LDTPipelineEngine) -> dict[str, Any]:
    """All that loading a checkpoint may change on this rank."""
    sharded = engine.using_sharded_optimizer
    optimizer = engine.optimizer.shard() if sharded else engine.optimizer.state_dict()
    return {
        "weights": weights_of(engine),
        "optimizer": _cloned(optimizer),
        "scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
        "lr": engine.get_lr(),
        "counters": (engine.global_steps, engine.global_samples, engine.skipped_steps),
        "data": engine.training_dataloader.state_dict() if engine.site == "edge" else None,
        "run": engine.module.run,
    }


def _cloned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _cloned(item) for key, item in value.items()}
    return [_cloned(item) for item in value] if isinstance(value, list | tuple) else value


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, tensors included."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def trained(settings: dict[str, Any], steps: int, **options: Any) -> ds_ldt.LDTPipelineEngine:
    """An engine that has trained."""
    engine = toy_engine(settings, batch_fn=batch_fn_of(settings), **options)
    for _ in range(steps):
        engine.train_batch()
    return engine


# -- other layouts ----------------------------------------------------------------------------------------------------


def save_and_go_on(settings: dict[str, Any], root: str, steps: int) -> dict[str, Any]:
    """Train, save, train on: losses and weights of the second half."""
    engine = trained(settings, steps)
    engine.save_checkpoint(site_directory(root))
    found = {"now": weights_of(engine), "losses": [engine.train_batch().item() for _ in range(steps)]}
    return found | {"later": weights_of(engine)}


def load_and_go_on(
    settings: dict[str, Any], root: str, steps: int, together: bool, options: dict[str, Any]
) -> dict[str, Any]:
    """Load what another layout has saved, and train on."""
    engine = trained(settings, 1, base_seed=99)
    before = state_of(engine)
    told = refusal(lambda: engine.load_checkpoint(root if together else site_directory(root), **options))
    if told != "no error":
        return {"told": told, "unchanged": same(before, state_of(engine))}
    found = {"now": weights_of(engine), "losses": [engine.train_batch().item() for _ in range(steps)]}
    return found | {"later": weights_of(engine)}


# -- halves that do not belong together -------------------------------------------------------------------------------


def mixed_halves(settings: dict[str, Any], root: str) -> dict[str, Any]:
    """Two runs save under one tag; a third loads halves of both, then that of one, and saves."""
    runs = []
    for name, seed in (("A", 1), ("B", 2)):
        engine = trained(settings, 2, base_seed=seed)
        engine.save_checkpoint(site_directory(f"{root}/{name}"), tag="best")
        runs.append(engine.module.run.run)
        engine.destroy()
    third = trained(settings, 1)
    before = state_of(third)
    mine = "A" if third.site == "edge" else "B"
    told = {"mixed": refusal(lambda: third.load_checkpoint(site_directory(f"{root}/{mine}")))}
    told["mixed by tag"] = refusal(lambda: third.load_checkpoint(site_directory(f"{root}/{mine}"), tag="best"))
    told["unchanged"] = same(before, state_of(third))
    third.load_checkpoint(site_directory(f"{root}/A"))
    third.save_checkpoint(site_directory(f"{root}/C"))
    manifest = Path(site_directory(f"{root}/C"), "global_step2", f"ldt_checkpoint_{third.site}.json").read_text()
    return told | {"runs": runs, "manifest": json.loads(manifest), "third": third.module.run.run}


def abandoned(settings: dict[str, Any], root: str) -> dict[str, Any]:
    """A run goes far, another begins anew in the same directory: what is loaded, and what is logged."""
    mine = site_directory(root)
    first = trained(settings, 3)
    first.save_checkpoint(mine)
    first.destroy()
    second = trained(settings, 1, base_seed=5)
    second.save_checkpoint(mine)
    wanted = weights_of(second)
    second.train_batch()
    logged: list[str] = []
    with patch("ds_ldt.checkpointing.save_load.logger.warning", logged.append):
        path, _ = second.load_checkpoint(mine)
    return {
        "path": str(path),
        "step": second.global_steps,
        "same": same(wanted, weights_of(second)),
        "logged": logged,
        "leads": second.grid.is_site_leader,
    }


# -- loads that fail --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Something that is wrong on one rank only.

    Attributes:
        rank: where.
        do: what makes it so, given the engine and the directory of the tag.
    """

    rank: int
    do: Callable[[ds_ldt.LDTPipelineEngine, Path], None]


def _remove(pattern: str) -> Callable[[ds_ldt.LDTPipelineEngine, Path], None]:
    return lambda engine, tag: next(tag.glob(pattern)).unlink()


def _cut(pattern: str) -> Callable[[ds_ldt.LDTPipelineEngine, Path], None]:
    def cut(engine: ds_ldt.LDTPipelineEngine, tag: Path) -> None:
        path = next(tag.glob(pattern))
        path.write_bytes(path.read_bytes()[:-100])

    return cut


def _rewrite(pattern: str, change: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
    def rewrite(engine: ds_ldt.LDTPipelineEngine, tag: Path) -> None:
        path = next(tag.glob(pattern))
        state = torch.load(path, weights_only=True)
        change(state)
        torch.save(state, path)

    return rewrite


def _break(owner: str, method: str) -> Callable[[ds_ldt.LDTPipelineEngine, Path], None]:
    def refuse(*args: Any) -> None:
        raise ArithmeticError(f"{owner} takes no state")

    return lambda engine, tag: setattr(getattr(engine, owner), method, refuse)


DAMAGES = {
    "layer missing": Damage(rank=1, do=_remove("layer_02*")),
    "layer cut short": Damage(rank=1, do=_cut("layer_02*")),
    "layer of another shape": Damage(
        rank=1, do=_rewrite("layer_02*", lambda state: state.update({"linear.bias": torch.zeros(3)}))
    ),
    "layer of another save": Damage(rank=1, do=_rewrite("layer_02*", lambda state: state["linear.bias"].add_(1))),
    "stage file cut short": Damage(rank=1, do=_cut("mp_rank_*")),
    "stage file missing": Damage(rank=0, do=_remove("mp_rank_*")),
    "position of the data cut short": Damage(rank=0, do=_cut("data_replica_*")),
    "scheduler refuses": Damage(rank=1, do=_break("lr_scheduler", "load_state_dict")),
    "data refuses": Damage(rank=0, do=_break("training_dataloader", "load_state_dict")),
}
SHARDED_DAMAGES = {
    "layer missing": DAMAGES["layer missing"],
    "shard missing": Damage(rank=1, do=_remove("*zero_pp_rank_0*")),
    "shard cut short": Damage(rank=1, do=_cut("*zero_pp_rank_0*")),
    "scheduler refuses": DAMAGES["scheduler refuses"],
}


def damaged(settings: dict[str, Any], root: str, sharded: bool) -> dict[str, tuple[str, bool]]:
    """For each damage: what every rank is told, and whether all is as it was before."""
    saved = trained(settings, 2)
    saved.save_checkpoint(site_directory(root), tag="whole")
    saved.destroy()
    found = {}
    for name, damage in (SHARDED_DAMAGES if sharded else DAMAGES).items():
        engine = trained(settings, 1, base_seed=9)
        mine = Path(site_directory(f"{root}/{name}"))
        shutil.copytree(site_directory(root), mine)
        if dist.get_rank() == damage.rank:
            damage.do(engine, mine / "whole")
        dist.barrier()
        before = state_of(engine)
        told = refusal(lambda engine=engine, mine=mine: engine.load_checkpoint(str(mine)))
        found[name] = (told, same(before, state_of(engine)))
        engine.destroy()
    return found


def settings_differ(saved: dict[str, Any], loaded: dict[str, Any], root: str) -> tuple[str, bool]:
    """Load into a run with other settings of the optimizer's form: the refusal, and whether nothing has changed."""
    first = trained(saved, 2)
    first.save_checkpoint(site_directory(root))
    first.destroy()
    engine = trained(loaded, 1, base_seed=9)
    before = state_of(engine)
    told = refusal(lambda: engine.load_checkpoint(site_directory(root)))
    return told, same(before, state_of(engine))


# -- saves that fail --------------------------------------------------------------------------------------------------


class Unreadable:
    """Of a class that `weights_only` does not read."""


class Unpicklable:
    """Cannot even be written."""

    def __reduce__(self) -> Any:
        raise EOFError("no way")


CLIENT_STATES: dict[str, Callable[[], Any]] = {
    "a path": lambda: Path("x"),
    "an object": Unreadable,
    "a nested object": lambda: {"deep": [Unreadable()]},
    "a function": lambda: print,
    "a closed lambda": lambda: lambda: 0,
    "an error while writing": Unpicklable,
}
FINE = {"epoch": 3, "best": 0.25, "name": "x", "list": [1, (2.0, None)], "tensor": torch.arange(3), "flag": True}
TAGS = ("run1/best", "../x", "..", "", "latest", ".x")


def refused_saves(settings: dict[str, Any], root: str) -> dict[str, Any]:
    """Values and tags that are refused, on one rank or on all, and what is there afterwards."""
    engine = trained(settings, 1)
    mine = site_directory(root)
    told = {}
    for name, make in CLIENT_STATES.items():
        state = {"fine": 1, "odd": make()} if engine.site == "cloud" else FINE
        told[name] = refusal(lambda state=state: engine.save_checkpoint(mine, tag="t", client_state=state))
    for tag in TAGS:
        told[f"tag {tag}"] = refusal(lambda tag=tag: engine.save_checkpoint(mine, tag=tag))
    there = [str(path) for path in Path(root).rglob("*") if path.is_file()]
    there += [path.name for path in Path(mine).iterdir()]
    engine.save_checkpoint(mine, client_state=FINE)
    _, client_state = engine.load_checkpoint(mine)
    return {"told": told, "there": there, "client_state": same(client_state, FINE)}


@contextmanager
def ended_before(step: str) -> Iterator[None]:
    """Leave out a step of a save on this rank, as a job does that ends before it."""
    with patch.object(CheckpointDirectory, step, lambda self, *args: None):
        yield


def one_site_ends(settings: dict[str, Any], root: str, behind: str) -> dict[str, Any]:
    """A tag is saved again and one site ends before it commits: what both load afterwards, twice; and a third save."""
    engine = trained(settings, 1)
    mine = Path(site_directory(root))
    engine.save_checkpoint(str(mine), tag="t")
    first, old = weights_of(engine), Path(f"{mine}.old")
    shutil.copytree(mine, old)
    engine.train_batch()
    with ended_before("finish"):
        engine.save_checkpoint(str(mine), tag="t")
    if engine.site == behind:
        shutil.rmtree(mine)
        old.rename(mine)
    dist.barrier()
    engine.train_batch()
    found: dict[str, Any] = {"loaded": [], "same": []}
    for _ in range(2):
        engine.load_checkpoint(str(mine))
        found["loaded"].append(engine.global_steps)
        found["same"].append(same(first, weights_of(engine)))
    for _ in range(2):
        engine.train_batch()
    engine.save_checkpoint(str(mine), tag="t")
    engine.load_checkpoint(str(mine))
    return found | {"last": engine.global_steps, "hidden": [p.name for p in mine.iterdir() if p.name[0] == "."]}


def one_site_cannot_commit(settings: dict[str, Any], root: str, site: str) -> dict[str, Any]:
    """A tag is saved again and one site fails to commit: both have the earlier save at once."""
    engine = trained(settings, 1)
    mine = Path(site_directory(root))
    engine.save_checkpoint(str(mine), tag="t")
    before = {path.name: path.stat().st_mtime_ns for path in (mine / "t").iterdir()}
    engine.train_batch()

    def fail(self: Any, manifest: Any) -> None:
        raise OSError(5, "Input/output error")

    with patch.object(CheckpointDirectory, "commit", fail if engine.site == site else CheckpointDirectory.commit):
        told = refusal(lambda: engine.save_checkpoint(str(mine), tag="t"))
    after = {path.name: path.stat().st_mtime_ns for path in (mine / "t").iterdir()}
    new = refusal(lambda: engine.save_checkpoint(str(mine), tag="t"))
    return {"told": told, "same": before == after, "again": new, "there": sorted(p.name for p in mine.iterdir())}


def full_disk(settings: dict[str, Any], roots: dict[str, str]) -> dict[str, Any]:
    """Save until the disk of one site is full: what every rank is told, and what is left."""
    engine = trained(settings, 1)
    mine = Path(roots[engine.site])
    engine.save_checkpoint(str(mine), tag="good")
    ballast, size = mine / "ballast", 1 << 16
    if engine.site == "cloud":
        with ballast.open("wb") as file:
            try:
                while True:
                    file.write(b"0" * size)
                    file.flush()
            except OSError:
                pass
    dist.barrier()
    engine.train_batch()
    told = refusal(lambda: engine.save_checkpoint(str(mine), tag="bad"))
    path, _ = engine.load_checkpoint(str(mine))
    there = sorted(entry.name for entry in mine.iterdir() if entry != ballast)
    return {
        "told": told,
        "there": there,
        "loaded": (Path(str(path)).name, engine.global_steps),
        "stage": stage_file(1),
    }
