"""Targets that write, or cannot write, what a training leaves behind."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.utils import logger

import ds_ldt
from tests.disks import fill
from tests.engine.cases import config, initialize, layout, toy_engine, toy_module
from tests.engine.failures import outcome
from tests.toy import Points

Outcome = tuple[str, str, float]


def settings_for(changes: dict[str, Any]) -> dict[str, Any]:
    """A job of one edge rank and two cloud ranks."""
    ldt = {key.removeprefix("ldt."): value for key, value in changes.items() if key.startswith("ldt.")}
    others = {key: value for key, value in changes.items() if not key.startswith("ldt.")}
    return config(layout(2, 2), num_domains=2, timeout_s=20, ldt=ldt, **others)


def unwritable_settings(cases: list[tuple[int, dict[str, Any]]]) -> list[Outcome]:
    """What `initialize` says on this rank where one rank's JSON names a place that cannot be written to."""
    found = []
    for bad_rank, changes in cases:
        settings = settings_for(changes if dist.get_rank() == bad_rank else {})
        module = toy_module(settings)
        found.append(outcome(lambda module=module: ds_ldt.initialize(model=module, training_data=_data())))
        module.mpu().close()
    return found


def _data() -> Points | None:
    return Points(96) if dist.get_rank() == 0 else None


def check_before_the_first_step(cases: list[dict[int, str | None]]) -> tuple[list[Outcome], float, list[Outcome]]:
    """What the checks of a script say: directories by rank, then arguments that differ; and that training goes on."""
    engine, rank = toy_engine(settings_for({})), dist.get_rank()
    saves = [outcome(lambda case=case: engine.check_save_dir(case[rank], setting="--save")) for case in cases]
    values = [
        {"--steps": 5},
        {"--steps": 5 if rank == 0 else 6, "--seed": 1},
        {"--steps": 5 if rank < 2 else 7},  # within the cloud
    ]
    return saves, engine.train_batch().item(), [outcome(lambda v=v: engine.agree_on(v)) for v in values]


class Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def listening() -> Heard:
    heard = Heard()
    logger.addHandler(heard)
    return heard


def places_that_go_bad(folder: str) -> tuple[list[float], list[float], list[str]]:
    """Losses of a run whose trace and monitor can no longer be written after the start, and of one without them."""
    places = Path(folder)
    settings = settings_for(
        {
            "ldt.trace": {"path": str(places / "trace"), "steps": [1, 2]},
            "csv_monitor": {"enabled": True, "output_path": str(places / "csv"), "job_name": "job"},
        }
    )
    engine, heard = toy_engine(settings), listening()
    if dist.get_rank() == 0:
        (places / "trace").write_text("in the way")
        shutil.rmtree(places / "csv/job")
    dist.barrier()
    losses = [engine.train_batch().item() for _ in range(4)]
    engine.destroy()
    logger.removeHandler(heard)
    plain = toy_engine(settings_for({}))
    return losses, [plain.train_batch().item() for _ in range(4)], heard.lines


def fill_disk_after_the_start(disk: str) -> tuple[int, list[str]]:
    """Steps of a run whose disk is full when the trace is to be written."""
    engine, heard = toy_engine(settings_for({"ldt.trace": {"path": disk, "steps": [1, 1]}})), listening()
    if dist.get_rank() == 0:
        fill(Path(disk, "other"))
    dist.barrier()
    engine.train_batch()
    engine.train_batch()
    logger.removeHandler(heard)
    return engine.global_steps, heard.lines


# --- a saver ------------------------------------------------------------------------------------------------------


def _tags(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []


def save_and_resume(folder: str, is_shared: bool) -> dict[str, Any]:
    """Save every step and keep two, beside checkpoints of others, and go on in a second engine; what is there then."""
    rank = dist.get_rank()
    directory = Path(folder, "both" if is_shared else ("edge" if rank == 0 else "cloud"))
    settings = settings_for({})
    first, heard = toy_engine(settings), listening()
    fresh = ds_ldt.Saver(first, directory, every=1, keep=2, resume=True)
    found: dict[str, Any] = {"fresh": fresh.state, "said": heard.lines[:]}
    first.train_batch()
    first.save_checkpoint(str(directory), "best")
    first.save_checkpoint(str(directory), "global_step99")  # of somebody else, whatever its name
    for step in range(3):
        if step:
            first.train_batch()
        fresh.save_if_due({"losses": [0.5] * first.global_steps})
        dist.barrier()
        found[f"after {first.global_steps}"] = _tags(directory)
    first.destroy()

    heard.lines.clear()
    second = toy_engine(settings, base_seed=99)
    saver = ds_ldt.Saver(second, directory, every=2, keep=2, resume=True)
    found |= {"state": saver.state, "steps": second.global_steps, "resumed": heard.lines[:]}
    saver.save({})  # this step is saved already
    for _ in range(3):
        second.train_batch()
        saver.save_if_due()
    saver.save()
    dist.barrier()
    found["in the end"] = _tags(directory)
    found["latest"] = (directory / "latest").read_text()
    second.destroy()

    heard.lines.clear()
    third = toy_engine(settings)
    ds_ldt.Saver(third, directory)
    found["unasked"] = heard.lines[:]
    differing = outcome(lambda: ds_ldt.Saver(third, directory, every=1 if rank == 0 else 2, resume=rank == 0))
    found["differing"] = differing
    logger.removeHandler(heard)
    return found


def saver_without_a_directory() -> tuple[int, dict[str, Any] | None]:
    """A script that saves nothing."""
    engine = initialize(model=toy_module(settings_for({})), training_data=_data())
    saver = ds_ldt.Saver(engine, None, every=1)
    engine.train_batch()
    saver.save_if_due({"a": 1})
    saver.save()
    return engine.global_steps, saver.state
