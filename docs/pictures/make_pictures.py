#!/usr/bin/env python3
"""Draw the pictures of the documentation from a real layout and a real plan.

    python docs/pictures/make_pictures.py

writes `u_shape.svg` and `schedule.svg` beside this file. `tests/test_docs.py` checks that the committed pictures are
what this script draws. Standard library and the pure layers of ds_ldt only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

from ds_ldt.plan import Costs, Op, PipelineShape, Plan, Span, Timeline, build_plan, simulate
from ds_ldt.topology.layout import Layout, VirtualStage

FOLDER = Path(__file__).resolve().parent

# 30 decoder layers over 3 stages. The embedding joins the head; the final norm and the output layer join the tail.
LAYOUT = Layout.build([[2, 13, 13], [2, 0, 0]], num_layers=30, num_leading=1, num_trailing=2)
NUM_DOMAINS = 2
NUM_MICRO_BATCHES = 4
# In units of one forward of the head. With these costs the edge is as busy as a cloud stage.
CLOUD_FORWARD, LATENCY = 4, 1

INK, PAPER, FRAME = "#24292f", "#ffffff", "#8c959f"
EDGE_FILL, CLOUD_FILL = "#ddf4ff", "#fff8c5"
# (kind of compute, domain) -> fill; the domains differ in shade only.
FILLS = {
    ("FS", 0): "#54aeff",
    ("FS", 1): "#b6e3ff",
    ("FE", 0): "#4ac26b",
    ("FE", 1): "#aceebb",
    ("BS", 0): "#fa8c45",
    ("BS", 1): "#ffc680",
    ("BE", 0): "#e16f24",
    ("BE", 1): "#fbbf8a",
    ("F", 0): "#54aeff",
    ("F", 1): "#b6e3ff",
    ("B", 0): "#fa8c45",
    ("B", 1): "#ffc680",
}


def box(x: float, y: float, width: float, height: float, fill: str, radius: int = 0) -> str:
    """Return a rectangle."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" fill="{fill}" '
        f'stroke="{FRAME}"/>'
    )


def text(x: float, y: float, words: str, size: int = 12, anchor: str = "middle") -> str:
    """Return a line of text, its baseline at y."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{INK}">{escape(words)}</text>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """Return a straight arrow."""
    return f'<path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" stroke="{INK}" fill="none" marker-end="url(#tip)"/>'


def document(width: float, height: float, title: str, parts: list[str]) -> str:
    """Return a complete SVG file."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="sans-serif">'
    )
    tip = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
        f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>'
    )
    paper = f'<rect width="{width:g}" height="{height:g}" fill="{PAPER}"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", tip, paper, *parts, "</svg>"]) + "\n"


def holds(virtual_stage: VirtualStage, layout: Layout) -> str:
    """Return what a virtual stage holds, decoder layers counted as Hugging Face counts them."""
    decoders = layout.num_layers - layout.num_leading - layout.num_trailing
    first = max(virtual_stage.start - layout.num_leading, 0)
    last = min(virtual_stage.stop - layout.num_leading, decoders) - 1
    words = f"layers {first}-{last}"
    if virtual_stage.index == 0:
        words = f"embedding, {words}"
    if virtual_stage.index == layout.num_boundaries:
        words = f"{words}, norm, lm_head, loss"
    return words


def u_shape(layout: Layout = LAYOUT, num_domains: int = NUM_DOMAINS) -> str:
    """Return the picture of the U: where the layers are and what crosses the link."""
    head, *middle, tail = layout.virtual_stages
    parts = [box(10, 30, 270, 250, EDGE_FILL, 8), box(410, 30, 420, 250, CLOUD_FILL, 8)]
    parts += [text(145, 22, "edge (stage 0)", 14), text(620, 22, f"cloud (stages 1-{layout.num_stages - 1})", 14)]
    parts += [text(145, 52, "samples, token ids and labels stay here")]
    for stage, y, name in ((head, 75, "head"), (tail, 195, "tail")):
        parts += [box(30, y, 230, 60, PAPER, 4), text(145, y + 25, f"{name}: virtual stage {stage.index}")]
        parts += [text(145, y + 45, holds(stage, layout), 11)]
    parts += ['<path d="M345 30 V280" stroke-dasharray="6 5" stroke="#57606a"/>', text(345, 22, "wide-area link")]
    for y, words in ((90, "activations"), (156, "gradients return"), (172, "the same way"), (225, "activations")):
        parts += [f'<rect x="295" y="{y - 13}" width="100" height="17" fill="{PAPER}"/>', text(345, y, words)]
    # The domains lie one behind the other; the front one is labelled.
    right = 410.0
    for domain in reversed(range(num_domains)):
        shift = 12 * domain
        for place, stage in enumerate(middle):
            x, y = 440 + 190 * place + shift, 110 - shift
            parts += [box(x, y, 165, 100, PAPER, 4)]
            if domain == 0:
                parts += [text(x + 82, y + 40, f"stage {stage.stage}: virtual stage {stage.index}", 11)]
                parts += [text(x + 82, y + 60, holds(stage, layout), 11)]
                right = x + 165
    parts += [text(620, 270, f"D = {num_domains} domains, one behind the other")]
    parts += [arrow(260, 105, 440, 130)]
    parts += [arrow(605 + 190 * place, 160, 630 + 190 * place, 160) for place in range(len(middle) - 1)]
    corner = right - 82
    parts += [f'<path d="M{corner:g} 210 V235 H262" stroke="{INK}" fill="none" marker-end="url(#tip)"/>']
    return document(840, 295, "The U: first and last layers on the edge, the middle in the cloud", parts)


