"""Reductions over two sites of unequal size: gradients inside a stage, a few numbers across the link.

Scaling rules (``docs/architecture.md`` derives them): the loss of every micro-batch is divided by M before its
backward pass, so the gradients that cross a boundary carry 1/M and nothing else. A cloud rank has then accumulated one
domain and is averaged over D; an edge replica has accumulated K = D/E domains, so it is scaled by 1/K and averaged
over E.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_ldt.comm.diagnosis import diagnosed
from ds_ldt.comm.grid import LDTPipelineGrid
from ds_ldt.comm.send_queue import has_timed_out
from ds_ldt.comm.step_summary import StepSummary
from ds_ldt.comm.waits import Wait
from ds_ldt.errors import LinkError

MAX_TEXT_BYTES = 8192
"""Longest text that the sites can exchange, in bytes of UTF-8."""


@contextmanager
def bounded(what: str, grid: LDTPipelineGrid) -> Iterator[None]:
    """Turn the failure of a collective into a :class:`~ds_ldt.errors.LinkError` that names it.

    Args:
        what: what the ranks are doing together, as the user would call it.
        grid: names this rank and the time allowed.

    Raises:
        LinkError: a collective inside failed or ran into ``ldt.timeout_s``; it names who was silent first.
    """
    begin = time.monotonic()
    with diagnosed(grid):
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, LinkError):
                raise
            wait = Wait(
                rank=grid.global_rank,
                peers=tuple(rank for rank in range(grid.world_size) if rank != grid.global_rank),
                doing=f"in {what}",
                seconds=time.monotonic() - begin,
                closed=not has_timed_out(error),
            )
            text = (
                f"rank {grid.global_rank} (stage {grid.stage_id}, {grid.site}): {what} failed within "
                f"ldt.timeout_s = {grid.timeout_s} s: {error}. Did every rank of both sites call it?"
            )
            raise LinkError.of(wait, text) from error


def scale_for_slice(gradients: Iterable[Tensor], *, slice_size: int, loss_scale: float = 1.0) -> None:
    """Divide gradients in place by K, as an edge replica has summed over its K domains, and by the loss scale.

    Args:
        gradients: fp32 where the loss scale is not 1, so that nothing underflows.
        slice_size: K on the edge, 1 in the cloud.
        loss_scale: the factor of the losses; what overflowed stays infinite.
    """
    tensors, divisor = list(gradients), slice_size * loss_scale
    if divisor != 1 and tensors:
        torch._foreach_mul_(tensors, 1.0 / divisor)


def sum_over_sites(values: Tensor, grid: LDTPipelineGrid) -> Tensor:
    """Sum a small vector over every rank of both sites; bit-equal everywhere.

    The sites sum on their own, their leaders exchange one message over the link, and each leader spreads the result
    inside its site.

    Args:
        values: float32 or integer vector, changed in place.
        grid: the groups.

    Returns:
        ``values``.
    """
    dist.all_reduce(values, group=grid.site_group)
    if grid.is_site_leader:
        dist.all_reduce(values, group=grid.leader_group)
    dist.broadcast(values, src=grid.site_ranks[0], group=grid.site_group)
    return values


def ranks_where(here: bool, grid: LDTPipelineGrid) -> list[int]:
    """Return the ranks of both sites that say yes; every rank calls it and gets the same answer.

    Args:
        here: what this rank says.
        grid: the groups.
    """
    flags = torch.zeros(grid.world_size, dtype=torch.int32)
    flags[grid.global_rank] = int(here)
    summed = sum_over_sites(flags.to(get_accelerator().current_device_name()), grid)
    return [rank for rank, flag in enumerate(summed.tolist()) if flag]


def global_norm(
    gradients: Sequence[Tensor], grid: LDTPipelineGrid, extra: Tensor, summary: StepSummary
) -> tuple[Tensor, Tensor]:
    """The 2-norm of the gradient of the whole model, and the sum of ``extra`` over all ranks, in one reduction.

    Every parameter counts once: after the data parallel average all replicas of a stage hold the same gradients, so
    only the first one contributes.

    Args:
        gradients: averaged gradients of this rank; a tied weight appears once.
        grid: says which replica this rank is.
        extra: float32 vector of whatever else is to be summed.
        summary: sums over both sites.

    Returns:
        ``(norm, extra)``: a float32 scalar and the summed vector, bit-equal on every rank.
    """
    square = torch.zeros(1, dtype=torch.float32, device=extra.device)
    if grid.data_parallel_id == 0 and gradients:
        square += torch.nn.utils.get_total_norm(gradients).float() ** 2
    summed = summary.sum(torch.cat([square, extra.float()]))
    return summed[0].sqrt(), summed[1:]


def exchange_text(text: str, grid: LDTPipelineGrid) -> list[str]:
    """Let the leaders of the two sites read each other's text, then everybody else of their site.

    Text, not pickled objects: what comes from the other site is never executed.

    Args:
        text: what this rank's site has to say; only the leader's counts. At most 8 KiB of UTF-8.
        grid: the groups.

    Returns:
        The edge's text and the cloud's, on every rank.

    Raises:
        ValueError: the text is too long.
    """
    encoded = text.encode()
    if len(encoded) > MAX_TEXT_BYTES:
        raise ValueError(f"{len(encoded)} bytes of text to exchange between the sites, at most {MAX_TEXT_BYTES} fit")
    both = torch.zeros(2, MAX_TEXT_BYTES, dtype=torch.uint8)
    if grid.is_site_leader:
        both[int(grid.site == "cloud"), : len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    summed = sum_over_sites(both.to(get_accelerator().current_device_name()), grid).cpu()
    return [bytes(row[row != 0].tolist()).decode() for row in summed]


def gather_text_of_site(text: str, grid: LDTPipelineGrid) -> list[str]:
    """Let every rank of a site read the texts of all its ranks.

    Args:
        text: of this rank. At most 8 KiB of UTF-8.
        grid: the groups.

    Returns:
        The texts of the ranks of this site, in the order of the ranks.
    """
    encoded = text.encode()
    mine = torch.zeros(MAX_TEXT_BYTES, dtype=torch.uint8)
    mine[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    mine = mine.to(get_accelerator().current_device_name())
    rows = [torch.zeros_like(mine) for _ in grid.site_ranks]
    dist.all_gather(rows, mine, group=grid.site_group)
    return [bytes(row[row != 0].tolist()).decode() for row in (row.cpu() for row in rows)]
