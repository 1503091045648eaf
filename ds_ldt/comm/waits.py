"""Who was silent first: follows who waits for whom to the rank that has reported nothing.

A rank that is stopped takes its neighbours with it: they wait for it, others wait for them, and all of them run into
the same timeout at nearly the same moment. Each knows only whom it waited for itself. Put together, the reports lead
to the rank that made none.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from ds_ldt.errors import enumerated

_MOST_CHARACTERS = 400
"""Characters of a report's text that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A wait of one rank that failed.

    Attributes:
        rank: Who waited.
        peers: For whom: one rank for a message, all others for a collective call.
        doing: For what, e.g. `to receive micro_batch 3 of ...`.
        seconds: For how long.
        closed: The connection was closed; False: the time ran out.
    """

    rank: int
    peers: tuple[int, ...]
    doing: str
    seconds: float
    closed: bool

    def dumps(self) -> str:
        """Return it as one line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    def __str__(self) -> str:
        """Return it as part of a sentence."""
        awaited = ranks(self.peers) if len(self.peers) == 1 else "the others"
        return f"rank {self.rank} waited {self.seconds:.1f} s for {awaited} ({self.doing})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the reports say.

    Attributes:
        silent: Ranks that are waited for and have reported nothing, nearest first.
        chain: The waits that lead to the first of them, this rank's own first. Without a silent rank: all the waits
            that this rank's depends on.
    """

    silent: tuple[int, ...]
    chain: tuple[Wait, ...]


def read_waits(text: str, *, world_size: int) -> dict[int, Wait]:
    """Return the reports by rank, the first of each; what is no report is left out.

    Args:
        text: A line of JSON each.
        world_size: Number of ranks.
    """
    found: dict[int, Wait] = {}
    for line in text.splitlines():
        wait = _read(line, world_size)
        if wait is not None:
            found.setdefault(wait.rank, wait)
    return found


def _read(line: str, world_size: int) -> Wait | None:
    try:
        content = json.loads(line)
        wait = Wait(
            rank=int(content["rank"]),
            peers=tuple(int(peer) for peer in content["peers"]),
            doing=str(content["doing"])[:_MOST_CHARACTERS],
            seconds=float(content["seconds"]),
            closed=bool(content["closed"]),
        )
    except (ValueError, KeyError, TypeError):
        return None
    return wait if all(0 <= rank < world_size for rank in (wait.rank, *wait.peers)) else None


def judge(mine: Wait, reported: Mapping[int, Wait]) -> Verdict:
    """Follow the waits from this rank's own.

    Args:
        mine: What this rank waited for.
        reported: The other ranks' waits, by rank.
    """
    waits = {**reported, mine.rank: mine}
    reached_by: dict[int, int | None] = {mine.rank: None}
    pending, silent = deque([mine.rank]), []
    while pending:
        rank = pending.popleft()
        if rank not in waits:
            silent.append(rank)
            continue
        for peer in waits[rank].peers:
            if peer not in reached_by:
                reached_by[peer] = rank
                pending.append(peer)
    if not silent:
        return Verdict(silent=(), chain=tuple(waits[rank] for rank in reached_by))
    path: list[Wait] = []
    step = reached_by[silent[0]]
    while step is not None:
        path.append(waits[step])
        step = reached_by[step]
    return Verdict(silent=tuple(silent), chain=tuple(reversed(path)))


def explain(verdict: Verdict, *, plain: str, timeout_s: float, cause: object) -> str:
    """Return the text of the error.

    Args:
        verdict: What the reports say.
        plain: What this rank says of its own wait alone.
        timeout_s: The value of `ldt.timeout_s`.
        cause: What the backend said.
    """
    mine, last = verdict.chain[0], verdict.chain[-1]
    if not verdict.silent and mine.closed:
        gave_up = [wait for wait in verdict.chain[1:] if mine.rank in wait.peers and not wait.closed]
        if gave_up:
            return (
                f"rank {mine.rank}: the others have given up waiting for this rank: {_sentence(gave_up)}. It was "
                f"stopped, busy or cut off for longer than ldt.timeout_s = {timeout_s:g} s: raise that if it is only "
                f"slow. Cause: {cause}"
            )
    if not verdict.silent:
        return (
            f"{plain} All who are waited for have reported that they wait too, so no rank is silent: "
            f"{_sentence(verdict.chain[1:])}. They make different calls, or a connection between them carries nothing "
            "any more. Every rank of both sites has to make the same calls in the same order."
        )
    if len(verdict.silent) > 1:
        return f"{plain} Those who have reported no wait of their own: {ranks(verdict.silent)}."
    if len(verdict.chain) == 1 and len(mine.peers) == 1:
        return plain
    (rank,) = verdict.silent
    if last.closed:
        what, why = "is gone or closed the connection first", f"Look for the first error in the log of rank {rank}."
    else:
        what = "was silent first"
        why = (
            f"Its process is stopped, hangs, or cannot be reached: look at its log and its machine. Raise "
            f"ldt.timeout_s (now {timeout_s:g} s) if it is only slow."
        )
    return (
        f"rank {mine.rank}: rank {rank} {what}: {_sentence(verdict.chain)}, and rank {rank} has reported no wait "
        f"(ldt.timeout_s = {timeout_s:g}). {why} Cause here: {cause}"
    )


def _sentence(waits: Iterable[Wait]) -> str:
    return ", ".join(map(str, waits))


def ranks(numbers: Sequence[int], *, most: int | None = None) -> str:
    """Return e.g. `rank 1` or `ranks 1, 2`; with ``most`` only that many are named, as in `ranks 1, 2 and 3 more`."""
    return f"rank{'' if len(numbers) == 1 else 's'} {enumerated(numbers, most=most)}"
