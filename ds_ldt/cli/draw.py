"""Draw the planned timeline, a measured one, or both.

    ds-ldt draw config.json -o plan.svg
    ds-ldt draw --trace trace.json -o run.svg
    ds-ldt draw config.json --trace trace.json -o both.svg

Needs the extra `plot` (matplotlib), and neither torch nor processes.
"""

from __future__ import annotations

from argparse import ArgumentError, ArgumentParser, Namespace
from pathlib import Path

from ds_ldt.cli.job import add_costs, add_set, load_job, report_of
from ds_ldt.cli.picture import check_drawable, draw_timeline
from ds_ldt.plan import Timeline
from ds_ldt.plan.chrome_trace import read_trace
from ds_ldt.plan.compare import differences
from ds_ldt.plan.simulate import for_all_replicas
from ds_ldt.plan.size import num_computes
from ds_ldt.plan.text import render_seconds

_SHOWN_DIFFERENCES = 10


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the command.

    Args:
        parser: Its parser.
    """
    parser.add_argument("config", nargs="?", help="DeepSpeed JSON with an ldt section")
    parser.add_argument("-o", "--output", required=True, help="the picture: .svg, .png or .pdf")
    parser.add_argument("--trace", help="Chrome trace of a run (events named like F0.3.1, tid = rank), or a directory")
    parser.add_argument("--step", type=int, help="training step of the trace; the last one by default")
    parser.add_argument("--arrows", action="store_true", help="draw the messages over the link")
    add_set(parser)
    add_costs(parser)


def run(options: Namespace) -> str:
    """Run the command; return what it prints.

    Args:
        options: The command line.

    Raises:
        ArgumentError: There is nothing to draw.
        LDTError: The input is wrong.
        OSError: A file cannot be read or written.
    """
    if options.config is None and options.trace is None:
        raise ArgumentError(None, "draw needs a configuration, a --trace, or both")
    measured = None if options.trace is None else read_trace(options.trace, step=options.step)
    if options.config is None:
        assert measured is not None
        title = f"measured: {render_seconds(measured.makespan)}"
        draw_timeline(measured, options.output, title=title)
        return f"wrote {options.output}: {title}\n"
    job = load_job(options, costs=options.costs)
    check_drawable(num_computes(job.shape) * job.shape.num_replicas, job.shape.num_ranks, options.output)
    report = report_of(job)
    title = (
        f"{report.plan.policy}, P={job.config.num_stages} V={job.layout.num_chunks} M={job.config.num_micro_batches} "
        f"D={job.config.num_domains} E={job.config.num_replicas}, hop {render_seconds(job.known.costs.latency)}: "
        f"{render_seconds(report.timeline.makespan)} planned, {report.efficiency:.3f} of the bound"
    )
    lines = []
    planned = for_all_replicas(report.timeline, job.shape)
    if measured is not None:
        title += f"; {render_seconds(measured.makespan)} measured (lower half of each row)"
        lines = _difference_lines(planned, measured)
    draw_timeline(planned, options.output, title=title, shape=job.shape, measured=measured, arrows=options.arrows)
    return "\n".join([f"wrote {Path(options.output)}: {title}", *lines]) + "\n"


def _difference_lines(planned: Timeline, measured: Timeline) -> list[str]:
    found = differences(planned, measured)
    if not found:
        return ["the run went as planned"]
    return ["largest differences:", *(f"  {one}" for one in found[:_SHOWN_DIFFERENCES])]
