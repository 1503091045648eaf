"""Targets about checkpoints of the engine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model

import ds_ldt
from tests.engine.cases import toy_engine, toy_module, weights_of
from tests.toy import Points, domain_batches


def site_directory(root: str, num_replicas: int = 1) -> str:
    """A directory of each site's own."""
    return f"{root}/{'edge' if dist.get_rank() < num_replicas else 'cloud'}"


def data(settings: dict[str, Any], skip: int) -> Any:
    """This replica's micro-batches, from the `skip`-th on (E = 1)."""
    domains = settings["ldt"]["cloud"]["data_parallel_size"]
    streams = [domain_batches(Points(96), d, domains, 2) for d in range(domains)]
    drawn = (next(stream) for _ in range(1000) for stream in streams)
    for _ in range(skip):
        next(drawn)
    return drawn if dist.get_rank() == 0 else None


def batch_fn_of(settings: dict[str, Any]) -> Any:
    """Inputs and labels as the layers of a half precision model expect them; None in fp32."""
    dtype = torch.bfloat16 if "bf16" in settings else torch.float16 if "fp16" in settings else None
    return None if dtype is None else lambda batch: (batch[0].to(dtype), batch[1].to(dtype))


def save_midway(jobs: list[tuple[dict[str, Any], str]], steps: int) -> list[dict[str, Any]]:
    """For each (configuration, directory): train, save, and go on training."""
    found = []
    for settings, root in jobs:
        engine = toy_engine(settings, batch_fn=batch_fn_of(settings))
        for _ in range(steps):
            engine.train_batch()
        engine.save_checkpoint(site_directory(root, engine.job.num_replicas))
        found.append(_now_and_later(engine, steps))
        engine.destroy()
    return found


def load_and_train(jobs: list[tuple[dict[str, Any], str]], steps: int) -> list[dict[str, Any]]:
    """For each (configuration, directory): load what other ranks have saved, and go on."""
    found = []
    for settings, root in jobs:
        engine = toy_engine(settings, base_seed=99, batch_fn=batch_fn_of(settings))
        engine.load_checkpoint(site_directory(root, engine.job.num_replicas))
        found.append(_now_and_later(engine, steps))
        engine.destroy()
    return found


def _now_and_later(engine: ds_ldt.LDTPipelineEngine, steps: int) -> dict[str, Any]:
    """Weights, state of the optimizer and position of the data of this rank, then losses, then weights again."""
    if engine.using_sharded_optimizer:
        shard = engine.optimizer.shard()
        optimizer = {**shard["base"]["state"][0], "fp32": shard["fp32_partitions"][0]}
    else:
        states = engine.optimizer.state_dict()["state"].values()
        optimizer = {name: torch.cat([state[name].flatten() for state in states]) for name in next(iter(states))}
    return {
        "place": (engine.stage_id, engine.grid.data_parallel_id),
        "weights": weights_of(engine),
        "optimizer": {name: value.clone() for name, value in optimizer.items()},
        "is_sharded": engine.using_sharded_optimizer,
        "scaler": engine.optimizer.shard()["loss_scaler"] if engine.using_sharded_optimizer else {},
        "position": engine.training_dataloader.state_dict() if engine.site == "edge" else None,
        "losses": [engine.train_batch().item() for _ in range(steps)],
        "weights_later": weights_of(engine),
        "scale_later": engine.cur_scale,
    }


def load_whole(settings: dict[str, Any], root: str) -> tuple[str, int]:
    """What a run that keeps its optimizer whole is told of one that was saved in shards; and the step without it."""
    engine, told = toy_engine(settings), ""
    try:
        engine.load_checkpoint(site_directory(root))
    except ds_ldt.CheckpointError as error:
        told = str(error)
    engine.load_checkpoint(site_directory(root), load_optimizer_states=False)
    return told, engine.global_steps


def resume(settings: dict[str, Any], root: str, steps: int) -> dict[str, Any]:
    """Train 2n steps; then n steps, save, load into a new engine, n more: what each run ends with."""
    batch_fn = batch_fn_of(settings)
    per_step = settings["gradient_accumulation_steps"] * settings["ldt"]["cloud"]["data_parallel_size"]
    whole = toy_engine(settings, batch_fn=batch_fn)
    whole.set_dataiterator(data(settings, 0))
    losses = [whole.train_batch().item() for _ in range(2 * steps)]

    first = toy_engine(settings, batch_fn=batch_fn)
    first.set_dataiterator(data(settings, 0))
    for _ in range(steps):
        first.train_batch()
    first.save_checkpoint(site_directory(root), client_state={"epoch": 3})
    first.save_checkpoint(site_directory(root), tag="again", save_latest=False)
    second = toy_engine(settings, batch_fn=batch_fn, base_seed=99)
    path, client_state = second.load_checkpoint(site_directory(root))
    second.set_dataiterator(data(settings, per_step * steps))
    resumed = [second.train_batch().item() for _ in range(steps)]
    return {
        "losses": losses,
        "resumed": resumed,
        "weights": [weights_of(whole), weights_of(second)],
        "lr": [whole.get_lr(), second.get_lr()],
        "steps": second.global_steps,
        "scales": [whole.cur_scale, second.cur_scale],
        "path": path,
        "client_state": client_state,
    }


