"""Shapes for the plan tests, written as the matrix a user would configure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hypothesis import strategies as st

from ds_ldt.plan import PipelineShape
from ds_ldt.topology.layout import Layout

Matrix = list[list[int]]


def full_matrix(num_stages: int, num_chunks: int) -> Matrix:
    """One layer in every cell; the last chunk has only the edge's, so that the tail is there."""
    body = [[1] * num_stages for _ in range(num_chunks - 1)]
    return [*body, [1] + [0] * (num_stages - 1)]


def shape_of(
    matrix: Matrix, *, m: int, d: int = 1, e: int = 1, gradients: tuple[bool, ...] | None = None
) -> PipelineShape:
    return PipelineShape.from_layout(
        Layout.build(matrix), num_micro_batches=m, num_domains=d, num_replicas=e, gradient_boundaries=gradients
    )


def full_shape(p: int, v: int, m: int, d: int = 1, e: int = 1) -> PipelineShape:
    return shape_of(full_matrix(p, v), m=m, d=d, e=e)


def split(shape: PipelineShape, *, everywhere: bool = False) -> PipelineShape:
    """The same with backwards in two halves: those of the cloud, as configured, or all."""
    return replace(shape, split_backward=tuple(everywhere or stage != 0 for stage in shape.stages))


def grid_of_shapes() -> Iterator[PipelineShape]:
    """P 2..6, V 2..3, M 1..12 with one domain and with a slice of two; V 4, replicas and wider slices more thinly."""
    for p in range(2, 7):
        for m in range(1, 13):
            yield from (full_shape(p, v, m, d) for d in (1, 2) for v in (2, 3))
        for m in (1, 2, p, 9):
            yield from (full_shape(p, 4, m), full_shape(p, 2, m, 2, 2), full_shape(p, 3, m, 2, 2))
        if p < 5:
            for m in (1, 3, 7):
                yield from (full_shape(p, v, m, d, e) for v in (2, 3) for d, e in ((3, 1), (4, 2)))


# Cells without layers: the edge has no middle chunk, a stage sits out a chunk, neighbouring cells of a stage merge.
SPARSE_MATRICES: dict[str, Matrix] = {
    "no middle chunk on the edge": [[1, 1, 1], [0, 1, 1], [1, 0, 0]],
    "stage 1 sits out chunk 1": [[1, 1, 1], [1, 0, 1], [1, 0, 0]],
    "stage 2 only in chunk 1": [[1, 1, 0], [0, 1, 1], [1, 0, 0]],
    "middle row empty": [[2, 1, 1], [0, 0, 0], [1, 0, 0]],
    "five chunks, two stages": [[1, 1], [1, 1], [0, 1], [1, 1], [2, 0]],
    "uneven work": [[1, 1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 1], [1, 0, 0, 0]],
}


@st.composite
def matrices(draw: st.DrawFn) -> Matrix:
    """Any matrix that is a layout: each cloud stage has a layer somewhere, head and tail are on the edge."""
    p, v = draw(st.integers(2, 5)), draw(st.integers(2, 4))
    body = [[draw(st.integers(0, 1)) for _ in range(p)] for _ in range(v - 1)]
    body[0][0] = 1
    for stage in range(1, p):
        if not any(row[stage] for row in body):
            body[draw(st.integers(0, v - 2))][stage] = 1
    return [*body, [1] + [0] * (p - 1)]


@st.composite
def shapes(draw: st.DrawFn, *, max_micro_batches: int = 9) -> PipelineShape:
    e, k = draw(st.sampled_from([(1, 1), (1, 2), (1, 3), (2, 1), (2, 2)]))
    return shape_of(draw(matrices()), m=draw(st.integers(1, max_micro_batches)), d=e * k, e=e)


@st.composite
def split_shapes(draw: st.DrawFn, *, max_micro_batches: int = 9) -> PipelineShape:
    """Any layout in which some backwards are asked to run in two halves, and some boundaries may carry no gradient."""
    shape = draw(shapes(max_micro_batches=max_micro_batches))
    asked = tuple(draw(st.booleans()) for _ in shape.stages)
    frozen = draw(st.integers(0, shape.num_boundaries))
    carries = (False,) * frozen + (True,) * (shape.num_boundaries - frozen)
    return replace(shape, split_backward=asked, gradient_boundaries=carries)
