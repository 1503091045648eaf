"""The layout: every layer exactly once, in order, and never a boundary inside a rank."""

from __future__ import annotations

import dataclasses
import re
from itertools import groupby, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_ldt.errors import ConfigError
from ds_ldt.topology.layout import Layout


def cells(layout: Layout) -> list[tuple[int, int, int, int]]:
    """Return (chunk, stage, start, stop) of each virtual stage."""
    return [(virtual.chunk, virtual.stage, virtual.start, virtual.stop) for virtual in layout.virtual_stages]


def test_two_chunks_over_three_stages() -> None:
    layout = Layout.build([[2, 13, 13], [2, 0, 0]], num_layers=30)
    assert cells(layout) == [(0, 0, 0, 2), (0, 1, 2, 15), (0, 2, 15, 28), (1, 0, 28, 30)]
    assert (layout.num_chunks, layout.num_stages, layout.num_layers) == (2, 3, 30)
    assert (layout.num_virtual_stages, layout.num_boundaries) == (4, 3)
    assert [virtual.index for virtual in layout.virtual_stages] == [0, 1, 2, 3]


def test_three_chunks_visit_the_edge_in_between() -> None:
    layout = Layout.build([[2, 4, 4], [1, 4, 4], [2, 0, 0]])
    assert [virtual.stage for virtual in layout.virtual_stages] == [0, 1, 2, 0, 1, 2, 0]
    assert [virtual.start for virtual in layout.virtual_stages_of(0)] == [0, 10, 19]
    assert [virtual.chunk for virtual in layout.virtual_stages_of(2)] == [0, 1]
    assert layout.virtual_stages_of(3) == ()


def test_leading_and_trailing_layers_join_head_and_tail() -> None:
    layout = Layout.build([[2, 26], [2, 0]], num_layers=30, num_leading=1, num_trailing=2)
    assert cells(layout) == [(0, 0, 0, 3), (0, 1, 3, 29), (1, 0, 29, 33)]
    assert layout.num_layers == 33
    assert layout.matrix == ((2, 26), (2, 0))


def test_cells_that_follow_each_other_on_one_stage_are_one_virtual_stage() -> None:
    layout = Layout.build([[2, 3], [0, 4], [1, 0], [2, 0]], num_trailing=1)
    assert cells(layout) == [(0, 0, 0, 2), (0, 1, 2, 9), (2, 0, 9, 13)]
    assert layout.virtual_stages[1].num_layers == 7


def test_cells_may_be_empty_in_the_middle() -> None:
    layout = Layout.build([[1, 0, 5], [0, 5, 0], [1, 0, 0]])
    assert [virtual.stage for virtual in layout.virtual_stages] == [0, 2, 1, 0]


def test_layers_know_their_stage() -> None:
    layout = Layout.build([[1, 2, 1], [1, 0, 0]])
    assert [layout.stage_of_layer(layer) for layer in range(5)] == [0, 1, 1, 2, 0]
    assert layout.virtual_stage_of_layer(4).index == 3
    for layer in (-1, 5):
        with pytest.raises(IndexError, match=f"layer {layer} is not one of the 5 pipeline layers"):
            layout.stage_of_layer(layer)


def test_layout_is_an_immutable_value() -> None:
    layout = Layout.build([[1, 1], [1, 0]])
    assert layout == Layout.build(((1, 1), (1, 0)))
    assert hash(layout) == hash(Layout.build(((1, 1), (1, 0))))
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.num_leading = 1  # type: ignore[misc]


@pytest.mark.parametrize("num_layers", [5, 7, 10])
def test_S41_sum_that_is_not_the_models_count_is_refused_with_both_numbers(num_layers: int) -> None:  # noqa: N802
    with pytest.raises(ConfigError) as raised:
        Layout.build([[1, 3, 2], [1, 0, 0], [1, 0, 0]], num_layers=num_layers)
    text = str(raised.value)
    assert "ldt.pipeline_num_layers: found [[1, 3, 2], [1, 0, 0], [1, 0, 0]], whose sum is 8" in text
    assert f"expected a sum of {num_layers}, the number of layers of the model" in text
    change = f"add {num_layers - 8} to" if num_layers > 8 else f"take {8 - num_layers} from"
    assert f"Fix: {change} the counts, so that every layer is held exactly once." in text


@pytest.mark.parametrize(
    "matrix, stage",
    [
        ([[1, 0], [1, 0]], 1),
        ([[1, 4, 0], [1, 0, 0]], 2),
        ([[1, 0, 4], [1, 0, 0]], 1),
        ([[1, 4, 0, 1], [1, 0, 0, 0]], 2),
    ],
)
def test_S45_empty_stage_is_named(matrix: list[list[int]], stage: int) -> None:  # noqa: N802
    with pytest.raises(ConfigError, match=f"with no layers on stage {stage}, expected at least one layer on every"):
        Layout.build(matrix)


