"""What a policy is."""

from __future__ import annotations

from typing import Protocol

from ds_ldt.plan.costs import Costs
from ds_ldt.plan.instructions import Orders
from ds_ldt.plan.policies.in_flight import Limits
from ds_ldt.plan.shape import PipelineShape


class Policy(Protocol):
    """Says in which order every rank computes. A pure function: equal arguments give equal orders on every machine."""

    def __call__(self, shape: PipelineShape, *, costs: Costs | None = None, limits: Limits | None = None) -> Orders:
        """Return the order of every rank.

        Args:
            shape: The shape.
            costs: Seconds of computes and messages; None if nothing is known of them.
            limits: For each stage, the most micro-batches of one domain in flight on a rank; None means no limit.
        """
        ...
