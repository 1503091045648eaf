"""Timelines as Chrome traces, which chrome://tracing and Perfetto show.

The part that is read back is small. A trace is a JSON list of events, or an object with that list as "traceEvents".
An event counts if its "ph" is "X" (complete) and its "name" is a compute like `F0.3.1`:

    {"name": "F0.3.1", "ph": "X", "tid": 2, "ts": 1250.0, "dur": 800.0, "args": {"step": 7}}

"tid" is the rank, "ts" and "dur" are microseconds, "args.step" is the training step and may be left out. All other
events (waits, messages, names) are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from ds_ldt.config.rules import is_whole
from ds_ldt.errors import Absent, ConfigError
from ds_ldt.plan.instructions import Compute
from ds_ldt.plan.timeline import Span, Timeline

_MICRO = 1e-6


def trace_document(timeline: Timeline, *, step: int | None = None) -> dict[str, Any]:
    """Return a timeline as a Chrome trace.

    Args:
        timeline: The timeline.
        step: The training step it is of.
    """
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(timeline.num_ranks)
    ]
    for span in timeline.spans:
        event = {
            "name": str(span.compute),
            "ph": "X",
            "pid": 0,
            "tid": span.rank,
            "ts": span.start / _MICRO,
            "dur": span.seconds / _MICRO,
        }
        events.append(event if step is None else event | {"args": {"step": step}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def read_trace(path: str | PathLike[str], *, step: int | None = None) -> Timeline:
    """Return the timeline of one step of a Chrome trace.

    Args:
        path: The trace, or a directory of traces, of one rank each, as a run with `ldt.trace` leaves it.
        step: The training step; None takes the last one in the trace.

    Raises:
        ConfigError: The file cannot be read, or holds no compute of the step, or one of them twice on a rank.
    """
    where = f"trace {path}"
    spans = [(number, span) for number, span in _spans(_events(path, where), where)]
    steps = sorted({number for number, _ in spans if number is not None})
    wanted = step if step is not None or not steps else steps[-1]
    chosen = [span for number, span in spans if number == wanted]
    if not chosen:
        held = f"steps {steps[0]} to {steps[-1]}" if steps else "no computes" if not spans else "computes of no step"
        raise ConfigError.of(
            where,
            found=Absent(held if step is not None or not spans else "no computes"),
            expected='complete events ("ph": "X") named like F0.3.1'
            + (f" of step {step}" if step is not None else ""),
            fix="name another step or another file",
        )
    seen: set[tuple[int, Compute]] = set()
    for span in chosen:
        if (span.rank, span.compute) in seen:
            raise ConfigError.of(
                where,
                found=Absent(f"{span.compute} twice on rank {span.rank}"),
                expected="each compute once in a step",
                fix='give the events of each step their "args": {"step": 3}',
            )
        seen.add((span.rank, span.compute))
    chosen.sort(key=lambda span: (span.rank, span.start))
    return Timeline(num_ranks=1 + max(span.rank for span in chosen), spans=tuple(chosen))


def _events(path: str | PathLike[str], where: str) -> list[Any]:
    if Path(path).is_dir():
        return [event for one in sorted(Path(path).glob("*.json")) for event in _events(one, f"trace {one}")]
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError.of(
            where, found=Absent(f"no readable trace ({error})"), expected="JSON", fix="correct the path or the file"
        ) from None
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise ConfigError.of(
            where,
            found=Absent("no list of events"),
            expected='a list, or an object with a list "traceEvents"',
            fix="write a Chrome trace",
        )
    return events


def _spans(events: list[Any], where: str) -> Iterator[tuple[int | None, Span]]:
    for event in events:
        if not isinstance(event, Mapping) or event.get("ph") != "X":
            continue
        try:
            compute = Compute.parse(str(event.get("name")))
        except ValueError:
            continue
        rank, start, duration = event.get("tid"), event.get("ts"), event.get("dur")
        if (
            not is_whole(rank, 0)
            or not isinstance(start, int | float)
            or not isinstance(duration, int | float)
            or duration < 0
        ):
            raise ConfigError.of(
                f"{where}: {compute}",
                found=dict(event),
                expected='"tid" a rank, "ts" and "dur" microseconds',
                fix="correct the event",
            )
        arguments = event.get("args")
        step = arguments.get("step") if isinstance(arguments, Mapping) else None
        number = step if isinstance(step, int) else None
        assert isinstance(rank, int)
        yield number, Span(rank=rank, compute=compute, start=start * _MICRO, end=(start + duration) * _MICRO)
