"""What a plan costs, from what is known: the hints of a configuration, then a file of measured costs.

The file is JSON, and what a measurement writes:

    {"forward_s": {"0.0": 0.25, "0.1": 1.0, "1.0": 0.25},   seconds of one forward, by "chunk.stage"
     "backward_ratio": 2.0,                                 optional: a backward over a forward
     "backward_s": {...},                                   optional: seconds of one backward
     "weight_share": 0.5,                                   optional: part of it for the weights, where it is split
     "activation_bytes": {...},                             optional: bytes kept of one micro-batch until its backward
     "latency_s": 0.02,                                     optional, one way, in place of ldt.link.latency_ms
     "bandwidth_bytes_per_s": 1.25e8,                       optional, 0 unlimited, in place of ldt.link.bandwidth_mbps
     "message_bytes": 65536}                                optional, in place of ldt.link.message_mb; where messages
                                                            differ {"0": 4000000, "5": 65536}, by boundary

Cells that follow each other on one stage run as one virtual stage: their values are added up. A cell that joins one
before it may be left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from ds_ldt.config.json_file import read_json
from ds_ldt.config.messages import unknown_key
from ds_ldt.config.rules import EDGE_STAGE
from ds_ldt.errors import Absent, ConfigError
from ds_ldt.plan.costs import Cell, Costs
from ds_ldt.plan.policies import AUTO
from ds_ldt.plan.policies.in_flight import Limits
from ds_ldt.plan.shape import PipelineShape

if TYPE_CHECKING:
    from ds_ldt.config.schema import JobConfig
    from ds_ldt.topology.layout import Layout

_BY_CELL = ("forward_s", "backward_s", "activation_bytes")
_NUMBERS = ("backward_ratio", "weight_share", "latency_s", "bandwidth_bytes_per_s", "message_bytes")
_BITS, _MEGA, _GIGA, _MILLI = 8, 1e6, 1e9, 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known before a run, and where it is from.

    Attributes:
        costs: Seconds of computes and messages.
        activation_bytes: (chunk, stage) -> bytes kept of one micro-batch until its backward; None if not known.
        measured: Whether the seconds of the computes are measured ones, else they are the hint for one layer.
    """

    costs: Costs
    activation_bytes: Mapping[Cell, float] | None
    measured: bool


def known_from_config(job: JobConfig, layout: Layout) -> Known:
    """Return what the hints of a configuration say. A virtual stage costs its configured layers, at least one.

    Leading and trailing layers of a model do not count, so that tools that do not know the model plan the same.

    Args:
        job: The configuration.
        layout: Its layout.
    """
    schedule, link = job.ldt.schedule, job.ldt.link
    per_layer, message = schedule.layer_activation_mb, link.message_mb
    forward = _over_layers(schedule.layer_forward_ms, layout)
    hops = {
        boundary: round(number * _MEGA)
        for boundary in range(layout.num_boundaries)
        for name, number in (message.items() if isinstance(message, Mapping) else ())
        if name == layout.modality_of_boundary(boundary)
    }
    costs = Costs(
        forward={cell: milliseconds * _MILLI for cell, milliseconds in forward.items()},
        latency=link.latency_ms * _MILLI,
        bandwidth=link.bandwidth_mbps * _MEGA / _BITS or None,
        message_bytes=max(hops.values()) if isinstance(message, Mapping) else round(message * _MEGA),
        hop_bytes=hops,
    )
    kept = None
    if per_layer is not None:
        kept = {cell: megabytes * _MEGA for cell, megabytes in _over_layers(per_layer, layout).items()}
    return Known(costs=costs, activation_bytes=kept, measured=False)


