"""Deterministic list scheduling: play the pipeline forward in time and write down what each rank starts.

Whenever a rank is free it starts the best compute that is ready, by priority, and never waits on purpose. The
sequence that each rank started is its order. Orders made so are free of deadlock: the played run itself is a
schedule in which every message was sent before it was needed.

Memory is bounded by a cap on the micro-batches that a rank has in flight for a domain. Only the forward on the
rank's *first* virtual stage is held back by it. That cannot block the pipeline: of all unfinished micro-batches of a
domain, the one that has come furthest is held back by nobody, since whoever filled the cap in front of it would have
come further still.

Weight gradients of backwards that are split start only if nothing else may, and count as in flight until then: a rank
at its cap that has nothing else to do makes room by them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ds_ldt.config.rules import EDGE_STAGE
from ds_ldt.plan.costs import Costs
from ds_ldt.plan.instructions import Op, Orders
from ds_ldt.plan.machine import JobOrders, Machine
from ds_ldt.plan.playback import Choose
from ds_ldt.plan.shape import PipelineShape

Priority = Callable[[Op, int, PipelineShape], int]
"""(op, virtual stage, shape) -> a number at least 0. On a rank the least goes first; where it is equal, the earlier
micro-batch does, then the later virtual stage, then the earlier domain."""


def pipeline_priority(op: Op, virtual_stage: int, shape: PipelineShape) -> int:
    """Rank a compute as the link-aware rule does.

    Edge: tail backward (it is ready only right after its tail forward) > tail forward > middle forward > other
    backward > head forward; ties by micro-batch, later virtual stage, domain. What the cloud waits for goes first,
    and new micro-batches enter last.
    Cloud: forward > backward, the later virtual stage first in both; ties by micro-batch, domain. A rank that does
    not take backwards first keeps the edge fed while gradients travel; the cap bounds what that costs in memory.
    """
    if op is Op.WEIGHT:
        return 0  # among weight gradients alone, which start only if nothing else may
    is_forward, tail = op is Op.FORWARD, shape.num_boundaries
    if shape.stages[virtual_stage] != EDGE_STAGE:
        return (0 if is_forward else shape.num_virtual_stages) + tail - virtual_stage
    ranked = {(Op.BACKWARD, tail): 0, (Op.FORWARD, tail): 1, (Op.FORWARD, 0): 4}
    return ranked.get((op, virtual_stage), 2 if is_forward else 3)


def list_orders(
    shape: PipelineShape,
    costs: Costs,
    *,
    training: bool,
    caps: Sequence[int],
    priority: Priority = pipeline_priority,
) -> Orders:
    """Return the orders that list scheduling finds.

    Args:
        shape: The shape to schedule.
        costs: What the played run costs.
        training: Whether to schedule backwards.
        caps: For each physical stage, the most micro-batches of one domain in flight on a rank; at least 1 each.
        priority: Which ready compute goes first.
    """
    machine = Machine.build(shape, costs, training=training)
    _, rows = list_schedule(machine, caps=caps, priority=priority)
    return machine.orders_of(rows)


def list_schedule(
    machine: Machine, *, caps: Sequence[int], priority: Priority = pipeline_priority
) -> tuple[int, JobOrders]:
    """Return the ticks that the list schedule of a machine takes, and its rows.

    Args:
        machine: What to schedule.
        caps: See `list_orders`.
        priority: See `list_orders`.
    """
    ranks = [priority(kind.op, kind.virtual_stage, machine.shape) for kind in machine.kinds]
    # Where priorities are equal the domains of a slice go in step.
    turns = [turn for turn in range(machine.shape.num_micro_batches) for _ in range(machine.num_domains)]
    run = Choose(machine, ranks=ranks, turns=turns, caps=caps)
    return run.play(), run.started
