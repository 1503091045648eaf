"""The policies: each a small file whose `orders` says in which order every rank computes.

To add one, write `policies/<name>.py` with `orders(shape, *, costs=None, limits=None) -> Orders`, name it in
`TRAINING` below (in `right_after` unless it plans weight gradients itself), and add its golden files with
`tests/plan/test_golden.py`. Sends, receives and checks come by themselves.
"""

from __future__ import annotations

from types import MappingProxyType

from ds_ldt.plan.policies import closed_form, forward_only, greedy, ldt_1f1b
from ds_ldt.plan.policies.base import Policy
from ds_ldt.plan.policies.split_backward import right_after

AUTO = "auto"
"""Stands for the best of the training policies; see `ds_ldt.plan.policies.auto`."""

TRAINING: MappingProxyType[str, Policy] = MappingProxyType(
    {
        "ldt_1f1b": right_after(ldt_1f1b.orders),
        "closed_form": right_after(closed_form.orders),
        "greedy": greedy.orders,
    }
)
"""Name, as in the setting `ldt.schedule.policy`, -> training policy."""

EVALUATION: MappingProxyType[str, Policy] = MappingProxyType({"forward_only": forward_only.orders})
"""Name -> evaluation policy."""
