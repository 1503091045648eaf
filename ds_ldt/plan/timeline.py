"""A run of a plan, simulated or measured: the same type, so that one can be laid over the other."""

from __future__ import annotations

from dataclasses import dataclass

from ds_ldt.plan.instructions import Compute, Order
from ds_ldt.plan.plan import peak_in_flight


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One compute of a run.

    Attributes:
        rank: Rank that ran it.
        compute: What it ran.
        start: When it began, in seconds.
        end: When it ended, in seconds.
    """

    rank: int
    compute: Compute
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The spans of all ranks in one step.

    Attributes:
        num_ranks: Number of ranks; each has a row, even if it ran nothing.
        spans: The spans; those of one rank in the order in which it ran them.
    """

    num_ranks: int
    spans: tuple[Span, ...]

    @property
    def start(self) -> float:
        """Seconds at which the first span begins; 0 without spans."""
        return min((span.start for span in self.spans), default=0.0)

    @property
    def makespan(self) -> float:
        """Seconds from the beginning of the first span to the end of the last; 0 without spans."""
        return max((span.end for span in self.spans), default=0.0) - self.start

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        """Return the spans of a rank."""
        return tuple(span for span in self.spans if span.rank == rank)

    def order_of(self, rank: int) -> Order:
        """Return the computes of a rank in the order in which it ran them."""
        return tuple(span.compute for span in self.of_rank(rank))

    def busy_seconds(self, rank: int) -> float:
        """Return the seconds that a rank computes."""
        return sum(span.seconds for span in self.of_rank(rank))

    def bubble(self, rank: int) -> float:
        """Return the part of the makespan in which a rank computes nothing, 0 to 1."""
        return 1.0 - self.busy_seconds(rank) / self.makespan if self.makespan else 0.0

    def peak_in_flight(self, rank: int) -> int:
        """Return the most micro-batches of one domain that a rank has in flight at once."""
        return peak_in_flight(self.order_of(rank))
