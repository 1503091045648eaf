"""What the sites tell each other at the end of a step: a few sums, in one message each way over the link."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ldt.comm.grid import LDTPipelineGrid
from ds_ldt.comm.send_queue import close_posted, kept

SUMMARY_SIZE = 8
"""Most numbers of a summary, float32."""

_TAG = 2


class StepSummary:
    """Sums a few numbers over all ranks of both sites.

    Each site sums on its own; then the leaders of the two sites send each other one message, at the same time, and
    spread the result inside their site. An all-reduce of the two leaders would be a round trip more: there a message
    waits until its receiver says that it is ready. Here the receive of the next summary is posted as soon as one has
    come.

    Args:
        grid: the groups inside the sites.
        group: group for control messages: gloo, on CPU tensors.
    """

    def __init__(self, grid: LDTPipelineGrid, group: dist.ProcessGroup) -> None:
        self._grid = grid
        self._group = group
        self._posted: tuple[dist.Work, Tensor] | None = None
        self._post()

    def sum(self, values: Tensor) -> Tensor:
        """Sum a vector over every rank of both sites. Every rank calls it, with as many numbers.

        Args:
            values: float32 vector of at most `SUMMARY_SIZE` numbers; changed in place.

        Returns:
            ``values``, bit-equal on every rank.

        Raises:
            RuntimeError: a peer is gone or silent; callers say what they were doing.
        """
        grid = self._grid
        if len(grid.site_ranks) > 1:
            dist.all_reduce(values, group=grid.site_group)
        if grid.is_site_leader:
            values += self._swap(values.cpu()).to(values.device)
        if len(grid.site_ranks) > 1:
            dist.broadcast(values, src=grid.site_ranks[0], group=grid.site_group)
        return values

    def _swap(self, values: Tensor) -> Tensor:
        assert self._posted is not None, "no summary is expected"
        received, theirs = self._posted
        timeout = timedelta(seconds=self._grid.timeout_s)
        mine = torch.zeros(SUMMARY_SIZE, dtype=torch.float32)
        mine[: values.numel()] = values
        sent = kept(dist.isend(mine, self._grid.other_site_leader, group=self._group, tag=_TAG))
        received.wait(timeout)
        sent.wait(timeout)
        self._post()
        return theirs[: values.numel()]

    def abandon(self) -> None:
        """Closes the connection on which the next summary is awaited. Raises nothing."""
        if self._posted is not None:
            close_posted([self._posted[0]])
            self._posted = None

    def _post(self) -> None:
        if self._grid.is_site_leader:
            theirs = torch.empty(SUMMARY_SIZE, dtype=torch.float32)
            self._posted = kept(dist.irecv(theirs, self._grid.other_site_leader, group=self._group, tag=_TAG)), theirs