def known_from_file(source: str | PathLike[str] | Mapping[str, Any], layout: Layout, *, hints: Known) -> Known:
    """Return what a file of costs says, and the hints where it says nothing.

    Args:
        source: Path of the file, or its content.
        layout: The layout.
        hints: What is known without it.

    Raises:
        ConfigError: The file cannot be read, or a key or value is wrong.
    """
    where = "costs" if isinstance(source, Mapping) else f"costs file {source}"
    content = source if isinstance(source, Mapping) else read_json(source, what="costs file")
    for key, value in content.items():
        if key not in (*_BY_CELL, *_NUMBERS):
            raise ConfigError.from_problems(
                [unknown_key(f"{where}: {key}", value, known=(*_BY_CELL, *_NUMBERS), owner="a file of costs")]
            )
    cells = {
        key: _by_virtual_stage(content[key], layout, where=f"{where}: {key}") for key in _BY_CELL if key in content
    }
    if "forward_s" not in cells:
        raise ConfigError.of(
            f"{where}: forward_s",
            found=Absent(),
            expected="seconds of one forward for every cell with layers",
            fix='add it, like "forward_s": {"0.0": 0.25, "0.1": 1.0, "1.0": 0.25}',
        )
    hops = hints.costs.hop_bytes
    if "message_bytes" in content:
        hops = _by_boundary(content["message_bytes"], hops, layout, where=f"{where}: message_bytes")
        content = {key: value for key, value in content.items() if key != "message_bytes" or not hops}
    numbers = {key: _number(content[key], where=f"{where}: {key}") for key in _NUMBERS if key in content}
    share = numbers.get("weight_share", 0.0)
    if share > 1:
        raise ConfigError.of(
            f"{where}: weight_share", found=share, expected="a part of a backward, 0 to 1", fix="write e.g. 0.5"
        )
    old = hints.costs
    bandwidth = numbers["bandwidth_bytes_per_s"] or None if "bandwidth_bytes_per_s" in numbers else old.bandwidth
    costs = Costs(
        forward=cells["forward_s"],
        backward=cells.get("backward_s", {}),
        backward_ratio=numbers.get("backward_ratio", old.backward_ratio),
        weight_share=numbers.get("weight_share", old.weight_share),
        latency=numbers.get("latency_s", old.latency),
        bandwidth=bandwidth,
        message_bytes=max(hops.values()) if hops else round(numbers.get("message_bytes", old.message_bytes)),
        hop_latency=old.hop_latency,
        hop_bytes=hops,
    )
    return Known(costs=costs, activation_bytes=cells.get("activation_bytes", hints.activation_bytes), measured=True)


def costs_document(known: Known) -> dict[str, Any]:
    """Return the content of a file of costs that says what is known.

    Args:
        known: What is known.
    """
    costs = known.costs
    document: dict[str, Any] = {
        "forward_s": _by_name(costs.forward),
        "backward_ratio": costs.backward_ratio,
        "weight_share": costs.weight_share,
        "latency_s": costs.latency,
        "bandwidth_bytes_per_s": costs.bandwidth or 0,
        "message_bytes": {str(boundary): size for boundary, size in costs.hop_bytes.items()} or costs.message_bytes,
    }
    if costs.backward:
        document["backward_s"] = _by_name(costs.backward)
    if known.activation_bytes is not None:
        document["activation_bytes"] = _by_name(known.activation_bytes)
    return document


