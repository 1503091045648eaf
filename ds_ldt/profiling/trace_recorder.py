"""What a rank really did in a step, as a Chrome trace that Perfetto and ``ds-ldt draw --trace`` read.

A training script sets ``"trace": {"path": "trace", "steps": [3, 4]}`` in the ``"ldt"`` section; each rank then writes
``<path>/rank_<rank>.json``. Times are wall-clock microseconds, so that files of both sites lie on one axis as far as
their clocks agree. Forward and backward passes carry the plan's short form as their name (``F0.3.1``: virtual stage 0,
micro-batch 3, domain 1); receives are the time spent waiting; every message is an arrow from its send to its receive.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator

from ds_ldt.plan import Channel, Compute, Handler, Handlers, Key, Kind

COMPUTE, WAIT, LINK, OTHER = "compute", "wait", "link", "other"

_CATEGORY = {
    Kind.FORWARD_PASS: COMPUTE,
    Kind.BACKWARD_PASS: COMPUTE,
    Kind.WEIGHT_PASS: COMPUTE,
    Kind.RECV_ACTIVATION: WAIT,
    Kind.RECV_GRAD: WAIT,
    Kind.SEND_ACTIVATION: LINK,
    Kind.SEND_GRAD: LINK,
}


class Recording:
    """Records the instructions that a rank executes.

    Args:
        rank: this rank; the row of its spans.
        label: what the row is called, e.g. ``edge replica 0``.
    """

    def __init__(self, rank: int, label: str) -> None:
        self._rank = rank
        self._step = 0
        self._events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": label}}
        ]

    def wrap(self, handlers: Handlers, *, step: int) -> Handlers:
        """Make handlers that do the same and leave a span each.

        Args:
            handlers: those of the step.
            step: the training step that they are for, counted from 1.

        On an accelerator every instruction then waits for the device, so that its span is its own work; a traced step
        is slower than others.
        """
        self._step = step
        return {kind: self._timed(kind, handler) for kind, handler in handlers.items()}

    def _timed(self, kind: Kind, handler: Handler) -> Handler:
        def handle(key: Key | None, channel: Channel | None) -> None:
            start = time.time_ns()
            handler(key, channel)
            get_accelerator().synchronize()
            self._add(kind, start, time.time_ns(), key, channel)

        return handle

    def _add(self, kind: Kind, start: int, end: int, key: Key | None, channel: Channel | None) -> None:
        place = {"pid": 0, "tid": self._rank}
        name = kind.value
        if key is not None and kind.op is not None:
            name = str(
                Compute(op=kind.op, virtual_stage=key.virtual_stage, micro_batch=key.micro_batch, domain=key.domain)
            )
        span = {
            "ph": "X",
            "name": name,
            "cat": _CATEGORY.get(kind, OTHER),
            "ts": start / 1e3,
            "dur": (end - start) / 1e3,
        }
        details = {"step": self._step, "instruction": kind.value, **(key._asdict() if key is not None else {})}
        self._events.append({**span, **place, "args": details})
        if channel is not None and key is not None:
            sends = kind.is_send
            arrow = {
                "ph": "s" if sends else "f",
                "bp": "e",
                "name": channel.flow.value,
                "cat": LINK,
                "id": f"{self._step}.{channel.flow.value}.{channel.boundary}.{channel.domain}.{key.micro_batch}",
                "ts": (start if sends else end) / 1e3,
            }
            self._events.append({**arrow, **place})

    def write(self, directory: str) -> Path:
        """Write the spans of all recorded steps; return the file, which is there as a whole or as it was before.

        Raises:
            OSError: the directory cannot be written.
        """
        path = Path(directory, f"rank_{self._rank}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.partial")
        try:
            aside.write_text(json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}) + "\n")
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
        return path
