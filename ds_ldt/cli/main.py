"""The command `ds-ldt`: plan a configuration and draw it, without torch, processes or a model; check two sites.

    ds-ldt plan config.json [--json] [--set ldt.link.latency_ms=40] [--costs costs.json]
    ds-ldt plan config.json --memory --model DIRECTORY --sequence-length 2048
    ds-ldt draw config.json -o plan.svg
    ds-ldt draw --trace trace.json -o run.svg
    ds-ldt draw config.json --trace trace.json -o both.svg
    ds-ldt check config.json --site edge --master_addr 203.0.113.10      and the same with --site cloud there

`python -m ds_ldt.cli` is the same program. It ends with status 0, with 1 if something is wrong with the input (one
message on stderr says what), and with 2 if the command line itself is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_ldt.cli.arguments import port, seconds, tokens
from ds_ldt.cli.memory_report import memory_report
from ds_ldt.cli.progress import Progress
from ds_ldt.comm.reach import exit_past_helpers
from ds_ldt.config.json_file import read_json
from ds_ldt.config.schema import JobConfig, LDTConfig, load_config
from ds_ldt.errors import ConfigError, LDTError
from ds_ldt.plan import PipelineShape, Timeline, build_plan
from ds_ldt.plan.bound import TO_CLOUD, TO_EDGE
from ds_ldt.plan.chrome_trace import read_trace
from ds_ldt.plan.compare import differences
from ds_ldt.plan.cost_file import Known, known_from_config, known_from_file, limits_from, memory_warning
from ds_ldt.plan.memory import Footprint
from ds_ldt.plan.policies.in_flight import Limits
from ds_ldt.plan.report import Report, phases_of, report_on
from ds_ldt.plan.simulate import for_all_replicas
from ds_ldt.plan.size import num_computes
from ds_ldt.plan.text import render_bound, render_seconds
from ds_ldt.plan.trained_layers import describe_layers, gradient_boundaries, trained_layers
from ds_ldt.topology.layout import Layout, VirtualStage

_SHOWN_DIFFERENCES = 10
_RANKS_SHOWN = 16
_STATEMENT = (
    "What may cross the link is the wire schema, which belongs to the model: module.wire.describe() prints it, and so",
    "does docs/privacy.md. Samples, token ids and labels are not sent. What is sent can be",
    "inverted by a curious operator of the cloud, with effort.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A configuration with all that follows from it."""

    config: JobConfig
    layout: Layout
    shape: PipelineShape
    known: Known
    limits: Limits | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    Args:
        arguments: The command line without the program's name; None takes the process's own.

    Raises:
        SystemExit: With status 2 if the command line is wrong, with 0 after `--help`.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command == "plan" and options.model is not None and not options.memory:
        parser.error("--model is for --memory")
    if options.command == "draw" and options.config is None and options.trace is None:
        parser.error("draw needs a configuration, a --trace, or both")
    status = _run(options)
    if arguments is None:
        exit_past_helpers(status)
    return status


def _run(options: argparse.Namespace) -> int:
    try:
        sys.stdout.write(_COMMANDS[options.command](options))
        sys.stdout.flush()
    except BrokenPipeError:
        return 1
    except (LDTError, OSError) as error:
        sys.stderr.write(f"ds-ldt: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ds-ldt", description="Plan split fine-tuning over an edge and a cloud.")
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="say how the micro-batches of a configuration will be scheduled")
    plan.add_argument("config", help="DeepSpeed JSON with an ldt section")
    plan.add_argument("--json", action="store_true", help="print JSON, the orders of all ranks included")
    plan.add_argument("--memory", action="store_true", help="estimate the memory of every rank")
    plan.add_argument("--model", help="with --memory: Hugging Face directory; only its config.json is read")
    plan.add_argument("--sequence-length", type=tokens, default=512, help="with --model: tokens of a sample (512)")
    draw = commands.add_parser("draw", help="draw the planned timeline, a measured one, or both")
    draw.add_argument("config", nargs="?", help="DeepSpeed JSON with an ldt section")
    draw.add_argument("-o", "--output", required=True, help="the picture: .svg, .png or .pdf")
    draw.add_argument("--trace", help="Chrome trace of a run (events named like F0.3.1, tid = rank), or a directory")
    draw.add_argument("--step", type=int, help="training step of the trace; the last one by default")
    draw.add_argument("--arrows", action="store_true", help="draw the messages over the link")
    check = commands.add_parser(
        "check", help="on both sites at once, before a job: do they agree, and what is the link between them like?"
    )
    _add_meeting(check)
    for command in (plan, draw, check):
        command.add_argument(
            "--set",
            action="append",
            default=[],
            type=_setting,
            metavar="KEY=VALUE",
            help="change a setting, e.g. ldt.link.latency_ms=40; the value is JSON or else text",
        )
    for command in (plan, draw):
        command.add_argument("--costs", help="JSON of measured seconds by chunk.stage, in place of the hints")
    check.set_defaults(costs=None)
    return parser


