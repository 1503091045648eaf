"""Times the first training steps of a rank, and lets all ranks know what all of them found.

A measured step runs as any other: its instructions are timed, nothing is sent besides. What takes messages comes once,
between the last measured step and the next: some messages between the leaders of the sites, and one sum over all
ranks. The messages of a step would tell of the link only where their receiver had been waiting for them, with the
receive posted long before, and that is what a good plan avoids.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import torch
from deepspeed.accelerator import get_accelerator

from ds_ldt.comm.collectives import sum_over_sites
from ds_ldt.comm.grid import LDTPipelineGrid
from ds_ldt.comm.link_probe import time_leaders
from ds_ldt.comm.wire import Signature
from ds_ldt.plan import Channel, Handler, Handlers, Key, Kind, Op, PipelineShape
from ds_ldt.plan.measured_costs import Duration, Kept, LinkTimes, Reading, Readings, Size, asked_of

_SERVES = {
    Kind.LOAD_MICRO_BATCH: Op.FORWARD,
    Kind.RECV_ACTIVATION: Op.FORWARD,
    Kind.SEND_ACTIVATION: Op.FORWARD,
    Kind.RECV_GRAD: Op.BACKWARD,
    Kind.SEND_GRAD: Op.BACKWARD,
}
"""What loads or passes on what a compute takes or gives -> the compute."""


class Calibration:
    """The measurement of one rank.

    Args:
        rank: this rank.
        num_steps: training steps to measure, at least 1. Where there are several the first one is left out: it
            allocates, compiles and warms up.
        waited_ns: tells how long the rank has waited for messages so far, in nanoseconds.
    """

    def __init__(self, rank: int, num_steps: int, waited_ns: Callable[[], int]) -> None:
        self._rank = rank
        self._waited_ns = waited_ns
        self._num_steps = num_steps
        self._num_begun = 0
        self._times: defaultdict[tuple[int, Op], Counter[tuple[int, Key]]] = defaultdict(Counter)
        self._sizes: dict[int, int] = {}

    @property
    def is_over(self) -> bool:
        """Whether the last step to measure has begun; asked between steps."""
        return self._num_begun >= self._num_steps

    def wrap(self, handlers: Handlers, signatures: Iterable[Sequence[Signature]]) -> Handlers:
        """Make handlers for the next training step that do the same and time its computes.

        On an accelerator those then wait for the device, so that the time is that of their own work; a measured step
        is slower than others. A compute takes as long as it keeps its rank busy, so what the rank does to take and
        pass on its messages is counted in, and waiting for them is not.

        Args:
            handlers: those of the step.
            signatures: for each micro-batch of the step, the signature at every boundary.
        """
        self._num_begun += 1
        if self._num_begun == 1 < self._num_steps:
            return dict(handlers)
        for boundaries in signatures:
            for boundary, signature in enumerate(boundaries):
                self._sizes[boundary] = max(sum(one.nbytes for one in signature), self._sizes.get(boundary, 0))
        return {kind: self._timed(kind, handler) for kind, handler in handlers.items()}

    def _timed(self, kind: Kind, handler: Handler) -> Handler:
        if kind.op is not None:
            return self._timed_compute(kind.op, handler)
        return self._timed_message(_SERVES[kind], handler) if kind in _SERVES else handler

    def _timed_compute(self, op: Op, handler: Handler) -> Handler:
        def handle(key: Key, channel: Channel | None) -> None:
            get_accelerator().synchronize()
            begin = time.perf_counter_ns()
            handler(key, channel)
            get_accelerator().synchronize()
            self._times[key.virtual_stage, op][self._num_begun, key] += time.perf_counter_ns() - begin

        return handle

    def _timed_message(self, op: Op, handler: Handler) -> Handler:
        def handle(key: Key, channel: Channel | None) -> None:
            begin, waited = time.perf_counter_ns(), self._waited_ns()
            handler(key, channel)
            busy = time.perf_counter_ns() - begin - (self._waited_ns() - waited)
            self._times[key.virtual_stage, op][self._num_begun, key] += busy

        return handle

    def share(
        self,
        shape: PipelineShape,
        grid: LDTPipelineGrid,
        device: torch.device | str,
        *,
        held: Mapping[int, int],
    ) -> tuple[Readings, LinkTimes]:
        """Measure the link, and exchange all that was measured. Every rank of both sites calls it.

        Args:
            shape: the shape that was measured.
            grid: the groups.
            device: where the groups want their tensors.
            held: virtual stage of this rank -> bytes that it keeps of a micro-batch in flight.

        Returns:
            The readings of all ranks, and the times that the leaders took; bit-equal everywhere.
        """
        asked, own, link = asked_of(shape), self._readings(held), time_leaders(grid, device)
        parts = [[own.get(name, 0) for name in asked], link.round_trips, *link.arrivals]
        values = torch.tensor([number for part in parts for number in part], dtype=torch.int64, device=device)
        summed = iter(sum_over_sites(values, grid).tolist())
        readings, round_trips, there, back = (tuple(islice(summed, len(part))) for part in parts)
        times = replace(link, round_trips=round_trips, arrivals=(there, back))
        return dict(zip(asked, readings, strict=True)), times

    def _readings(self, held: Mapping[int, int]) -> dict[Reading, int]:
        return {
            **{
                Duration(self._rank, *what): round(statistics.median(times.values()))
                for what, times in self._times.items()
            },
            **{Size(self._rank, boundary): num_bytes for boundary, num_bytes in self._sizes.items()},
            **{Kept(self._rank, virtual_stage): num_bytes for virtual_stage, num_bytes in held.items()},
        }
