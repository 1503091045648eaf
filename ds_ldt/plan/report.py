"""What there is to say about a plan: how long a step takes, how near that is to the bound, what crosses the link."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ds_ldt.plan.bound import lower_bound
from ds_ldt.plan.build import build_plan, candidate_of
from ds_ldt.plan.costs import Costs, touches_edge
from ds_ldt.plan.machine import TICKS_PER_SECOND
from ds_ldt.plan.plan import Plan
from ds_ldt.plan.policies import AUTO, TRAINING
from ds_ldt.plan.policies.auto import Candidate
from ds_ldt.plan.policies.depth import Limits, hop_seconds, slowest_forward
from ds_ldt.plan.shape import EDGE_STAGE, PipelineShape
from ds_ldt.plan.simulate import simulate
from ds_ldt.plan.timeline import Timeline

TO_CLOUD, TO_EDGE = "edge_to_cloud", "cloud_to_edge"
_PUBLISHED = "ldt_1f1b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rating:
    """How one policy does.

    Attributes:
        policy: Its name.
        makespan: Seconds of a step.
        efficiency: The lower bound over that, 0 to 1.
        peak_in_flight: The most micro-batches of one domain in flight on any rank.
    """

    policy: str
    makespan: float
    efficiency: float
    peak_in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What there is to say about a plan.

    Attributes:
        plan: The plan.
        timeline: Its simulated run.
        costs: What it was simulated with.
        lower_bound: Seconds that no plan can undercut.
        lower_bound_whole: The same if no backward were split; None if none is.
        ratings: The chosen policy and those it was compared with.
        why: Why that policy, in one sentence.
        link_bytes: Direction -> bytes of activations and gradients over the link in a step, of all replicas.
        link_messages: Direction -> their number.
    """

    plan: Plan
    timeline: Timeline
    costs: Costs
    lower_bound: float
    lower_bound_whole: float | None
    ratings: tuple[Rating, ...]
    why: str
    link_bytes: dict[str, int]
    link_messages: dict[str, int]

    @property
    def efficiency(self) -> float:
        """The lower bound over the makespan, 0 to 1; 1 if a step takes no time."""
        return _ratio(self.lower_bound, self.timeline.makespan)

    def document(self) -> dict[str, Any]:
        """Return the report as JSON would have it."""
        ranks = range(self.plan.shape.num_ranks)
        return {
            "policy": self.plan.policy,
            "why": self.why,
            "makespan": self.timeline.makespan,
            "lower_bound": self.lower_bound,
            "lower_bound_whole": self.lower_bound_whole,
            "efficiency": self.efficiency,
            "peak_in_flight": {str(rank): self.plan.peak_in_flight(rank) for rank in ranks},
            "bubble": {str(rank): self.timeline.bubble(rank) for rank in ranks},
            "link_bytes": self.link_bytes,
            "link_messages": self.link_messages,
            "policies": {
                rating.policy: {"makespan": rating.makespan, "efficiency": rating.efficiency}
                for rating in self.ratings
            },
            "fingerprint": self.plan.fingerprint,
            "orders": {str(rank): [str(compute) for compute in order] for rank, order in self.plan.orders().items()},
        }


def report_on(shape: PipelineShape, costs: Costs, *, policy: str = AUTO, limits: Limits | None = None) -> Report:
    """Plan a training step and return what there is to say about it.

    Args:
        shape: The shape.
        costs: Seconds of computes and messages.
        policy: The policy asked for.
        limits: The most micro-batches of one domain in flight, by stage.
    """
    plan = build_plan(shape, policy=policy, costs=costs, max_in_flight=limits)
    bound = lower_bound(shape, costs)
    compared = TRAINING if policy == AUTO else dict.fromkeys((_PUBLISHED, plan.policy))
    timeline = simulate(plan, costs)
    ratings = tuple(
        _rated(candidate_of(shape, name, costs, limits), bound, timeline if name == plan.policy else None)
        for name in compared
    )
    sent_bytes, sent_messages = _over_the_link(shape, costs)
    return Report(
        plan=plan,
        timeline=timeline,
        costs=costs,
        lower_bound=bound,
        lower_bound_whole=lower_bound(replace(shape, split_backward=None), costs) if shape.split_stages else None,
        ratings=ratings,
        why=_why(plan, costs, ratings, asked=policy),
        link_bytes=sent_bytes,
        link_messages=sent_messages,
    )


def _rated(candidate: Candidate, bound: float, timeline: Timeline | None) -> Rating:
    # Simulating takes a lowered plan. What the planner played is as good, but may break ties on a busy link otherwise.
    makespan = candidate.ticks / TICKS_PER_SECOND if timeline is None else timeline.makespan
    return Rating(
        policy=candidate.policy,
        makespan=makespan,
        efficiency=_ratio(bound, makespan),
        peak_in_flight=max(candidate.peaks),
    )


def _why(plan: Plan, costs: Costs, ratings: tuple[Rating, ...], *, asked: str) -> str:
    if asked != AUTO:
        return "the configuration asks for it"
    own = next(rating for rating in ratings if rating.policy == plan.policy)
    hop, slowest = hop_seconds(plan.shape, costs), slowest_forward(plan.shape, costs)
    link = f"a message takes {hop / slowest:.2g} forward times of the slowest cloud stage" if slowest else "no compute"
    faster = [rating.policy for rating in ratings if rating.makespan > own.makespan * (1 + 1e-3)]
    if faster:
        return f"{link}, for which it is faster than {' and '.join(faster)}"
    return f"{link}, for which no policy is faster, and none as fast has fewer micro-batches in flight"


def _over_the_link(shape: PipelineShape, costs: Costs) -> tuple[dict[str, int], dict[str, int]]:
    sent_bytes, sent_messages = {TO_CLOUD: 0, TO_EDGE: 0}, {TO_CLOUD: 0, TO_EDGE: 0}
    for boundary in range(shape.num_boundaries):
        if not touches_edge(boundary, shape):
            continue
        forth, back = (TO_CLOUD, TO_EDGE) if shape.stages[boundary] == EDGE_STAGE else (TO_EDGE, TO_CLOUD)
        for direction in (forth, back) if shape.carries_gradient(boundary) else (forth,):
            sent_messages[direction] += shape.num_micro_batches * shape.num_domains
            sent_bytes[direction] += shape.num_micro_batches * shape.num_domains * costs.bytes_over(boundary)
    return sent_bytes, sent_messages


def _ratio(bound: float, makespan: float) -> float:
    return bound / makespan if makespan else 1.0
