"""``StageExecutor``: runs the instructions of one rank on real tensors, one small handler per kind.

It knows no schedule, no DeepSpeed and no process group. What it holds of a micro-batch is keyed by (virtual stage,
micro-batch, domain), never by a place in a queue, so that any order that a plan has is run as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from deepspeed.utils import logger
from torch import Tensor

from ds_ldt.comm.wire import dtype_name, signature_of
from ds_ldt.data.containers import tensors_in, to_device
from ds_ldt.errors import LinkError
from ds_ldt.plan import Channel, Handlers, Key, Kind, Planned
from ds_ldt.runtime.losses import Results, split_loss, weighted
from ds_ldt.runtime.module import LDTPipelineModule
from ds_ldt.runtime.rng import Place
from ds_ldt.runtime.step_inputs import Step
from ds_ldt.runtime.weight_gradients import WeightLedger


class Messages(Protocol):
    """Takes and gives the messages of channels; :class:`ds_ldt.comm.transport.Transport` does."""

    def send(self, channel: Channel, micro_batch: int, tensors: tuple[Tensor, ...]) -> None:
        """Hand a message to a channel, without waiting for it to arrive."""

    def receive(self, channel: Channel, micro_batch: int) -> tuple[Tensor, ...]:
        """Wait for a message of a channel."""


class StageExecutor:
    """Runs steps on one rank.

    Args:
        rank: this rank.
        module: its layers, loss function and wire schema.
        messages: where activations and gradients come from and go to.
        device: where the layers are.
        gradient_boundaries: for each boundary whether gradients cross it.

    Attributes:
        gradient_boundaries: as given.
        results: losses, outputs and named values of the step.
        ledger: weight gradients that a backward pass has put off.
        accumulating: makes the context of a backward pass.
        loss_scale: the factor of losses before their backward passes.
        with_loss: whether the loss function is applied; without it the results are what `retained` makes of outputs.
        with_outputs: whether the outputs of the last layer are kept, too.
        retained: what to keep of the outputs of the last layer where no loss is computed.
    """

    def __init__(
        self,
        *,
        rank: int,
        module: LDTPipelineModule,
        messages: Messages,
        device: torch.device,
        gradient_boundaries: tuple[bool, ...],
    ) -> None:
        self.results = Results()
        self.ledger = WeightLedger()
        self.accumulating: Callable[[], AbstractContextManager[None]] = nullcontext
        self.loss_scale: Callable[[], float] = lambda: 1.0
        self.with_loss, self.with_outputs = True, False
        self.retained: Callable[[Any], Any] = unchanged
        self.inputs: dict[Key, tuple[Tensor, ...]] = {}
        self.outputs: dict[Key, tuple[Tensor, ...]] = {}
        self.output_grads: dict[Key, tuple[Tensor, ...]] = {}
        self.losses: dict[Key, Tensor] = {}
        self.handlers: Handlers = {
            Kind.LOAD_MICRO_BATCH: self._load_micro_batch,
            Kind.RECV_ACTIVATION: self._receive_activations,
            Kind.FORWARD_PASS: self._forward,
            Kind.SEND_ACTIVATION: self._send_activations,
            Kind.RECV_GRAD: self._receive_gradients,
            Kind.BACKWARD_PASS: self._backward,
            Kind.WEIGHT_PASS: self._weight_gradients,
            Kind.SEND_GRAD: self._send_gradients,
        }
        self._rank = rank
        self._module = module
        self._messages = messages
        self._device = device
        self.gradient_boundaries = gradient_boundaries
        self._step: Step | None = None
        self._number = 0
        self._logged_shares: set[int] = set()

    def clear(self) -> None:
        """Let go of everything that is held of a step, finished or not."""
        for buffers in (self.inputs, self.outputs, self.output_grads, self.losses, self.results, self.ledger):
            buffers.clear()
        self._step = None

    def begin(self, step: Step, *, number: int) -> None:
        """Take up a step that is open.

        Args:
            step: its plan, the signatures of its messages and on the edge its micro-batches.
            number: training steps done before it; what layers draw at random depends on it.
        """
        self._step, self._number = step, number

    def run(self, instructions: Iterable[Planned], handlers: Handlers) -> None:
        """Run instructions in the order given.

        Args:
            instructions: of this rank.
            handlers: what to run for each kind: :attr:`handlers`, perhaps watched by others, and closing reductions.
        """
        for kind, key, channel in instructions:
            handlers[kind](key, channel)

    def payloads(self, key: Key) -> tuple[Tensor, ...]:
        """Return what is held of a micro-batch between two virtual stages: inputs and outputs of one."""
        return (*tensors_in(self.inputs.get(key, ())), *self.outputs.get(key, ()))

    @property
    def step(self) -> Step:
        """The step that is run."""
        assert self._step is not None, "no step has been opened"
        return self._step

    # -- forward ----------------------------------------------------------------------------------------------------

    def _load_micro_batch(self, key: Key, channel: Channel | None) -> None:
        """Move a micro-batch that the edge has drawn to the device: inputs for the head, labels for the tail."""
        batch = self.step.batches[key.micro_batch, key.domain]
        batch.labels, batch.local = to_device((batch.labels, batch.local), self._device)
        inputs = batch.inputs if isinstance(batch.inputs, tuple) else (batch.inputs,)
        self.inputs[key] = to_device(inputs, self._device)
        batch.inputs = None

    def _receive_activations(self, key: Key, channel: Channel) -> None:
        """Take a payload from its channel; what carries a gradient becomes a leaf of this virtual stage's graph."""
        tensors = self._messages.receive(channel, key.micro_batch)
        if torch.is_grad_enabled() and self.gradient_boundaries[channel.boundary]:
            for tensor in self._with_gradients(channel.boundary, tensors):
                tensor.requires_grad_()
        self.inputs[key] = tensors

    def _forward(self, key: Key, channel: Channel | None) -> None:
        """Run one virtual stage; on the tail this ends in the loss."""
        inputs = self.inputs[key] if torch.is_grad_enabled() else self.inputs.pop(key)
        outputs = self._module(
            inputs if len(inputs) > 1 else inputs[0],
            virtual_stage=key.virtual_stage,
            local=self._local(key),
            inside=self.ledger.deferring if self._is_split(key) else None,
            place=self._place(key),
        )
        if key.virtual_stage == self._module.layout.num_boundaries:
            self._finish_forward(key, outputs)
        else:
            self.outputs[key] = outputs if isinstance(outputs, tuple) else (outputs,)

    def _local(self, key: Key) -> tuple[Tensor, ...]:
        """What stays on the edge of a micro-batch; nothing in the cloud."""
        batch = self.step.batches.get((key.micro_batch, key.domain))
        return () if batch is None else batch.local

    def _place(self, key: Key) -> Place | None:
        """What the random numbers of a micro-batch depend on; in evaluation nothing is seeded."""
        if not self._module.training:
            return None
        return Place(
            base_seed=self._module.base_seed, step=self._number, domain=key.domain, micro_batch=key.micro_batch
        )

    def _finish_forward(self, key: Key, outputs: Any) -> None:
        """Turn the tail's outputs into a loss and keep it under its own key: several are in flight."""
        place = (key.micro_batch, key.domain)
        batch, loss_fn = self.step.batches.pop(place), self._module.loss_fn
        if self.with_outputs:
            self.results.outputs[place] = outputs
        if not self.with_loss and loss_fn is not None:
            self.results.losses[place] = self.retained(outputs)
            return
        found = loss_fn(outputs, batch.labels) if loss_fn is not None else outputs
        loss, named = split_loss(found, self._module.get_additional_losses(), training=torch.is_grad_enabled())
        self.results.keep_named(place, {name: weighted(value, batch.loss_weight) for name, value in named.items()})
        loss = weighted(loss, batch.loss_weight)
        if torch.is_grad_enabled():
            self.losses[key] = loss
            loss = loss.detach()
        self.results.losses[place] = loss

    def _send_activations(self, key: Key, channel: Channel) -> None:
        """Hand the outputs of a virtual stage to the channel; without a backward pass nothing else needs them."""
        outputs = self.outputs[key] if torch.is_grad_enabled() else self.outputs.pop(key)
        self._check_announced(key, outputs)
        self._messages.send(channel, key.micro_batch, outputs)

    def _check_announced(self, key: Key, outputs: tuple[Tensor, ...]) -> None:
        announced = self.step.signatures[key.micro_batch, key.domain][key.virtual_stage]
        if [(t.dtype, t.shape) for t in outputs] != [(t.dtype, t.shape) for t in announced]:
            found = signature_of(outputs)
            raise LinkError(
                f"rank {self._rank}: virtual stage {key.virtual_stage}, micro-batch {key.micro_batch} of domain "
                f"{key.domain}: the layers returned {_describe(found)}, but {_describe(announced)} was announced to "
                "the receiver at the start of the step. The shapes of a boundary must follow from the shapes of the "
                "micro-batch; declare sent_shapes= or WireSchema(uniform=False) so that they are announced right."
            )

    # -- backward ---------------------------------------------------------------------------------------------------

    def _receive_gradients(self, key: Key, channel: Channel) -> None:
        """Take the gradients of a virtual stage's outputs from their channel."""
        self.output_grads[key] = self._messages.receive(channel, key.micro_batch)

    def _backward(self, key: Key, channel: Channel | None) -> None:
        """Backpropagate through one virtual stage, from its own loss or from the gradients received."""
        roots = [(root, grad) for root, grad in self._roots(key) if root.requires_grad]
        if roots:
            with self.accumulating(), self.ledger.owed_by(key) if self._is_split(key) else nullcontext():
                torch.autograd.backward([root for root, _ in roots], [grad for _, grad in roots])
        if key.virtual_stage == 0 or not self.gradient_boundaries[key.virtual_stage - 1]:
            del self.inputs[key]

    def _roots(self, key: Key) -> list[tuple[Tensor, Tensor | None]]:
        """Where a backward pass starts: tensors and their gradients. Only here is a loss divided by M and scaled."""
        if key in self.losses:
            loss, scale = self.losses.pop(key), self.loss_scale()
            scaled = loss if scale == 1.0 else loss.float() * scale
            return [(scaled / self.step.plan.shape.num_micro_batches, None)]
        outputs = self._with_gradients(key.virtual_stage, self.outputs.pop(key))
        grads = self.output_grads.pop(key, None)
        return list(zip(outputs, grads, strict=True)) if grads is not None else []

    def _weight_gradients(self, key: Key, channel: Channel | None) -> None:
        """Make the weight gradients that a backward pass has put off."""
        with self.accumulating():
            made = set(self.ledger.settle(key))
        if key.virtual_stage not in self._logged_shares:
            self._logged_shares.add(key.virtual_stage)
            trained = self._module.trained_parameters(key.virtual_stage)
            part, whole = (sum(p.numel() for p in parameters) for parameters in (made, trained))
            logger.info(
                f"ds_ldt: rank {self._rank}, virtual stage {key.virtual_stage}: gradients of {part} of {whole} "
                "trained parameters are made apart from the backward pass; the others are no weights of plain linear "
                "layers"
            )

    def _send_gradients(self, key: Key, channel: Channel) -> None:
        """Send the gradients of a virtual stage's inputs; one that got none is sent as zeros: the peer waits."""
        inputs = self._with_gradients(channel.boundary, self.inputs.pop(key))
        grads = tuple(t.grad if t.grad is not None else torch.zeros_like(t) for t in inputs)
        self._messages.send(channel, key.micro_batch, grads)

    def _is_split(self, key: Key) -> bool:
        """Whether the backward of a virtual stage runs in two halves in this step."""
        plan = self.step.plan
        return plan.training and plan.shape.splits(key.virtual_stage)

    def _with_gradients(self, boundary: int, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        """The tensors of a payload whose gradients cross a boundary, by the wire schema."""
        declared = self._module.wire.tensors_at(boundary)
        return [t for t, wire_tensor in zip(tensors, declared, strict=False) if wire_tensor.gradient]


def unchanged(outputs: Any) -> Any:
    """Return outputs as they are."""
    return outputs


def _describe(signature: Any) -> str:
    return "(" + ", ".join(f"{dtype_name(t.dtype)}{list(t.shape)}" for t in signature) + ")"
