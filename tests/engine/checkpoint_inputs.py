"""Targets about what else a checkpoint directory, a call and a layer may hold, beside what the engine puts there."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.engine.cases import initialize, toy_module, weights_of
from tests.engine.checkpoint_faults import refusal, same, state_of, trained
from tests.engine.checkpoints import batch_fn_of, site_directory
from tests.toy import Points

ARGUMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tags": ({"tag": "a"}, {"tag": "b"}),
    "a tag and none": ({"tag": "a"}, {}),
    "load_module_only": ({}, {"load_module_only": True}),
    "load_optimizer_states": ({"load_optimizer_states": False}, {}),
    "load_lr_scheduler_states": ({}, {"load_lr_scheduler_states": False}),
    "load_module_strict": ({}, {"load_module_strict": False}),
    "a long tag": ({"tag": "x" * 20_000}, {"tag": "y" * 20_000}),
    "a path": ({"tag": "../a"}, {"tag": "../a"}),
}
"""What the edge and the cloud pass to load_checkpoint."""


def other_arguments(settings: dict[str, Any], root: str) -> dict[str, Any]:
    """Each site passes its own arguments: what it is told, and whether all is as it was; then a save and a number."""
    engine, mine = trained(settings, 1), site_directory(root)
    engine.save_checkpoint(mine, tag="a")
    engine.train_batch()
    engine.save_checkpoint(mine, tag="b")
    engine.train_batch()
    found: dict[str, Any] = {}
    is_edge = engine.site == "edge"
    for name, (edge, cloud) in ARGUMENTS.items():
        before, options = state_of(engine), edge if is_edge else cloud
        told = refusal(lambda options=options: engine.load_checkpoint(mine, **options))
        found[name] = (told, same(before, state_of(engine)))
    found["save_latest"] = (refusal(lambda: engine.save_checkpoint(mine, tag="c", save_latest=is_edge)), True)
    engine.save_checkpoint(mine, tag=5)  # type: ignore[arg-type]
    path, _ = engine.load_checkpoint(mine, tag=5)  # type: ignore[arg-type]
    return {"told": found, "number": Path(str(path)).name}


def numbers_of_numpy(settings: dict[str, Any], root: str) -> dict[str, Any]:
    """A rate and a schedule of numpy's numbers: whether a save is loaded as it was; then values that are refused."""
    module = toy_module(settings, batch_fn=batch_fn_of(settings))
    optimizer = torch.optim.AdamW(module.parameters(), lr=np.float64(0.01))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.cos(step / 10))
    engine = initialize(
        model=module,
        config=settings,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        training_data=Points(96) if dist.get_rank() == 0 else None,
    )
    engine.train_batch()
    engine.save_checkpoint(site_directory(root))
    rate = engine.get_lr()
    later = engine.train_batch().item(), weights_of(engine)
    engine.load_checkpoint(site_directory(root))
    found = {"rate": rate == engine.get_lr(), "same": same(later, (engine.train_batch().item(), weights_of(engine)))}
    if engine.site == "cloud":
        scheduler.base_lrs = [Path("x")]
    found["told"] = refusal(lambda: engine.save_checkpoint(site_directory(root), tag="odd"))
    found["there"] = sorted(path.name for path in Path(site_directory(root)).iterdir())
    return found


def flip(path: Path) -> None:
    """Change one byte of the largest tensor of a file, as a disk or a copy may."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        largest = max((e for e in archive.infolist() if "/data/" in e.filename), key=lambda entry: entry.file_size)
    at = largest.header_offset
    names = int.from_bytes(content[at + 26 : at + 28], "little") + int.from_bytes(content[at + 28 : at + 30], "little")
    content[at + 30 + names + 2] ^= 0x41
    path.write_bytes(content)


def flipped(settings: dict[str, Any], root: str) -> dict[str, tuple[str, bool]]:
    """One byte of each kind of file of the cloud is another: what every rank is told, and whether all is as it was."""
    engine, mine = trained(settings, 1), Path(site_directory(root))
    engine.save_checkpoint(str(mine), tag="t")
    engine.train_batch()
    shutil.copytree(mine / "t", f"{mine}.good")
    found = {}
    for pattern in ("layer_*", "*zero_pp*" if engine.using_sharded_optimizer else "mp_rank*"):
        for strict in (True, False):
            shutil.rmtree(mine / "t")
            shutil.copytree(f"{mine}.good", mine / "t")
            if engine.site == "cloud":
                flip(next((mine / "t").glob(pattern)))
            dist.barrier()
            before = state_of(engine)
            told = refusal(lambda strict=strict: engine.load_checkpoint(str(mine), load_module_strict=strict))
            found[f"{pattern} {strict}"] = (told, same(before, state_of(engine)))
    return found


def a_layer_refuses(settings: dict[str, Any], root: str) -> tuple[str, bool, list[int]]:
    """A layer's own code refuses weights once others are replaced: what is told, whether all is as it was; twice."""
    engine, mine = trained(settings, 1), site_directory(root)
    engine.save_checkpoint(mine)
    engine.train_batch()
    layer = list(engine.module.owned_layers().values())[-1]

    def refuse(*args: Any) -> None:
        raise ArithmeticError("no weights for this layer")

    handle = layer.register_load_state_dict_pre_hook(refuse) if engine.site == "edge" else None
    before = state_of(engine)
    told = refusal(lambda: engine.load_checkpoint(mine))
    is_same = same(before, state_of(engine))
    if handle is not None:
        handle.remove()
    steps = [engine.global_steps]
    engine.load_checkpoint(mine)
    return told, is_same, [*steps, engine.global_steps]


