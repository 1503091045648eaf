"""Locks that a killed build of a DeepSpeed operator leaves behind.

DeepSpeed compiles some operators when they are first used. While torch does so it keeps the file `lock` open in the
operator's build directory; everybody else waits, without a word and without end, until that file is gone. A build that
was killed never removes it. Here such a wait is announced and bounded, and an operator that ds_ldt never uses (the CPU
shared-memory one) is taken out of play.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ds_ldt.errors import ConfigError

logger = logging.getLogger(__name__)

SHARED_MEMORY_OP = "deepspeed_shm_comm"

# A lock that no process of this machine holds may still belong to another machine that shares the directory.
STALE_GRACE_S = 10.0

# Optimizer type of the JSON, lower case -> the operators DeepSpeed compiles for it (with and without offload).
_OPTIMIZER_OPS = {
    "adam": ("fused_adam", "cpu_adam"),
    "adamw": ("fused_adam", "cpu_adam"),
    "muon": ("fused_adam", "cpu_adam"),
    "lion": ("fused_lion", "cpu_lion"),
    "lamb": ("fused_lamb",),
    "adagrad": ("cpu_adagrad",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildLock:
    """The lock file of one operator.

    Attributes:
        op: Name of the operator, e.g. `fused_adam`.
        path: The lock file.
    """

    op: str
    path: Path

    def holders(self) -> tuple[int, ...]:
        """Return the ids of the processes of this machine that hold the lock open, as far as this user may see.

        None of them means that it is stale.
        """
        path = str(self.path.resolve())
        processes = psutil.process_iter(["pid", "open_files"])  # None where this user may not look
        opened = {process.pid: process.info["open_files"] or () for process in processes}
        return tuple(pid for pid, files in sorted(opened.items()) if path in (file.path for file in files))


def extensions_roots() -> tuple[Path, ...]:
    """Return the directories in which torch looks for the build directories of operators.

    `TORCH_EXTENSIONS_DIR` is used as it is; torch's own default has one folder per Python and accelerator in between.
    """
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen is not None:
        return (Path(chosen),)
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(get_default_build_root())
    return tuple(sorted(path for path in root.iterdir() if path.is_dir())) if root.is_dir() else ()


def find_locks(roots: Collection[Path] | None = None) -> tuple[BuildLock, ...]:
    """Return the locks that exist now.

    Args:
        roots: Where to look (default: `extensions_roots()`).
    """
    found = extensions_roots() if roots is None else roots
    return tuple(BuildLock(op=path.parent.name, path=path) for root in found for path in sorted(root.glob("*/lock")))


def ops_of(deepspeed_config: Mapping[str, Any]) -> frozenset[str]:
    """Return the operators that DeepSpeed compiles at first use for the optimizer of this JSON.

    Args:
        deepspeed_config: The DeepSpeed JSON.
    """
    optimizer = deepspeed_config.get("optimizer")
    if not isinstance(optimizer, Mapping):
        return frozenset()
    params = optimizer.get("params")
    if isinstance(params, Mapping) and params.get("torch_adam") is True:
        return frozenset()
    return frozenset(_OPTIMIZER_OPS.get(str(optimizer.get("type", "")).lower(), ()))


def wait_for_locks(
    ops: Collection[str],
    *,
    timeout_s: float,
    grace_s: float = STALE_GRACE_S,
    roots: Collection[Path] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait, with a warning and a bound, until nobody builds an operator that this run needs.

    Args:
        ops: Operators this run needs. A lock of any other one is reported and passed over.
        timeout_s: Longest wait in seconds for a build that is going on.
        grace_s: Longest wait in seconds for a lock that no process of this machine holds.
        roots: Where to look (default: `extensions_roots()`).
        sleep: Replaced in tests.

    Raises:
        ConfigError: If a lock of a needed operator is still there; it names the file to remove.
    """
    for lock in find_locks(roots):
        if lock.op in ops:
            _wait_for(lock, timeout_s=timeout_s, grace_s=min(grace_s, timeout_s), sleep=sleep)
        elif not lock.holders():
            logger.warning(
                "%s was left by a build of '%s' that was killed. This run does not use it and goes on, but other"
                " DeepSpeed programs would wait for it without end: remove it.",
                lock.path,
                lock.op,
            )


def leave_out_shared_memory_op() -> None:
    """Keep DeepSpeed from building its CPU shared-memory operator: ds_ldt talks over gloo and never calls it.

    Its first build takes about a minute on every machine, and a killed one leaves a lock. The table edited here is the
    one in which DeepSpeed notes what can be built on this machine; nothing else reads the entry.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__[SHARED_MEMORY_OP] = False


def _wait_for(lock: BuildLock, *, timeout_s: float, grace_s: float, sleep: Callable[[float], None]) -> None:
    started = time.monotonic()
    poll_s = 0.2
    warned: tuple[int, ...] | None = None
    while lock.path.exists():
        holders = lock.holders()
        bound_s = timeout_s if holders else grace_s
        if holders != warned:
            who = f"process {', '.join(map(str, holders))}" if holders else "no process of this machine"
            logger.warning(
                "DeepSpeed operator '%s' is locked by %s, held by %s; waiting at most %.0f s for it.",
                lock.op,
                lock.path,
                who,
                bound_s,
            )
            warned = holders
        if time.monotonic() - started >= bound_s:
            raise _still_locked(lock, holders, bound_s)
        sleep(poll_s)


def _still_locked(lock: BuildLock, holders: tuple[int, ...], bound_s: float) -> ConfigError:
    if holders:
        return ConfigError(
            f"DeepSpeed operator '{lock.op}' is still being built by process {', '.join(map(str, holders))} after "
            f"{bound_s:g} s (lock {lock.path}). Fix: let that build end and start again, or raise ldt.timeout_s."
        )
    return ConfigError(
        f"DeepSpeed operator '{lock.op}' is locked by {lock.path}, which no process of this machine holds (waited "
        f"{bound_s:g} s): a build was killed. Fix: rm '{lock.path}' and start again, unless another machine is "
        'building there; or, for Adam, set "torch_adam": true in the optimizer\'s params, which needs no build.'
    )
