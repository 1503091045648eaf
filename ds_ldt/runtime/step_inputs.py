"""The start of a step: the edge draws its micro-batches and announces them, the cloud learns what will arrive.

The edge draws all M*K micro-batches of a step before it computes anything. So it knows, before the first message,
whether the data suffices (else every rank raises ``StopIteration`` together), how many targets the whole global batch
has (for token-weighted losses, at no extra cost in messages), and what shapes will cross the link.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

from ds_ldt.comm.collectives import bounded
from ds_ldt.comm.control import ControlLink
from ds_ldt.comm.grid import LDTPipelineGrid
from ds_ldt.comm.groups import StreamGroups
from ds_ldt.comm.step_header import Announcement, Status, StepId, StepKind, short_fingerprint
from ds_ldt.comm.wire import Signature, WireGuard, gradient_signature
from ds_ldt.errors import ConfigError, LDTError, LinkError, SampleError
from ds_ldt.plan import Channel, Flow, Plan
from ds_ldt.plan.recent import REMEMBERED_PLANS, Recent
from ds_ldt.runtime.micro_batches import MicroBatch, MicroBatchKey, MicroBatchReader
from ds_ldt.runtime.module import LDTPipelineModule
from ds_ldt.runtime.shape_inference import Shapes, ShapeTracer, shapes_of, without_gradients

_ENDED = "the data of an edge replica ended inside a step"


@dataclass(slots=True, kw_only=True)
class Step:
    """What a rank knows before the first instruction of a step.

    Attributes:
        plan: the plan to execute.
        signatures: per micro-batch, the signature at every boundary.
        batches: the micro-batches themselves; empty in the cloud.
    """

    plan: Plan
    signatures: dict[MicroBatchKey, tuple[Signature, ...]]
    batches: dict[MicroBatchKey, MicroBatch] = field(default_factory=dict)


class Intake:
    """Opens steps on one rank.

    Args:
        module: says how to read a batch and what its head will send.
        grid: which domains this rank serves, and the groups.
        groups: the control stream among them.
        guard: checks announcements against the wire schema.
        tracer: derives shapes.
    """

    def __init__(
        self,
        module: LDTPipelineModule,
        grid: LDTPipelineGrid,
        groups: StreamGroups,
        guard: WireGuard,
        tracer: ShapeTracer,
    ) -> None:
        self._module = module
        self._reader = MicroBatchReader(module)
        self._grid = grid
        self._guard = guard
        self._tracer = tracer
        self._num_steps, self._said_no_targets = 0, False
        self._kind, self._with_loss = StepKind.TRAIN, True
        self._inbound_of: Recent[str, dict[Channel, tuple[int, ...]]] = Recent(REMEMBERED_PLANS)
        self._opening_of: Recent[str, dict[Channel, tuple[int, ...]]] = Recent(REMEMBERED_PLANS)
        self._edge_boundaries = module.layout.edge_boundaries
        self._control = ControlLink(
            rank=grid.global_rank,
            groups=groups,
            timeout_s=grid.timeout_s,
            guard=guard,
            boundaries=self._edge_boundaries,
        )
        if grid.site == "cloud":
            self._edge_rank = grid.rank_map.rank_serving(stage=0, domain=grid.domains[0])
            self._control.expect(self._edge_rank)

    def open(
        self,
        plan: Plan,
        data_iterator: Iterator[Any] | None,
        *,
        kind: StepKind,
        with_loss: bool = True,
    ) -> Step:
        """Draw and announce (edge) or listen (cloud).

        Args:
            plan: what is about to be executed.
            data_iterator: edge only; yields this replica's micro-batches, m-major and domain-minor.
            kind: the call that the step belongs to.
            with_loss: whether a loss is computed, so that labels are needed.

        Raises:
            StopIteration: on every rank, if the data of any edge replica has ended.
            ConfigError: on the edge: there is no data, or a micro-batch cannot be used; as a SampleError it names the
                micro-batch and, of ``training_data``, the sample.
            PrivacyError: on the edge: the head would send something undeclared.
            LinkError: in the cloud: the edge failed, or is about to do something else.
        """
        self._num_steps += 1
        self._kind, self._with_loss = kind, with_loss
        return self._draw(plan, data_iterator) if self._grid.site == "edge" else self._listen(plan)

    def close(self) -> None:
        """Wait until the cloud has received every announcement."""
        self._control.close()

    def abandon(self) -> None:
        """Close the connections of announcements. Raises nothing."""
        self._control.abandon()

    def receives(self, step: Step) -> dict[Channel, list[tuple[int, Signature]]]:
        """What this rank will receive in a step: per channel the micro-batches in order, with their signatures."""
        expected: dict[Channel, list[tuple[int, Signature]]] = {}
        for channel, micro_batches in self._inbound(step.plan).items():
            messages = expected[channel] = []
            for micro_batch in micro_batches:
                signature = step.signatures[micro_batch, channel.domain][channel.boundary]
                if channel.flow is Flow.GRADIENT:
                    signature = gradient_signature(signature)
                messages.append((micro_batch, signature))
        return expected

    def opening(self, step: Step) -> dict[Channel, tuple[Signature, ...]]:
        """The channels of this rank on which a step opens, and the signatures of the first messages on them.

        They are as many as the receiver will have in flight: it takes that long for anything to come back.
        """
        found: dict[Channel, tuple[Signature, ...]] = {}
        for channel, micro_batches in self._opening_order(step.plan).items():
            found[channel] = tuple(step.signatures[m, channel.domain][channel.boundary] for m in micro_batches)
        return found

    def _opening_order(self, plan: Plan) -> dict[Channel, tuple[int, ...]]:
        """The channels out of the head that begin or end on this rank and the order of their first messages."""
        return self._opening_of.get(plan.fingerprint, lambda: plan.first_messages(self._grid.global_rank))

    def _inbound(self, plan: Plan) -> dict[Channel, tuple[int, ...]]:
        """The channels that end on this rank and the order of their messages; read off a plan once, not every step."""
        return self._inbound_of.get(plan.fingerprint, lambda: plan.received_by(self._grid.global_rank))

    def _step_id(self, plan: Plan, domain: int) -> StepId:
        return StepId(
            kind=self._kind,
            step=self._num_steps,
            domain=domain,
            num_micro_batches=plan.shape.num_micro_batches,
            fingerprint=short_fingerprint(plan.fingerprint),
        )

    # -- edge -------------------------------------------------------------------------------------------------------

    def _draw(self, plan: Plan, data_iterator: Iterator[Any] | None) -> Step:
        step = Step(plan=plan, signatures={})
        status, failure = Status.OK, None
        try:
            self._read_micro_batches(step, data_iterator)
        except StopIteration:
            status = Status.END_OF_DATA
        except Exception as error:  # whatever user code raised: the cloud must hear of it before this rank ends
            status, failure = Status.ERROR, error
        status, num_targets = self._agree(status, sum(batch.num_targets for batch in step.batches.values()))
        self._announce(step, status)
        if status is not Status.OK:
            self._control.close()  # the caller may end this process next, and with it what is still on its way
        if failure is not None:
            raise failure
        if status is Status.END_OF_DATA:
            raise StopIteration(_ENDED)
        if status is Status.ERROR:
            raise LinkError(f"rank {self._grid.global_rank}: another edge replica failed to draw its micro-batches")
        self._weigh(step, num_targets)
        return step

    def _read_micro_batches(self, step: Step, data_iterator: Iterator[Any] | None) -> None:
        if data_iterator is None:
            raise ConfigError.of(
                "training_data",
                found=None,
                expected="data on every edge rank",
                fix="pass training_data= to ds_ldt.initialize, or data_iter= to train_batch or eval_batch",
            )
        for micro_batch in range(step.plan.shape.num_micro_batches):
            for domain in self._grid.domains:
                place = f"micro-batch {micro_batch} of domain {domain}"
                batch = self._reader.read(
                    data_iterator,
                    place,
                    with_loss=self._with_loss,
                    is_generated=self._kind is StepKind.GENERATE,
                )
                step.batches[micro_batch, domain] = batch
                try:
                    step.signatures[micro_batch, domain] = self._signatures(batch, place)
                except SampleError:
                    raise
                except ConfigError as error:  # the layers cannot take it: say which micro-batch
                    raise ConfigError.from_problems(error.problems, where=place) from error
        if not self._module.dynamic_shape and len(set(step.signatures.values())) > 1:
            raise ConfigError.of(
                "dynamic_shape",
                found=False,
                expected="micro-batches of one shape, but those of this step differ",
                fix="pad them to one length, or build the module with dynamic_shape=True",
            )

    def _announce(self, step: Step, status: Status) -> None:
        """Tell every cloud rank of every domain of this replica what comes."""
        for domain in self._grid.domains:
            keys = [(m, domain) for m in range(step.plan.shape.num_micro_batches)] if status is Status.OK else []
            announcement = Announcement(
                step=self._step_id(step.plan, domain),
                status=status,
                signatures=tuple(
                    tuple(step.signatures[key][boundary] for boundary in self._edge_boundaries) for key in keys
                ),
            )
            for stage in range(1, self._grid.rank_map.num_stages):
                self._control.announce(self._grid.rank_map.rank_serving(stage=stage, domain=domain), announcement)

    def _signatures(self, batch: MicroBatch, place: str) -> tuple[Signature, ...]:
        """The signature of a micro-batch at every boundary."""
        announced: tuple[Signature, ...] = ()
        before: Shapes = ()
        known, local = self._tracer.boundaries(()), shapes_of(batch.local)
        for boundary in self._edge_boundaries:
            shapes = self._reader.sent_shapes(batch, boundary, place)
            if shapes is not None:
                signature = self._tracer.declare(boundary, shapes)
            elif boundary == 0:
                signature = self._tracer.sent_by_head(batch.inputs, local)
            else:
                signature = self._tracer.sent_by_edge(boundary, before, local)
            self._guard.check_announced(boundary, signature)
            announced = (*announced, signature)
            known = self._tracer.boundaries(announced)
            before = without_gradients(known[-1])
        return known

    def _agree(self, status: Status, num_targets: int) -> tuple[Status, int]:
        """Let the edge replicas agree on the worst status and on the number of targets of the global batch."""
        if self._grid.num_physical_replicas == 1:
            return status, num_targets
        device = torch.device("cpu") if dist.get_backend(self._grid.dp_proc_group) == "gloo" else _device()
        mine = [int(status is Status.END_OF_DATA), int(status is Status.ERROR), num_targets]
        total = torch.tensor(mine, dtype=torch.int64, device=device)
        with bounded("the start of a step", self._grid):
            dist.all_reduce(total, group=self._grid.dp_proc_group)
        ended, failed, num_targets = total.tolist()
        return Status.ERROR if failed else Status.END_OF_DATA if ended else Status.OK, num_targets

    def _weigh(self, step: Step, num_targets: int) -> None:
        """Turn target counts into factors such that the mean over micro-batches is the mean over targets."""
        if self._module.loss_reduction != "token" or not self._with_loss:
            return
        shape = step.plan.shape
        if not num_targets and not self._said_no_targets:
            self._said_no_targets = True
            logger.warning(
                "ds_ldt: no micro-batch of this step has a target, as all labels are -100: its loss is 0, and it "
                "teaches nothing. Look at what collate_fn makes of labels (said once)"
            )
        for batch in step.batches.values():
            share = batch.num_targets / num_targets if num_targets else 0.0
            batch.loss_weight = share * shape.num_micro_batches * shape.num_domains

    # -- cloud ------------------------------------------------------------------------------------------------------

    def _listen(self, plan: Plan) -> Step:
        domain = self._grid.domains[0]
        announcement = self._control.receive(self._edge_rank, self._step_id(plan, domain))
        if announcement.status is Status.END_OF_DATA:
            raise StopIteration(_ENDED)
        if announcement.status is Status.ERROR:
            raise LinkError(
                f"rank {self._grid.global_rank}: the edge (rank {self._edge_rank}) failed to draw the micro-batches "
                "of this step. Its own message says why; it is not repeated here, for it may quote a sample."
            )
        step = Step(plan=plan, signatures={})
        for micro_batch, announced in enumerate(announcement.signatures):
            try:
                step.signatures[micro_batch, domain] = self._tracer.boundaries(announced)
            except LDTError as error:
                raise LinkError(f"micro-batch {micro_batch} was announced as {announced}: {error}") from error
        return step


def _device() -> torch.device:
    return torch.device(get_accelerator().current_device_name())
