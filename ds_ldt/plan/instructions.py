"""The words a plan is written in: computes, channels and instructions.

An *order* is the sequence of computes of one rank. `ds_ldt.plan.lower` turns orders into instructions, which add the
loads, the sends, the receives and the closing reductions. Everything here is an immutable value without behaviour.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

_COMPUTE_PATTERN = re.compile(r"([A-Z])(\d+)\.(\d+)\.(\d+)")


class Op(StrEnum):
    """What a compute does with its virtual stage.

    A backward gives the gradients of inputs and weights. Where it is split, B gives those of the inputs, which another
    rank waits for, and W those of the weights, which nobody waits for before the closing reduction.
    """

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"

    __hash__ = str.__hash__  # Enum's own is several times slower, and computes are keys everywhere


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Compute:
    """One forward, backward or weight gradient of one virtual stage for one micro-batch of one domain.

    Attributes:
        op: Forward, backward or weight gradient.
        virtual_stage: Index `s` of the virtual stage, in visiting order.
        micro_batch: Index of the micro-batch within its domain, `0..M-1`.
        domain: Index of the domain, `0..D-1`.
    """

    op: Op
    virtual_stage: int
    micro_batch: int
    domain: int

    def __str__(self) -> str:
        """Return the short form, for example `F0.3.1` (virtual stage 0, micro-batch 3, domain 1)."""
        return f"{self.op.value}{self.virtual_stage}.{self.micro_batch}.{self.domain}"

    @classmethod
    def parse(cls, text: str) -> Compute:
        """Read the short form that `str` writes.

        Args:
            text: For example `F0.3.1`.

        Raises:
            ValueError: The text is not a compute in short form.
        """
        match = _COMPUTE_PATTERN.fullmatch(text)
        if match is None or match[1] not in tuple(Op):
            ops = "|".join(Op)
            raise ValueError(
                f"{text!r} is no compute; expected ({ops})VIRTUAL_STAGE.MICRO_BATCH.DOMAIN, like 'F0.3.1'"
            )
        return cls(op=Op(match[1]), virtual_stage=int(match[2]), micro_batch=int(match[3]), domain=int(match[4]))


Order = tuple[Compute, ...]
Orders = dict[int, Order]
"""Rank -> its order. Ranks are numbered as the topology numbers them at tensor parallel size 1."""


class Kind(StrEnum):
    """What an instruction does; the values are DeepSpeed's instruction names, but for the weight pass."""

    LOAD_MICRO_BATCH = "LoadMicroBatch"
    FORWARD_PASS = "ForwardPass"
    BACKWARD_PASS = "BackwardPass"
    WEIGHT_PASS = "WeightPass"
    SEND_ACTIVATION = "SendActivation"
    RECV_ACTIVATION = "RecvActivation"
    SEND_GRAD = "SendGrad"
    RECV_GRAD = "RecvGrad"
    REDUCE_GRADS = "ReduceGrads"
    OPTIMIZER_STEP = "OptimizerStep"

    __hash__ = str.__hash__  # as that of Op

    @property
    def op(self) -> Op | None:
        """What a compute does; None of what is no compute."""
        return _OP_OF.get(self)

    @property
    def is_compute(self) -> bool:
        """Whether the instruction runs layers."""
        return self is Kind.FORWARD_PASS or self is Kind.BACKWARD_PASS or self is Kind.WEIGHT_PASS

    @property
    def is_send(self) -> bool:
        """Whether the instruction hands a message to a channel."""
        return self is Kind.SEND_ACTIVATION or self is Kind.SEND_GRAD

    @property
    def is_receive(self) -> bool:
        """Whether the instruction takes a message from a channel."""
        return self is Kind.RECV_ACTIVATION or self is Kind.RECV_GRAD


_OP_OF = {Kind.FORWARD_PASS: Op.FORWARD, Kind.BACKWARD_PASS: Op.BACKWARD, Kind.WEIGHT_PASS: Op.WEIGHT}

_SERVED_OP = {
    Kind.BACKWARD_PASS: Op.BACKWARD,
    Kind.SEND_GRAD: Op.BACKWARD,
    Kind.RECV_GRAD: Op.BACKWARD,
    Kind.WEIGHT_PASS: Op.WEIGHT,
}


