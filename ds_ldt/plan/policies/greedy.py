"""`greedy`: list scheduling with the costs and the link that are known, as deep as it must be and no deeper.

1. Play the list schedule (`ds_ldt.plan.list_schedule`) for a ladder of depths: for V = 2 first
   K_p = P-p+1 + ceil(2L/t), then the shallowest first K_p = 1 + ceil(rt_p / tau) + slack with
   (tau, slack) = (3t, 1), (2t, 0), (1.5t, 0), (t, 0); each with four rules for what the edge does first.
   Keep the fastest; stop at the lower bound, give or take that part in 1200.
2. Take micro-batches out of flight again, first on all stages alike, then stage by stage, as long as the step becomes
   no longer, or stays within a part in 1200 of the bound.

Where backwards are split, a micro-batch is in flight until its weight gradients, which fill the bubbles: step 1 tries
each depth with up to three micro-batches more. What that finds is compared with the plan for whole backwards, each
with its weight gradients right behind; so a split never makes a step longer.

A long step is searched with fewer micro-batches (`ds_ldt.plan.size.for_search`) and played once with all of them, at
the depth and by the rule that were found.

t is the forward time of the slowest cloud stage, rt_p the unloaded time from the first to the last compute of a
micro-batch on stage p.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from ds_ldt.config.rules import EDGE_STAGE
from ds_ldt.plan.bound import lower_bound
from ds_ldt.plan.costs import Costs
from ds_ldt.plan.instructions import Op, Orders
from ds_ldt.plan.list_schedule import Priority, list_schedule, pipeline_priority
from ds_ldt.plan.machine import TICKS_PER_SECOND, JobOrders, Machine
from ds_ldt.plan.playback import Follow
from ds_ldt.plan.policies.in_flight import (
    Limits,
    clamped,
    link_caps,
    nominal_costs,
    round_trip_caps,
    slowest_forward,
)
from ds_ldt.plan.policies.split_backward import right_after
from ds_ldt.plan.shape import PipelineShape
from ds_ldt.plan.size import for_search

_LADDER = ((3.0, 1), (2.0, 0), (1.5, 0), (1.0, 0))
_OTHER_BACKWARDS = 3  # their rank in `pipeline_priority`
_TAIL_LAST = (0, 4, 2, 3, 1)  # by the rank in `pipeline_priority`
_MORE_IF_SPLIT = (0, 1, 2, 3)
_NEAR = 1 / 1200
_MOST_JOBS_TRIED = 1_600_000
_MOST_JOBS_SHRUNK = 200_000


def head_before_its_backward(op: Op, virtual_stage: int, shape: PipelineShape) -> int:
    """Rank as `pipeline_priority` does, but let new micro-batches enter before other backwards on the edge."""
    rank = pipeline_priority(op, virtual_stage, shape)
    if shape.stages[virtual_stage] != EDGE_STAGE or rank < _OTHER_BACKWARDS:
        return rank
    return _OTHER_BACKWARDS if (op, virtual_stage) == (Op.FORWARD, 0) else _OTHER_BACKWARDS + 1


def head_before_tail(op: Op, virtual_stage: int, shape: PipelineShape) -> int:
    """Rank as `pipeline_priority` does, but let new micro-batches enter before other forwards on the edge."""
    rank = pipeline_priority(op, virtual_stage, shape)
    if shape.stages[virtual_stage] != EDGE_STAGE or rank == 0:
        return rank
    return 1 if (op, virtual_stage) == (Op.FORWARD, 0) else rank + 1


def tail_last(op: Op, virtual_stage: int, shape: PipelineShape) -> int:
    """Rank as `pipeline_priority` does, but new micro-batches first on the edge, and the tail's forwards last.

    Where memory is just enough this makes room for new micro-batches as early as can be.
    """
    rank = pipeline_priority(op, virtual_stage, shape)
    if shape.stages[virtual_stage] != EDGE_STAGE:
        return rank
    return _TAIL_LAST[rank]


RULES: tuple[Priority, ...] = (pipeline_priority, head_before_its_backward, head_before_tail, tail_last)
"""The rules that are tried, in this sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    ticks: int
    caps: tuple[int, ...]
    rule: Priority
    rows: JobOrders