def _add_meeting(check: argparse.ArgumentParser) -> None:
    check.add_argument("config", help="DeepSpeed JSON with an ldt section, this site's copy")
    check.add_argument("--site", required=True, choices=("edge", "cloud"), help="which site this is")
    check.add_argument(
        "--master_addr",
        default=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        help="address of the edge, as seen from here (default: MASTER_ADDR, else 127.0.0.1)",
    )
    check.add_argument(
        "--master_port",
        type=port,
        default=os.environ.get("MASTER_PORT", "29500"),
        help="a TCP port of the edge that can be reached (default: MASTER_PORT, else 29500)",
    )
    check.add_argument("--interface", help="network interface that leads to the other site (as GLOO_SOCKET_IFNAME)")
    check.add_argument("--timeout_s", type=seconds, help="longest wait for the other site (ldt.timeout_s)")
    check.add_argument("--json", action="store_true", help="print JSON")


def _setting(text: str) -> tuple[list[str], Any]:
    key, separator, value = text.partition("=")
    path = key.strip().split(".")
    if not separator or not all(path):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE, like ldt.link.latency_ms=40")
    if path[0] in LDTConfig.model_fields:
        path.insert(0, "ldt")
    try:
        return path, json.loads(value)
    except json.JSONDecodeError:
        return path, value


def _load(options: argparse.Namespace) -> _Job:
    settings = read_json(options.config)
    for path, value in options.set:
        place = settings
        for name in path[:-1]:
            inner = place.get(name)
            if not isinstance(inner, dict):
                inner = place[name] = {}
            place = inner
        place[path[-1]] = value
    config = load_config(settings)
    layout = _layout(config.ldt)
    shape = PipelineShape.from_layout(
        layout,
        num_micro_batches=config.num_micro_batches,
        num_domains=config.num_domains,
        num_replicas=config.num_replicas,
        gradient_boundaries=gradient_boundaries(trained_layers(config.ldt, layout), layout),
        split_backward=config.ldt.schedule.split_backward,
    )
    known = known_from_config(config, layout)
    if options.costs is not None:
        known = known_from_file(options.costs, layout, hints=known)
    return _Job(config=config, layout=layout, shape=shape, known=known, limits=limits_from(config, shape, known))


def _layout(ldt: LDTConfig) -> Layout:
    """Lay out layers without a model. Only a model knows the layers that join those it counts."""
    layers, exposed = ldt.pipeline_num_layers, ldt.allow_exposed_edge
    if isinstance(layers, dict):
        return Layout.build(layers, num_leading=1, num_between=1, num_trailing=1, allow_exposed_edge=exposed)
    # Where the edge's cell is empty, they are all it has.
    leading, trailing = (0 if row[0] else 1 for row in (layers[0], layers[-1]))
    return Layout.build(layers, num_leading=leading, num_trailing=trailing, allow_exposed_edge=exposed)


def _report(job: _Job) -> Report:
    policy = job.config.ldt.schedule.policy
    with Progress(phases_of(policy)) as progress:
        return report_on(job.shape, job.known.costs, policy=policy, limits=job.limits, progress=progress)


