"""How an engine runs steps: its connections, the plan of a step, and its way from the first announcement to the end.

The path of a micro-batch: :mod:`ds_ldt.runtime.step_inputs` draws it on the edge and announces its shapes;
:mod:`ds_ldt.runtime.executor` takes it from virtual stage to virtual stage, forward and back; here the gradients are
averaged and the step is closed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from deepspeed.runtime.engine import MEMORY_OPT_ALLREDUCE_SIZE
from deepspeed.utils import logger
from torch import Tensor

from ds_ldt.checkpointing.output_paths import end_monitoring_at_errors
from ds_ldt.comm.collectives import bounded, global_norm, scale_for_slice
from ds_ldt.comm.diagnosis import diagnosed
from ds_ldt.comm.groups import StreamGroups
from ds_ldt.comm.step_header import StepKind
from ds_ldt.comm.step_summary import StepSummary
from ds_ldt.comm.transport import Transport
from ds_ldt.comm.wire import WireGuard
from ds_ldt.errors import end_inside_a_step
from ds_ldt.plan import Channel, Key, Kind, Plan
from ds_ldt.plan.recent import REMEMBERED_PLANS, Recent
from ds_ldt.profiling.observer import Observer
from ds_ldt.profiling.replanning import Planner, receive_window
from ds_ldt.runtime.deepspeed_overrides import DeepSpeedOverrides
from ds_ldt.runtime.executor import StageExecutor
from ds_ldt.runtime.gradient_boundaries import agree_on_gradient_boundaries
from ds_ldt.runtime.rng import rng_untouched
from ds_ldt.runtime.schedule import LDTInferenceSchedule, LDTSchedule, LDTTrainSchedule
from ds_ldt.runtime.shape_inference import ShapeTracer
from ds_ldt.runtime.step_inputs import Intake, Step

ScheduleType = TypeVar("ScheduleType", bound=LDTSchedule)


class SteppingEngine(DeepSpeedOverrides):
    """An engine that is connected to its peers and can run steps.

    Args:
        training_data: data set of the edge; ignored, and never opened, in the cloud.
        shuffle_seed: None to read it in order; else each epoch has an order of its own, that of torch's
            ``DistributedSampler`` with this seed.
        num_workers: processes of an edge replica that read it ahead; 0 for none.
        kwargs: as for ``deepspeed.PipelineEngine``.

    Attributes:
        transport: sends and receives activations and gradients.
        executor: runs the instructions of this rank.
        intake: draws and announces micro-batches on the edge, hears of them in the cloud.
    """

    def __init__(
        self, *, training_data: Any = None, shuffle_seed: int | None = None, num_workers: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        end_monitoring_at_errors(self.monitor)
        self._schedules: Recent[str, LDTSchedule] = Recent(REMEMBERED_PLANS)
        self._connect()
        if training_data is not None and self.site == "edge":
            self._build_data_iter(training_data, shuffle_seed=shuffle_seed, num_workers=num_workers)

    def _connect(self) -> None:
        """Create the channels of both flows, after agreeing which boundaries carry gradients."""
        with bounded("ds_ldt.initialize", self.grid):
            boundaries = agree_on_gradient_boundaries(self.module, self.grid, self.device)
            self._planner = Planner(self.global_rank, self.job, self.module.layout, boundaries)
            plan = self._train_schedule().plan
            groups = StreamGroups.create(
                rank=self.global_rank,
                channels=plan.channels(),
                timeout_s=self.job.ldt.timeout_s,
                backend=dist.get_backend(),
            )
        guard = WireGuard(self.module.wire, self.site)
        self.transport = Transport(
            rank=self.global_rank,
            groups=groups,
            device=self.device,
            timeout_s=self.job.ldt.timeout_s,
            receive_window=receive_window(plan, self.global_rank),
            guard=guard,
        )
        tracer = ShapeTracer(
            self.module._layer_specs,
            self.module.layout,
            self.module.wire,
            dtype=self.get_data_types()[0],
            local_layers=self.module.local_layers,
        )
        self.intake = Intake(self.module, self.grid, groups, guard, tracer)
        self._summary = StepSummary(self.grid, groups.control)
        self._observer = Observer(self.global_rank, self.job, self.module, lambda: self.transport.waited_ns)
        self.executor = StageExecutor(
            rank=self.global_rank,
            module=self.module,
            messages=self.transport,
            device=self.device,
            gradient_boundaries=boundaries,
        )
        self.executor.accumulating, self.executor.loss_scale = self._accumulating, lambda: self.cur_scale

    # -- connections ------------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Close every connection and end every thread of this engine and its module, which cannot be used again.

        All ranks should call it: what is being sent is finished first, then the ranks wait for each other, a few
        seconds at most, since a connection that is closed early may lose what is on its way. After a failed step
        nobody is waited for. Calling it again is harmless.

        Processes that read ``training_data`` ahead end, and the engine lets go of every data loader and iterator: the
        workers of those that you made live as long as you keep them.

        Raises:
            LinkError: a peer is gone, or did not take what was sent to it; this rank's connections are closed all the
                same.
        """
        try:
            if "transport" in self.__dict__ and not self.grid.is_closed:
                self._part()
        finally:
            self.training_dataloader = self.data_iterator = None
            if self._training_data is not None:
                self._training_data.close()
        super().destroy()

    def __del__(self) -> None:
        """Finish what is being sent. Garbage is collected on each rank in its own time, so nobody is waited for."""
        try:
            if "transport" in self.__dict__ and not self.transport.is_closed:
                self._finish_sending()
            super().destroy()
        except Exception as error:  # as the parent: an engine may be collected that was never whole
            logger.debug("ds_ldt: clean-up of an engine skipped: %s", error)

    def _part(self) -> None:
        """Take leave of the other ranks and close the connections."""
        try:
            if not self.transport.is_closed:
                self._finish_sending()
                self.transport.farewell()
        finally:
            self._disconnect()

    def _finish_sending(self) -> None:
        self.intake.close()
        self.transport.close()

    def _disconnect(self) -> None:
        self.intake.abandon()
        self._summary.abandon()
        self.transport.abort()
        self.grid.close()
        # The threads and sockets of a group end when nobody holds it any more.
        del self.intake, self._summary
        self.data_parallel_group = self.seq_data_parallel_group = None

    # -- plans ------------------------------------------------------------------------------------------------------

    def _train_schedule(self) -> LDTTrainSchedule:
        return self._schedule_of(self._planner.plan(self.micro_batches, training=True), LDTTrainSchedule)

    def _inference_schedule(self, micro_batches: int) -> LDTInferenceSchedule:
        return self._schedule_of(self._planner.plan(micro_batches, training=False), LDTInferenceSchedule)

    def _schedule_of(self, plan: Plan, kind: type[ScheduleType]) -> ScheduleType:
        """Made once for each plan, not for every step."""
        schedule = self._schedules.get(plan.fingerprint, lambda: kind(plan, self.global_rank))
        assert isinstance(schedule, kind)
        return schedule

    def _plan_with_what_was_measured(self) -> None:
        """Replace hints by measured costs, on all ranks alike; the next step runs another plan."""
        with bounded("train_batch (exchange of what was measured)", self.grid):
            readings, times = self._observer.exchange(self.executor.step.plan.shape, self.grid, self.device)
        self._planner.learn(readings, times, self.micro_batches)
        self.transport.set_receive_window(receive_window(self._train_schedule().plan, self.global_rank))

    # -- one step ---------------------------------------------------------------------------------------------------

    def _exec_schedule(self, pipe_schedule: LDTSchedule, kind: StepKind | None = None) -> None:
        """Open the step (draw and announce), execute the rank's instructions, and close it.

        Args:
            pipe_schedule: the instructions of this rank.
            kind: the call that the step belongs to; by default what the plan is for.
        """
        plan = pipe_schedule.plan
        self.transport.refuse_if_closed()
        self.executor.clear()
        with diagnosed(self.grid):
            step = self.intake.open(
                plan,
                self.data_iterator,
                kind=kind or (StepKind.TRAIN if plan.training else StepKind.EVAL),
                with_loss=self._compute_loss,
            )
        self.executor.begin(step, number=self.global_steps)
        try:
            with diagnosed(self.grid):
                self._run_step(pipe_schedule, step)
        except BaseException as error:
            self.transport.abort()  # peers wait for messages that will not come: let them fail now
            if isinstance(error, StopIteration):
                raise end_inside_a_step(error) from error
            raise

    def _run_step(self, pipe_schedule: LDTSchedule, step: Step) -> None:
        """Post the receives of the step that is open, execute its instructions, and see what was sent received."""
        self.transport.begin_step(self.intake.receives(step), self.intake.opening(step))
        executor = self.executor
        executor.with_loss, executor.with_outputs = self._compute_loss, self.eval_return_logits
        observed = self._observer.watching(
            {
                **executor.handlers,
                Kind.REDUCE_GRADS: self._reduce_gradients,
                Kind.OPTIMIZER_STEP: self._step_optimizer,
            },
            step.plan,
            signatures=step.signatures.values(),
            number=self.global_steps + 1,
            payloads=executor.payloads,
        )
        with observed as handlers, rng_untouched():
            executor.run(pipe_schedule.planned, handlers)
        self.transport.end_step()

    @contextmanager
    def _accumulating(self) -> Iterator[None]:
        """Around a backward pass: half precision gradients are added to their fp32 accumulators right away."""
        if not self.using_sharded_optimizer:
            yield
            return
        self.optimizer.clear_lp_grads(set_to_none=True)
        yield
        self.optimizer.update_hp_grads()

    def _reduce_gradients(self, key: Key | None, channel: Channel | None) -> None:
        """Average the gradients over the replicas of this stage, then the norm and the loss over both sites."""
        self._average_named("train_batch")
        gradients = self._accumulated_gradients()
        slice_size = self.job.slice_size if self.site == "edge" else 1
        scale_for_slice(gradients, slice_size=slice_size, loss_scale=self.cur_scale)
        with bounded("train_batch (gradient reduction)", self.grid):
            if self.grid.num_physical_replicas > 1:
                self.buffered_allreduce_fallback(grads=gradients, elements_per_buffer=MEMORY_OPT_ALLREDUCE_SIZE)
            norm, summed = global_norm(gradients, self.grid, self.executor.results.total(self.device), self._summary)
        self._mean_loss = summed[0] / self._num_results()
        self._norm = norm
        self._global_grad_norm = norm.item()
        if self.using_sharded_optimizer:
            self.optimizer.global_norm = norm

    def _step_optimizer(self, key: Key | None, channel: Channel | None) -> None:
        self._exec_optimizer_step()

    def _accumulated_gradients(self) -> list[Tensor]:
        if self.using_sharded_optimizer:
            gradients: list[Tensor] = self.optimizer.get_grads_for_reduction()[0]
        else:
            gradients = self._get_gradients_for_reduction()[0]
        return gradients

    def _average_named(self, what: str) -> None:
        """Average what the loss function returned beside the loss, over the edge replicas alone."""
        if self.site == "edge":
            try:
                self.agg_additional_losses = self.executor.results.named_means(
                    self.grid, self.device, count=self._num_results(), what=what
                )
            except BaseException:
                self.transport.abort()  # the cloud knows nothing of names: let it fail now
                raise

    def _mean_of_results(self) -> Tensor:
        """Mean of the step's results over every micro-batch and domain, on every rank of both sites."""
        with bounded("eval_batch", self.grid):
            return self._summary.sum(self.executor.results.total(self.device))[0] / self._num_results()

    def _num_results(self) -> int:
        return self.executor.step.plan.shape.num_micro_batches * self.job.num_domains
