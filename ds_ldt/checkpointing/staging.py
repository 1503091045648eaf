"""Directories that appear complete or not at all, and never at the cost of somebody else's files."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

from ds_ldt.checkpointing.disk_space import check_free, writing
from ds_ldt.errors import CheckpointError

_LOST_AND_FOUND = "lost+found"
"""What some file systems hold from the beginning."""


class StagedDirectory:
    """Writes a directory aside and puts it in place in one step.

    Use it as a context manager: what has not been committed when the block ends is removed, and what was there before
    stays.

    Args:
        target: The directory to write. Its parent is created if need be.
        is_ours: Tells, given an existing target and the name of a file in it ("/" between the parts), whether this
            tool wrote that file.
        overwrite: Replace an existing target, if everything in it is ours.
        needed_bytes: Size of what will be written, or an estimate.

    Attributes:
        target: The directory to write.
        path: The directory aside; write here.

    Raises:
        CheckpointError: The target is not empty and may not be replaced, or there is no space to write it.
    """

    def __init__(
        self, target: Path, *, is_ours: Callable[[Path, str], bool], overwrite: bool, needed_bytes: int
    ) -> None:
        self.target = target.resolve() if target.is_symlink() else target
        # What is a file system of its own, as a volume of a container, cannot be renamed: it is filled from within.
        self._is_mount = self.target.is_mount()
        self.path = (self.target if self._is_mount else self.target.parent) / f".{self.target.name}.{os.getpid()}.tmp"
        self._needed_bytes = needed_bytes
        self._writing = writing(target, needed_bytes)
        _check_replaceable(self.target, is_ours, overwrite)

    def __enter__(self) -> StagedDirectory:
        check_free({self.target: self._needed_bytes})
        self._writing.__enter__()
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self.path, ignore_errors=True)  # left by a process of this number that was killed
            self.path.mkdir()
        except OSError as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._writing.__exit__(kind, error, traceback)
        finally:
            shutil.rmtree(self.path, ignore_errors=True)

    def commit(self) -> None:
        """Put the directory in place. What was there before, stale files included, is gone afterwards."""
        _settle(self.path)
        before = self.path.with_suffix(".old")
        if self._is_mount:
            self._commit_within(before)
        else:
            self._commit_whole(before)
        shutil.rmtree(before, ignore_errors=True)

    def _commit_whole(self, before: Path) -> None:
        if self.target.exists():
            self.target.rename(before)
        try:
            self.path.rename(self.target)
        except OSError:
            if before.exists():
                before.rename(self.target)
            raise
        _sync(self.target.parent)

    def _commit_within(self, before: Path) -> None:
        shutil.rmtree(before, ignore_errors=True)
        before.mkdir()
        for entry in list(self.target.iterdir()):
            if entry not in (self.path, before) and entry.name != _LOST_AND_FOUND:
                entry.rename(before / entry.name)
        for entry in list(self.path.iterdir()):
            entry.rename(self.target / entry.name)
        _sync(self.target)


def check_apart(directories: Iterable[Path]) -> None:
    """Check that no two directories are the same and none lies within another.

    Raises:
        CheckpointError: Two of them overlap.
    """
    resolved = [directory.resolve() for directory in directories]
    for number, first in enumerate(resolved):
        for second in resolved[number + 1 :]:
            if first == second or first in second.parents or second in first.parents:
                raise CheckpointError(
                    f"{first} and {second} overlap. Fix: name separate directories, so that what is read stays "
                    "untouched and neither site gets the other's files."
                )


def _check_replaceable(target: Path, is_ours: Callable[[Path, str], bool], overwrite: bool) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(f"{target} is a file, expected a directory or nothing. Fix: name another directory.")
    names = [
        path.relative_to(target).as_posix()
        for path in sorted(target.rglob("*"))
        if path.is_symlink() or not path.is_dir() or not any(path.iterdir())
    ]
    if target.is_mount():
        names = [name for name in names if name.split("/")[0] != _LOST_AND_FOUND]
    foreign = [name for name in names if not is_ours(target, name)]
    if foreign:
        shown = ", ".join(foreign[:5]) + (", ..." if len(foreign) > 5 else "")
        raise CheckpointError(
            f"{target} holds files that were not written by this tool: {shown}. Fix: name an empty directory."
        )
    if names and not overwrite:
        raise CheckpointError(f"{target} is not empty. Fix: name an empty directory, or replace it with --overwrite.")


def _settle(directory: Path) -> None:
    """Make the files of a directory durable, and give all the mode that a new file has here.

    safetensors writes files that only their owner may read.
    """
    probe = directory / ".mode"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in directory.rglob("*"):
        if path.is_file():
            path.chmod(mode)
            with path.open("rb") as stream:
                os.fsync(stream.fileno())


def _sync(directory: Path) -> None:
    """Make renames in a directory durable, where the operating system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
