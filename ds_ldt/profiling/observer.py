"""What is looked at while training steps run: what a micro-batch keeps, how long computes take, what to trace.

Each observer of a step wraps the handlers of the instructions; a step that nobody observes runs the handlers as they
are. Steps that only evaluate are never observed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from deepspeed.utils import logger
from torch import Tensor, nn

from ds_ldt.comm.grid import LDTPipelineGrid
from ds_ldt.comm.wire import Signature
from ds_ldt.config.schema import JobConfig
from ds_ldt.plan import Handlers, Key, PipelineShape, Plan
from ds_ldt.plan.cost_file import is_measured
from ds_ldt.plan.measured_costs import LinkTimes, Readings
from ds_ldt.plan.memory import peak_held
from ds_ldt.profiling.activation_memory import ActivationMeter
from ds_ldt.profiling.step_timer import Calibration
from ds_ldt.profiling.trace_recorder import Recording


class Observer:
    """Observes the training steps of one rank.

    Args:
        rank: this rank.
        job: says which steps are measured and traced.
        module: the layers of this rank.
        waited_ns: tells how long the rank has waited for messages so far, in nanoseconds.

    Attributes:
        held: virtual stage of this rank -> bytes that it keeps of a micro-batch in flight; empty before the first
            training step is over.
    """

    def __init__(self, rank: int, job: JobConfig, module: nn.Module, waited_ns: Callable[[], int]) -> None:
        self.held: dict[int, int] = {}
        self._rank = rank
        self._module = module
        self._trace = job.ldt.trace
        self._meter: ActivationMeter | None = ActivationMeter()
        self._calibration = Calibration(rank, job.ldt.schedule.measure_steps, waited_ns) if is_measured(job) else None
        self._recording: Recording | None = None

    @contextmanager
    def watching(
        self,
        handlers: Handlers,
        plan: Plan,
        *,
        signatures: Iterable[Sequence[Signature]],
        number: int,
        payloads: Callable[[Key], Iterable[Tensor]],
    ) -> Iterator[Handlers]:
        """Around the instructions of a step; gives the handlers to run it with. Traces are written when it is over.

        Args:
            handlers: those of the step.
            plan: of the step.
            signatures: for each micro-batch of the step, the signature at every boundary.
            number: of the training step, counted from 1; means nothing in others.
            payloads: key -> the inputs and outputs that are held of a micro-batch after its forward pass.

        Where a trace can no longer be written, recording ends with a warning and the training goes on.
        """
        if not plan.training:
            yield handlers
            return
        if self._meter is not None:
            handlers = self._meter.wrap(handlers, self._module, payloads)
        if self._calibration is not None:
            handlers = self._calibration.wrap(handlers, signatures)
        with self._recorded(plan, handlers, number) as recorded:
            yield recorded

    @contextmanager
    def _recorded(self, plan: Plan, handlers: Handlers, number: int) -> Iterator[Handlers]:
        """Record the training steps that ``ldt.trace`` names, and write them when the last of them is over."""
        wanted = self._trace
        if wanted is None or not wanted.steps[0] <= number <= wanted.steps[1]:
            yield handlers
            return
        if self._recording is None:
            self._recording = Recording(self._rank, plan.shape.describe_rank(self._rank))
        yield self._recording.wrap(handlers, step=number)
        if number == wanted.steps[1]:
            self._write(self._recording, wanted.path)

    def _write(self, recording: Recording, directory: str) -> None:
        """Write the trace; the place was tried at the start, but a disk may have become full since."""
        try:
            recording.write(directory)
        except OSError as error:
            self._trace = self._recording = None
            logger.warning(f"ldt.trace.path: rank {self._rank} wrote no trace, training goes on: {error}")

    def tell_what_is_held(self, plan: Plan) -> None:
        """After a training step: keep what was measured in the first one, and say it once.

        Args:
            plan: of the step.
        """
        if self._meter is None:
            return
        self.held, self._meter = self._meter.num_bytes, None
        each = ", ".join(f"{size / 1e6:.3g} MB on virtual stage {stage}" for stage, size in self.held.items())
        logger.info(
            f"ds_ldt: rank {self._rank} keeps {each} of a micro-batch in flight; with at most "
            f"{plan.peak_in_flight(self._rank)} of a domain in flight that is at most "
            f"{peak_held(plan, self._rank, self.held) / 1e6:.3g} MB at once"
        )

    @property
    def has_measured(self) -> bool:
        """Whether all steps to measure are over and what was measured waits for :meth:`exchange`."""
        return self._calibration is not None and self._calibration.is_over

    def exchange(
        self, shape: PipelineShape, grid: LDTPipelineGrid, device: torch.device | str
    ) -> tuple[Readings, LinkTimes]:
        """Measure the link and exchange all that was measured, once; later steps are not measured.

        Every rank calls it, after the step in which :attr:`has_measured` became true on all of them.

        Args:
            shape: the shape that was measured.
            grid: the groups.
            device: where the groups want their tensors.

        Returns:
            As :meth:`ds_ldt.profiling.step_timer.Calibration.share`.
        """
        assert self._calibration is not None, "nothing was measured"
        shared = self._calibration.share(shape, grid, device, held=self.held)
        self._calibration = None
        return shared