@pytest.mark.parametrize(
    "matrix, message",
    [
        ([[0, 4], [2, 0]], "[0]: found [[0, 4], [2, 0]], with the first layers on stage 1, expected the first layers"),
        ([[2, 4], [0, 0]], "[1]: found [[2, 4], [0, 0]], with the last layers on stage 1, expected the last layers"),
        ([[2, 4], [2, 1]], "[1]: found [[2, 4], [2, 1]], with the last layers on stage 1, expected the last layers"),
    ],
)
def test_first_and_last_layers_are_on_the_edge(matrix: list[list[int]], message: str) -> None:
    for allow in (False, True):
        with pytest.raises(ConfigError, match=re.escape(f"ldt.pipeline_num_layers{message}")):
            Layout.build(matrix, allow_exposed_edge=allow)


@pytest.mark.parametrize(
    "matrix, num_leading, num_trailing, cell",
    [
        ([[0, 4], [2, 0]], 1, 2, "[0][0]"),
        ([[2, 4], [0, 0]], 1, 2, "[1][0]"),
        ([[0, 4], [2, 0]], 1, 0, "[0][0]"),
        ([[2, 4], [0, 0]], 0, 1, "[1][0]"),
    ],
)
def test_exposed_edge_is_refused_unless_accepted(
    matrix: list[list[int]], num_leading: int, num_trailing: int, cell: str
) -> None:
    sizes = {"num_leading": num_leading, "num_trailing": num_trailing}
    with pytest.raises(ConfigError, match=re.escape(f"ldt.pipeline_num_layers{cell}: found 0, expected 1 or more")):
        Layout.build(matrix, **sizes)
    layout = Layout.build(matrix, **sizes, allow_exposed_edge=True)
    assert layout.num_layers == 6 + num_leading + num_trailing


def test_layers_of_an_earlier_chunk_protect_the_tail() -> None:
    layout = Layout.build([[2, 4], [2, 0], [0, 0]], num_leading=1, num_trailing=2)
    assert cells(layout) == [(0, 0, 0, 3), (0, 1, 3, 7), (1, 0, 7, 11)]


@pytest.mark.parametrize(
    "matrix", [None, 3, "ab", [3, 4], ["ab", "cd"], [[1, 2]], [[1], [1]], [[1, 2], [1]], [[]], []]
)
def test_malformed_matrix_is_refused(matrix: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape("ldt.pipeline_num_layers")):
        Layout.build(matrix)


_SHAPES = st.tuples(st.integers(2, 4), st.integers(2, 4))
_ENDS = st.integers(0, 2)


@st.composite
def matrices(draw: st.DrawFn) -> list[list[int]]:
    num_chunks, num_stages = draw(_SHAPES)
    row = st.lists(st.integers(0, 2), min_size=num_stages, max_size=num_stages)
    return draw(st.lists(row, min_size=num_chunks, max_size=num_chunks))


@st.composite
def sound_matrices(draw: st.DrawFn) -> list[list[int]]:
    """Matrices with layers at both ends of the edge, none behind the tail, and some on every cloud stage."""
    matrix = draw(matrices())
    matrix[0][0] += 1
    matrix[-1] = [matrix[-1][0] + 1, *(0 for _ in matrix[-1][1:])]
    for stage in range(1, len(matrix[0])):
        if not any(row[stage] for row in matrix):
            matrix[draw(st.integers(0, len(matrix) - 2))][stage] = 1
    return matrix


@settings(deadline=None)
@given(matrix=sound_matrices(), num_leading=_ENDS, num_trailing=_ENDS)
def test_S41_every_layer_is_held_exactly_once_and_in_order(  # noqa: N802
    matrix: list[list[int]], num_leading: int, num_trailing: int
) -> None:
    configured = sum(map(sum, matrix))
    layout = Layout.build(matrix, num_layers=configured, num_leading=num_leading, num_trailing=num_trailing)
    total = configured + num_leading + num_trailing
    held = [layer for virtual in layout.virtual_stages for layer in range(virtual.start, virtual.stop)]
    assert held == list(range(total))
    assert layout.num_layers == total
    assert all(before.stage != after.stage for before, after in pairwise(layout.virtual_stages))
    assert layout.virtual_stages[0].stage == layout.virtual_stages[-1].stage == 0
    for stage in range(layout.num_stages):
        joined = num_leading + num_trailing if stage == 0 else 0
        expected = sum(row[stage] for row in matrix) + joined
        assert sum(virtual.num_layers for virtual in layout.virtual_stages_of(stage)) == expected > 0


@settings(deadline=None)
@given(matrix=matrices(), num_leading=_ENDS, num_trailing=_ENDS)
def test_a_matrix_is_refused_exactly_where_a_stage_is_empty_or_an_end_is_not_on_the_edge(
    matrix: list[list[int]], num_leading: int, num_trailing: int
) -> None:
    flat = [(stage, count) for row in matrix for stage, count in enumerate(row)]
    flat[0] = (0, flat[0][1] + num_leading)
    flat[-len(matrix[0])] = (0, flat[-len(matrix[0])][1] + num_trailing)
    visited = [stage for stage, count in flat if count]
    sound = set(range(1, len(matrix[0]))) <= set(visited) and visited[0] == visited[-1] == 0

    def build() -> Layout:
        return Layout.build(matrix, num_leading=num_leading, num_trailing=num_trailing, allow_exposed_edge=True)

    if sound:
        assert [virtual.stage for virtual in build().virtual_stages] == [stage for stage, _ in groupby(visited)]
    else:
        with pytest.raises(ConfigError):
            build()
