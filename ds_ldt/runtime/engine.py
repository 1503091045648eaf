"""``LDTPipelineEngine``: executes the plan of one rank, one small handler per instruction.

The path of a micro-batch: :mod:`ds_ldt.runtime.step_inputs` draws it on the edge and announces its shapes;
``LoadMicroBatch``, ``ForwardPass`` and ``SendActivation`` take it from virtual stage to virtual stage; on the tail ``ForwardPass`` ends in
the loss; ``BackwardPass`` and ``SendGrad`` retrace the way; ``ReduceGrads`` and ``OptimizerStep`` close the step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import MEMORY_OPT_ALLREDUCE_SIZE
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.pipe import schedule as ds
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine
from deepspeed.runtime.utils import DummyOptim
from deepspeed.utils import logger
from torch import Tensor

from ds_ldt.checkpointing import save_load as checkpointing
from ds_ldt.checkpointing.output_paths import check_directory, end_monitoring_at_errors
from ds_ldt.comm.agreement import agree_on
from ds_ldt.comm.collectives import bounded, global_norm, scale_for_slice
from ds_ldt.comm.diagnosis import diagnosed
from ds_ldt.comm.groups import StreamGroups
from ds_ldt.comm.step_header import StepKind
from ds_ldt.comm.step_summary import StepSummary
from ds_ldt.comm.transport import Transport
from ds_ldt.comm.wire import WireGuard, signature_of
from ds_ldt.data.containers import tensors_in, to_device
from ds_ldt.data.sampling import TrainingData, build_training_data
from ds_ldt.errors import ConfigError, LinkError, end_inside_a_step
from ds_ldt.plan import Channel
from ds_ldt.profiling.observer import Observer
from ds_ldt.profiling.replanning import Planner, agree_on_gradient_boundaries, receive_window
from ds_ldt.runtime.dropout import Place, rng_untouched
from ds_ldt.runtime.evaluation import evaluating
from ds_ldt.runtime.generation import Decoding, Generator, check_model, last_position
from ds_ldt.runtime.losses import Results, split_loss, weighted
from ds_ldt.runtime.module import LDTPipelineModule
from ds_ldt.runtime.optimizer import LDTShardedOptimizer, check_elementwise
from ds_ldt.runtime.optimizer_coverage import agree_on_coverage
from ds_ldt.runtime.schedule import Handlers, Key, LDTInferenceSchedule, LDTSchedule, LDTTrainSchedule, WeightPass
from ds_ldt.runtime.shape_inference import ShapeTracer
from ds_ldt.runtime.step_inputs import Intake, Step
from ds_ldt.runtime.weight_gradients import WeightLedger


class LDTPipelineEngine(PipelineEngine):
    """A ``PipelineEngine`` for a pipeline that starts and ends on the edge and whose sites differ in width.

    Created by :func:`ds_ldt.initialize`. ``train_batch``, ``eval_batch``, ``save_checkpoint`` and ``load_checkpoint``
    must be called by every rank of both sites, in the same order.

    Args:
        training_data: data set of the edge; ignored, and never opened, in the cloud.
        shuffle_seed: None to read it in order; else each epoch has an order of its own, that of torch's
            ``DistributedSampler`` with this seed.
        num_workers: processes of an edge replica that read it ahead; 0 for none.
        kwargs: as for ``deepspeed.PipelineEngine``; ``model`` is an :class:`~ds_ldt.runtime.module.LDTPipelineModule`.
    """

    module: LDTPipelineModule
    data_iterator: Any
    _is_checking_hosts_fp16 = False

    def __init__(
        self, *, training_data: Any = None, shuffle_seed: int | None = None, num_workers: int = 0, **kwargs: Any
    ) -> None:
        self._under_construction = True
        self._training_data: TrainingData | None = None
        super().__init__(training_data=None, **kwargs)
        self._under_construction = False
        end_monitoring_at_errors(self.monitor)
        self.using_sharded_optimizer = isinstance(self.optimizer, LDTShardedOptimizer)
        self.job = self.module.job
        self.site = self.grid.site
        self._inputs: dict[Key, tuple[Tensor, ...]] = {}
        self._outputs: dict[Key, tuple[Tensor, ...]] = {}
        self._output_grads: dict[Key, tuple[Tensor, ...]] = {}
        self._losses: dict[Key, Tensor] = {}
        self._owed = WeightLedger()
        self._told_shares: set[int] = set()
        self._results = Results()
        self._keep_of_outputs: Callable[[Any], Any] = _everything
        self._step: Step | None = None
        self._observer = Observer(self.global_rank, self.job, self.module)
        self._connect()
        if training_data is not None and self.site == "edge":
            self._build_data_iter(training_data, shuffle_seed=shuffle_seed, num_workers=num_workers)

    def _connect(self) -> None:
        """Create the channels of both flows, after agreeing which boundaries carry gradients."""
        with bounded("ds_ldt.initialize", self.grid):
            self._gradient_boundaries = agree_on_gradient_boundaries(self.module, self.grid, self.device)
            self._planner = Planner(self.global_rank, self.job, self.module.layout, self._gradient_boundaries)
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

    def describe(self) -> str:
        """One line about the job: layout, sizes, schedule."""
        job, layout = self.job, self.module.layout
        measuring = f" for {job.ldt.schedule.measure_steps} steps of measuring" if self._planner.is_measuring else ""
        return (
            f"pipeline_num_layers {layout.configured} over {layout.num_stages} stages, "
            f"D = {job.num_domains} domains on E = {job.num_replicas} edge replicas, "
            f"M = {self.micro_batches} micro-batches of {self.micro_batch_size}, "
            f"schedule {self._train_schedule().plan.policy}{measuring}, loss per {self.module.loss_reduction}"
        )

    # -- what DeepSpeed asks of a pipeline engine -------------------------------------------------------------------

    def is_first_stage(self) -> bool:
        """True on the edge; and everywhere while the parent's constructor would greet neighbouring stages."""
        return self._under_construction or self.stage_id == 0

    def is_last_stage(self) -> bool:
        """True on the edge, which holds the loss; and everywhere during construction."""
        return self._under_construction or self.stage_id == 0

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

    def _loss_stage_global_rank(self) -> int:
        return 0

    def _broadcast_model(self) -> None:
        """Give every replica of a stage the weights of the first; the parent's version fails on scalar parameters."""
        if self.mpu.num_physical_replicas > 1:
            for parameter in self.module.parameters():
                dist.broadcast(parameter.data, src=self.mpu.dp_group[0], group=self.mpu.dp_proc_group)

    @property
    def cur_scale(self) -> float:
        """The factor that losses are multiplied with before their backward passes; 1 except in fp16."""
        return self.optimizer.cur_scale if self.using_sharded_optimizer else 1.0

    @property
    def communication_data_type(self) -> torch.dtype:
        """Gradients are averaged over the replicas in fp32, whatever the model computes in."""
        return torch.float32

    def _is_sharding(self) -> bool:
        """Whether master weights and optimizer states are kept in fp32 and sharded over the replicas of a stage."""
        return self.get_data_types()[0] != torch.float32 or self.zero_optimization()

    def _configure_bf16_optimizer(self, optimizer: Any) -> LDTShardedOptimizer:
        """Make the optimizer of every half precision and of ZeRO stage 1."""
        dtype = self.get_data_types()[0]
        return LDTShardedOptimizer(
            optimizer if optimizer is not None else DummyOptim(list(self.module.parameters())),
            self.param_names,
            dtype=dtype,
            loss_scaler=CreateLossScaler(
                dtype,
                static_loss_scale=self.loss_scale(),
                dynamic_scaling=self.dynamic_loss_scale(),
                dynamic_loss_args=self.dynamic_loss_scale_args(),
            ),
            immediate_grad_update=self._config.bfloat16_config.immediate_grad_update,
            clip_grad=self.gradient_clipping(),
            allgather_bucket_size=self.zero_allgather_bucket_size(),
            dp_process_group=self.seq_data_parallel_group,
            timers=self.timers,
        )

    def _configure_zero_optimizer(self, optimizer: Any) -> LDTShardedOptimizer:
        return self._configure_bf16_optimizer(optimizer)

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Model dtype and gradient accumulation dtype, which is always fp32."""
        return super().get_data_types()[0], torch.float32

    def _check_for_duplicates(self, optimizer: Any) -> None:
        # Called once the optimizer is made, wherever it is from, and before its parameters are flattened.
        agree_on_coverage(self.module, optimizer.param_groups, self.mpu)
        super()._check_for_duplicates(optimizer)

    def _do_optimizer_sanity_check(self, basic_optimizer: Any) -> Any:
        # The parent has an optimizer for each combination of precision and ZeRO stage; here one class does for all.
        if not self._is_sharding():
            return super()._do_optimizer_sanity_check(basic_optimizer)
        check_elementwise(basic_optimizer, allow_untested=bool(self.zero_allow_untested_optimizer()))
        return "bf16"

    def _scheduler_from_config(self, optimizer: Any) -> Any:
        # torch's own schedulers insist on a torch optimizer; the wrapper shares its parameter groups.
        return super()._scheduler_from_config(self.basic_optimizer)

    def fp16_enabled(self) -> bool:
        """Whether the model computes in fp16."""
        return bool(super().fp16_enabled()) and not self._is_checking_hosts_fp16

    def _do_sanity_check(self) -> None:
        # The parent refuses fp16 on CPUs without fast kernels for it; torch computes fp16 on every CPU.
        self._is_checking_hosts_fp16 = get_accelerator().device_name() == "cpu"
        super()._do_sanity_check()
        self._is_checking_hosts_fp16 = False
        self._assert_valid_mixed_precision_config()

    def _assert_valid_mixed_precision_config(self) -> None:
        if not self._is_checking_hosts_fp16:
            super()._assert_valid_mixed_precision_config()

    def _build_data_iter(self, dataset: Any, **options: Any) -> None:
        data = build_training_data(
            dataset,
            domains=self.grid.domains,
            num_domains=self.job.num_domains,
            micro_batch_size=self.micro_batch_size,
            collate_fn=self.collate_fn,
            drop_last=self.dataloader_drop_last(),
            **options,
        )
        self._training_data = data
        self.set_dataloader(data)

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Replace the module's ``batch_fn``, which turns what the data iterator yields into ``(inputs, labels)``."""
        self.module.batch_fn = fn

    # -- one step ---------------------------------------------------------------------------------------------------

    def _train_schedule(self) -> LDTTrainSchedule:
        return self._planner.train_schedule(self.micro_batches)

    def _inference_schedule(self, micro_batches: int) -> LDTInferenceSchedule:
        return self._planner.inference_schedule(micro_batches)

    def _plan_with_what_was_measured(self) -> None:
        """Replace hints by measured costs, on all ranks alike; the next step runs another plan."""
        with bounded("train_batch (exchange of what was measured)", self.grid):
            readings, times = self._observer.exchange(self._current.plan.shape, self.grid, self.device)
        self._planner.learn(readings, times, self.micro_batches)
        self.transport.set_receive_window(receive_window(self._train_schedule().plan, self.global_rank))

    def train_batch(self, data_iter: Any = None) -> Tensor:
        """Train on one global batch: M micro-batches of each of the D domains.

        Args:
            data_iter: edge only (ignored in the cloud): iterator from which this replica draws M*K micro-batches per
                step, m-major and domain-minor. It stays the source of later steps. Default: ``training_data``.

        Returns:
            The mean loss over all micro-batches and domains, a float32 scalar, bit-equal on every rank.

        Raises:
            StopIteration: on every rank, when the data of any edge replica ends inside the step.
            LinkError: a peer is gone, silent for ``ldt.timeout_s`` seconds, or runs something else.
        """
        if self.optimizer is None or not getattr(self.optimizer, "using_real_optimizer", True):
            raise ConfigError.of(
                "optimizer",
                found=None,
                expected="an optimizer",
                fix='add an "optimizer" section to the DeepSpeed JSON',
            )
        try:
            loss: Tensor = super().train_batch(data_iter)
        except StopIteration:
            self.timers(TRAIN_BATCH_TIMER).reset()  # the parent has started it; the caller may go on with new data
            raise
        if self.get_additional_losses():
            self._write_to_monitor("", {})
        self._observer.tell_what_is_held(self._current.plan)
        if self._observer.has_measured:
            self._plan_with_what_was_measured()
        return loss

    def eval_batch(
        self,
        data_iter: Any,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Run forward passes only; weights, buffers, train/eval modes, RNG and training data stay as they were.

        The micro-batches may be of another size and number than those of training.

        Args:
            data_iter: edge only: iterator from which this replica draws ``num_micro_batches`` * K micro-batches.
            return_logits: also return the outputs of the last layer (edge only; None in the cloud).
            compute_loss: apply the loss function; without it the outputs of the last layer are returned, as a list.
            reduce_output: ``"avg"`` for the mean over all micro-batches and domains, None for the list of this
                replica's values. Where ``loss_fn`` returns several losses of a micro-batch (a tensor of them, or a
                list), the list holds them as they are, and their mean is the loss of the micro-batch.
                With ``loss_reduction`` "token" each value carries its weight, so that in both cases the plain mean of
                all values is the mean over targets.
            bcast_loss: kept for DeepSpeed's signature; a mean is always the same on every rank.
            num_micro_batches: micro-batches per domain; default M.

        Returns:
            The mean loss (on every rank), or with ``reduce_output=None`` the list of values in the order they were
            drawn (edge only; None in the cloud). With ``return_logits`` a tuple of that and the list of outputs.

        Raises:
            ConfigError: an argument is wrong (on every rank), or the loss is none (on the edge).
            StopIteration: on every rank, when the data ends early.
            LinkError: as for :meth:`train_batch`.
        """
        if reduce_output not in ("avg", None):
            raise ConfigError.of(
                "reduce_output", found=reduce_output, expected='"avg" or None', fix="choose one of the two"
            )
        if num_micro_batches is not None and num_micro_batches < 1:
            raise ConfigError.of(
                "num_micro_batches", found=num_micro_batches, expected="at least 1", fix="leave it out for M"
            )
        schedule = self._inference_schedule(num_micro_batches or self.micro_batches)
        is_loss = compute_loss or self.module.loss_fn is None
        with self._evaluating(data_iter, compute_loss=compute_loss):
            self.eval_return_logits = return_logits
            self._exec_schedule(schedule)
            if is_loss:
                self._average_named("eval_batch")
            output = (
                self._mean_of_results() if reduce_output == "avg" and is_loss else self._in_order(self._results.losses)
            )
            logits = self._in_order(self._results.outputs)
        if is_loss and isinstance(output, Tensor):
            self._write_to_monitor("eval_", {"loss": output})
        return (output, logits) if return_logits else output

    def generate(  # noqa: PLR0913 - the arguments of transformers' generate
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int = 20,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        do_sample: bool = False,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
    ) -> Tensor | None:
        """Continue prompts, one token a step, as transformers' ``generate`` does; training is left as it was.

        Every rank calls it; the arguments count on the edge alone, and each edge replica has prompts of its own. They
        stop together. There is no cache: each token is a forward pass over the whole sequence and one trip around the
        U, so N tokens of a prompt of S cost N trips and about N * (S + N / 2) positions. It is for looking at what a
        model has learnt, not for serving. Prompts and answers stay on the edge; the cloud sees hidden states, and the
        number and length of the sequences, padding and the number of tokens in the answer.

        Args:
            input_ids: edge only: prompts (B, S), padded on the left. B rows are spread over the K domains of the
                replica.
            attention_mask: edge only: (B, S), 0 where a prompt is padded. Default: where ``pad_token_id`` stands,
                unless that ends a sequence too.
            max_new_tokens: most tokens to append.
            eos_token_id: one or several; a row ends with the first of them that comes. Default: none.
            pad_token_id: fills up rows that ended early. Default: the first ``eos_token_id``.
            do_sample: draw tokens at random, as the next three say, instead of taking the likeliest.
            temperature: divides the logits. Default: 1.
            top_k: draw from this many likeliest tokens only. Default: from all (transformers: from 50).
            top_p: draw from the smallest set of likeliest tokens that has this probability. Default: from all.
            repetition_penalty: above 1 makes tokens that a row already holds less likely. Default: 1.
            seed: of the draws; gives what transformers gives after ``torch.manual_seed``. Default: another each time.

        Returns:
            Prompts and answers (B, S + new tokens), int64, on the edge; None in the cloud.

        Raises:
            ConfigError: on every rank, for a model with images. On the edge: an argument cannot be used, or the model
                has no logits; the cloud then raises a LinkError, and the job may go on.
            LinkError: as for :meth:`train_batch`.
        """
        check_model(self.module)
        generator = None
        if self.site == "edge":
            decoding = Decoding(
                max_new_tokens=max_new_tokens,
                eos_token_id=eos_token_id,
                pad_token_id=pad_token_id,
                do_sample=do_sample,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                repetition_penalty=repetition_penalty,
                seed=seed,
            )
            generator = Generator(self.module, self.grid, self.device, input_ids, attention_mask, decoding)
        schedule = self._inference_schedule(1)
        batches = None if generator is None else generator.batches()
        with self._evaluating(batches, compute_loss=False), suppress(StopIteration):
            self._keep_of_outputs = last_position
            while True:
                self._exec_schedule(schedule, StepKind.GENERATE)
                if generator is not None:
                    generator.logits = self._in_order(self._results.losses) or ()
        return None if generator is None else generator.ids

    @contextmanager
    def _evaluating(self, data_iter: Any, *, compute_loss: bool) -> Iterator[None]:
        """Around forward-only steps: what belongs to training is as before afterwards, and results are let go of."""
        train_iterator = self.data_iterator
        self._compute_loss = compute_loss
        self.data_iterator = data_iter if self.site == "edge" else None
        try:
            with evaluating(self.module):
                yield
        finally:
            self.data_iterator = train_iterator
            self.eval_return_logits = False
            self._keep_of_outputs = _everything
            self._results.clear()

    def check_save_dir(self, save_dir: str | os.PathLike[str] | None, *, setting: str = "save_dir") -> None:
        """Try on every rank whether checkpoints can be written; call it before the first step.

        Nothing is left behind. A directory that does not exist yet is fine if it can be made.

        Args:
            save_dir: directory of this site; None on every rank of both sites if nothing will be saved.
            setting: what names it, for the error, e.g. ``--save``.

        Raises:
            ConfigError: on every rank of both sites: some rank cannot write, or only some ranks have a directory.
            LinkError: a rank did not take part.
        """
        check_directory(save_dir, self.grid, setting=setting)

    def agree_on(self, values: Mapping[str, object]) -> None:
        """Check that both sites were started with the same values; call it before the first step.

        Each site starts the script on its own. If they differ in the number of steps or in when they save, one waits
        for the other until ``ldt.timeout_s`` is over.

        Args:
            values: by what names them, e.g. ``{"--steps": 100}``. They cross the link.

        Raises:
            ConfigError: on every rank of both sites, if they differ; all differences are listed.
            LinkError: the other site did not take part.
        """
        agree_on(values, self.grid)

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool | None = None,
    ) -> bool:
        """Save a checkpoint on both sites; see :func:`ds_ldt.checkpointing.save_load.save`.

        Args:
            save_dir: directory of this site, shared by the ranks of the site.
            tag: name, the same on every rank; default ``global_step<N>``.
            client_state: the caller's own values, returned by :meth:`load_checkpoint`: numbers, texts, tensors, and
                lists, tuples and dicts of them.
            save_latest: point ``latest`` to it.
            exclude_frozen_parameters: leave out what is not trained; default: with ``ldt.lora``, whose adapters are
                then all that is saved.

        Returns:
            True.

        Raises:
            CheckpointError: on every rank, if any rank could not write, or was given what could not be read back.
            LinkError: a rank did not take part.
        """
        checkpointing.save(
            self,
            save_dir,
            tag,
            client_state or {},
            save_latest=save_latest,
            exclude_frozen_parameters=self.module.adapters is not None
            if exclude_frozen_parameters is None
            else exclude_frozen_parameters,
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint that both sites hold; see :func:`ds_ldt.checkpointing.save_load.load`.

        Args:
            load_dir: directory of this site.
            tag: which one; default that which ``latest`` names. Another layout may have saved it, as long as every
                layer is on the site that it was on.
            load_module_strict: missing or unexpected keys of a layer are an error.
            load_optimizer_states: restore the optimizer.
            load_lr_scheduler_states: restore the LR scheduler.
            load_module_only: restore weights only, and leave the training data where it is.
            custom_load_fn: not accepted.

        Returns:
            ``(path, client_state)``, or ``(None, None)`` when neither site holds any checkpoint.

        Raises:
            CheckpointError: on every rank: no common checkpoint, or it is of another model, or a part of it is missing
                or does not fit. Nothing has changed then, on any rank.
            LinkError: a rank did not take part.
        """
        if custom_load_fn is not None:
            raise ConfigError.of("custom_load_fn", found=custom_load_fn, expected="nothing", fix="leave it out")
        return checkpointing.load(
            self,
            load_dir,
            tag,
            strict=load_module_strict,
            optimizer_states=load_optimizer_states,
            lr_scheduler_states=load_lr_scheduler_states,
            module_only=load_module_only,
        )

    def _in_order(self, values: dict[tuple[int, int], Any]) -> list[Any] | None:
        """Results of this replica in the order they were drawn; None in the cloud."""
        return [values[place] for place in sorted(values)] if self.site == "edge" else None

    def get_additional_losses(self) -> dict[str, Tensor] | None:
        """What ``loss_fn`` returned beside the loss in the last ``train_batch`` or ``eval_batch``, averaged.

        Returns:
            Name -> mean over all micro-batches and domains, float32 scalars, the same on every edge replica; None if
            there was nothing. In the cloud always None: names and values do not leave the edge.
        """
        additional: dict[str, Tensor] | None = self.agg_additional_losses
        return additional

    def _average_named(self, what: str) -> None:
        """Average what the loss function returned beside the loss, over the edge replicas alone."""
        if self.site == "edge":
            try:
                self.agg_additional_losses = self._results.named_means(
                    self.grid, self.device, count=self._num_results(), what=what
                )
            except BaseException:
                self.transport.abort()  # the cloud knows nothing of names: let it fail now
                raise

    def _write_to_monitor(self, prefix: str, values: dict[str, Tensor]) -> None:
        """Write values of a step, and those beside the loss, under DeepSpeed's ``Train/Samples``, once for the job."""
        if self.global_rank == 0 and self.monitor.enabled:
            self.monitor.write_events(
                [
                    (f"Train/Samples/{prefix}{name}", value.item(), self.global_samples)
                    for name, value in {**values, **(self.get_additional_losses() or {})}.items()
                ]
            )

    def _mean_of_results(self) -> Tensor:
        """Mean of the step's results over every micro-batch and domain, on every rank of both sites."""
        with bounded("eval_batch", self.grid):
            return self._summary.sum(self._results.total(self.device))[0] / self._num_results()

    def _num_results(self) -> int:
        return self._current.plan.shape.num_micro_batches * self.job.num_domains

    @property
    def _current(self) -> Step:
        assert self._step is not None, "no step has been opened"
        return self._step

    def _exec_schedule(self, pipe_schedule: LDTSchedule, kind: StepKind | None = None) -> None:
        """Open the step (draw and announce), execute the rank's instructions, and close it.

        Args:
            pipe_schedule: the instructions of this rank.
            kind: the call that the step belongs to; by default what the plan is for.
        """
        plan = pipe_schedule.plan
        self.transport.refuse_if_closed()
        for buffers in (self._inputs, self._outputs, self._output_grads, self._losses, self._results):
            buffers.clear()
        self._owed.clear()
        with diagnosed(self.grid):
            self._step = self.intake.open(
                plan,
                self.data_iterator,
                kind=kind or (StepKind.TRAIN if plan.training else StepKind.EVAL),
                with_loss=self._compute_loss,
            )
        try:
            with diagnosed(self.grid):
                self._run_step(pipe_schedule)
        except BaseException as error:
            self.transport.abort()  # peers wait for messages that will not come: let them fail now
            if isinstance(error, StopIteration):
                raise end_inside_a_step(error) from error
            raise

    def _run_step(self, pipe_schedule: LDTSchedule) -> None:
        """Post the receives of the step that is open, execute its instructions, and see what was sent received."""
        self.transport.begin_step(self.intake.receives(self._current), self.intake.opening(self._current))
        observed = self._observer.watching(
            self._INSTRUCTION_MAP, self._current, number=self.global_steps + 1, payloads=self._payloads
        )
        with observed as handlers, rng_untouched():
            self._execute(pipe_schedule, handlers)
        self.transport.end_step()

    def _execute(self, pipe_schedule: LDTSchedule, handlers: Handlers) -> None:
        """Do what the parent does for each instruction, without binding every handler anew."""
        for commands in pipe_schedule:
            for command in commands:
                handlers[type(command)](self, **command.kwargs)

    def _payloads(self, key: Key) -> tuple[Tensor, ...]:
        """What this rank holds of a micro-batch between two virtual stages: inputs and outputs of one."""
        return (*tensors_in(self._inputs.get(key, ())), *self._outputs.get(key, ()))

    def _aggregate_total_loss(self) -> Tensor:
        return self._mean_loss

    # -- instructions -----------------------------------------------------------------------------------------------

    def _exec_load_micro_batch(self, buffer_id: int, key: Key) -> None:
        """Move a micro-batch that the intake has drawn to the device: inputs for the head, labels for the tail."""
        batch = self._current.batches[key.micro_batch, key.domain]
        batch.labels, batch.local = to_device((batch.labels, batch.local), self.device)
        inputs = batch.inputs if isinstance(batch.inputs, tuple) else (batch.inputs,)
        self._inputs[key] = to_device(inputs, self.device)
        batch.inputs = None

    def _exec_recv_activations(self, buffer_id: int, key: Key, channel: Channel) -> None:
        """Take a payload from its channel; what carries a gradient becomes a leaf of this virtual stage's graph."""
        tensors = self.transport.receive(channel, key.micro_batch)
        if torch.is_grad_enabled() and self._gradient_boundaries[channel.boundary]:
            for tensor in self._flowing(channel.boundary, tensors):
                tensor.requires_grad_()
        self._inputs[key] = tensors

    def _exec_forward_pass(self, buffer_id: int, key: Key) -> None:
        """Run one virtual stage; on the tail this ends in the loss."""
        inputs = self._inputs[key] if torch.is_grad_enabled() else self._inputs.pop(key)
        outputs = self.module(
            inputs if len(inputs) > 1 else inputs[0],
            virtual_stage=key.virtual_stage,
            local=self._local(key),
            inside=self._owed.deferring if self._is_split(key) else None,
            place=self._place(key),
        )
        if key.virtual_stage == self.module.layout.num_boundaries:
            self._finish_forward(key, outputs)
        else:
            self._outputs[key] = outputs if isinstance(outputs, tuple) else (outputs,)

    def _local(self, key: Key) -> tuple[Tensor, ...]:
        """What stays on the edge of a micro-batch; nothing in the cloud."""
        batch = self._current.batches.get((key.micro_batch, key.domain))
        return () if batch is None else batch.local

    def _place(self, key: Key) -> Place | None:
        """What the random numbers of a micro-batch depend on; in evaluation nothing is seeded."""
        if not self.module.training:
            return None
        return Place(
            base_seed=self.module.base_seed, step=self.global_steps, domain=key.domain, micro_batch=key.micro_batch
        )

    def _finish_forward(self, key: Key, outputs: Any) -> None:
        """Turn the tail's outputs into a loss and keep it under its own key: several are in flight."""
        place = (key.micro_batch, key.domain)
        batch = self._current.batches.pop(place)
        if self.eval_return_logits:
            self._results.outputs[place] = outputs
        if not self._compute_loss and self.module.loss_fn is not None:
            self._results.losses[place] = self._keep_of_outputs(outputs)
            return
        found = self.module.loss_fn(outputs, batch.labels) if self.module.loss_fn is not None else outputs
        loss, named = split_loss(found, self.module.get_additional_losses(), training=torch.is_grad_enabled())
        self._results.keep_named(place, {name: weighted(value, batch.loss_weight) for name, value in named.items()})
        loss = weighted(loss, batch.loss_weight)
        if torch.is_grad_enabled():
            self._losses[key] = loss
            loss = loss.detach()
        self._results.losses[place] = loss

    def _exec_send_activations(self, buffer_id: int, key: Key, channel: Channel) -> None:
        """Hand the outputs of a virtual stage to the channel; without a backward pass nothing else needs them."""
        outputs = self._outputs[key] if torch.is_grad_enabled() else self._outputs.pop(key)
        self._check_announced(key, outputs)
        self.transport.send(channel, key.micro_batch, outputs)

    def _check_announced(self, key: Key, outputs: tuple[Tensor, ...]) -> None:
        announced = self._current.signatures[key.micro_batch, key.domain][key.virtual_stage]
        if [(t.dtype, t.shape) for t in outputs] != [(t.dtype, t.shape) for t in announced]:
            found = signature_of(outputs)
            raise LinkError(
                f"rank {self.global_rank}: virtual stage {key.virtual_stage}, micro-batch {key.micro_batch} of domain "
                f"{key.domain}: the layers returned {_describe(found)}, but {_describe(announced)} was announced to "
                "the receiver at the start of the step. The shapes of a boundary must follow from the shapes of the "
                "micro-batch; declare sent_shapes= or WireSchema(uniform=False) so that they are announced right."
            )

    def _exec_recv_grads(self, buffer_id: int, key: Key, channel: Channel) -> None:
        """Take the gradients of a virtual stage's outputs from their channel."""
        self._output_grads[key] = self.transport.receive(channel, key.micro_batch)

    def _exec_backward_pass(self, buffer_id: int, key: Key) -> None:
        """Backpropagate through one virtual stage, from its own loss or from the gradients received."""
        flowing = [(root, grad) for root, grad in self._roots(key) if root.requires_grad]
        if flowing:
            with self._accumulating(), self._owed.owed_by(key) if self._is_split(key) else nullcontext():
                torch.autograd.backward([root for root, _ in flowing], [grad for _, grad in flowing])
        if key.virtual_stage == 0 or not self._gradient_boundaries[key.virtual_stage - 1]:
            del self._inputs[key]

    def _is_split(self, key: Key) -> bool:
        """Whether the backward of a virtual stage runs in two halves in this step."""
        plan = self._current.plan
        return plan.training and plan.shape.splits(key.virtual_stage)

    def _exec_weight_pass(self, buffer_id: int, key: Key) -> None:
        """Make the weight gradients that a backward pass has put off."""
        with self._accumulating():
            made = set(self._owed.settle(key))
        if key.virtual_stage not in self._told_shares:
            self._told_shares.add(key.virtual_stage)
            trained = self.module.trained_parameters(key.virtual_stage)
            part, whole = (sum(p.numel() for p in parameters) for parameters in (made, trained))
            logger.info(
                f"ds_ldt: rank {self.global_rank}, virtual stage {key.virtual_stage}: gradients of {part} of {whole} "
                "trained parameters are made apart from the backward pass; the others are no weights of plain linear "
                "layers"
            )

    def _roots(self, key: Key) -> list[tuple[Tensor, Tensor | None]]:
        """Where a backward pass starts: tensors and their gradients. Only here is a loss divided by M and scaled."""
        if key in self._losses:
            loss = self._losses.pop(key)
            scaled = loss if self.cur_scale == 1.0 else loss.float() * self.cur_scale
            return [(scaled / self._current.plan.shape.num_micro_batches, None)]
        outputs = self._flowing(key.virtual_stage, self._outputs.pop(key))
        grads = self._output_grads.pop(key, None)
        return list(zip(outputs, grads, strict=True)) if grads is not None else []

    def _flowing(self, boundary: int, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        """The tensors of a payload whose gradients cross a boundary, by the wire schema."""
        declared = self.module.wire.tensors_at(boundary)
        return [t for t, wire_tensor in zip(tensors, declared, strict=False) if wire_tensor.gradient]

    @contextmanager
    def _accumulating(self) -> Iterator[None]:
        """Around a backward pass: half precision gradients are added to their fp32 accumulators right away."""
        if not self.using_sharded_optimizer:
            yield
            return
        self.optimizer.clear_lp_grads(set_to_none=True)
        yield
        self.optimizer.update_hp_grads()

    def _exec_send_grads(self, buffer_id: int, key: Key, channel: Channel) -> None:
        """Send the gradients of a virtual stage's inputs; one that got none goes as zeros, for it is awaited."""
        inputs = self._flowing(channel.boundary, self._inputs.pop(key))
        grads = tuple(t.grad if t.grad is not None else torch.zeros_like(t) for t in inputs)
        self.transport.send(channel, key.micro_batch, grads)

    def _exec_reduce_grads(self) -> None:
        """Average the gradients over the replicas of this stage, then the norm and the loss over both sites."""
        self._average_named("train_batch")
        gradients = self._accumulated_gradients()
        slice_size = self.job.slice_size if self.site == "edge" else 1
        scale_for_slice(gradients, slice_size=slice_size, loss_scale=self.cur_scale)
        with bounded("train_batch (gradient reduction)", self.grid):
            if self.grid.num_physical_replicas > 1:
                self.buffered_allreduce_fallback(grads=gradients, elements_per_buffer=MEMORY_OPT_ALLREDUCE_SIZE)
            norm, summed = global_norm(gradients, self.grid, self._results.total(self.device), self._summary)
        self._mean_loss = summed[0] / self._num_results()
        self._norm = norm
        self._global_grad_norm = norm.item()
        if self.using_sharded_optimizer:
            self.optimizer.global_norm = norm

    def _accumulated_gradients(self) -> list[Tensor]:
        if self.using_sharded_optimizer:
            gradients: list[Tensor] = self.optimizer.get_grads_for_reduction()[0]
        else:
            gradients = self._get_gradients_for_reduction()[0]
        return gradients

    def clip_fp32_gradients(self) -> None:
        """Scale the gradients of this rank by the norm of the whole model; the parent uses its stage's alone."""
        torch.nn.utils.clip_grads_with_norm_(self.module.parameters(), self.gradient_clipping(), self._norm)

    _INSTRUCTION_MAP = {
        **PipelineEngine._INSTRUCTION_MAP,
        ds.LoadMicroBatch: _exec_load_micro_batch,
        ds.ForwardPass: _exec_forward_pass,
        ds.BackwardPass: _exec_backward_pass,
        WeightPass: _exec_weight_pass,
        ds.SendActivation: _exec_send_activations,
        ds.RecvActivation: _exec_recv_activations,
        ds.SendGrad: _exec_send_grads,
        ds.RecvGrad: _exec_recv_grads,
        ds.ReduceGrads: _exec_reduce_grads,
    }


def _describe(signature: Any) -> str:
    return "(" + ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in signature) + ")"


def _everything(outputs: Any) -> Any:
    return outputs
