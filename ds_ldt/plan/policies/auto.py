"""`auto`: the best of the training policies when played with the costs that are known.

The fastest wins. Of those that are as fast, to one part in 1200, the one with the fewest micro-batches in flight
does, and of those the first in the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_ldt.plan.costs import Costs
from ds_ldt.plan.instructions import Orders
from ds_ldt.plan.machine import Machine
from ds_ldt.plan.playback import Follow
from ds_ldt.plan.policies.base import Policy
from ds_ldt.plan.policies.in_flight import Limits, nominal_costs
from ds_ldt.plan.shape import PipelineShape

_NEAR = 1 / 1200


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What a policy came to.

    Attributes:
        policy: Its name.
        orders: The order of every rank.
        ticks: How long a step takes, in ticks of `ds_ldt.plan.machine`.
        peaks: For each physical stage the most micro-batches of one domain in flight on a rank.
    """

    policy: str
    orders: Orders
    ticks: int
    peaks: tuple[int, ...]


def tried(
    name: str, policy: Policy, shape: PipelineShape, *, costs: Costs | None = None, limits: Limits | None = None
) -> Candidate:
    """Return what a policy comes to.

    Args:
        name: Its name.
        policy: The policy.
        shape: The shape.
        costs: Seconds of computes and messages; None takes nominal ones.
        limits: The most micro-batches of one domain in flight, by stage; None leaves it to the policy.
    """
    machine = Machine.build(shape, nominal_costs(shape) if costs is None else costs, training=True)
    orders = policy(shape, costs=costs, limits=limits)
    rows = machine.jobs_of(orders)
    return Candidate(policy=name, orders=orders, ticks=Follow(machine, rows).play(), peaks=machine.peaks(rows))


def best_of(found: Sequence[Candidate]) -> Candidate:
    """Return the candidate that wins.

    Args:
        found: At least one candidate.
    """
    fastest = min(candidate.ticks for candidate in found)
    as_fast = [candidate for candidate in found if candidate.ticks <= fastest * (1 + _NEAR)]
    return min(as_fast, key=lambda candidate: sum(candidate.peaks))