def failures(settings: dict[str, Any], root: str) -> dict[str, Any]:
    """Every way in which a checkpoint can be incomplete, and what each rank is told."""
    engine = toy_engine(settings)
    mine = site_directory(root)
    edge = dist.get_rank() == 0
    told: dict[str, Any] = {"nothing there": engine.load_checkpoint(mine)}

    def expect(name: str, action: Any) -> None:
        try:
            action()
            told[name] = "no error"
        except ds_ldt.CheckpointError as error:
            told[name] = str(error)
        dist.barrier()

    engine.train_batch()
    expect("tags", lambda: engine.save_checkpoint(mine, tag="a" if edge else "b"))
    engine.save_checkpoint(mine, tag="good")
    expect(
        "reserved", lambda: engine.save_checkpoint(mine, tag="x", client_state={"optimizer": 1} if not edge else {})
    )
    expect("unknown tag", lambda: engine.load_checkpoint(mine, tag="other"))
    if not edge:  # the cloud's disk is full, or read-only
        Path(mine, ".full.cloud.partial").write_text("in the way")
        Path(mine, "full").write_text("in the way")
    dist.barrier()
    expect("cannot write", lambda: engine.save_checkpoint(mine, tag="full"))
    told["latest"] = Path(mine, "latest").read_text()
    if edge:
        os.remove(Path(mine, "good", "layer_00-model_states.pt"))
    dist.barrier()
    expect("missing file", lambda: engine.load_checkpoint(mine))
    return told


def same_directory(settings: dict[str, Any], root: str) -> list[str]:
    """Both sites save into one directory, twice under one tag: the files that are there afterwards."""
    engine = toy_engine(settings)
    for _ in range(2):
        engine.train_batch()
        engine.save_checkpoint(root, tag="t")
    site = engine.site
    if (
        engine.grid.is_site_leader
    ):  # as a process leaves it that ends between putting the old aside and the new in place
        aside = Path(root, f".t.{site}.previous")
        aside.mkdir()
        for name in [*json.loads(Path(root, "t", f"ldt_checkpoint_{site}.json").read_text())["files"]]:
            os.replace(Path(root, "t", name), aside / name)
        os.replace(Path(root, "t", f"ldt_checkpoint_{site}.json"), aside / f"ldt_checkpoint_{site}.json")
    dist.barrier()
    engine.load_checkpoint(root, tag="t")
    assert engine.global_steps == 2
    state = torch.load(f"{root}/t/mp_rank_{engine.stage_id:02d}_model_states.pt", weights_only=True)
    assert state["global_steps"] == 2
    return sorted(str(path.relative_to(root)) for path in Path(root).rglob("*") if path.is_file())


def own_adapters(settings: dict[str, Any], root: str) -> dict[str, Any]:
    """Train adapters that the user has injected; resume from trained parameters alone, whole and with one missing."""

    def engine_of(seed: int) -> ds_ldt.LDTPipelineEngine:
        module = toy_module(settings)
        torch.manual_seed(seed)
        for layer in module.owned_layers().values():
            inject_adapter_in_model(LoraConfig(r=2, target_modules=["linear"], init_lora_weights=False), layer)
        return ds_ldt.initialize(model=module, config=settings)[0]

    first, mine = engine_of(1), site_directory(root)
    stream = data(settings, 0)
    first.train_batch(stream)
    first.save_checkpoint(mine, exclude_frozen_parameters=True)
    loss = first.train_batch(stream).item()
    second = engine_of(2)
    second.load_checkpoint(mine)
    told: dict[str, Any] = {"same": loss == second.train_batch(data(settings, 4)).item()}
    path = next(Path(mine).rglob("layer_*2-model_states.pt" if first.site == "cloud" else "layer_*0-model_states.pt"))
    state = torch.load(path, weights_only=True)
    told["kept"] = sorted(state)
    if first.site == "cloud":
        torch.save({key: value for key, value in state.items() if "lora_A" not in key}, path)
    dist.barrier()
    try:
        second.load_checkpoint(mine)
    except ds_ldt.CheckpointError as error:
        told["missing"] = str(error)
    told["not strict"] = second.load_checkpoint(mine, load_module_strict=False)[0] is not None
    first.destroy()
    second.destroy()
    return told
