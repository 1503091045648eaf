"""How large a step may be: every rank plans it before it starts, and has to come to an end within seconds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ds_ldt.errors import ConfigError
from ds_ldt.plan.shape import PipelineShape

if TYPE_CHECKING:
    from ds_ldt.config.schema import JobConfig
    from ds_ldt.topology.layout import Layout

MOST_COMPUTES = 200_000
"""The most computes of an edge replica and of the cloud ranks of its domains in one step.

Planning takes 15 to 25 microseconds for each of them on one core of an AMD EPYC, and about a kilobyte.
"""

_MOST_SEARCHED = 40_000
_MOST_SEARCHED_IF_SPLIT = 20_000
_ROUND_TRIPS = 4


def num_computes(shape: PipelineShape, *, training: bool = True) -> int:
    """Return the computes of an edge replica and the cloud ranks of its domains in a step, or a few more.

    Backwards that are asked to run in two halves count as two, wherever gradients go: that is known early.

    Args:
        shape: The shape.
        training: Whether backwards run.
    """
    return _passes(shape, training=training) * shape.num_micro_batches * shape.slice_size


def check_size(shape: PipelineShape, *, training: bool = True) -> None:
    """Refuse a step that is too large to be planned within seconds.

    Args:
        shape: The shape.
        training: Whether it is a training step, else an evaluation.

    Raises:
        ConfigError: It is; the text names the setting to lower, and its limit.
    """
    found = num_computes(shape, training=training)
    if found <= MOST_COMPUTES:
        return
    each = _passes(shape, training=training) * shape.slice_size
    most = MOST_COMPUTES // each
    why = (
        f"at most {MOST_COMPUTES} forwards and backwards of an edge replica and the cloud ranks of its domains are "
        f"planned in a step, and these are {found} ({shape.num_virtual_stages} virtual stages, {shape.slice_size} "
        f"domains of an edge replica, {shape.num_micro_batches} micro-batches)"
    )
    if most < 1:
        raise ConfigError.of(
            "ldt.cloud.data_parallel_size",
            found=shape.num_domains,
            expected=f"at most {MOST_COMPUTES // (each // shape.slice_size)} domains of an edge replica: {why}",
            fix="raise ldt.edge.data_parallel_size, so that each edge replica serves fewer domains, or lower it",
        )
    raise ConfigError.of(
        "gradient_accumulation_steps" if training else "num_micro_batches of an evaluation",
        found=shape.num_micro_batches,
        expected=f"at most {most} here: {why}",
        fix=f"set it to {most} or less"
        + (" and raise train_micro_batch_size_per_gpu instead" if training else " and evaluate in several calls")
        + (", or raise ldt.edge.data_parallel_size" if shape.slice_size > 1 else ""),
    )


def check_job(job: JobConfig, layout: Layout) -> None:
    """Refuse a configuration whose training steps are too large to be planned within seconds.

    Args:
        job: The configuration.
        layout: Its layout.

    Raises:
        ConfigError: See `check_size`.
    """
    check_size(
        PipelineShape.from_layout(
            layout,
            num_micro_batches=job.num_micro_batches,
            num_domains=job.num_domains,
            num_replicas=job.num_replicas,
            split_backward=job.ldt.schedule.split_backward,
        )
    )


def for_search(shape: PipelineShape, *, deepest: int) -> PipelineShape:
    """Return the shape by which a policy tries out depths: where a step is long, one with fewer micro-batches.

    Between its beginning and its end a step repeats itself, so that the depth that is best for some hundreds of
    micro-batches is best for more of them.

    Args:
        shape: The shape of a training step.
        deepest: The most micro-batches in flight that are to be tried; the shorter step has several times as many.
    """
    most = _MOST_SEARCHED_IF_SPLIT if shape.split_stages else _MOST_SEARCHED
    fewer = max(most // (_passes(shape, training=True) * shape.slice_size), _ROUND_TRIPS * deepest)
    return shape if fewer >= shape.num_micro_batches else replace(shape, num_micro_batches=fewer)


def _passes(shape: PipelineShape, *, training: bool) -> int:
    """Forwards and backwards of one micro-batch."""
    if not training:
        return shape.num_virtual_stages
    return 2 * shape.num_virtual_stages + sum(shape.split_backward or ())