def _plan(options: argparse.Namespace) -> str:
    job = _load(options)
    warning = memory_warning(job.config, job.known)
    if warning is not None:
        sys.stderr.write(f"ds-ldt: {warning}\n")
    footprint = _footprint(options, job)
    if footprint is not None:  # the model knows what is trained
        if footprint.warning is not None:
            sys.stderr.write(f"ds-ldt: --sequence-length: {footprint.warning}\n")
        job = replace(job, shape=replace(job.shape, gradient_boundaries=footprint.gradient_boundaries))
    report = _report(job)
    memory = memory_report(job.config, report.plan, job.known, footprint) if options.memory else None
    if options.json:
        return json.dumps(report.document() | ({} if memory is None else {"memory": memory.document()})) + "\n"
    return "\n".join((*_lines(job, report), *(() if memory is None else ("", *memory.lines(report.plan))))) + "\n"


def _footprint(options: argparse.Namespace, job: _Job) -> Footprint | None:
    if options.model is None:
        return None
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed greets
        from ds_ldt.runtime.dry_run import footprint_of

        return footprint_of(job.config, options.model, sequence_length=options.sequence_length)


def _lines(job: _Job, report: Report) -> Iterator[str]:
    yield from _layer_lines(job)
    yield ""
    yield from _cost_lines(job)
    yield ""
    yield f"policy       {report.plan.policy}: {report.why}"
    step, bound = render_seconds(report.timeline.makespan), render_seconds(report.lower_bound)
    yield f"step         {step} (simulated), lower bound {bound}"
    if report.lower_bound_whole is not None:
        shorter = 1 - report.timeline.makespan / report.lower_bound_whole if report.lower_bound_whole else 0.0
        whole = render_seconds(report.lower_bound_whole)
        yield f"split        {shorter:.1%} below the bound of whole backwards, {whole}"
    yield f"efficiency   {report.efficiency:.3f} of the bound"
    for rating in report.ratings:
        mark = "*" if rating.policy == report.plan.policy else " "
        yield (
            f"  {mark} {rating.policy:<12} {render_seconds(rating.makespan):>10}  efficiency {rating.efficiency:.3f}  "
            f"at most {rating.peak_in_flight} in flight"
        )
    yield from render_bound(report.bound)
    yield ""
    yield "rank                                     in flight   idle"
    shape = report.plan.shape
    for rank in range(min(shape.num_ranks, _RANKS_SHOWN)):
        peak, idle = report.plan.peak_in_flight(rank), report.bubble(rank)
        yield f"  {shape.describe_rank(rank):<40} {peak:>7} {idle:>6.1%}"
    if shape.num_ranks > _RANKS_SHOWN:
        yield f"  and {shape.num_ranks - _RANKS_SHOWN} more (--json lists all)"
    yield "  in flight: micro-batches of one domain at once; idle: part of the step without a compute (bubble)"
    yield ""
    for direction, name in ((TO_CLOUD, "edge to cloud"), (TO_EDGE, "cloud to edge")):
        yield (
            f"link         {name}: {report.link_bytes[direction] / 1e6:.6g} MB per step "
            f"in {report.link_messages[direction]} messages"
        )
    yield ""
    yield from _STATEMENT


def _layer_lines(job: _Job) -> Iterator[str]:
    config, layout = job.config, job.layout
    yield (
        f"{config.num_stages} stages, {config.num_domains} domains, {config.num_replicas} edge replicas, "
        f"{config.num_micro_batches} micro-batches of {config.micro_batch_size} per domain and step, "
        f"{config.world_size} ranks"
    )
    yield "layers in the sequence in which a micro-batch meets them, without embedding and output layer:"
    rows = [_held(layout, virtual) for virtual in layout.virtual_stages]
    width = max(len("layers 100-127 "), *map(len, rows))
    for virtual, held in zip(layout.virtual_stages, rows, strict=True):
        place = "edge " if virtual.stage == 0 else "cloud"
        seconds = job.known.costs.forward[virtual.chunk, virtual.stage]
        yield (
            f"  virtual stage {virtual.index}  {place} stage {virtual.stage}, chunk {virtual.chunk}  "
            f"{held:<{width}} forward {render_seconds(seconds)}"
        )
    if config.ldt.lora is not None:
        adapted = trained_layers(config.ldt, layout)
        where = "anywhere: where exactly, the model decides" if adapted is None else describe_layers(adapted, layout)
        yield f"adapters     {where}"