class Flow(StrEnum):
    """What the messages of a channel are: activations go forward, gradients retrace their path."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"

    __hash__ = str.__hash__  # as for Op


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Channel:
    """One ordered stream of messages, one for each micro-batch of its domain.

    Attributes:
        domain: The domain whose messages it carries.
        boundary: Boundary `b` lies between virtual stage `b` and `b + 1`.
        flow: Activations or gradients.
        source: Rank that sends.
        destination: Rank that receives.
    """

    domain: int
    boundary: int
    flow: Flow
    source: int
    destination: int

    def __str__(self) -> str:
        """Return for example `activation over boundary 0 of domain 1, rank 0 -> rank 2`."""
        return (
            f"{self.flow.value} over boundary {self.boundary} of domain {self.domain}, "
            f"rank {self.source} -> rank {self.destination}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One thing a rank does.

    The four indices say for which compute the instruction is there: a receive serves the compute that consumes the
    message, a send the one that produced it. All of them are None for the closing reductions.

    Attributes:
        kind: What is done.
        chunk: Chunk of the virtual stage.
        virtual_stage: Index of the virtual stage.
        micro_batch: Index of the micro-batch within its domain.
        domain: Index of the domain.
        channel: The channel of a send or a receive, else None.
        serves: The compute that the instruction runs, feeds or forwards the result of; None for a closing reduction.

    Raises:
        ValueError: Some of the indices are there and some are missing.
    """

    kind: Kind
    chunk: int | None = None
    virtual_stage: int | None = None
    micro_batch: int | None = None
    domain: int | None = None
    channel: Channel | None = None
    serves: Compute | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Put the indices together once."""
        object.__setattr__(self, "serves", self._served_compute())

    def _served_compute(self) -> Compute | None:
        if self.virtual_stage is not None and self.micro_batch is not None and self.domain is not None:
            op = _SERVED_OP.get(self.kind, Op.FORWARD)
            return Compute(op=op, virtual_stage=self.virtual_stage, micro_batch=self.micro_batch, domain=self.domain)
        if self.virtual_stage is None and self.micro_batch is None and self.domain is None:
            return None
        raise ValueError(f"{self} must name a virtual stage, a micro-batch and a domain, or none of them")

    @classmethod
    def serving(
        cls, kind: Kind, compute: Compute, *, chunk: int | None, channel: Channel | None = None
    ) -> Instruction:
        """Return the instruction that runs, feeds or forwards the result of a compute.

        The same as the constructor's, several times faster: a plan has hundreds of thousands of them.

        Args:
            kind: What is done; it fits the op of the compute.
            compute: The compute.
            chunk: Chunk of its virtual stage.
            channel: The channel of a send or a receive.
        """
        made = object.__new__(cls)
        put = object.__setattr__
        put(made, "kind", kind)
        put(made, "chunk", chunk)
        put(made, "virtual_stage", compute.virtual_stage)
        put(made, "micro_batch", compute.micro_batch)
        put(made, "domain", compute.domain)
        put(made, "channel", channel)
        put(made, "serves", compute)
        return made

    @property
    def compute(self) -> Compute | None:
        """The compute that a ForwardPass, BackwardPass or WeightPass runs; None for every other kind."""
        return self.serves if self.kind.is_compute else None

    def __str__(self) -> str:
        """Return for example `SendActivation(0.3.1 boundary 0 to rank 2)`; the numbers are those of a compute."""
        if self.virtual_stage is None and self.micro_batch is None and self.domain is None:
            return self.kind.value
        place = f"{self.virtual_stage}.{self.micro_batch}.{self.domain}"
        if self.channel is None:
            return f"{self.kind.value}({place})"
        peer = f"to rank {self.channel.destination}" if self.kind.is_send else f"from rank {self.channel.source}"
        return f"{self.kind.value}({place} boundary {self.channel.boundary} {peer})"


class Key(NamedTuple):
    """What a rank keeps of a micro-batch is found by.

    Attributes:
        virtual_stage: Index of the virtual stage.
        micro_batch: Index of the micro-batch within its domain.
        domain: Index of the domain.
    """

    virtual_stage: int
    micro_batch: int
    domain: int


Planned = tuple[Kind, Any, Any]
"""An instruction as it is run: its kind, its `Key` and its `Channel`; None where it has none."""

Handler = Callable[[Any, Any], None]
"""Runs one kind of instruction; takes the key and the channel."""

Handlers = dict[Kind, Handler]
"""What runs each kind of instruction."""


def planned(instruction: Instruction) -> Planned:
    """Return an instruction as it is run."""
    virtual_stage, micro_batch, domain = instruction.virtual_stage, instruction.micro_batch, instruction.domain
    if virtual_stage is None or micro_batch is None or domain is None:
        return instruction.kind, None, None
    return instruction.kind, Key(virtual_stage, micro_batch, domain), instruction.channel
