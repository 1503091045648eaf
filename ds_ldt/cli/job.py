"""What `plan`, `draw` and `check` are about: a configuration, changed by `--set`, and all that follows from it."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import dataclass
from typing import Any

from ds_ldt.cli.progress import Progress
from ds_ldt.config.json_file import read_json
from ds_ldt.config.schema import JobConfig, LDTConfig, load_config
from ds_ldt.plan import PipelineShape
from ds_ldt.plan.cost_file import Known, known_from_config, known_from_file, limits_from
from ds_ldt.plan.policies.in_flight import Limits
from ds_ldt.plan.report import Report, phases_of, report_on
from ds_ldt.plan.trained_layers import gradient_boundaries, trained_layers
from ds_ldt.topology.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A configuration with all that follows from it.

    Attributes:
        config: The configuration.
        layout: Which stage holds which layers.
        shape: What a plan is made for.
        known: Measured costs, or the hints of the configuration.
        limits: Most micro-batches in flight by stage; None where memory is not limited.
    """

    config: JobConfig
    layout: Layout
    shape: PipelineShape
    known: Known
    limits: Limits | None


def add_set(parser: ArgumentParser) -> None:
    """Add `--set`.

    Args:
        parser: The parser of a command.
    """
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=_setting,
        metavar="KEY=VALUE",
        help="change a setting, e.g. ldt.link.latency_ms=40; the value is JSON or else text",
    )


def add_costs(parser: ArgumentParser) -> None:
    """Add `--costs`.

    Args:
        parser: The parser of a command.
    """
    parser.add_argument("--costs", metavar="JSON", help="measured seconds by chunk.stage, in place of the hints")


def load_job(options: Namespace, *, costs: str | None = None) -> Job:
    """Return the job of a command line.

    Args:
        options: Its `config` and `set`.
        costs: Path of measured costs; None: the hints of the configuration count.

    Raises:
        ConfigError: The configuration or the file of costs is wrong.
    """
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
    if costs is not None:
        known = known_from_file(costs, layout, hints=known)
    return Job(config=config, layout=layout, shape=shape, known=known, limits=limits_from(config, shape, known))


def report_of(job: Job) -> Report:
    """Make the plan of a job, and say how it compares with others; a line on stderr says how far that is.

    Args:
        job: The job.
    """
    policy = job.config.ldt.schedule.policy
    with Progress(phases_of(policy)) as progress:
        return report_on(job.shape, job.known.costs, policy=policy, limits=job.limits, progress=progress)


def _setting(text: str) -> tuple[list[str], Any]:
    key, separator, value = text.partition("=")
    path = key.strip().split(".")
    if not separator or not all(path):
        raise ArgumentTypeError(f"{text!r} is not KEY=VALUE, like ldt.link.latency_ms=40")
    if path[0] in LDTConfig.model_fields:
        path.insert(0, "ldt")
    try:
        return path, json.loads(value)
    except json.JSONDecodeError:
        return path, value


def _layout(ldt: LDTConfig) -> Layout:
    """Lay out layers without a model. Only a model knows the layers that join those it counts."""
    layers, exposed = ldt.pipeline_num_layers, ldt.allow_exposed_edge
    if isinstance(layers, dict):
        return Layout.build(layers, num_leading=1, num_between=1, num_trailing=1, allow_exposed_edge=exposed)
    # Where the edge's cell is empty, they are all it has.
    leading, trailing = (0 if row[0] else 1 for row in (layers[0], layers[-1]))
    return Layout.build(layers, num_leading=leading, num_trailing=trailing, allow_exposed_edge=exposed)
