"""Pictures of timelines: every compute is in them, bubbles stay empty, and equal timelines give equal files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_ldt.errors import ConfigError
from ds_ldt.plan import Compute, Costs, PipelineShape, Span, Timeline, build_plan, simulate
from ds_ldt.plan.chrome_trace import read_trace, trace_document
from ds_ldt.plan.compare import differences
from tests.plan.shapes import full_shape, split

pytest.importorskip("matplotlib")
from ds_ldt.cli.picture import colour_of, draw_timeline  # noqa: E402

SHAPE = full_shape(4, 2, m=16, d=2)


def timeline_of(shape: PipelineShape, latency: float = 1.0) -> Timeline:
    costs = Costs.uniform(shape, edge=0.1, latency=latency)
    return simulate(build_plan(shape, policy="auto", costs=costs), costs)


def test_every_compute_of_every_rank_is_a_box(tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    draw_timeline(timeline_of(SHAPE), path, title="a title", shape=SHAPE)
    text = path.read_text(encoding="utf-8")
    computes = 2 * SHAPE.num_virtual_stages * SHAPE.num_micro_batches * SHAPE.num_domains
    assert text.count("stroke: #ffffff; stroke-width: 0.4") >= computes
    for name in ("a title", "rank 0", "edge replica 0", "cloud stage 3, domain 1", "B chunk 1, domain 1", "idle"):
        assert name in text


def test_the_halves_of_a_backward_have_a_shade_each(tmp_path: Path) -> None:
    path, shape = tmp_path / "plan.svg", split(full_shape(3, 2, m=4))
    draw_timeline(timeline_of(shape), path, title="t", shape=shape)
    text = path.read_text(encoding="utf-8")
    assert "W chunk 0, domain 0" in text and "W chunk 1" not in text
    colours = {colour_of(Compute.parse(f"{op}1.0.0"), chunk=0) for op in "FBW"}
    assert len(colours) == 3


def test_messages_over_the_link_can_be_drawn(tmp_path: Path) -> None:
    plain, arrows = tmp_path / "plain.svg", tmp_path / "arrows.svg"
    for path in (plain, arrows):
        draw_timeline(timeline_of(SHAPE), path, title="t", shape=SHAPE, arrows=path == arrows)
    messages = 4 * SHAPE.num_micro_batches * SHAPE.num_domains
    drawn = [path.read_text(encoding="utf-8").count("stroke: #555555") for path in (plain, arrows)]
    assert drawn == [0, messages]


def test_equal_timelines_are_equal_files(tmp_path: Path) -> None:
    paths = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for path in paths:
        draw_timeline(timeline_of(full_shape(2, 2, m=2)), path, title="t")
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_png_is_a_picture_wide_enough_to_read(tmp_path: Path) -> None:
    from matplotlib.image import imread

    path = tmp_path / "plan.png"
    draw_timeline(timeline_of(SHAPE), path, title="t", shape=SHAPE, measured=timeline_of(SHAPE, 2.0))
    height, width = imread(path).shape[:2]
    assert width > 2000
    assert height > 400


def test_a_timeline_without_spans_is_drawn(tmp_path: Path) -> None:
    draw_timeline(Timeline(num_ranks=2, spans=()), tmp_path / "empty.svg", title="nothing")
    assert (tmp_path / "empty.svg").exists()


def test_op_chunk_and_domain_have_their_own_colours() -> None:
    colours = {
        colour_of(Compute.parse(f"{op}0.0.{domain}"), chunk=chunk)
        for op in "FB"
        for chunk in range(3)
        for domain in range(4)
    }
    assert len(colours) == 2 * 3 * 4
    assert all(0 <= part <= 1 for colour in colours for part in colour)


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.svg, \.png, \.pdf"):
        draw_timeline(timeline_of(full_shape(2, 2, m=1)), tmp_path / "plan", title="t")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r'pip install "ds_ldt\[plot\]"'):
        draw_timeline(timeline_of(full_shape(2, 2, m=1)), tmp_path / "plan.svg", title="t")


# --- traces -------------------------------------------------------------------------------------------------------


def written(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_a_trace_is_read_back(tmp_path: Path) -> None:
    timeline = timeline_of(full_shape(2, 2, m=3))
    found = read_trace(written(tmp_path, trace_document(timeline)))
    assert found.num_ranks == 2
    for rank in range(2):
        assert found.order_of(rank) == timeline.order_of(rank)
        assert [span.start for span in found.of_rank(rank)] == pytest.approx(
            [span.start for span in timeline.of_rank(rank)]
        )
    assert found.makespan == pytest.approx(timeline.makespan)


def event(name: str = "F0.0.0", **changes: Any) -> dict[str, Any]:
    return {"name": name, "ph": "X", "tid": 0, "ts": 0.0, "dur": 1.0} | changes


def test_events_of_other_kinds_are_ignored(tmp_path: Path) -> None:
    others = [event("wait"), event(ph="B"), {"name": "x"}, 3, event("F0.1.0", ph="i")]
    assert read_trace(written(tmp_path, [*others, event()])).order_of(0) == (Compute.parse("F0.0.0"),)


def test_the_last_step_is_taken_unless_another_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, [event(ts=step * 10.0, dur=float(step), args={"step": step}) for step in (1, 2)])
    assert read_trace(path).makespan == pytest.approx(2e-6)
    assert read_trace(path, step=1).makespan == pytest.approx(1e-6)


@pytest.mark.parametrize(
    "content, message",
    [
        ({"events": []}, "no list of events"),
        ([], "no computes"),
        ([event(), event()], r"F0\.0\.0 twice on rank 0"),
        ([event(tid="edge")], '"tid" a rank'),
        ([event(dur=-1)], "microseconds"),
    ],
)
def test_a_trace_that_cannot_be_used_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace(written(tmp_path, content))


def test_the_largest_differences_come_first() -> None:
    planned = timeline_of(full_shape(2, 2, m=2))
    assert differences(planned, planned) == ()
    spans = list(planned.spans)
    first = max(range(len(spans)), key=lambda at: spans[at].end)
    spans[first] = replace(spans[first], start=spans[first].start + 0.5, end=spans[first].end + 2.0)
    run, wait = differences(planned, Timeline(num_ranks=2, spans=tuple(spans)))[:2]
    assert (run.is_wait, run.seconds) == (False, pytest.approx(1.5))
    assert (wait.is_wait, wait.seconds) == (True, pytest.approx(0.5))
    assert "takes 1.5 s longer for" in str(run)
    assert "waits 0.5 s longer before" in str(wait)


def test_a_late_clock_is_no_difference() -> None:
    planned = timeline_of(full_shape(2, 2, m=2))
    late = tuple(
        Span(rank=span.rank, compute=span.compute, start=span.start + 64, end=span.end + 64) for span in planned.spans
    )
    assert all(abs(one.seconds) < 1e-9 for one in differences(planned, Timeline(num_ranks=2, spans=late)))
