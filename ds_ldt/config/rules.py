"""The rules that the numbers of a job obey, each a small function that returns the problem it finds, or None.

The configuration and the topology share them, so that a rule has one wording wherever it is broken. Those of
`pipeline_num_layers` are in `ds_ldt.config.layer_matrix`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_ldt.errors import Absent, ConfigProblem

MATRIX_KEY = "ldt.pipeline_num_layers"
EDGE_STAGE = 0
MIN_STAGES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenBatch:
    """The batch numbers as configured, each positive or None.

    Attributes:
        train: `train_batch_size`, samples per step over all domains.
        micro: `train_micro_batch_size_per_gpu`, samples per micro-batch and domain.
        accumulation: `gradient_accumulation_steps`, micro-batches per domain and step.
    """

    train: int | None
    micro: int | None
    accumulation: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """All three batch numbers: train = micro * accumulation * D."""

    train: int
    micro: int
    accumulation: int


def is_whole(value: object, least: int) -> bool:
    """Return whether a value is a whole number (not a boolean, not a text) of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def one_for_each_chunk(intervals: list[int] | None, num_chunks: int) -> ConfigProblem | None:
    """Check that there are as many intervals of activation checkpoints as chunks.

    Args:
        intervals: Whole numbers >= 0, or None.
        num_chunks: V.
    """
    if intervals is None or len(intervals) == num_chunks:
        return None
    return ConfigProblem(
        key="ldt.activation_checkpoint_interval",
        found=intervals,
        expected=f"{num_chunks} numbers, one for each chunk of ldt.pipeline_num_layers",
        fix='correct it, or set "pipeline": {"activation_checkpoint_interval": 1} for all chunks alike',
    )


def edge_divides_cloud(edge_size: int, cloud_size: int) -> ConfigProblem | None:
    """Check that E divides D."""
    if cloud_size % edge_size == 0:
        return None
    return ConfigProblem(
        key="ldt.edge.data_parallel_size",
        found=edge_size,
        expected=f"a divisor of ldt.cloud.data_parallel_size = {cloud_size}, because every edge replica serves the "
        "same number of domains",
        fix="change one of the two sizes",
    )


def weights_can_wait(settings: Mapping[str, Any], *, split_backward: bool) -> ConfigProblem | None:
    """Refuse a setting that takes gradients away as soon as the backward pass has made them.

    Args:
        settings: The DeepSpeed JSON.
        split_backward: Whether weight gradients are made later than that.
    """
    bf16 = settings.get("bf16")
    if not split_backward or not isinstance(bf16, Mapping) or not bf16.get("immediate_grad_update"):
        return None
    return ConfigProblem(
        key="bf16.immediate_grad_update",
        found=True,
        expected="false where ldt.schedule.split_backward is true: weight gradients come after the backward pass",
        fix="remove it, or set ldt.schedule.split_backward to false",
    )


def world_size_fits(
    found: int, *, edge: tuple[int, int], cloud: tuple[int, int], num_stages: int
) -> ConfigProblem | None:
    """Check the number of processes.

    Args:
        found: Number of processes launched.
        edge: (E, Te).
        cloud: (D, Tc).
        num_stages: P.
    """
    on_edge = edge[0] * edge[1]
    in_cloud = (num_stages - 1) * cloud[0] * cloud[1]
    if found == on_edge + in_cloud:
        return None
    return ConfigProblem(
        key="world size",
        found=Absent(f"{found} process{'' if found == 1 else 'es'}"),
        expected=f"E*Te + (P-1)*D*Tc = {edge[0]}*{edge[1]} + ({num_stages}-1)*{cloud[0]}*{cloud[1]} = "
        f"{on_edge + in_cloud} (E, Te of ldt.edge; D, Tc of ldt.cloud; P columns of {MATRIX_KEY})",
        fix=f"launch {on_edge} on the edge and {in_cloud} in the cloud, or change the sizes",
    )


def complete_batch(given: GivenBatch, *, num_domains: int, num_replicas: int) -> Batch | ConfigProblem:
    """Fill in the batch numbers that are not given, as DeepSpeed does; a problem if they do not fit.

    Args:
        given: Positive numbers or None.
        num_domains: D, by which the global batch is divided.
        num_replicas: E, which plays no part, and is named because users expect it to.
    """
    train, micro, accumulation = given.train, given.micro, given.accumulation
    if train is None and micro is None:
        return _batch_problem(given, num_domains, num_replicas)
    if train is not None and micro is not None and accumulation is None:
        accumulation = train // (micro * num_domains)
    if accumulation is None:
        accumulation = 1
    if micro is None and train is not None:
        micro = train // (accumulation * num_domains)
    micro = micro or 0
    product = micro * accumulation * num_domains
    if product == 0 or (train is not None and train != product):
        return _batch_problem(given, num_domains, num_replicas)
    return Batch(train=product, micro=micro, accumulation=accumulation)


def _batch_problem(given: GivenBatch, num_domains: int, num_replicas: int) -> ConfigProblem:
    numbers = {
        "train_micro_batch_size_per_gpu": given.micro,
        "gradient_accumulation_steps": given.accumulation,
    }
    filled = " * ".join(str(number) if number else name for name, number in numbers.items())
    product = (given.micro or 0) * (given.accumulation or 0) * num_domains
    result = f" = {product}" if product else ""
    if given.train is None:
        fix = 'set "train_micro_batch_size_per_gpu" (samples per micro-batch and domain), or "train_batch_size"'
    elif product:
        fix = f"set train_batch_size to {product}, or leave one of the three numbers out"
    else:
        divisor = (given.micro or 1) * (given.accumulation or 1) * num_domains
        fix = f"set train_batch_size to a multiple of {divisor}"
    return ConfigProblem(
        key="train_batch_size",
        found=Absent() if given.train is None else given.train,
        expected="train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * D, here "
        f"{filled} * {num_domains}{result}, with D = ldt.cloud.data_parallel_size = {num_domains} "
        f"(neither the world size nor E = ldt.edge.data_parallel_size = {num_replicas} counts)",
        fix=fix,
    )
