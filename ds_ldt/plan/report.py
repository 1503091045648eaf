"""What there is to say about a plan: how long a step takes, how near that is to the bound, what crosses the link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ds_ldt.config.rules import EDGE_STAGE
from ds_ldt.plan.bound import TO_CLOUD, TO_EDGE, Bound, bound_of, lower_bound
from ds_ldt.plan.costs import Costs, touches_edge
from ds_ldt.plan.machine import TICKS_PER_SECOND
from ds_ldt.plan.plan import Plan
from ds_ldt.plan.planner import build_plan, candidate_of
from ds_ldt.plan.policies import AUTO, TRAINING
from ds_ldt.plan.policies.auto import Candidate
from ds_ldt.plan.policies.in_flight import Limits, hop_seconds, slowest_forward
from ds_ldt.plan.shape import PipelineShape
from ds_ldt.plan.simulate import simulate_slice
from ds_ldt.plan.size import check_size
from ds_ldt.plan.timeline import Timeline

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
        timeline: Its simulated run, of one slice, with ranks and domains as in `shape.one_slice`.
        costs: What it was simulated with.
        bound: The lower bound of a step, and what bounds it.
        lower_bound_whole: The same if no backward were split; None if none is.
        ratings: The chosen policy and those it was compared with.
        why: Why that policy, in one sentence.
        link_bytes: Direction -> bytes of activations and gradients over the link in a step, of all replicas.
        link_messages: Direction -> their number.
    """

    plan: Plan
    timeline: Timeline
    costs: Costs
    bound: Bound
    lower_bound_whole: float | None
    ratings: tuple[Rating, ...]
    why: str
    link_bytes: dict[str, int]
    link_messages: dict[str, int]

    @property
    def lower_bound(self) -> float:
        """Seconds that no plan can undercut."""
        return self.bound.seconds

    @property
    def efficiency(self) -> float:
        """The lower bound over the makespan, 0 to 1; 1 if a step takes no time."""
        return _ratio(self.lower_bound, self.timeline.makespan)

    def bubble(self, rank: int) -> float:
        """Return the part of the step in which a rank of the job computes nothing, 0 to 1."""
        return self.timeline.bubble(self.plan.shape.rank_in_slice(rank))

    def document(self) -> dict[str, Any]:
        """Return the report as JSON would have it."""
        shape = self.plan.shape
        ranks = range(shape.num_ranks)
        bubbles = [self.timeline.bubble(rank) for rank in range(self.timeline.num_ranks)]
        return {
            "policy": self.plan.policy,
            "why": self.why,
            "makespan": self.timeline.makespan,
            "lower_bound": self.lower_bound,
            "lower_bound_whole": self.lower_bound_whole,
            "bounded_by": self.bound.cause.value,
            "bounds": {cause.value: seconds for cause, seconds in self.bound.figures().items()},
            "efficiency": self.efficiency,
            "peak_in_flight": {str(rank): self.plan.peak_in_flight(rank) for rank in ranks},
            "bubble": {str(rank): bubbles[shape.rank_in_slice(rank)] for rank in ranks},
            "link_bytes": self.link_bytes,
            "link_messages": self.link_messages,
            "policies": {
                rating.policy: {"makespan": rating.makespan, "efficiency": rating.efficiency}
                for rating in self.ratings
            },
            "fingerprint": self.plan.fingerprint,
            "orders": self._orders(),
        }

    def _orders(self) -> dict[str, list[str]]:
        """The orders of all ranks, in the short form of their computes."""
        shape = self.plan.shape
        rows = [
            [(f"{one.op.value}{one.virtual_stage}.{one.micro_batch}", one.domain) for one in order]
            for order in self.plan.slice_orders().values()
        ]
        found = {}
        for rank in range(shape.num_ranks):
            by = shape.replica_of(rank) * shape.slice_size
            found[str(rank)] = [f"{text}.{domain + by}" for text, domain in rows[shape.rank_in_slice(rank)]]
        return found


def report_on(
    shape: PipelineShape,
    costs: Costs,
    *,
    policy: str = AUTO,
    limits: Limits | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Plan a training step and return what there is to say about it.

    Args:
        shape: The shape.
        costs: Seconds of computes and messages.
        policy: The policy asked for.
        limits: The most micro-batches of one domain in flight, by stage.
        progress: Called with what is done next, each of `phases_of(policy)` in turn.

    Raises:
        ConfigError: See `build_plan`.
    """
    begin = progress or _silent
    check_size(shape)
    if policy == AUTO:
        for name in TRAINING:
            begin(f"trying {name}")
            candidate_of(shape, name, costs, limits)
    begin("making the plan")
    plan = build_plan(shape, policy=policy, costs=costs, max_in_flight=limits)
    begin("simulating")
    bound = bound_of(shape, costs)
    compared = TRAINING if policy == AUTO else dict.fromkeys((_PUBLISHED, plan.policy))
    timeline = simulate_slice(plan, costs)
    ratings = tuple(
        _rated(candidate_of(shape, name, costs, limits), bound.seconds, timeline if name == plan.policy else None)
        for name in compared
    )
    sent_bytes, sent_messages = _over_the_link(shape, costs)
    return Report(
        plan=plan,
        timeline=timeline,
        costs=costs,
        bound=bound,
        lower_bound_whole=lower_bound(replace(shape, split_backward=None), costs) if shape.split_stages else None,
        ratings=ratings,
        why=_why(plan, costs, ratings, asked=policy),
        link_bytes=sent_bytes,
        link_messages=sent_messages,
    )


def phases_of(policy: str) -> int:
    """Return in how many phases `report_on` works.

    Args:
        policy: The policy asked for.
    """
    return 2 + (len(TRAINING) if policy == AUTO else 0)


def _silent(phase: str) -> None:
    """Say nothing."""


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
