"""The policies: each a small file whose `orders` says in which order every rank computes.

To add one, write `policies/<name>.py` with `orders(shape, *, max_in_flight=None) -> Orders`, name it in `TRAINING`
below, and add its golden files with `tests/plan/test_golden.py`. Sends, receives and checks come by themselves.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Protocol

from ds_ldt.plan.instructions import Orders
from ds_ldt.plan.policies import forward_only, ldt_1f1b
from ds_ldt.plan.shape import PipelineShape


class Policy(Protocol):
    """Says in which order every rank computes."""

    def __call__(self, shape: PipelineShape, *, max_in_flight: int | None = None) -> Orders:
        """Return the order of every rank, with at most `max_in_flight` micro-batches of a domain in flight."""
        ...


AUTO = "auto"
"""Stands for the best of the training policies. There is one so far, so it is that one."""

TRAINING: MappingProxyType[str, Policy] = MappingProxyType({"ldt_1f1b": ldt_1f1b.orders})
"""Name, as in the setting `ldt.schedule.policy`, -> training policy."""

EVALUATION: MappingProxyType[str, Policy] = MappingProxyType({"forward_only": forward_only.orders})
"""Name -> evaluation policy."""
