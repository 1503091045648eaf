from __future__ import annotations

import pytest
from hypothesis import given, settings

from ds_ldt.plan import Costs, PipelineShape, build_plan, parse_orders, render_orders, render_timeline, simulate
from tests.plan.shapes import full_shape, shapes


def test_a_table_has_a_row_for_each_rank() -> None:
    assert render_orders(build_plan(full_shape(2, 2, m=2)).orders()) == (
        "rank | 0      1      2      3      4      5      6      7\n"
        "   0 | F0.0.0 F0.1.0 F2.0.0 B2.0.0 F2.1.0 B2.1.0 B0.0.0 B0.1.0\n"
        "   1 | F1.0.0 F1.1.0 B1.0.0 B1.1.0"
    )


@settings(deadline=None, max_examples=20)
@given(shape=shapes(max_micro_batches=4))
def test_a_table_is_read_back(shape: PipelineShape) -> None:
    orders = build_plan(shape).orders()
    assert parse_orders(render_orders(orders)) == orders


def test_a_mark_shows_its_surroundings_only() -> None:
    table = render_orders(build_plan(full_shape(2, 2, m=30)).orders(), mark=(1, 20))
    header, _, marked = table.splitlines()
    assert header.split()[2:] == [str(place) for place in range(14, 27)]
    assert [cell for cell in marked.split() if cell.startswith("[")] == [marked.split()[8]]


def test_a_mark_past_the_end_says_so() -> None:
    table = render_orders(build_plan(full_shape(2, 2, m=2)).orders(), mark=(1, 4))
    assert table.splitlines()[2].split()[-1] == "[end]"


def test_a_malformed_cell_is_refused() -> None:
    with pytest.raises(ValueError, match="'F0' is no compute"):
        parse_orders("0 | F0")


def test_a_timeline_shows_durations_and_bubbles() -> None:
    shape = full_shape(2, 2, m=1)
    timeline = simulate(build_plan(shape), Costs.uniform(shape, edge=1, cloud=2))
    assert render_timeline(timeline) == (
        "rank | 0      1      2      3      4      5      6      7      8      9      10     11\n"
        "   0 | F0.0.0 .      .      F2.0.0 B2.0.0 ====== .      .      .      .      B0.0.0 ======\n"
        "   1 | .      F1.0.0 ====== .      .      .      B1.0.0 ====== ====== ====== .      ."
    )


def test_wider_slices_show_less() -> None:
    shape = full_shape(2, 2, m=2)
    timeline = simulate(build_plan(shape), Costs.uniform(shape, edge=1, cloud=2))
    assert len(render_timeline(timeline, seconds_per_column=4).splitlines()[0].split()) == 2 + 4


def test_slices_too_thin_to_print_are_refused() -> None:
    shape = full_shape(2, 2, m=2)
    timeline = simulate(build_plan(shape), Costs.uniform(shape, edge=1, cloud=2))
    with pytest.raises(ValueError, match="16000 columns; expected at most 10000"):
        render_timeline(timeline, seconds_per_column=0.001)