def memory_limits(shape: PipelineShape, *, memory_gb: float, activation_bytes: Mapping[Cell, float]) -> Limits:
    """Return the most micro-batches of one domain that fit into the memory of a rank, for each stage.

    Args:
        shape: The shape.
        memory_gb: Gigabytes of a rank that activations in flight may take.
        activation_bytes: (chunk, stage) -> bytes kept of one micro-batch until its backward.

    Raises:
        ConfigError: A stage cannot hold a single micro-batch.
    """
    limits = []
    for stage in range(shape.num_stages):
        owned = shape.virtual_stages_of(stage)
        domains = shape.slice_size if stage == EDGE_STAGE else 1
        one = domains * sum(activation_bytes[shape.chunks[index], stage] for index in owned)
        fitting = int(memory_gb * _GIGA // one) if one else shape.num_micro_batches
        if fitting < 1:
            raise ConfigError.of(
                "ldt.schedule.memory_gb",
                found=memory_gb,
                expected=f"at least {one / _GIGA:.3g}, which one micro-batch takes on stage {stage}",
                fix="raise it, lower the micro-batch size, or checkpoint activations",
            )
        limits.append(min(fitting, shape.num_micro_batches))
    return tuple(limits)


def is_measured(job: JobConfig) -> bool:
    """Return whether a configuration asks for a plan of what its first steps measure.

    Args:
        job: The configuration.
    """
    return job.ldt.schedule.policy == AUTO and job.ldt.schedule.measure_steps > 0


def memory_warning(job: JobConfig, known: Known, *, running: bool = False) -> str | None:
    """Return what to say where `ldt.schedule.memory_gb` is set and limits nothing; None where all is well.

    Args:
        job: The configuration.
        known: What is known.
        running: Whether training is about to start, in which the bytes of a micro-batch may be measured.
    """
    if running and is_measured(job):
        return None
    if job.ldt.schedule.memory_gb is None or known.activation_bytes is not None:
        return None
    return (
        "ldt.schedule.memory_gb limits nothing here: the bytes of a micro-batch are not known. Set "
        'ldt.schedule.layer_activation_mb, or let "auto" measure them (ds-ldt plan: name the file that it wrote in '
        "--costs)."
    )


def limits_from(job: JobConfig, shape: PipelineShape, known: Known) -> Limits | None:
    """Return the most micro-batches of one domain in flight on each stage that a configuration allows.

    Args:
        job: The configuration.
        shape: The shape.
        known: What is known; without activation bytes `memory_gb` limits nothing.

    Raises:
        ConfigError: The memory does not hold a single micro-batch.
    """
    schedule = job.ldt.schedule
    found = [] if schedule.max_in_flight is None else [(schedule.max_in_flight,) * shape.num_stages]
    if schedule.memory_gb is not None and known.activation_bytes is not None:
        found.append(memory_limits(shape, memory_gb=schedule.memory_gb, activation_bytes=known.activation_bytes))
    return tuple(map(min, *found)) if len(found) > 1 else found[0] if found else None


def _virtual_stages_by_cell(layout: Layout) -> dict[Cell, Cell]:
    """Every cell with layers -> the (chunk, stage) of the virtual stage that it is part of."""
    found: dict[Cell, Cell] = {}
    start = 0
    for cell in layout.cells:
        virtual = layout.virtual_stage_of_layer(start)
        found[cell.chunk, cell.stage] = virtual.chunk, virtual.stage
        start += cell.configured + cell.joining
    return found


def _over_layers(each: float | Mapping[str, float], layout: Layout) -> dict[Cell, float]:
    """(chunk, stage) of every virtual stage -> a number of one layer, summed over its layers that are no joining ones.

    A virtual stage of joining layers only counts as one layer.
    """
    found: dict[Cell, float] = {}
    for virtual in layout.virtual_stages:
        blocks = layout.blocks_of(virtual) or {layout.matrices[-1][0]: range(1)}
        found[virtual.chunk, virtual.stage] = sum(
            len(held) * (each[name] if isinstance(each, Mapping) else each) for name, held in blocks.items()
        )
    return found


def _by_boundary(values: object, hints: Mapping[int, int], layout: Layout, *, where: str) -> dict[int, int]:
    """Return the bytes of messages by boundary; none if one number says it for all."""
    if not isinstance(values, Mapping):
        return {}
    known = {str(boundary): boundary for boundary in range(layout.num_boundaries)}
    for name in values:
        if name not in known:
            raise ConfigError.of(
                f"{where}.{name}",
                found=values[name],
                expected=f"boundaries 0 to {layout.num_boundaries - 1}",
                fix="remove it",
            )
    found = {known[name]: round(_number(value, where=f"{where}.{name}")) for name, value in values.items()}
    return {**hints, **found}


def _by_virtual_stage(values: object, layout: Layout, *, where: str) -> dict[Cell, float]:
    owners = _virtual_stages_by_cell(layout)
    names = {f"{chunk}.{stage}": owner for (chunk, stage), owner in owners.items()}
    if not isinstance(values, Mapping):
        raise ConfigError.of(where, found=values, expected='numbers by "chunk.stage"', fix='write {"0.0": 0.25, ...}')
    found: dict[Cell, float] = {}
    for name, value in values.items():
        if name not in names:
            raise ConfigError.of(
                f"{where}.{name}",
                found=value,
                expected=f"the cells that hold layers, {', '.join(names)}",
                fix="remove it",
            )
        found[names[name]] = found.get(names[name], 0.0) + _number(value, where=f"{where}.{name}")
    missing = [f"{chunk}.{stage}" for chunk, stage in dict.fromkeys(owners.values()) if (chunk, stage) not in found]
    if missing:
        raise ConfigError.of(
            f"{where}.{missing[0]}", found=Absent(), expected="a number for every virtual stage", fix="add it"
        )
    return found


def _number(value: object, *, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ConfigError.of(where, found=value, expected="a number >= 0", fix="write a number")
    return float(value)


def _by_name(values: Mapping[Cell, float]) -> dict[str, float]:
    return {f"{chunk}.{stage}": value for (chunk, stage), value in values.items()}
