"""Timelines as pictures, planned or measured: a row for each rank, a box for each compute, gaps where a rank waits.

matplotlib draws them. It is an extra (`pip install "ds_ldt[plot]"`) and is imported only when something is drawn.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_ldt.errors import Absent, ConfigError
from ds_ldt.plan.dependencies import receiver
from ds_ldt.plan.instructions import Compute, Op
from ds_ldt.plan.timeline import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ds_ldt.plan.shape import PipelineShape

SUFFIXES = (".svg", ".png", ".pdf")

MOST_BOXES, MOST_ROWS = 50_000, 800
"""Of a picture. More take minutes to draw and to look at, and a PNG of more rows cannot be made."""

_INCHES_WIDE = 22.0
_INCHES_PER_ROW = 0.62
_POINTS_PER_INCH = 72.0
_SMALLEST_FONT, _LARGEST_FONT = 3.0, 8.0
_CHARACTER_WIDTH = 0.8  # of the font size
_HUES = (0.58, 0.09, 0.33, 0.80, 0.95, 0.47)
_TONES = {Op.FORWARD: (0.78, 0.62), Op.BACKWARD: (0.56, 0.62), Op.WEIGHT: (0.69, 0.26)}
"""Lightness and saturation."""
_IDLE = "#e9e9e9"

Box = tuple[Timeline, float, float]
"""A timeline, and where in the row of a rank its boxes begin and end, 0 (top) to 1."""


def draw_timeline(
    timeline: Timeline,
    path: str | PathLike[str],
    *,
    title: str,
    shape: PipelineShape | None = None,
    measured: Timeline | None = None,
    arrows: bool = False,
) -> None:
    """Draw a timeline into a file.

    Args:
        timeline: The timeline; the upper half of each row where there are two.
        path: Where to; the suffix says the format, one of `SUFFIXES`.
        title: What stands above.
        shape: The shape, which says what each rank is and which chunk a virtual stage belongs to.
        measured: A second timeline, for the lower half of each row.
        arrows: Draw each message over the link as a line from the compute that sends to the one that needs it.

    Raises:
        ConfigError: The suffix is of no known format, there is too much to draw, or matplotlib is not installed.
        OSError: The file cannot be written.
    """
    for each in (timeline, *(() if measured is None else (measured,))):
        check_drawable(len(each.spans), each.num_ranks, path)
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise ConfigError.of(
            f"picture {path}",
            found=Absent(f"the suffix {suffix!r}"),
            expected=f"one of {', '.join(SUFFIXES)}",
            fix="name the file plan.svg or plan.png",
        )
    figure, axes = _figure(timeline.num_ranks)
    halves: tuple[Box, ...] = ((timeline, 0.06, 0.94),)
    if measured is not None:
        halves = ((timeline, 0.04, 0.49), (measured, 0.51, 0.96))
    _draw_rows(axes, halves, shape)
    if arrows and shape is not None:
        for each, top, bottom in halves:
            _draw_arrows(axes, each, shape, middle=(top + bottom) / 2)
    _label(axes, halves, shape, title)
    figure.savefig(path, format=suffix[1:], dpi=130, bbox_inches="tight", metadata=_without_date(suffix))


def check_drawable(num_boxes: int, num_ranks: int, path: str | PathLike[str]) -> None:
    """Refuse a picture that nobody could look at.

    Args:
        num_boxes: Computes in it.
        num_ranks: Rows in it.
        path: Where it was to go.

    Raises:
        ConfigError: There is too much to draw.
    """
    if num_boxes > MOST_BOXES or num_ranks > MOST_ROWS:
        raise ConfigError.of(
            f"picture {path}",
            found=Absent(f"{num_boxes} computes on {num_ranks} ranks"),
            expected=f"at most {MOST_BOXES} computes on {MOST_ROWS} ranks",
            fix="draw a smaller step: --set gradient_accumulation_steps=16, fewer domains and edge replicas, or, of "
            "traces, those of some ranks",
        )


def colour_of(compute: Compute, *, chunk: int) -> tuple[float, float, float]:
    """Return red, green and blue of a compute, 0 to 1: the chunk is the hue, the domain the shade.

    F is paler than B, and W has less colour than either.

    Args:
        compute: The compute.
        chunk: Chunk of its virtual stage.
    """
    hue = _HUES[chunk % len(_HUES)]
    lightness, saturation = _TONES[compute.op]
    return colorsys.hls_to_rgb(
        (hue + 0.028 * (compute.domain % 4)) % 1, lightness - 0.055 * (compute.domain % 4), saturation
    )


def _figure(num_ranks: int) -> tuple[Any, Axes]:
    try:
        from matplotlib import rcParams
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError.of(
            "matplotlib",
            found=Absent("no such package"),
            expected="it, to draw pictures",
            fix='pip install "ds_ldt[plot]"',
        ) from None
    rcParams["svg.hashsalt"] = "ds_ldt"  # equal pictures are equal files
    figure = Figure(figsize=(_INCHES_WIDE, 1.5 + _INCHES_PER_ROW * num_ranks))
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _draw_rows(axes: Axes, halves: Sequence[Box], shape: PipelineShape | None) -> None:
    longest = max(timeline.makespan for timeline, _, _ in halves) or 1.0
    for timeline, top, bottom in halves:
        for rank in range(timeline.num_ranks):
            spans = timeline.of_rank(rank)
            axes.broken_barh([(0, longest)], (rank + top, bottom - top), facecolors=_IDLE, zorder=0)
            axes.broken_barh(
                [(span.start - timeline.start, span.seconds) for span in spans],
                (rank + top, bottom - top),
                facecolors=[colour_of(span.compute, chunk=_chunk(span, shape)) for span in spans],
                edgecolors="white",
                linewidth=0.4,
            )
            for span in spans:
                _name(axes, span, start=timeline.start, longest=longest, row=rank + (top + bottom) / 2)
    axes.set_xlim(0, longest)


def _name(axes: Axes, span: Span, *, start: float, longest: float, row: float) -> None:
    """Write op and micro-batch into the box of a compute, if they fit. Stage and domain are told by row and colour."""
    text = str(span.compute.micro_batch)
    points = span.seconds / longest * _INCHES_WIDE * 0.78 * _POINTS_PER_INCH
    size = min(_LARGEST_FONT, points / (len(text) * _CHARACTER_WIDTH))
    if size >= _SMALLEST_FONT:
        middle = (span.start + span.end) / 2 - start
        axes.text(middle, row, text, ha="center", va="center", fontsize=size, clip_on=True)


def _draw_arrows(axes: Axes, timeline: Timeline, shape: PipelineShape, *, middle: float) -> None:
    by_compute = {span.compute: span for span in timeline.spans}
    for span in timeline.spans:
        waiting = receiver(span.compute, shape)
        target = None if waiting is None else by_compute.get(waiting)
        if target is None or (shape.stage_of(span.rank) and shape.stage_of(target.rank)):
            continue
        axes.plot(
            [span.end - timeline.start, target.start - timeline.start],
            [span.rank + middle, target.rank + middle],
            color="#555555",
            linewidth=0.35,
            alpha=0.6,
        )


def _label(axes: Axes, halves: Sequence[Box], shape: PipelineShape | None, title: str) -> None:
    from matplotlib.patches import Patch

    num_ranks = max(timeline.num_ranks for timeline, _, _ in halves)
    axes.set_ylim(num_ranks, 0)
    axes.set_yticks([rank + 0.5 for rank in range(num_ranks)])
    axes.set_yticklabels([_row_name(rank, halves[0][0], shape) for rank in range(num_ranks)])
    axes.set_xlabel("seconds; the number in a box is the micro-batch, gaps are waits")
    axes.set_title(title, loc="left", fontsize=11)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    shown = {
        (_chunk(span, shape), span.compute.domain, span.compute.op): span
        for timeline, _, _ in halves
        for span in timeline.spans
    }
    what = "stage" if shape is None else "chunk"
    handles = [
        Patch(
            color=colour_of(shown[key].compute, chunk=key[0]), label=f"{key[2].value} {what} {key[0]}, domain {key[1]}"
        )
        for key in sorted(shown)
    ]
    below = -1.0 / (1.0 + num_ranks)
    axes.legend(handles=handles, ncols=8, fontsize=7, loc="upper left", bbox_to_anchor=(0, below), frameon=False)


def _row_name(rank: int, timeline: Timeline, shape: PipelineShape | None) -> str:
    name = f"rank {rank}" if shape is None else shape.describe_rank(rank).replace(" (", "\n").rstrip(")")
    return f"{name}, idle {timeline.bubble(rank):.0%}" if rank < timeline.num_ranks else name


def _chunk(span: Span, shape: PipelineShape | None) -> int:
    return span.compute.virtual_stage if shape is None else shape.chunks[span.compute.virtual_stage]


def _without_date(suffix: str) -> dict[str, Any]:
    """Metadata that keeps the date out of files, so that equal pictures are equal files."""
    return {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix, {})
