"""Which rank runs what, when, and to whom it sends: the plan of a step, made and proven before anything runs.

    shape -> policy -> orders -> lower -> plan -> validate

Everything here is standard library only: a plan is made in milliseconds, on any machine, for all ranks at once.
"""

from __future__ import annotations

from ds_ldt.plan.build import available_policies, build_plan
from ds_ldt.plan.costs import Costs
from ds_ldt.plan.instructions import Channel, Compute, Flow, Instruction, Kind, Op, Order, Orders
from ds_ldt.plan.lower import lower
from ds_ldt.plan.plan import Plan
from ds_ldt.plan.shape import PipelineShape

__all__ = [
    "Channel",
    "Compute",
    "Costs",
    "Flow",
    "Instruction",
    "Kind",
    "Op",
    "Order",
    "Orders",
    "PipelineShape",
    "Plan",
    "available_policies",
    "build_plan",
    "lower",
]
