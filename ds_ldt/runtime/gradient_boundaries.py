"""Which boundaries carry gradients: those before which anything is trained."""

from __future__ import annotations

import torch

from ds_ldt.comm.collectives import sum_over_sites
from ds_ldt.comm.grid import LDTPipelineGrid
from ds_ldt.errors import ConfigError
from ds_ldt.runtime.module import LDTPipelineModule


def agree_on_gradient_boundaries(
    module: LDTPipelineModule, grid: LDTPipelineGrid, device: torch.device | str
) -> tuple[bool, ...]:
    """Find which boundaries carry gradients: those before which anything is trained. Every rank calls it.

    Args:
        module: the layers of this rank.
        grid: the groups.
        device: where the groups want their tensors.

    Returns:
        One flag for each boundary, the same on every rank.

    Raises:
        ConfigError: on every rank: ``ldt.freeze`` leaves nothing to train.
    """
    trainable = torch.zeros(module.layout.num_virtual_stages, dtype=torch.int32, device=device)
    for virtual_stage in module.virtual_stage_funcs:
        trainable[virtual_stage] = int(bool(module.trained_parameters(virtual_stage)))
    counts = sum_over_sites(trainable, grid).cumsum(0).tolist()
    freeze = module.job.ldt.freeze
    if freeze and counts[-1] == 0:
        raise ConfigError.of(
            "ldt.freeze",
            found=freeze,
            expected="some part of the model that is left to train",
            fix="take a name off the list",
        )
    return tuple(
        counts[boundary] > 0 and any(tensor.gradient for tensor in module.wire.tensors_at(boundary))
        for boundary in range(module.layout.num_boundaries)
    )
