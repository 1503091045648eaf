"""A run of a plan, simulated or measured: the same type, so that one can be laid over the other."""

from __future__ import annotations

from dataclasses import dataclass, field

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
        start: Seconds at which the first span begins; 0 without spans.
        makespan: Seconds from the beginning of the first span to the end of the last; 0 without spans.
    """

    num_ranks: int
    spans: tuple[Span, ...]
    start: float = field(init=False, compare=False, repr=False)
    makespan: float = field(init=False, compare=False, repr=False)
    _rows: tuple[tuple[Span, ...], ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Sort the spans by rank, once."""
        rows: list[list[Span]] = [[] for _ in range(self.num_ranks)]
        for span in self.spans:
            rows[span.rank].append(span)
        start = min((span.start for span in self.spans), default=0.0)
        object.__setattr__(self, "_rows", tuple(map(tuple, rows)))
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "makespan", max((span.end for span in self.spans), default=0.0) - start)

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        """Return the spans of a rank."""
        return self._rows[rank]

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