def _of_manifest(text: str | None = None, **changes: Any) -> Callable[[Path, str], None]:
    def edit(root: Path, site: str) -> None:
        path = root / "t" / f"ldt_checkpoint_{site}.json"
        path.write_text(text or json.dumps(json.loads(path.read_text()) | changes))

    return edit


def _of_latest(content: bytes) -> Callable[[Path, str], None]:
    def edit(root: Path, site: str) -> None:
        (root / "latest").write_bytes(content)

    return edit


EDITS: dict[str, tuple[Callable[[Path, str], None], str]] = {
    "steps are a text": (_of_manifest(global_steps="1"), "the edge holds []"),
    "no moment": (_of_manifest(saved_at=None), "the edge holds []"),
    "no time": (_of_manifest(saved_at="yesterday"), "the edge holds []"),
    "no run": (_of_manifest(run=None), "the edge holds []"),
    "a list of files": (_of_manifest(files=[]), "the edge holds []"),
    "files elsewhere": (_of_manifest(files={"../x": "y"}), "the edge holds []"),
    "another site": (_of_manifest(site="x"), "the edge holds []"),
    "no JSON": (_of_manifest(text="{"), "the edge holds []"),
    "no tag at all": (lambda root, site: shutil.rmtree(root / "t"), "the tag that latest names ('t')"),
    "latest is long": (_of_latest(b"x" * 20_000), "the tag that latest names ('xxx"),
    "latest is no text": (_of_latest(b"\xff\xfe\x00"), "the tag that latest names ("),
    "latest is empty": (_of_latest(b""), "the tag that latest names ('')"),
    "latest begins with a mark of its encoding": (_of_latest(b"\xef\xbb\xbft\r\n"), "no error"),
}
"""What happens to the directories of both sites, and what every rank is told then."""


def edited(settings: dict[str, Any], root: str) -> dict[str, tuple[str, bool]]:
    """For each edit: what a rank is told that loads, and whether a refusal has changed nothing."""
    engine, found = trained(settings, 1), {}
    mine = Path(site_directory(root))
    engine.save_checkpoint(str(mine), tag="t")
    shutil.copytree(mine, f"{mine}.good")
    for name, (edit, _) in EDITS.items():
        engine.train_batch()
        shutil.rmtree(mine)
        shutil.copytree(f"{mine}.good", mine)
        edit(mine, engine.site)
        dist.barrier()
        before = state_of(engine)
        told = refusal(lambda: engine.load_checkpoint(str(mine)))
        found[name] = (told, told == "no error" or same(before, state_of(engine)))
    return found


def in_the_way(settings: dict[str, Any], root: str) -> dict[str, Any]:
    """What keeps the cloud from saving a tag, and what is left of it there; then a tag that was removed by hand."""
    engine, mine = trained(settings, 1), Path(site_directory(root))
    for tag in ("t", "good"):
        engine.save_checkpoint(str(mine), tag=tag)
    if engine.site == "cloud":
        (mine / "file").write_text("x")
        (mine / "link").symlink_to("/nowhere/at/all")
        (mine / "t" / "ldt_checkpoint_cloud.json").write_text("{")
    dist.barrier()
    told = {tag: refusal(lambda tag=tag: engine.save_checkpoint(str(mine), tag=tag)) for tag in ("file", "link", "t")}
    hidden = sorted(path.name for path in mine.iterdir() if path.name[0] == ".")
    if engine.site == "cloud":  # as a job leaves it that ended inside a commit, and somebody who tidied up
        os.rename(mine / "good", mine / ".good.cloud.previous")
    dist.barrier()
    path, _ = engine.load_checkpoint(str(mine), tag="good")
    return {"told": told, "hidden": hidden, "loaded": Path(str(path)).name}
