"""The plan of one rank as a DeepSpeed ``PipeSchedule``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from deepspeed.runtime.pipe import schedule as ds

from ds_ldt.plan import Instruction, Kind, Op, Plan


class WeightPass(ds.BufferOpInstruction):
    """Make the weight gradients that the backward pass of a micro-batch has put off. DeepSpeed has no such thing."""


_INSTRUCTION_OF: dict[Kind, type[ds.PipeInstruction]] = {
    Kind.LOAD_MICRO_BATCH: ds.LoadMicroBatch,
    Kind.FORWARD_PASS: ds.ForwardPass,
    Kind.BACKWARD_PASS: ds.BackwardPass,
    Kind.WEIGHT_PASS: WeightPass,
    Kind.SEND_ACTIVATION: ds.SendActivation,
    Kind.RECV_ACTIVATION: ds.RecvActivation,
    Kind.SEND_GRAD: ds.SendGrad,
    Kind.RECV_GRAD: ds.RecvGrad,
    Kind.REDUCE_GRADS: ds.ReduceGrads,
    Kind.OPTIMIZER_STEP: ds.OptimizerStep,
}


OP_OF = {"ForwardPass": Op.FORWARD, "BackwardPass": Op.BACKWARD, "WeightPass": Op.WEIGHT}
"""Name of an instruction that computes -> what it is in a plan."""

Handler = Callable[..., None]
"""Executes one instruction of an engine; takes the engine, and what the instruction carries by name."""

Handlers = dict[type, Handler]
"""Instruction type -> handler."""


class Key(NamedTuple):
    """What the engine's buffers are keyed by."""

    virtual_stage: int
    micro_batch: int
    domain: int


class LDTSchedule(ds.PipeSchedule):
    """Lifts the instructions of one rank of a plan to DeepSpeed's instruction objects, one per step.

    Args:
        plan: a validated plan.
        rank: the rank whose instructions are wanted.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        shape = plan.shape
        super().__init__(micro_batches=shape.num_micro_batches, stages=shape.num_stages, stage_id=shape.stage_of(rank))
        self.plan = plan
        self.rank = rank
        self._steps = [[lift(instruction)] for instruction in plan.for_rank(rank)]

    def steps(self) -> Iterator[list[ds.PipeInstruction]]:
        """Yield DeepSpeed instructions in order."""
        yield from self._steps

    def num_pipe_buffers(self) -> int:
        """None: the engine keys what it holds by (virtual stage, micro-batch, domain), not by slot."""
        return 0


class LDTTrainSchedule(LDTSchedule):
    """Forward and backward passes of one training step, the reductions and the optimizer step."""


class LDTInferenceSchedule(LDTSchedule):
    """Forward passes only."""


def lift(instruction: Instruction) -> ds.PipeInstruction:
    """Make the DeepSpeed instruction of a plan instruction.

    An instruction about a micro-batch carries ``buffer_id`` (DeepSpeed's word for it: the micro-batch), the ``key``
    under which the engine holds what belongs to it, and, for a message, its ``channel``. Closing instructions carry
    nothing.
    """
    kind = _INSTRUCTION_OF[instruction.kind]
    virtual_stage, micro_batch, domain = instruction.virtual_stage, instruction.micro_batch, instruction.domain
    if virtual_stage is None or micro_batch is None or domain is None:
        return kind()
    message = {} if instruction.channel is None else {"channel": instruction.channel}
    return kind(buffer_id=micro_batch, key=Key(virtual_stage, micro_batch, domain), **message)
