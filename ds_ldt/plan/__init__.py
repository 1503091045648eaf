"""Which rank runs what, when, and to whom it sends: the plan of a step, made and proven before anything runs.

    shape -> policy -> orders -> lower -> plan -> validate

Everything here is standard library only: a plan is made in milliseconds, on any machine, for all ranks at once.
"""

from __future__ import annotations

from ds_ldt.plan.bound import lower_bound
from ds_ldt.plan.costs import Costs
from ds_ldt.plan.deadlock import min_posted_receives
from ds_ldt.plan.instructions import (
    Channel,
    Compute,
    Flow,
    Handler,
    Handlers,
    Instruction,
    Key,
    Kind,
    Op,
    Order,
    Orders,
    Planned,
    planned,
)
from ds_ldt.plan.lower import lower
from ds_ldt.plan.plan import Plan, peak_in_flight
from ds_ldt.plan.planner import available_policies, build_plan
from ds_ldt.plan.shape import PipelineShape
from ds_ldt.plan.simulate import simulate
from ds_ldt.plan.text import parse_orders, render_orders, render_timeline
from ds_ldt.plan.timeline import Span, Timeline
from ds_ldt.plan.validate import validate

__all__ = [
    "Channel",
    "Compute",
    "Costs",
    "Flow",
    "Handler",
    "Handlers",
    "Instruction",
    "Key",
    "Kind",
    "Op",
    "Order",
    "Orders",
    "PipelineShape",
    "Plan",
    "Planned",
    "Span",
    "Timeline",
    "available_policies",
    "build_plan",
    "lower",
    "lower_bound",
    "min_posted_receives",
    "parse_orders",
    "peak_in_flight",
    "planned",
    "render_orders",
    "render_timeline",
    "simulate",
    "validate",
]
