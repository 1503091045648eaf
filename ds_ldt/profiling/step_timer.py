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
from itertools import islice

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_ldt.comm.collectives import sum_over_sites
from ds_ldt.comm.grid import LDTPipelineGrid
from ds_ldt.comm.send_queue import kept
from ds_ldt.comm.wire import Signature
from ds_ldt.plan import Channel, Handler, Handlers, Key, Kind, Op, PipelineShape
from ds_ldt.plan.measured_costs import Duration, Kept, LinkTimes, Reading, Readings, Size, asked_of

_PINGS, _PING_BYTES = 10, 8
_TRAIN, _WAGON_BYTES = 10, 512 * 1024
"""Messages of a train, and bytes of one."""

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
        asked, own = asked_of(shape), self._readings(held)
        there, back = [0] * _TRAIN, [0] * _TRAIN
        pings = [0] * _PINGS
        if grid.is_site_leader:
            pings = _round_trips(grid, device)
            there = _train(grid, device, source="edge")
            back = _train(grid, device, source="cloud")
        numbers = [*(own.get(name, 0) for name in asked), *pings, *there, *back]
        values = torch.tensor(numbers, dtype=torch.int64, device=device)
        summed = iter(sum_over_sites(values, grid).tolist())
        readings = {name: next(summed) for name in asked}
        return readings, LinkTimes(
            round_trips=tuple(islice(summed, _PINGS)),
            arrivals=(tuple(islice(summed, _TRAIN)), tuple(islice(summed, _TRAIN))),
            num_bytes=_WAGON_BYTES,
        )

    def _readings(self, held: Mapping[int, int]) -> dict[Reading, int]:
        return {
            **{
                Duration(self._rank, *what): round(statistics.median(times.values()))
                for what, times in self._times.items()
            },
            **{Size(self._rank, boundary): num_bytes for boundary, num_bytes in self._sizes.items()},
            **{Kept(self._rank, virtual_stage): num_bytes for virtual_stage, num_bytes in held.items()},
        }


def _round_trips(grid: LDTPipelineGrid, device: torch.device | str) -> list[int]:
    """Nanoseconds of round trips of a small message between the leaders, on the edge; zeros in the cloud.

    Both have their next receive posted by the time a message comes for it, which is what gloo asks for, and both send
    and receive in turn, as backends ask that serialise a group. The first round trip opens the way and is not counted.
    """
    peer = grid.other_site_leader
    there, back = (torch.zeros(_PING_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    times = []
    for _ in range(_PINGS + 1):
        begin = time.perf_counter_ns()
        if grid.site == "edge":
            sending = kept(dist.isend(there, peer, group=grid.leader_group))
            dist.recv(back, peer, group=grid.leader_group)
            sending.wait()
        else:
            dist.recv(there, peer, group=grid.leader_group)
            dist.send(back, peer, group=grid.leader_group)
        get_accelerator().synchronize()
        times.append(time.perf_counter_ns() - begin)
    return times[1:] if grid.site == "edge" else [0] * _PINGS


def _train(grid: LDTPipelineGrid, device: torch.device | str, *, source: str) -> list[int]:
    """Send large messages one behind the other; nanoseconds at which each has arrived, at the receiver, else zeros.

    Twice, and the second time counts: TCP sends slowly at first on a long way.
    """
    sends, peer = grid.site == source, grid.other_site_leader
    transfer = dist.isend if sends else dist.irecv
    times: list[int] = []
    begin = time.perf_counter_ns()
    for _ in range(2):
        buffers = [torch.zeros(_WAGON_BYTES, dtype=torch.uint8, device=device) for _ in range(_TRAIN)]
        works = [kept(transfer(buffer, peer, group=grid.leader_group)) for buffer in buffers]
        times.clear()
        for work in works:
            work.wait()
            get_accelerator().synchronize()
            times.append(time.perf_counter_ns() - begin)
    return [0] * _TRAIN if sends else times
