"""Lay a measured timeline over a planned one: where do they differ most?"""

from __future__ import annotations

from dataclasses import dataclass

from ds_ldt.plan.instructions import Compute
from ds_ldt.plan.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One place where a run did not go as planned.

    Attributes:
        rank: Rank.
        compute: The compute that took another time, or that was waited for.
        is_wait: Whether the wait before the compute differs, else the compute itself does.
        planned: Seconds planned.
        measured: Seconds measured.
    """

    rank: int
    compute: Compute
    is_wait: bool
    planned: float
    measured: float

    @property
    def seconds(self) -> float:
        """Seconds that the run took longer than planned here; negative if it was faster."""
        return self.measured - self.planned

    def __str__(self) -> str:
        """Return for example `rank 2 waits 0.4 s longer before F1.3.0 (planned 0 s, measured 0.4 s)`."""
        changed = f"{abs(self.seconds):.3g} s {'longer' if self.seconds > 0 else 'shorter'}"
        what = f"waits {changed} before {self.compute}" if self.is_wait else f"takes {changed} for {self.compute}"
        return f"rank {self.rank} {what} (planned {self.planned:.3g} s, measured {self.measured:.3g} s)"


def differences(planned: Timeline, measured: Timeline) -> tuple[Difference, ...]:
    """Return where a run differs from its plan, the largest difference first.

    Computes that only one of the two has are left out. The wait before a compute is the time since the end of the one
    before it on its rank, or since the beginning of the timeline.

    Args:
        planned: The simulated timeline.
        measured: The measured one.
    """
    before, after = _seconds(planned), _seconds(measured)
    found = []
    for key in before.keys() & after.keys():
        (planned_wait, planned_run), (measured_wait, measured_run) = before[key], after[key]
        rank, compute = key
        for is_wait, was, became in ((True, planned_wait, measured_wait), (False, planned_run, measured_run)):
            if was != became:
                found.append(Difference(rank=rank, compute=compute, is_wait=is_wait, planned=was, measured=became))
    return tuple(sorted(found, key=lambda one: (-abs(one.seconds), one.rank, one.compute, one.is_wait)))


def _seconds(timeline: Timeline) -> dict[tuple[int, Compute], tuple[float, float]]:
    """(rank, compute) -> seconds of the wait before it, and of itself."""
    free = [timeline.start] * timeline.num_ranks
    found = {}
    for span in sorted(timeline.spans, key=lambda span: span.start):
        found[span.rank, span.compute] = (span.start - free[span.rank], span.seconds)
        free[span.rank] = span.end
    return found
