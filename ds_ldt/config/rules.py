"""The rules that the numbers of a job obey, each a small function that returns the problem it finds, or None.

`config`, `layout` and `topology` share them, so that a rule has one wording wherever it is broken. Standard library
only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any, TypeGuard

from ds_ldt.errors import Absent, ConfigProblem

MATRIX_KEY = "ldt.pipeline_num_layers"
EDGE_STAGE = 0
MIN_CHUNKS = 2
MIN_STAGES = 2

Matrix = tuple[tuple[int, ...], ...]
Matrices = dict[str, Matrix]
"""Modality -> its matrix, in the order in which a micro-batch meets the modalities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One visit of a stage.

    Attributes:
        chunk: Chunk index.
        stage: Physical stage.
        configured: Layers that the matrix gives to it.
        joining: Leading or trailing layers that join it.
    """

    chunk: int
    stage: int
    configured: int
    joining: int


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


def cells_in_order(matrix: Matrix, *, num_leading: int, num_trailing: int) -> list[Cell]:
    """Return the cells that hold layers, in visiting order: leading layers in (0, 0), trailing ones in (V-1, 0)."""
    cells = [
        Cell(
            chunk=chunk,
            stage=stage,
            configured=count,
            joining=(num_leading if (chunk, stage) == (0, EDGE_STAGE) else 0)
            + (num_trailing if (chunk, stage) == (len(matrix) - 1, EDGE_STAGE) else 0),
        )
        for chunk, row in enumerate(matrix)
        for stage, count in enumerate(row)
    ]
    return [cell for cell in cells if cell.configured + cell.joining]


def matrix_form(matrix: object, *, key: str = MATRIX_KEY) -> ConfigProblem | None:
    """Check that a matrix is rectangular, at least 2 x 2, of whole numbers >= 0.

    Args:
        matrix: The matrix as configured.
        key: The path of its setting.
    """
    fix = f'write it as in "{key.rpartition(".")[2]}": [[2, 13, 13], [2, 0, 0]]'
    if not _is_list(matrix) or not all(_is_list(row) for row in matrix):
        expected = "a list of chunks, each a list of layer counts, one count per stage"
        return ConfigProblem(key=key, found=matrix, expected=expected, fix=fix)
    if len(matrix) < MIN_CHUNKS:
        return ConfigProblem(
            key=key,
            found=Absent(f"{_listed(matrix)}, which is {len(matrix)} chunk{'' if len(matrix) == 1 else 's'}"),
            expected=f"at least {MIN_CHUNKS} chunks, because the first and the last layers are both on the edge",
            fix="add a last chunk that holds the last layers on stage 0, e.g. [2, 0, 0]",
        )
    return _rows_form(matrix, key)


def _rows_form(matrix: Sequence[Sequence[object]], key: str) -> ConfigProblem | None:
    width = max(len(matrix[0]), MIN_STAGES)
    for chunk, row in enumerate(matrix):
        if len(row) != width:
            return ConfigProblem(
                key=f"{key}[{chunk}]",
                found=row,
                expected=f"{width} layer counts (one for the edge and one per cloud stage), as many in every chunk",
                fix="write 0 where a stage holds no layers of a chunk",
            )
        for stage, count in enumerate(row):
            if not is_whole(count, 0):
                return ConfigProblem(
                    key=f"{key}[{chunk}][{stage}]",
                    found=count,
                    expected="a whole number of layers, 0 or more",
                    fix=f"write how many layers stage {stage} holds in chunk {chunk}",
                )
    return None


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _listed(matrix: Sequence[Sequence[object]]) -> list[list[object]]:
    return [list(row) for row in matrix]


def matrix_sum(
    matrix: Matrix, num_layers: int, *, key: str = MATRIX_KEY, owner: str = "the model"
) -> ConfigProblem | None:
    """Check that a matrix distributes exactly the layers there are.

    Args:
        matrix: The matrix.
        num_layers: Number of layers to distribute.
        key: The path of its setting.
        owner: Whose layers they are.
    """
    total = sum(map(sum, matrix))
    if total == num_layers:
        return None
    change = f"add {num_layers - total} to" if num_layers > total else f"take {total - num_layers} from"
    return ConfigProblem(
        key=key,
        found=Absent(f"{_listed(matrix)}, whose sum is {total}"),
        expected=f"a sum of {num_layers}, the number of layers of {owner}",
        fix=f"{change} the counts, so that every layer is held exactly once",
    )


def one_for_each_chunk(intervals: list[int] | None, layers: Matrix | Matrices) -> ConfigProblem | None:
    """Check that there are as many intervals of activation checkpoints as chunks.

    Args:
        intervals: Whole numbers >= 0, or None.
        layers: `pipeline_num_layers`, well-formed.
    """
    num_chunks = len(next(iter(layers.values())) if isinstance(layers, Mapping) else layers)
    if intervals is None or len(intervals) == num_chunks:
        return None
    return ConfigProblem(
        key="ldt.activation_checkpoint_interval",
        found=intervals,
        expected=f"{num_chunks} numbers, one for each chunk of ldt.pipeline_num_layers",
        fix='correct it, or set "pipeline": {"activation_checkpoint_interval": 1} for all chunks alike',
    )


def matrix_sites(
    matrix: Matrix, *, num_leading: int, num_trailing: int, allow_exposed_edge: bool
) -> ConfigProblem | None:
    """Check where layers are: some on every cloud stage, and the first and the last of the model on the edge.

    Args:
        matrix: V x P layer counts, well-formed.
        num_leading: Layers that join the head.
        num_trailing: Layers that join the tail.
        allow_exposed_edge: Accept a head (tail) of leading (trailing) layers only.
    """
    problem = empty_stage(matrix, found=f"{_listed(matrix)}")
    if problem is not None:
        return problem
    cells = cells_in_order(matrix, num_leading=num_leading, num_trailing=num_trailing)
    last_chunk = len(matrix) - 1
    problem = _end_on_edge(cells, matrix, end="first", chunk=0) or _end_on_edge(
        cells[::-1], matrix, end="last", chunk=last_chunk
    )
    if problem is not None or allow_exposed_edge:
        return problem
    return _exposed(cells, end="first", chunk=0) or _exposed(cells[::-1], end="last", chunk=last_chunk)


def empty_stage(matrix: Matrix, *, found: str) -> ConfigProblem | None:
    """Check that every cloud stage holds a layer.

    Args:
        matrix: Layers of all modalities in every cell.
        found: What the configuration says, for the message.
    """
    for stage in range(1, len(matrix[0])):
        if not any(row[stage] for row in matrix):
            return ConfigProblem(
                key=MATRIX_KEY,
                found=Absent(f"{found}, with no layers on stage {stage}"),
                expected="at least one layer on every cloud stage",
                fix=f"give stage {stage} layers in some chunk, or remove its column and its ranks",
            )
    return None


def _end_on_edge(cells: Sequence[Cell], matrix: Matrix, *, end: str, chunk: int) -> ConfigProblem | None:
    """Check that the first cell given, the head or the tail, is on the edge."""
    if cells[0].stage == EDGE_STAGE:
        return None
    return ConfigProblem(
        key=f"{MATRIX_KEY}[{chunk}]",
        found=Absent(f"{_listed(matrix)}, with the {end} layers on stage {cells[0].stage}"),
        expected=f"the {end} layers on stage 0, the edge, which holds the samples and the labels",
        fix=f"give layers to {MATRIX_KEY}[{chunk}][0]"
        + ("" if end == "first" else " and none to the cloud stages of the last chunk"),
    )


def _exposed(cells: Sequence[Cell], *, end: str, chunk: int) -> ConfigProblem | None:
    """Check that configured layers stand between the first (last) layer of a model and the link."""
    on_edge = cells[: len(cells) - len(list(dropwhile(lambda cell: cell.stage == EDGE_STAGE, cells)))]
    if any(cell.configured for cell in on_edge):
        return None
    reason = "token ids are read off embedding outputs" if end == "first" else "gradients give the labels away"
    return ConfigProblem(
        key=f"{MATRIX_KEY}[{chunk}][0]",
        found=0,
        expected=f"1 or more: at least one of the {end} layers on the edge, because {reason}",
        fix='move layers to the edge, or accept it with "allow_exposed_edge": true in the "ldt" section',
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
