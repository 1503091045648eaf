"""``LDTPipelineEngine``: what a training script calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER
from torch import Tensor

from ds_ldt.checkpointing import save_load
from ds_ldt.checkpointing.output_paths import check_directory
from ds_ldt.comm.agreement import agree_on
from ds_ldt.comm.step_header import StepKind
from ds_ldt.errors import ConfigError
from ds_ldt.runtime.executor import unchanged
from ds_ldt.runtime.generation import Decoding, Generator, check_model, last_position
from ds_ldt.runtime.rng import evaluating
from ds_ldt.runtime.stepping import SteppingEngine


class LDTPipelineEngine(SteppingEngine):
    """A ``PipelineEngine`` for a pipeline that starts and ends on the edge and whose sites differ in width.

    Created by ``ds_ldt.initialize``. ``train_batch``, ``eval_batch``, ``save_checkpoint`` and ``load_checkpoint``
    must be called by every rank of both sites, in the same order.

    Args:
        training_data: data set of the edge; ignored, and never opened, in the cloud.
        shuffle_seed: None to read it in order; else each epoch has an order of its own, that of torch's
            ``DistributedSampler`` with this seed.
        num_workers: processes of an edge replica that read it ahead; 0 for none.
        kwargs: as for ``deepspeed.PipelineEngine``; ``model`` is an ``LDTPipelineModule``.
    """

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

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Replace the module's ``batch_fn``, which turns what the data iterator yields into ``(inputs, labels)``."""
        self.module.batch_fn = fn

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
        self._observer.tell_what_is_held(self.executor.step.plan)
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
            LinkError: as for ``train_batch``.
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
                self._mean_of_results()
                if reduce_output == "avg" and is_loss
                else self._in_order(self.executor.results.losses)
            )
            logits = self._in_order(self.executor.results.outputs)
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
            LinkError: as for ``train_batch``.
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
            self.executor.retained = last_position
            while True:
                self._exec_schedule(schedule, StepKind.GENERATE)
                if generator is not None:
                    generator.logits = self._in_order(self.executor.results.losses) or ()
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
            self.executor.retained = unchanged
            self.executor.results.clear()

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
        """Save a checkpoint on both sites; see ``ds_ldt.checkpointing.save_load.save``.

        Args:
            save_dir: directory of this site, shared by the ranks of the site.
            tag: name, the same on every rank; default ``global_step<N>``.
            client_state: the caller's own values, returned by ``load_checkpoint``: numbers, texts, tensors, and
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
        save_load.save(
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
        """Load a checkpoint that both sites hold; see ``ds_ldt.checkpointing.save_load.load``.

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
        return save_load.load(
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

    def _write_to_monitor(self, prefix: str, values: dict[str, Tensor]) -> None:
        """Write values of a step, and those beside the loss, under DeepSpeed's ``Train/Samples``, once for the job."""
        if self.global_rank == 0 and self.monitor.enabled:
            self.monitor.write_events(
                [
                    (f"Train/Samples/{prefix}{name}", value.item(), self.global_samples)
                    for name, value in {**values, **(self.get_additional_losses() or {})}.items()
                ]
            )