def orders(shape: PipelineShape, *, costs: Costs | None = None, limits: Limits | None = None) -> Orders:
    """Return the orders of the best list schedule.

    Args:
        shape: Any shape.
        costs: Seconds of computes and messages; None takes nominal ones.
        limits: The most micro-batches of one domain in flight, by stage; None leaves it to the policy.
    """
    costs = nominal_costs(shape) if costs is None else costs
    searched = for_search(shape, deepest=max(map(max, _ladder(shape, costs, limits))))
    machine = Machine.build(searched, costs, training=True)
    good_enough = lower_bound(searched, costs) * TICKS_PER_SECOND * (1 + _NEAR)
    best = _fastest(machine, _ladder(searched, costs, limits), good_enough=good_enough)
    if shape.split_stages and best.ticks > good_enough:
        whole = right_after(orders)
        if Follow(machine, machine.jobs_of(whole(searched, costs=costs, limits=limits))).play() < best.ticks:
            return whole(shape, costs=costs, limits=limits)
    best = _shrunk(machine, best, allowed=max(best.ticks, good_enough))
    if searched is shape:
        return machine.orders_of(best.rows)
    machine = Machine.build(shape, costs, training=True)
    return machine.orders_of(list_schedule(machine, caps=best.caps, priority=best.rule)[1])


def _ladder(shape: PipelineShape, costs: Costs, limits: Limits | None) -> Iterator[tuple[int, ...]]:
    """The depths to try, each once; at the end as deep as is allowed."""
    slowest = slowest_forward(shape, costs)
    rungs = [
        round_trip_caps(shape, costs, training=True, tau=tau * slowest, slack=slack, limits=limits)
        for tau, slack in _LADDER
    ]
    if shape.is_single_pass:
        rungs.insert(0, link_caps(shape, costs, limits=limits))
    more = _MORE_IF_SPLIT if shape.split_stages else (0,)
    yield from dict.fromkeys(clamped([cap + one for cap in rung], shape, limits) for rung in rungs for one in more)


def _fastest(machine: Machine, ladder: Iterator[tuple[int, ...]], *, good_enough: float) -> _Found:
    best: _Found | None = None
    tries = ((caps, rule) for caps in ladder for rule in RULES)
    for caps, rule in islice(tries, max(1, _MOST_JOBS_TRIED // machine.num_jobs)):
        ticks, rows = list_schedule(machine, caps=caps, priority=rule)
        if best is None or ticks < best.ticks:
            best = _Found(ticks=ticks, caps=caps, rule=rule, rows=rows)
        if best.ticks <= good_enough:
            return best
    assert best is not None, "the ladder has a rung"
    return best


def _shrunk(machine: Machine, found: _Found, *, allowed: float) -> _Found:
    """Lower the caps while the schedule stays within the allowed ticks."""
    left = max(1, _MOST_JOBS_SHRUNK // machine.num_jobs)
    best = found

    def attempt(caps: tuple[int, ...]) -> bool:
        nonlocal best, left
        left -= 1
        ticks, rows = list_schedule(machine, caps=caps, priority=found.rule)
        if ticks <= allowed:
            best = _Found(ticks=ticks, caps=caps, rule=found.rule, rows=rows)
        return ticks <= allowed

    def lower(caps_at: Callable[[int], tuple[int, ...]], most: int) -> None:
        """Find by bisection how much can be taken away, 0 to `most`."""
        least = 0
        while least < most and left > 0:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if attempt(caps_at(middle)) else (least, middle - 1)

    start = machine.peaks(found.rows)
    best = _Found(ticks=found.ticks, caps=start, rule=found.rule, rows=found.rows)
    lower(lambda less: clamped([cap - less for cap in start], machine.shape, None), max(start) - 1)
    for stage in range(machine.shape.num_stages):
        caps = best.caps

        def with_less(less: int, caps: tuple[int, ...] = caps, stage: int = stage) -> tuple[int, ...]:
            return (*caps[:stage], caps[stage] - less, *caps[stage + 1 :])

        lower(with_less, caps[stage] - 1)
    return best
