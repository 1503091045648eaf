"""Which plan a step gets: one made of the hints at first, and under "auto" one of what the first steps measured.

All here depends on numbers that every rank has, so all ranks plan the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from deepspeed.utils import logger

from ds_ldt.config.schema import JobConfig
from ds_ldt.plan import PipelineShape, Plan, build_plan
from ds_ldt.plan.cost_file import Known, costs_document, is_measured, known_from_config, limits_from
from ds_ldt.plan.measured_costs import LinkTimes, Readings, describe, find
from ds_ldt.topology.layout import Layout

_WHILE_MEASURING = "closed_form"
"""The policy of the steps that "auto" measures: it fits the link as the hints describe it, and is planned at once."""


class Planner:
    """Plans the steps of a job.

    Args:
        rank: this rank.
        job: the configuration: policy, hints, limits.
        layout: its layout.
        gradient_boundaries: for each boundary whether gradients cross it.

    Attributes:
        known: the costs to plan with: those of the hints, later the measured ones.
        is_measuring: whether plans are those of steps that are to be measured.
    """

    def __init__(self, rank: int, job: JobConfig, layout: Layout, gradient_boundaries: Sequence[bool]) -> None:
        self.known: Known = known_from_config(job, layout)
        self.is_measuring = is_measured(job)
        self._rank = rank
        self._job = job
        self._layout = layout
        self._gradient_boundaries = tuple(gradient_boundaries)

    def plan(self, micro_batches: int, *, training: bool) -> Plan:
        """Return the plan of a step; the same object as long as nothing new is known.

        Args:
            micro_batches: of each domain.
            training: for a training step, not for forward passes only.

        Raises:
            ConfigError: the memory allowed does not hold a single micro-batch.
        """
        schedule = self._job.ldt.schedule
        shape = PipelineShape.from_layout(
            self._layout,
            num_micro_batches=micro_batches,
            num_domains=self._job.num_domains,
            num_replicas=self._job.num_replicas,
            gradient_boundaries=self._gradient_boundaries,
            split_backward=schedule.split_backward,
        )
        return build_plan(
            shape,
            policy=_WHILE_MEASURING if self.is_measuring else schedule.policy,
            training=training,
            costs=self.known.costs,
            max_in_flight=limits_from(self._job, shape, self.known),
        )

    def learn(self, readings: Readings, times: LinkTimes, micro_batches: int) -> None:
        """Replace hints by what was measured; later steps run other plans. The first rank says so, and writes costs.

        Args:
            readings: of all ranks, the same on each.
            times: between the leaders of the sites, the same on each rank.
            micro_batches: of each domain in the training steps that were measured.

        Raises:
            ConfigError: the memory allowed does not hold a single micro-batch, now that its bytes are known.
        """
        before = self.plan(micro_batches, training=True)
        findings = find(before.shape, readings, times, hints=self.known)
        self.known, self.is_measuring = findings.known, False
        after = self.plan(micro_batches, training=True)
        if self._rank == 0:
            logger.info(f"ds_ldt {describe(findings, before=before, after=after)}")
            self._write_costs()

    def _write_costs(self) -> None:
        path = self._job.ldt.measured_costs
        if path is None:
            return
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(json.dumps(costs_document(self.known), indent=2) + "\n")
        except OSError as error:  # training does not depend on it
            logger.warning(f"ldt.measured_costs: nothing was written, {error}")


def receive_window(plan: Plan, rank: int) -> int:
    """How many receives of a channel are posted at once: all that may be in flight, and no fewer than P + 1.

    Args:
        plan: of training.
        rank: the rank that receives.
    """
    return max(plan.shape.num_stages + 1, plan.peak_in_flight(rank))
