"""Targets that test_harness.py runs inside groups."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def rank_and(value: int) -> tuple[int, int, int]:
    """(rank, value, process id)."""
    return int(os.environ["RANK"]), value, os.getpid()


def sleep_in_a_function_with_a_telling_name(rank: int) -> None:
    """Hangs on one rank."""
    if int(os.environ["RANK"]) == rank:
        sys.stderr.write("about to sleep\n")
        time.sleep(3600)


def raise_on(rank: int) -> str:
    """Raises on one rank; the others answer late but within the grace."""
    if int(os.environ["RANK"]) == rank:
        raise ConnectionResetError(f"told to on rank {rank}")
    time.sleep(0.3)
    return "fine"


def die_on(rank: int) -> str:
    """Ends one process without a word; rank 0 never answers."""
    if int(os.environ["RANK"]) == rank:
        sys.stderr.write("last words\n")
        os._exit(7)
    if int(os.environ["RANK"]) == 0:
        time.sleep(3600)
    return "fine"


def unpicklable() -> object:
    """A result that cannot travel."""
    return lambda: None


def all_reduce_of_ranks() -> float:
    """Sum of rank + 1 over the group that the harness initialised."""
    import torch
    import torch.distributed as dist

    value = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(value)
    return float(value)


def hang_in_a_receive() -> None:
    """Rank 1 waits for a message that nobody sends."""
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 1:
        dist.recv(torch.zeros(1), src=0)


def template_of() -> tuple[int, int, bool]:
    """Process id of what this process was forked from, its number of threads, and whether it had imported torch."""
    template = os.getppid()
    imported = "libtorch_cpu" in Path(f"/proc/{template}/maps").read_text()
    return template, len(os.listdir(f"/proc/{template}/task")), imported
