"""Saving every so often, keeping the last few, going on after a stop: what a training script does beside its steps."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed.utils import logger

from ds_ldt.errors import ConfigError

if TYPE_CHECKING:
    from ds_ldt.runtime.engine import LDTPipelineEngine

_SAVED = "saved_tags"
_LATEST = "latest"


class Saver:
    """Checkpoints of a script, the last few of which are kept. Every rank makes one, before the first step.

    It removes only what it has saved itself, in this run or in the one that this run goes on from: other checkpoints
    in the directory stay. The oldest ones are removed, on each site, once both sites have committed a newer one; the
    one that ``latest`` names never is.

    Args:
        engine: the engine.
        directory: of this site; None on every rank of both sites to save nothing.
        every: save after so many steps; None for never.
        keep: how many checkpoints are kept; None for all.
        resume: go on from the checkpoint that ``latest`` names: weights, optimizer, scheduler, counters and training
            data. Where neither site holds a checkpoint the run starts anew, and says so.
        setting: what names the directory, for errors.

    Attributes:
        state: what was given to ``save`` with the checkpoint that the run goes on from; None if it starts anew.

    Raises:
        ConfigError: on every rank of both sites: some rank cannot write there, only some ranks have a directory, or
            the sites differ in ``every``, ``keep`` or ``resume``.
        CheckpointError: on every rank: the sites hold no checkpoint to go on from together, or it does not fit.
        LinkError: a rank did not take part.
    """

    def __init__(
        self,
        engine: LDTPipelineEngine,
        directory: str | os.PathLike[str] | None,
        *,
        every: int | None = None,
        keep: int | None = None,
        resume: bool = False,
        setting: str = "save_dir",
    ) -> None:
        for name, number in (("save_every", every), ("keep", keep)):
            if number is not None and number < 1:
                raise ConfigError.of(name, found=number, expected="at least 1, or None", fix="raise it")
        engine.agree_on({"save_every": every, "keep": keep, "resume": resume})
        engine.check_save_dir(directory, setting=setting)
        self.state: dict[str, Any] | None = None
        self._engine = engine
        self._directory = None if directory is None else Path(directory)
        self._every = every
        self._keep = keep
        self._saved: list[str] = []
        self._last_step = -1
        self._start(resume)

    def _start(self, resume: bool) -> None:
        """Go on from the last checkpoint, or start anew; say which where it may surprise."""
        engine, directory = self._engine, self._directory
        if directory is None:
            return
        if resume:
            path, self.state = engine.load_checkpoint(str(directory))
            if path is not None and self.state is not None:
                self._saved = list(self.state.pop(_SAVED, []))
                self._last_step = engine.global_steps
                self._say(f"goes on after step {engine.global_steps}, from {path}")
            else:
                self._say(f"starts anew: there is no checkpoint to go on from in {directory}")
        elif (directory / _LATEST).is_file():
            self._say(f"starts anew, though {directory} holds checkpoints: those of the same step will be replaced")

    def _say(self, text: str) -> None:
        if self._engine.grid.is_site_leader:
            logger.warning(f"the {self._engine.site} {text}")

    def save_if_due(self, state: Mapping[str, Any] | None = None) -> bool:
        """Save after a step if it is one of every so many; return whether it was."""
        is_due = self._every is not None and self._engine.global_steps % self._every == 0
        if is_due:
            self.save(state)
        return is_due

    def save(self, state: Mapping[str, Any] | None = None) -> None:
        """Save a checkpoint and remove the oldest beyond those to keep. Does nothing if this step is saved already.

        Args:
            state: values of the script; numbers, text, lists and dictionaries of them.

        Raises:
            CheckpointError: on every rank, if any could not write.
        """
        step = self._engine.global_steps
        if self._directory is None or step == self._last_step:
            return
        tag = f"global_step{step}"
        saved = [*(name for name in self._saved if name != tag), tag]
        self._engine.save_checkpoint(str(self._directory), tag, client_state={**(state or {}), _SAVED: saved})
        self._last_step = step
        cut = 0 if self._keep is None else max(0, len(saved) - self._keep)
        self._remove(saved[:cut])
        self._saved = saved[cut:]

    def _remove(self, tags: list[str]) -> None:
        """Remove checkpoints of this site; both sites hold a newer one by now."""
        if self._directory is None or not self._engine.grid.is_site_leader:
            return
        latest = self._directory / _LATEST
        named = latest.read_text().strip() if latest.is_file() else None
        for tag in tags:
            if tag == named:
                continue
            # Under its own name a checkpoint is there as a whole or not at all. Sites that share the directory both
            # come here, and the second one finds it moved.
            removed = self._directory / f".{tag}.removed"
            shutil.rmtree(removed, ignore_errors=True)
            try:
                (self._directory / tag).rename(removed)
            except FileNotFoundError:
                continue
            except OSError as error:
                logger.warning(f"checkpoint {tag!r} could not be removed: {error}")
            shutil.rmtree(removed, ignore_errors=True)
