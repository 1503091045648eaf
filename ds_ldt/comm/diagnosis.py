"""When a wait has failed: report it to the other ranks, read their reports, and name who was silent first.

Nothing of this costs a step anything: the store is used only once a wait has failed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import torch.distributed as dist

from ds_ldt.comm.reach import reason
from ds_ldt.comm.rendezvous import holds_store, of_world
from ds_ldt.comm.shared_store import SharedStore
from ds_ldt.comm.waits import Wait, explain, judge, read_waits
from ds_ldt.errors import LinkError

_LEAST_GRACE_S, _LONGEST_GRACE_S, _GRACE = 0.5, 30.0, 0.1
"""Seconds for the reports of others whose waits began later: this share of the timeout, within these bounds."""

_CLOSED_GRACE_S = 0.3
"""The same in seconds where a connection was closed in a collective call: the others see it at once too."""

_LINGER_S = 0.3
"""Seconds that the rank whose process holds the store stays, so that the others can read it."""

_PAUSE_S = 0.05


class Ranks(Protocol):
    """The part of the grid that is needed here."""

    global_rank: int
    world_size: int
    timeout_s: float
    number: int


@contextmanager
def diagnosed(grid: Ranks) -> Iterator[None]:
    """Around what waits for other ranks: have the error of a failed wait name who was silent first.

    Args:
        grid: this rank, the number of ranks and the time allowed.

    Raises:
        LinkError: in place of one whose ``wait`` is set. It takes a share of the timeout longer, 30 s at most, and a
            fraction of a second where the peer is gone.
    """
    try:
        yield
    except LinkError as error:
        if error.wait is None:
            raise
        raise LinkError(_diagnose(error, error.wait, grid)).with_traceback(error.__traceback__) from error.__cause__


def _diagnose(error: LinkError, mine: Wait, grid: Ranks) -> str:
    """Return the text of the error, with what the other ranks say."""
    store = None
    if dist.is_initialized():
        with suppress(RuntimeError, ValueError):  # whatever torch says of a world that is being taken apart
            store = of_world(dist, timeout_s=min(2.0, max(0.5, grid.timeout_s / 10)))
    if store is None or not store.is_usable:
        return str(error)
    key, reported = f"waits/{grid.number}", {mine.rank: mine}
    try:
        store.append(key, mine.dumps())
        _collect(store, key, mine, grid, reported)
    except OSError as silence:
        if len(reported) == 1:
            return _without_store(error, mine, grid, store, silence)
    if holds_store(grid.global_rank):
        time.sleep(_LINGER_S)
    verdict = judge(mine, reported)
    return explain(verdict, plain=str(error), timeout_s=grid.timeout_s, cause=error.__cause__)


def _collect(store: SharedStore, key: str, mine: Wait, grid: Ranks, reported: dict[int, Wait]) -> None:
    """Read the others' reports until the time for them is over, or nobody who is waited for is missing."""
    if mine.closed:
        grace_s = _CLOSED_GRACE_S if len(mine.peers) > 1 else 0.0
    else:
        grace_s = min(_LONGEST_GRACE_S, max(_LEAST_GRACE_S, _GRACE * grid.timeout_s))
    until = time.monotonic() + grace_s
    while True:
        reported.update(read_waits(store.read(key), world_size=grid.world_size))
        if not judge(mine, reported).silent or time.monotonic() >= until:
            return
        time.sleep(_PAUSE_S)


def _without_store(error: LinkError, mine: Wait, grid: Ranks, store: SharedStore, silence: OSError) -> str:
    """Return the text where the store cannot be asked, which says something of the process that holds it."""
    where = ":".join(map(str, store.address or ("the job's store",)))
    if not holds_store(0):
        return f"{error} The store at {where}, where ranks report their waits, cannot be asked: {reason(silence)}."
    if not isinstance(silence, TimeoutError):
        return (
            f"{error} Rank 0, whose process holds the store at {where} where ranks report their waits, has ended too: "
            "look at its log as well."
        )
    return (
        f"rank {grid.global_rank}: rank 0 was silent first: its process holds the store at {where}, which does not "
        f"answer either. It is stopped, hangs, or cannot be reached: look at its log and its machine. Here {mine} "
        f"(ldt.timeout_s = {grid.timeout_s:g}). Cause here: {error.__cause__}"
    )
