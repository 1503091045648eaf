"""Run a plan without time: does every rank come to its end, whatever the messages' delays?

Each rank runs its instructions in sequence, a receive waits for its message and nothing else waits. Such a network
of processes is deterministic: how far each rank comes does not depend on delays or on which rank is looked at first.
So one run decides for all delays. With a bounded number of receives posted ahead the same holds, since a full channel
is only one more message (the free place) in the other direction.
"""

from __future__ import annotations

from collections import deque

from ds_ldt.plan.instructions import Channel, Instruction
from ds_ldt.plan.plan import Plan

Positions = dict[int, int]
"""Rank of a slice, as `Plan.rows` numbers them -> index of the instruction that it is at."""

_DESCRIBED_RANKS = 12


def find_stall(plan: Plan, *, posted_ahead: int | None = None) -> Positions:
    """Return where each rank that cannot go on is stuck; nothing if all ranks come to their end.

    Args:
        plan: Any plan; its channels need not be consistent.
        posted_ahead: Rendezvous: a send waits until a receive of its channel is posted for it, and the destination
            keeps this many posted, from the start of the step on. None: sends never wait.
    """
    numbers: dict[Channel, int] = {}
    rows = [_messages(row, numbers) for row in plan.rows]
    ends = [(channel.source, channel.destination) for channel in numbers]
    reached = [0] * len(rows)
    undelivered = [0] * len(numbers)
    runnable = deque(range(len(rows)))
    while runnable:
        rank = runnable.popleft()
        row, at = rows[rank], reached[rank]
        peers: set[int] = set()
        while at < len(row):
            _, channel, is_receive = row[at]
            count = undelivered[channel]
            if count == 0 if is_receive else count == posted_ahead:
                break
            undelivered[channel] = count - 1 if is_receive else count + 1
            at += 1
            peers.add(ends[channel][0 if is_receive else 1])
        reached[rank] = at
        runnable.extend(sorted(peers))
    return {rank: rows[rank][at][0] for rank, at in enumerate(reached) if at < len(rows[rank])}


def min_posted_receives(plan: Plan) -> int:
    """Return the fewest receives that a transport whose sends wait must keep posted on each channel.

    Args:
        plan: A validated plan.
    """
    windows = range(1, plan.shape.num_micro_batches + 1)
    return next(window for window in windows if not find_stall(plan, posted_ahead=window))


def _messages(row: tuple[Instruction, ...], numbers: dict[Channel, int]) -> list[tuple[int, int, bool]]:
    """The instructions of a rank that may have to wait, as (position, number of the channel, is a receive)."""
    found, known = [], {id(channel): number for channel, number in numbers.items()}
    for position, instruction in enumerate(row):
        channel = instruction.channel
        if channel is not None:
            number = known.get(id(channel))
            if number is None:  # another object may be an equal channel
                number = known[id(channel)] = numbers.setdefault(channel, len(numbers))
            found.append((position, number, instruction.kind.is_receive))
    return found


def describe_stall(plan: Plan, positions: Positions) -> str:
    """Say who waits for whom, one line for each stuck rank.

    Args:
        plan: The plan that stalled.
        positions: What `find_stall` returned.
    """
    stuck = sorted(positions)
    lines = [_describe_wait(plan, rank, positions) for rank in stuck[:_DESCRIBED_RANKS]]
    if len(stuck) > _DESCRIBED_RANKS:
        lines.append(f"and {len(stuck) - _DESCRIBED_RANKS} more ranks")
    return "deadlock:\n  " + "\n  ".join(lines)


def _describe_wait(plan: Plan, rank: int, positions: Positions) -> str:
    instruction = plan.rows[rank][positions[rank]]
    channel = instruction.channel
    assert channel is not None, "only a send or a receive can wait"
    peer = channel.source if instruction.kind.is_receive else channel.destination
    waits_for = "a message from" if instruction.kind.is_receive else "a posted receive of"
    stuck_at = f"is itself stuck at {plan.rows[peer][positions[peer]]}" if peer in positions else "has ended"
    who = plan.shape.one_slice.describe_rank(rank)
    return f"{who} at {instruction} waits for {waits_for} rank {peer} ({channel.flow.value}), which {stuck_at}"
