"""Directories that appear complete or not at all, and never at the cost of somebody else's files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

from ds_ldt.errors import CheckpointError

# Files beside the weights that say how to turn text and images into numbers, or how to generate. For the edge only.
EDGE_ONLY_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)


class StagedDirectory:
    """Writes a directory aside and puts it in place in one step.

    Use it as a context manager: what has not been committed when the block ends is removed.

    Args:
        target: The directory to write. Its parent is created if need be.
        is_ours: Tells, given an existing target and a name in it, whether this tool wrote that file.
        overwrite: Replace an existing target, if everything in it is ours.

    Attributes:
        target: The directory to write.
        path: The directory aside; write here.

    Raises:
        CheckpointError: The target is not empty and may not be replaced.
    """

    def __init__(self, target: Path, *, is_ours: Callable[[Path, str], bool], overwrite: bool) -> None:
        self.target = target
        self.path = target.parent / f".{target.name}.{os.getpid()}.tmp"
        _check_replaceable(target, is_ours, overwrite)

    def __enter__(self) -> StagedDirectory:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def commit(self) -> None:
        """Put the directory in place. What was there before, stale files included, is gone afterwards."""
        before = self.path.with_suffix(".old")
        if self.target.exists():
            self.target.rename(before)
        self.path.rename(self.target)
        _sync(self.target.parent)
        shutil.rmtree(before, ignore_errors=True)


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


def copy_files(names: Iterable[str], sources: Iterable[Path], destination: Path) -> list[str]:
    """Copy files, each from the first source directory that has it; return the names of those that were found."""
    copied = []
    for name in names:
        found = next((source / name for source in sources if (source / name).is_file()), None)
        if found is not None:
            shutil.copyfile(found, destination / name)
            copied.append(name)
    return copied


def _check_replaceable(target: Path, is_ours: Callable[[Path, str], bool], overwrite: bool) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(f"{target} is a file, expected a directory or nothing. Fix: name another directory.")
    names = sorted(entry.name for entry in target.iterdir())
    foreign = [name for name in names if not is_ours(target, name)]
    if foreign:
        shown = ", ".join(foreign[:5]) + (", ..." if len(foreign) > 5 else "")
        raise CheckpointError(
            f"{target} holds files that were not written by this tool: {shown}. Fix: name an empty directory."
        )
    if names and not overwrite:
        raise CheckpointError(f"{target} is not empty. Fix: name an empty directory, or replace it with --overwrite.")


def _sync(directory: Path) -> None:
    """Make renames in a directory durable, where the operating system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
