"""The plan of one rank as a DeepSpeed ``PipeSchedule``: what DeepSpeed's engine and its users see of it."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.runtime.pipe import schedule as ds

from ds_ldt.plan import Kind, Plan, Planned, planned


class WeightPass(ds.BufferOpInstruction):
    """Make the weight gradients that the backward pass of a micro-batch has put off. DeepSpeed has no such thing."""


_CLASS_OF: dict[Kind, type[ds.PipeInstruction]] = {
    kind: WeightPass if kind is Kind.WEIGHT_PASS else getattr(ds, kind.value) for kind in Kind
}


class LDTSchedule(ds.PipeSchedule):
    """The instructions of one rank of a plan.

    Args:
        plan: a validated plan.
        rank: the rank whose instructions are wanted.

    Attributes:
        plan: the plan.
        rank: the rank.
        planned: what the rank runs, in order.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        shape = plan.shape
        super().__init__(micro_batches=shape.num_micro_batches, stages=shape.num_stages, stage_id=shape.stage_of(rank))
        self.plan = plan
        self.rank = rank
        self.planned: tuple[Planned, ...] = tuple(planned(instruction) for instruction in plan.for_rank(rank))

    def steps(self) -> Iterator[list[ds.PipeInstruction]]:
        """Yield DeepSpeed's instructions in order, one per step.

        An instruction about a micro-batch has ``buffer_id`` (DeepSpeed's word for it: the micro-batch), the ``key``
        under which what belongs to it is held, and, for a message, its ``channel``.
        """
        for kind, key, channel in self.planned:
            place = {} if key is None else {"buffer_id": key.micro_batch, "key": key}
            yield [_CLASS_OF[kind](**place, **({} if channel is None else {"channel": channel}))]

    def num_pipe_buffers(self) -> int:
        """None: what is held is found by (virtual stage, micro-batch, domain), not by slot."""
        return 0


class LDTTrainSchedule(LDTSchedule):
    """Forward and backward passes of one training step, the reductions and the optimizer step."""


class LDTInferenceSchedule(LDTSchedule):
    """Forward passes only."""
