"""Disks that are full: one error with path, bytes needed and bytes free, whichever library was writing."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ds_ldt.errors import CheckpointError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

# torch.save's zip writer reports a write that failed in its own words, and keeps the reason at most as the context.
_TORCH_WRITER = re.compile(r"unexpected pos \d+ vs \d+|PytorchStreamWriter failed|basic_ios::clear: iostream error")
# safetensors' errors are texts of Rust's std::io::Error.
_RUST_ERRNO = re.compile(r"\(os error (\d+)\)")


@contextmanager
def writing(path: Path, needed_bytes: int) -> Iterator[None]:
    """Say it in one sentence if the disk is full while a file or a directory is written.

    Errors of another kind pass unchanged, as does a `CheckpointError` of a context within this one. Removing what is
    partial is the caller's part.

    Args:
        path: What is written; it need not exist.
        needed_bytes: Size that it will have, or an estimate.

    Raises:
        CheckpointError: The file system is full, a quota is used up or a file may not become so large.
    """
    before = free_bytes(path)
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = _reason(error)
        if reason is None:
            raise
        raise CheckpointError(
            f"no space to write {path} ({reason}): {needed_bytes:,} bytes are needed, {before:,} were free before and "
            f"{free_bytes(path):,} are free now. Fix: free some space (or raise the limit), or write elsewhere"
        ) from error


def check_free(needed: Mapping[Path, int]) -> None:
    """Check before anything is written that there is room for it.

    Args:
        needed: What is to be written (it need not exist) -> bytes that it will have. Those on one file system share
            its free bytes.

    Raises:
        CheckpointError: There is less space.
    """
    places: dict[int, list[Path]] = {}
    for path in needed:
        places.setdefault(_existing(path).stat().st_dev, []).append(path)
    for paths in places.values():
        total, free = sum(needed[path] for path in paths), free_bytes(paths[0])
        if free < total:
            raise CheckpointError(
                f"no space to write {' and '.join(map(str, paths))}: {total:,} bytes are needed, {free:,} are free. "
                "Fix: free some space, or write elsewhere"
            )


def free_bytes(path: Path) -> int:
    """Return the bytes that this process may still write to the file system that a path is or will be on."""
    return shutil.disk_usage(_existing(path)).free


def _existing(path: Path) -> Path:
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def _reason(error: BaseException) -> str | None:
    """Return why there is no space, None if the error is of another kind."""
    reason = None
    seen: BaseException | None = error
    while seen is not None:
        number = _errno(seen)
        if number is not None:
            return os.strerror(number) if number in _FULL else None
        if isinstance(seen, RuntimeError) and _TORCH_WRITER.search(str(seen)):
            reason = "torch could not write on and does not say why"
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return reason


def _errno(error: BaseException) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    match = _RUST_ERRNO.search(str(error)) if isinstance(error, SafetensorError) else None
    return int(match[1]) if match else None