def _held(layout: Layout, virtual: VirtualStage) -> str:
    """Return the layers of a virtual stage, each numbered within its modality, e.g. `layers 2-14`."""
    blocks = layout.blocks_of(virtual).items()
    return ", ".join(f"{name} {held[0]}-{held[-1]}" for name, held in blocks) or "layers none"


def _cost_lines(job: _Job) -> Iterator[str]:
    costs, schedule = job.known.costs, job.config.ldt.schedule
    assumed = json.dumps(schedule.layer_forward_ms)
    source = "measured" if job.known.measured else f"assumed, ldt.schedule.layer_forward_ms = {assumed}"
    yield f"forwards     {source}; a backward takes {costs.backward_ratio:g} times as long unless it was measured"
    if job.shape.split_stages:
        stages = ", ".join(map(str, job.shape.split_stages))
        yield (
            f"split        weight gradients apart, {costs.weight_share:g} of a backward, on virtual stages {stages}; "
            "in flight until then"
        )
    rate = "unlimited" if costs.bandwidth is None else f"{costs.bandwidth * 8 / 1e6:g} Mbit/s each way"
    yield f"hop          {render_seconds(costs.latency)} one way, {rate}, messages of {_message_sizes(job)}"
    if job.limits is not None:
        yield f"limit        at most {', '.join(map(str, job.limits))} micro-batches of a domain in flight, by stage"


def _message_sizes(job: _Job) -> str:
    """Return the size of a message, e.g. `1 MB`, or of each modality's largest one."""
    costs, layout = job.known.costs, job.layout
    if not costs.hop_bytes:
        return f"{costs.message_bytes / 1e6:g} MB"
    largest: dict[str, int] = {}
    for boundary in range(layout.num_boundaries):
        name = layout.modality_of_boundary(boundary)
        largest[name] = max(largest.get(name, 0), costs.bytes_over(boundary))
    return ", ".join(f"{size / 1e6:g} MB ({name})" for name, size in largest.items())


def _draw(options: argparse.Namespace) -> str:
    from ds_ldt.cli.draw import check_drawable, draw_timeline

    measured = None if options.trace is None else read_trace(options.trace, step=options.step)
    if options.config is None:
        assert measured is not None
        title = f"measured: {render_seconds(measured.makespan)}"
        draw_timeline(measured, options.output, title=title)
        return f"wrote {options.output}: {title}\n"
    job = _load(options)
    check_drawable(num_computes(job.shape) * job.shape.num_replicas, job.shape.num_ranks, options.output)
    report = _report(job)
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


def _check(options: argparse.Namespace) -> str:
    job = _load(options)
    policy = job.config.ldt.schedule.policy
    with Progress(1) as progress:
        progress("making the plan")
        plan = build_plan(job.shape, policy=policy, costs=job.known.costs, max_in_flight=job.limits)
    if options.interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = options.interface
    # What torch says of a site that is not there yet is many lines of C++ frames.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    # DeepSpeed greets on stdout, which is for the report.
    with contextlib.redirect_stdout(sys.stderr):
        from ds_ldt.cli.site_check import Meeting, check_sites, facts_of

        report = check_sites(
            facts_of(job.config, plan, options.site),
            Meeting(
                site=options.site,
                master_addr=options.master_addr,
                master_port=options.master_port,
                timeout_s=options.timeout_s or job.config.ldt.timeout_s,
            ),
        )
    text = json.dumps(report.document()) + "\n" if options.json else report.text()
    if report.difference is None:
        return text
    if options.json:
        sys.stdout.write(text)
        sys.stdout.flush()
    raise ConfigError.from_problems([report.difference], where="what the two sites have")


_COMMANDS = {"plan": _plan, "draw": _draw, "check": _check}

if __name__ == "__main__":
    sys.exit(main())
