"""How many parameters the whole model has: every one once, whatever replicas there are of it."""

from __future__ import annotations

import torch
from torch import nn

from ds_ldt.comm.collectives import bounded, sum_over_sites
from ds_ldt.comm.grid import LDTPipelineGrid


def count_parameters(module: nn.Module, grid: LDTPipelineGrid, device: torch.device) -> tuple[int, int]:
    """Sum up the parameters of all stages; every rank of both sites calls it.

    Only the first replica of each stage counts, and a tied pair, which is one tensor on one stage, counts once.

    Args:
        module: the layers of this rank.
        grid: says which replica this rank is.
        device: where the sum is made.

    Returns:
        ``(all parameters, those that are trained)``, the same on every rank.

    Raises:
        LinkError: a rank did not take part within ``ldt.timeout_s``.
    """
    sizes = (
        [(p.numel(), p.numel() * p.requires_grad) for p in module.parameters()] if grid.data_parallel_id == 0 else []
    )
    counts = torch.tensor(
        [sum(column) for column in zip((0, 0), *sizes, strict=True)], dtype=torch.int64, device=device
    )
    with bounded("ds_ldt.initialize (number of parameters)", grid):
        total, trained = sum_over_sites(counts, grid).tolist()
    return total, trained
