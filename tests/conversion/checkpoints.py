"""Checkpoints as the engine writes them, made of converted layers: no process group is needed to read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ds_ldt.checkpointing.layer_files import LayerFiles, read_layer, write_layer
from ds_ldt.checkpointing.manifest import LATEST_FILE, CheckpointManifest, content_id, manifest_name
from ds_ldt.comm.identity import RunIdentity
from ds_ldt.config.lora import LoraSettings
from ds_ldt.models import build_layers, family_of, read_hf_config
from ds_ldt.models.lora import plan_adapters
from ds_ldt.topology.ranks import Site

SITES: tuple[Site, ...] = ("edge", "cloud")
LORA = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
Change = Callable[[int, dict[str, Tensor]], dict[str, Tensor]]


def save_half(
    converted: Path,
    root: Path,
    site: Site,
    *,
    tag: str = "step2",
    run: str = "a" * 16,
    save: str = "1" * 16,
    change: Change | None = None,
    omit: Collection[int] = (),
    more: Mapping[int, dict[str, Tensor]] | None = None,
    suffix: str = "",
    **manifest: Any,
) -> Path:
    """Write converted layers of a site as a checkpoint into `root`, and let `latest` name it.

    Args:
        converted: The directory that the conversion wrote for the site.
        root: The checkpoint directory; the other site may have saved into it.
        site: The site.
        tag: Name of the checkpoint.
        run: Identity of the run.
        save: Identity of the save.
        change: Gets a layer's index and weights, and returns those to save.
        omit: Layers that are left out.
        more: Further layers of the edge, with their weights.
        suffix: What DeepSpeed puts into the name of a file before `-model_states`.
        manifest: Further fields of the manifest.
    """
    files, directory = LayerFiles(converted, site), root / tag
    directory.mkdir(parents=True, exist_ok=True)
    layers = {layer: read_layer(path) for layer, path in files.paths.items() if layer not in omit}
    layers |= more if more is not None and site == "edge" else {}
    names = []
    for layer, state in layers.items():
        name = write_layer(directory, layer, state if change is None else change(layer, state)).file
        names.append(name.replace("-model_states", f"{suffix}-model_states"))
        (directory / name).rename(directory / names[-1])
    content = CheckpointManifest(
        **{
            "site": site,
            "tag": tag,
            "save": save,
            "saved_at": f"2026-01-02T03:04:05.{int(save, 16) % 10**6:06d}+00:00",
            "run": RunIdentity(run=run),
            "model": files.model,
            "global_steps": 2,
            "pipeline_num_layers": [[1, 2], [1, 0]],
            "data_parallel_size": 1,
            "frozen_excluded": False,
            "lora": None,
            "files": {name: content_id(directory / name) for name in names},
            **manifest,
        }
    )
    (directory / manifest_name(site)).write_text(json.dumps(content.as_json()))
    (root / LATEST_FILE).write_text(tag)
    return directory


def save_adapters(work: Path, hf: Path, target: str = "lora", **options: Any) -> tuple[Path, Path]:
    """Write a checkpoint of adapters over the converted layers of a model; return the two checkpoint directories."""
    config = read_hf_config(hf)
    family, layers = family_of(config), build_layers(config)
    keys = family.key_map(config)
    names = [keys.module_name(index) for index in range(keys.num_layers)]
    settings = LoraSettings(**LORA)
    plan = plan_adapters(settings, layers, names=names, model_type=family.name)

    def adapters(layer: int, _: dict[str, Tensor]) -> dict[str, Tensor]:
        trained = plan.put_into(layers[layer].build(), layer, seed=layer).named_parameters()
        return {name: parameter.detach() for name, parameter in trained if parameter.requires_grad}

    lora = {"lora": plan.settings.model_dump(), "frozen_excluded": True}
    return save_both(work, target=target, change=adapters, **lora, **options)


def save_both(work: Path, prefix: str = "", target: str = "saved", **options: Any) -> tuple[Path, Path]:
    """Write the converted layers of both sites in a directory as one save; return the two checkpoint directories."""
    roots = {site: work / f"{target}_{site}" for site in SITES}
    for site, root in roots.items():
        save_half(work / f"{prefix}{site}", root, site, **options)
    return roots["edge"], roots["cloud"]
