"""Layouts of two modalities: vision before text, the join on the edge, every block numbered within its modality."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_ldt.errors import ConfigError
from ds_ldt.topology.layout import Layout
from tests.test_layout import cells

ISSUE_LAYOUT = {
    "vision_encoder": [[3, 7, 7, 7, 7], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]],
    "text_decoder": [[0, 0, 0, 0, 0], [1, 16, 16, 16, 14], [1, 0, 0, 0, 0]],
}
VL = {"num_leading": 1, "num_between": 1, "num_trailing": 2}


def test_two_modalities_over_three_chunks() -> None:
    layout = Layout.build(ISSUE_LAYOUT, num_layers={"vision_encoder": 32, "text_decoder": 64}, **VL)
    assert cells(layout)[:6] == [
        (0, 0, 0, 4),
        (0, 1, 4, 11),
        (0, 2, 11, 18),
        (0, 3, 18, 25),
        (0, 4, 25, 32),
        (1, 0, 32, 35),
    ]
    assert cells(layout)[6:] == [(1, 1, 35, 51), (1, 2, 51, 67), (1, 3, 67, 83), (1, 4, 83, 97), (2, 0, 97, 100)]
    assert layout.matrix[1] == (2, 16, 16, 16, 14)
    assert layout.configured == ISSUE_LAYOUT
    assert layout.parts["between"] == range(33, 34)
    places = [(layout.place_of(layer).part, layout.place_of(layer).index) for layer in (0, 1, 32, 33, 34, 97, 98, 99)]
    assert places == [
        ("leading", 0),
        ("vision_encoder", 0),
        ("vision_encoder", 31),
        ("between", 0),
        ("text_decoder", 0),
        ("text_decoder", 63),
        ("trailing", 0),
        ("trailing", 1),
    ]
    assert [layout.modality_of_boundary(b) for b in range(10)] == ["vision_encoder"] * 5 + ["text_decoder"] * 5
    assert layout.edge_boundaries == (0, 5)


def test_the_whole_vision_encoder_may_be_on_the_edge() -> None:
    layout = Layout.build({"vision_encoder": [[4, 0], [0, 0]], "text_decoder": [[1, 6], [1, 0]]}, **VL)
    assert cells(layout) == [(0, 0, 0, 7), (0, 1, 7, 13), (1, 0, 13, 16)]
    assert layout.parts["between"] == range(5, 6)
    assert [layout.modality_of_boundary(b) for b in range(2)] == ["text_decoder"] * 2


def test_a_layout_of_one_modality_numbers_its_layers_too() -> None:
    layout = Layout.build([[2, 26], [2, 0]], num_leading=1, num_trailing=2)
    assert (layout.place_of(0).part, layout.place_of(1).part, layout.place_of(32).index) == ("leading", "layers", 1)
    assert layout.modality_of_boundary(0) == "layers"
    assert layout.configured == [[2, 26], [2, 0]]


def _vision(text: list[list[int]], vision: list[list[int]]) -> dict[str, list[list[int]]]:
    return {"vision_encoder": vision, "text_decoder": text}


MORE = "found 0, expected 1 or more: a layer of"
REFUSED = [
    (
        [[0, 0], [1, 4], [1, 0]],
        [[1, 2], [0, 2], [0, 0]],
        ".vision_encoder[1][1]: found 2, expected 0: every layer of",
    ),
    (
        [[0, 0], [0, 4], [1, 0]],
        [[1, 2], [0, 2], [0, 0]],
        ".vision_encoder[1][1]: found 2, expected 0: text_decoder be",
    ),
    ([[1, 0], [1, 4], [1, 0]], [[1, 2], [0, 0], [0, 0]], ".vision_encoder[0][1]: found 2, expected 0: every layer of"),
    (
        [[0, 0], [0, 4], [1, 0]],
        [[1, 2], [1, 0], [0, 0]],
        f".text_decoder[1][0]: {MORE} text_decoder on the edge after",
    ),
    (
        [[0, 0], [1, 4], [0, 0]],
        [[1, 2], [1, 0], [0, 0]],
        f".text_decoder[2][0]: {MORE} text_decoder on the edge after",
    ),
    ([[0, 0], [1, 4], [1, 0]], [[0, 2], [1, 0], [0, 0]], f".vision_encoder[0][0]: {MORE} vision_encoder on the edge"),
    ([[0, 0], [1, 4], [1, 1]], [[1, 2], [1, 0], [0, 0]], ".text_decoder[2][1]: found 1, expected 0: the last layers"),
    ([[0, 0], [1, 4], [1, 0]], [[0, 0], [0, 0], [0, 0]], ".vision_encoder: found no layer in any cell, expected at"),
    ([[0, 0], [1, 0], [1, 0]], [[2, 0], [0, 0], [0, 0]], ": found {"),
    (
        [[1, 4], [1, 0]],
        [[2, 0], [0, 0], [0, 0]],
        ".text_decoder: found 2 chunks of 2 stages, expected 3 chunks of 2 st",
    ),
    ([[1, "4"], [1, 0]], [[2, 0], [0, 0]], '.text_decoder[0][1]: found "4", expected a whole number'),
]


@pytest.mark.parametrize("text, vision, message", REFUSED)
def test_two_modalities_are_refused_where_they_cannot_meet_on_the_edge(text: Any, vision: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"ldt.pipeline_num_layers{message}")):
        Layout.build(_vision(text, vision), **VL)


def test_depths_of_the_modalities_are_checked_one_by_one() -> None:
    with pytest.raises(
        ConfigError, match="text_decoder: found .* whose sum is 64, expected a sum of 63, the number of"
    ):
        Layout.build(ISSUE_LAYOUT, num_layers={"vision_encoder": 32, "text_decoder": 63}, **VL)
    with pytest.raises(ConfigError, match="one matrix, because the model has one modality"):
        Layout.build(ISSUE_LAYOUT, num_layers=96)
    with pytest.raises(ConfigError, match="a matrix for each modality of the model, vision_encoder and text_decoder"):
        Layout.build([[1, 2], [1, 0]], num_layers={"vision_encoder": 2, "text_decoder": 2})


def test_exposed_modalities_can_be_accepted() -> None:
    for text, vision in (
        ([[0, 0], [0, 4], [1, 0]], [[1, 2], [1, 0], [0, 0]]),
        ([[0, 0], [1, 4], [0, 0]], [[0, 2], [1, 0], [0, 0]]),
    ):
        layout = Layout.build(_vision(text, vision), allow_exposed_edge=True, **VL)
        assert layout.stage_of_layer(layout.parts["between"].start) == 0


_ROW = st.lists(st.integers(0, 2), min_size=2, max_size=2)


@settings(deadline=None)
@given(text=st.lists(_ROW, min_size=3, max_size=3), vision=st.lists(_ROW, min_size=3, max_size=3))
def test_accepted_modalities_hold_every_layer_once_and_meet_on_the_edge(
    text: list[list[int]], vision: list[list[int]]
) -> None:
    try:
        layout = Layout.build(_vision(text, vision), allow_exposed_edge=True, **VL)
    except ConfigError:
        return
    held = [layer for virtual in layout.virtual_stages for layer in range(virtual.start, virtual.stop)]
    assert held == list(range(4 + sum(map(sum, text)) + sum(map(sum, vision))))
    for part, site in (("leading", 0), ("between", 0), ("trailing", 0)):
        assert {layout.stage_of_layer(layer) for layer in layout.parts[part]} == {site}
    # every block is on the stage that its own matrix says
    for name, matrix in (("vision_encoder", vision), ("text_decoder", text)):
        wanted = [stage for row in matrix for stage, count in enumerate(row) for _ in range(count)]
        assert [layout.stage_of_layer(layer) for layer in layout.parts[name]] == wanted