def shape_of(layout: Layout = LAYOUT) -> PipelineShape:
    """Return the shape that `schedule.svg` shows."""
    return PipelineShape.from_layout(
        layout, num_micro_batches=NUM_MICRO_BATCHES, num_domains=NUM_DOMAINS, num_replicas=1
    )


def kind_of(span: Span, plan: Plan) -> str:
    """Return the name of a compute: FS, FE, BS, BE on the edge, F and B in the cloud."""
    shape, compute = plan.shape, span.compute
    forward = compute.op is Op.FORWARD
    if shape.stages[compute.virtual_stage] != 0:
        return "F" if forward else "B"
    if compute.virtual_stage == 0:
        return "FS" if forward else "BE"
    return "FE" if forward else "BS"


def rows(plan: Plan, timeline: Timeline, *, left: float, unit: float) -> Iterator[str]:
    """Yield a row of boxes for each rank, a micro-batch index in each box."""
    for rank in range(timeline.num_ranks):
        y = 34 + 34 * rank
        stage, domains = plan.shape.stage_of(rank), plan.shape.domains_of(rank)
        label = f"rank {rank}: " + ("edge" if stage == 0 else f"cloud stage {stage}, domain {domains[0]}")
        yield text(left - 8, y + 17, label, 12, "end")
        for span in timeline.of_rank(rank):
            fill = FILLS[kind_of(span, plan), span.compute.domain]
            yield box(left + unit * span.start, y, unit * span.seconds, 26, fill)
            yield text(left + unit * (span.start + span.end) / 2, y + 17, str(span.compute.micro_batch), 11)


def schedule() -> str:
    """Return the picture of one step of `ldt_1f1b`, as the simulator plays it."""
    shape = shape_of()
    plan = build_plan(shape, policy="ldt_1f1b")
    timeline = simulate(plan, Costs.uniform(shape, edge=1, cloud=CLOUD_FORWARD, latency=LATENCY))
    left, unit = 225.0, 12.0
    parts = [
        text(
            left,
            20,
            f"one step of ldt_1f1b: P = {shape.num_stages}, D = {shape.num_domains}, M = {shape.num_micro_batches}; "
            "the number is the micro-batch",
            13,
            "start",
        )
    ]
    parts += rows(plan, timeline, left=left, unit=unit)
    bottom = 34.0 + 34 * timeline.num_ranks
    legend = {"FS": "first layers forward", "FE": "last layers forward, loss", "BS": "last layers backward"}
    legend |= {"BE": "first layers backward", "F": "cloud forward", "B": "cloud backward"}
    for place, (kind, words) in enumerate(legend.items()):
        x, y = left + 260 * (place % 3), bottom + 14 + 22 * (place // 3)
        parts += [box(x, y, 14, 14, FILLS[kind, 0]), box(x + 16, y, 14, 14, FILLS[kind, 1])]
        parts += [text(x + 36, y + 12, f"{kind}: {words}", 12, "start")]
    parts += [text(left, bottom + 76, "dark: domain 0, light: domain 1; white: idle; time runs right", 12, "start")]
    return document(left + unit * timeline.makespan + 20, bottom + 90, "One training step as planned", parts)


def pictures() -> Mapping[str, str]:
    """Return file name -> content of every picture."""
    return {"u_shape.svg": u_shape(), "schedule.svg": schedule()}


if __name__ == "__main__":
    for name, content in pictures().items():
        (FOLDER / name).write_text(content, encoding="utf-8")
