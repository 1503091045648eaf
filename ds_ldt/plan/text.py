"""Plans and timelines as text, for terminals, error messages and golden files."""

from __future__ import annotations

from collections.abc import Iterator

from ds_ldt.errors import ScheduleError
from ds_ldt.plan.bound import Bound, Cause
from ds_ldt.plan.instructions import Compute, Orders
from ds_ldt.plan.plan import Plan
from ds_ldt.plan.timeline import Timeline

_SEPARATOR = "|"
_MARKED_CONTEXT = 6
_MAX_TIME_COLUMNS = 10_000
_CAUSES = {
    Cause.EDGE_COMPUTE: "compute of an edge replica",
    Cause.CLOUD_COMPUTE: "compute of the busiest cloud stage",
    Cause.RATE: "rate of the link of an edge replica",
    Cause.LATENCY: "latency on the journey of one micro-batch",
}


def render_orders(orders: Orders, *, mark: tuple[int, int] | None = None) -> str:
    """Return a table with a row for each rank and a column for each place in the orders.

    Args:
        orders: The orders; those of a plan are `plan.orders()`.
        mark: (rank, place) to set in brackets. The table then shows only the columns around that place.
    """
    longest = max((len(order) for order in orders.values()), default=0)
    first, last = 0, longest
    if mark is not None:
        first, last = max(0, mark[1] - _MARKED_CONTEXT), min(longest, mark[1] + _MARKED_CONTEXT + 1)
    rows = {"rank": [str(place) for place in range(first, last)]}
    for rank in sorted(orders):
        cells = [str(compute) for compute in orders[rank][first:last]]
        if mark is not None and mark[0] == rank:
            place = mark[1] - first
            cells += ["end"] * (place - len(cells) + 1)
            cells[place] = f"[{cells[place]}]"
        rows[str(rank)] = cells
    return _table(rows)


def parse_orders(text: str) -> Orders:
    """Read the table that `render_orders` writes, without a mark.

    Args:
        text: The table; lines without a separator are ignored.

    Raises:
        ValueError: A row or a cell is malformed.
    """
    orders: Orders = {}
    for line in text.splitlines():
        head, separator, cells = line.partition(_SEPARATOR)
        if separator and head.strip() != "rank":
            orders[int(head)] = tuple(Compute.parse(cell) for cell in cells.split())
    return orders


def render_timeline(timeline: Timeline, *, seconds_per_column: float | None = None) -> str:
    """Return a table with a row for each rank and a column for each slice of time.

    A span begins with its compute and goes on with `=`; `.` is idle.

    Args:
        timeline: The run.
        seconds_per_column: Width of a slice; None takes the shortest span that takes any time.

    Raises:
        ValueError: The slices are so thin that the table would have more than 10,000 columns.
    """
    if seconds_per_column is None:
        seconds_per_column = min((span.seconds for span in timeline.spans if span.seconds > 0), default=1.0)
    num_columns = round(timeline.makespan / seconds_per_column)
    if num_columns > _MAX_TIME_COLUMNS:
        raise ValueError(
            f"seconds_per_column is {seconds_per_column} for a run of {timeline.makespan} s, which is "
            f"{num_columns} columns; expected at most {_MAX_TIME_COLUMNS}, take wider slices"
        )
    width = max((len(str(span.compute)) for span in timeline.spans), default=1)
    rows = {"rank": [str(column) for column in range(num_columns)]}
    for rank in range(timeline.num_ranks):
        cells = ["." for _ in range(num_columns)]
        for span in timeline.of_rank(rank):
            begin = round((span.start - timeline.start) / seconds_per_column)
            end = round((span.end - timeline.start) / seconds_per_column)
            if begin < end:
                cells[begin:end] = [str(span.compute), *["=" * width] * (end - begin - 1)]
        rows[str(rank)] = cells
    return _table(rows)


def render_bound(bound: Bound) -> Iterator[str]:
    """Yield lines that say what bounds a step, each cause with its figure.

    Args:
        bound: The bound.
    """
    yield f"bounded by   {_CAUSES[bound.cause]}"
    for cause, seconds in bound.figures().items():
        mark = "*" if cause is bound.cause else " "
        yield f"  {mark} {_CAUSES[cause]:<41} {render_seconds(seconds):>10}"


def render_seconds(seconds: float) -> str:
    """Return for example `16.5 s` or `80 ms`.

    Args:
        seconds: The seconds.
    """
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"


def schedule_error(plan: Plan, fault: str, *, rank: int | None = None, position: int | None = None) -> ScheduleError:
    """Return the error for a fault of a plan: what is wrong, then the orders of a slice with the place marked.

    Args:
        plan: The plan at fault.
        fault: What is wrong, in one sentence or several lines.
        rank: Rank of `plan.rows` at whose instructions the fault is; None if it has no place.
        position: Index of the instruction of that rank at which the fault is.
    """
    kind = "training" if plan.training else "evaluation"
    shape = plan.shape.one_slice
    head = f"{kind} plan of policy {plan.policy!r} cannot be run: {fault}"
    about = (
        f"stages={shape.stages} M={shape.num_micro_batches} D={plan.shape.num_domains} E={plan.shape.num_replicas} "
        f"(cells are OP VIRTUAL_STAGE.MICRO_BATCH.DOMAIN)"
    )
    if plan.shape.num_replicas > 1:
        about += "\nRanks and domains are those of a job with one edge replica; all replicas do the same."
    mark = None
    if rank is not None and position is not None:
        row = plan.rows[rank]
        place = sum(instruction.kind.is_compute for instruction in row[:position])
        mark = (rank, place)
        shown = row[position] if position < len(row) else "the end"
        head += f"\nAt {shape.describe_rank(rank)}, instruction {position}: {shown}"
    return ScheduleError(f"{head}\n{about}\n{render_orders(plan.slice_orders(), mark=mark)}")


def _table(rows: dict[str, list[str]]) -> str:
    """Align the cells in columns; every column is as wide as the widest cell."""
    width = max((len(cell) for cells in rows.values() for cell in cells), default=0)
    head_width = max(map(len, rows))
    return "\n".join(
        f"{head:>{head_width}} {_SEPARATOR} " + " ".join(f"{cell:<{width}}" for cell in cells).rstrip()
        for head, cells in rows.items()
    )
