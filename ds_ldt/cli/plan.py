"""Say how the micro-batches of a configuration will be scheduled.

    ds-ldt plan config.json [--json] [--set ldt.link.latency_ms=40] [--costs costs.json]
    ds-ldt plan config.json --memory --model DIRECTORY --sequence-length 2048

Needs neither torch nor processes; --model imports torch and reads the config.json of that directory alone.
"""

from __future__ import annotations

import contextlib
import json
import sys
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import replace

from ds_ldt.cli.arguments import tokens
from ds_ldt.cli.job import Job, add_costs, add_set, load_job, report_of
from ds_ldt.cli.memory_report import memory_report
from ds_ldt.plan.bound import TO_CLOUD, TO_EDGE
from ds_ldt.plan.cost_file import memory_warning
from ds_ldt.plan.memory import Footprint
from ds_ldt.plan.report import Report
from ds_ldt.plan.text import render_bound, render_seconds
from ds_ldt.plan.trained_layers import describe_layers, trained_layers
from ds_ldt.topology.layout import Layout, VirtualStage

_RANKS_SHOWN = 16
_STATEMENT = (
    "What may cross the link is the wire schema, which belongs to the model: module.wire.describe() prints it, and so",
    "does docs/privacy.md. Samples, token ids and labels are not sent. What is sent can be",
    "inverted by a curious operator of the cloud, with effort.",
)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the command.

    Args:
        parser: Its parser.
    """
    parser.add_argument("config", help="DeepSpeed JSON with an ldt section")
    parser.add_argument("--json", action="store_true", help="print JSON, the orders of all ranks included")
    parser.add_argument("--memory", action="store_true", help="estimate the memory of every rank")
    parser.add_argument("--model", help="with --memory: Hugging Face directory; only its config.json is read")
    parser.add_argument("--sequence-length", type=tokens, default=512, help="with --model: tokens of a sample (512)")
    add_set(parser)
    add_costs(parser)


def run(options: Namespace) -> str:
    """Run the command; return what it prints.

    Args:
        options: The command line.

    Raises:
        ArgumentError: Two options do not go together.
        LDTError: The input is wrong.
        OSError: A file cannot be read.
    """
    if options.model is not None and not options.memory:
        raise ArgumentError(None, "--model is for --memory")
    job = load_job(options, costs=options.costs)
    warning = memory_warning(job.config, job.known)
    if warning is not None:
        sys.stderr.write(f"ds-ldt: {warning}\n")
    footprint = _footprint(options, job)
    if footprint is not None:  # the model knows what is trained
        if footprint.warning is not None:
            sys.stderr.write(f"ds-ldt: --sequence-length: {footprint.warning}\n")
        job = replace(job, shape=replace(job.shape, gradient_boundaries=footprint.gradient_boundaries))
    report = report_of(job)
    memory = memory_report(job.config, report.plan, job.known, footprint) if options.memory else None
    if options.json:
        return json.dumps(report.document() | ({} if memory is None else {"memory": memory.document()})) + "\n"
    return "\n".join((*_lines(job, report), *(() if memory is None else ("", *memory.lines(report.plan))))) + "\n"


def _footprint(options: Namespace, job: Job) -> Footprint | None:
    if options.model is None:
        return None
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed greets
        from ds_ldt.runtime.dry_run import footprint_of

        return footprint_of(job.config, options.model, sequence_length=options.sequence_length)


def _lines(job: Job, report: Report) -> Iterator[str]:
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


def _layer_lines(job: Job) -> Iterator[str]:
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


def _cost_lines(job: Job) -> Iterator[str]:
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


def _message_sizes(job: Job) -> str:
    """Return the size of a message, e.g. `1 MB`, or of each modality's largest one."""
    costs, layout = job.known.costs, job.layout
    if not costs.hop_bytes:
        return f"{costs.message_bytes / 1e6:g} MB"
    largest: dict[str, int] = {}
    for boundary in range(layout.num_boundaries):
        name = layout.modality_of_boundary(boundary)
        largest[name] = max(largest.get(name, 0), costs.bytes_over(boundary))
    return ", ".join(f"{size / 1e6:g} MB ({name})" for name, size in largest.items())
