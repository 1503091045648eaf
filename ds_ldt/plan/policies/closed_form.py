"""`closed_form`: the published rule with a depth that fits the link. Nothing is searched where a slice has one domain.

Where a micro-batch meets each cloud stage once (V = 2) it is the form of `ds_ldt.plan.policies.u_pattern`. With t the
forward time of the slowest cloud stage and L the one-way time of a message over the link,

    x = ceil(2L/t), W = P + x + ceil(2L/3t), k = P-1 + ceil(L/t)

A gradient comes back to the last cloud stage 2L after its activation left, so that this stage needs x more forwards to
fill the time; the edge must have sent them. With one domain this reaches the lower bound wherever it was tried
(P 2-5, L up to 8t). An edge that serves several domains needs other numbers: W and k are those around the formula that
are best when played.

For any other shape, and for a limit that the form would break, the order is found by list scheduling with the caps
K_p = 1 + ceil(rt_p / t).
"""

from __future__ import annotations

from collections.abc import Iterator

from ds_ldt.plan.costs import Costs
from ds_ldt.plan.instructions import Orders
from ds_ldt.plan.list_schedule import list_orders
from ds_ldt.plan.machine import Machine
from ds_ldt.plan.playback import Follow
from ds_ldt.plan.policies.in_flight import (
    Limits,
    hop_seconds,
    nominal_costs,
    round_trip_caps,
    slowest_forward,
    stage_times,
)
from ds_ldt.plan.policies.u_pattern import Depth, unit_orders
from ds_ldt.plan.shape import PipelineShape
from ds_ldt.plan.size import for_search

_WARM_UPS = (0, 1, -1, 2)
_AHEADS = (0, 1, -1, 2, 3)
_MOST_JOBS_PLAYED = 80_000


def orders(shape: PipelineShape, *, costs: Costs | None = None, limits: Limits | None = None) -> Orders:
    """Return the orders of the form.

    Args:
        shape: Any shape.
        costs: Seconds of computes and messages; None takes nominal ones.
        limits: The most micro-batches of one domain in flight, by stage; None leaves it to the form.
    """
    costs = nominal_costs(shape) if costs is None else costs
    if shape.is_single_pass:
        depth = _best_depth(shape, costs, limits)
        if depth is not None:
            return unit_orders(shape, depth)
    caps = round_trip_caps(shape, costs, training=True, tau=slowest_forward(shape, costs), limits=limits)
    return list_orders(shape, costs, training=True, caps=caps)


def _best_depth(shape: PipelineShape, costs: Costs, limits: Limits | None) -> Depth | None:
    """The depth with the shortest step, tried out on fewer micro-batches where a step is long; None if none runs."""
    formula = _formula(shape, costs)
    searched = for_search(shape, deepest=formula.warm_up + max(_WARM_UPS) + 1)
    machine = Machine.build(searched, costs, training=True)
    best: tuple[int, Depth] | None = None
    for depth in _around(formula, shape, machine.num_jobs):
        rows = machine.jobs_of(unit_orders(searched, depth))
        if limits is not None and any(p > limit for p, limit in zip(machine.peaks(rows), limits, strict=True)):
            continue
        run = Follow(machine, rows)
        ticks = run.play()
        if not run.stuck and (best is None or ticks < best[0]):
            best = ticks, depth
    return None if best is None else best[1]


def _formula(shape: PipelineShape, costs: Costs) -> Depth:
    num_stages, hop = shape.num_stages, hop_seconds(shape, costs)
    extra = stage_times(2 * hop, shape, costs)
    warm_up = num_stages + extra + stage_times(2 * hop / 3, shape, costs)
    return Depth(warm_up=warm_up, ahead=num_stages - 1 + stage_times(hop, shape, costs), extra=extra)


def _around(formula: Depth, shape: PipelineShape, num_jobs: int) -> Iterator[Depth]:
    """The depth of the formula and, where a slice has several domains, those around it; no more than can be tried."""
    yield formula
    if shape.slice_size == 1:
        return
    around = ((more_warm_up, more_ahead) for more_warm_up in _WARM_UPS for more_ahead in _AHEADS)
    num_tried = max(1, _MOST_JOBS_PLAYED // num_jobs)
    for (more_warm_up, more_ahead), _ in zip(around, range(num_tried), strict=False):
        wider, later = formula.warm_up + more_warm_up, formula.ahead + more_ahead
        if 1 <= later <= wider and (more_warm_up or more_ahead):
            yield Depth(warm_up=wider, ahead=later, extra=formula.extra)
