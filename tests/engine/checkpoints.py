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


def site_directory(root: str) -> str:
    """A directory of each site's own."""
    return f"{root}/{'edge' if dist.get_rank() == 0 else 'cloud'}"


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


def save_midway(settings: dict[str, Any], root: str, steps: int) -> list[float]:
    """Train, save, and go on training: the losses since."""
    engine = toy_engine(settings)
    engine.set_dataiterator(data(settings, 0))
    for _ in range(steps):
        engine.train_batch()
    engine.save_checkpoint(site_directory(root))
    return [engine.train_batch().item() for _ in range(steps)]


def load_and_train(settings: dict[str, Any], root: str, steps: int) -> dict[str, Any]:
    """Load what was saved with another number of domains and go on; what a run is told that shards otherwise."""
    per_step = settings["gradient_accumulation_steps"] * settings["ldt"]["cloud"]["data_parallel_size"]
    engine = toy_engine(settings, base_seed=99)
    engine.load_checkpoint(site_directory(root))
    engine.set_dataiterator(data(settings, per_step * steps))
    losses = [engine.train_batch().item() for _ in range(steps)]
    whole = toy_engine({name: value for name, value in settings.items() if name != "zero_optimization"})
    told = ""
    try:
        whole.load_checkpoint(site_directory(root))
    except ds_ldt.CheckpointError as error:
        told = str(error)
    whole.load_checkpoint(site_directory(root), load_optimizer_states=False)
    return {"losses": losses, "weights": weights_of(engine), "told": told, "steps": whole.global_steps}


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
