"""Bytes of a rank, from a plan and what is known of a model. Arithmetic only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ds_ldt.config.deepspeed_settings import precision, shards_optimizer
from ds_ldt.config.rules import EDGE_STAGE
from ds_ldt.plan.instructions import Flow, Op
from ds_ldt.plan.plan import Plan
from ds_ldt.plan.shape import PipelineShape

if TYPE_CHECKING:
    from ds_ldt.config.schema import JobConfig

_FP32, _HALF = 4, 2
_MOMENTS = {"sgd": 0, "lion": 1, "adagrad": 1, "muon": 1}
"""Numbers per parameter that an optimizer keeps; those of the Adam kind keep two."""
_ADAM_MOMENTS = 2
_STEP_TENSORS = 2
"""Temporary tensors of the size of a parameter in the step of an optimizer of the Adam kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a parameter costs beside its activations.

    Attributes:
        weight_bytes: Bytes of a weight as layers compute with it.
        moments: fp32 numbers per trained parameter that the optimizer keeps.
        has_master: Whether there are fp32 copies of weights and an fp32 accumulator of gradients besides, as in half
            precision. In fp32 weights and gradients are their own.
        is_sharded: Whether copies and moments are flat buffers that are shared out over the replicas of a stage.
    """

    weight_bytes: int
    moments: int
    has_master: bool
    is_sharded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWeights:
    """Numbers of the parameters of a stage: those that are trained, those that are not, the largest trained tensor."""

    trained: int
    frozen: int
    largest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PassBytes:
    """Bytes of one micro-batch of one domain on a virtual stage.

    Attributes:
        held: Kept from its forward to its backward.
        forward_peak: The most that its forward takes at once, what it keeps and its input included.
        backward_peak: The most that its backward takes at once beyond what was kept and beyond gradients of weights.
    """

    held: float
    forward_peak: float = 0.0
    backward_peak: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What is known of a model.

    Attributes:
        weights: Of each stage.
        passes: Of each virtual stage.
        activation_bytes: Of a message over each boundary.
        gradient_bytes: Of a message back over each boundary.
        sample_bytes: Of a micro-batch as the edge draws it.
        warning: What the model was not made for; None if nothing.
    """

    weights: tuple[StageWeights, ...]
    passes: tuple[PassBytes, ...]
    activation_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    sample_bytes: int
    warning: str | None = None

    @property
    def gradient_boundaries(self) -> tuple[bool, ...]:
        """Whether gradients cross each boundary."""
        return tuple(size > 0 for size in self.gradient_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one rank.

    Attributes:
        rank: The rank.
        weights: Of its parameters.
        gradients: Of their gradients, with fp32 accumulators.
        optimizer: Of the optimizer's state, with fp32 copies of weights.
        activations: The most of what is in flight and being computed at once.
        messages: Of receives that are posted, gradients on their way, and micro-batches drawn ahead.
        closing: Of temporary tensors when a step closes, with nothing in flight.
    """

    rank: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    messages: float
    closing: float

    @property
    def peak(self) -> float:
        """The most at once."""
        return self.weights + self.gradients + self.optimizer + max(self.activations + self.messages, self.closing)

    def document(self) -> dict[str, float]:
        """Return it as JSON would have it, in whole bytes."""
        names = ("weights", "gradients", "optimizer", "activations", "messages", "closing", "peak")
        return {name: round(getattr(self, name)) for name in names}


def recipe_of(job: JobConfig) -> Recipe:
    """Return what a configuration says of precision, optimizer and ZeRO.

    Args:
        job: The configuration.
    """
    settings = job.deepspeed
    optimizer: Mapping[str, Any] = settings.get("optimizer", {})
    name = str(optimizer.get("type", "")).lower()
    moments = next((count for known, count in _MOMENTS.items() if known in name), _ADAM_MOMENTS)
    if name == "sgd" and optimizer.get("params", {}).get("momentum"):
        moments = 1
    half = precision(settings) != "fp32"
    return Recipe(
        weight_bytes=_HALF if half else _FP32,
        moments=moments,
        has_master=half,
        is_sharded=shards_optimizer(settings),
    )


def estimate(plan: Plan, footprint: Footprint, recipe: Recipe, *, receive_window: int) -> tuple[RankMemory, ...]:
    """Return the bytes of every rank of a training plan.

    Args:
        plan: The plan.
        footprint: What is known of the model.
        recipe: What a parameter costs.
        receive_window: The fewest receives of a channel that are posted ahead (P + 1).
    """
    shape = plan.shape
    of_one = [_rank_memory(plan, rank, footprint, recipe, receive_window) for rank in shape.ranks_of_slice(0)]
    return tuple(replace(of_one[shape.rank_in_slice(rank)], rank=rank) for rank in range(shape.num_ranks))


def _rank_memory(plan: Plan, rank: int, footprint: Footprint, recipe: Recipe, receive_window: int) -> RankMemory:
    shape = plan.shape
    stage = shape.stage_of(rank)
    weights, replicas = footprint.weights[stage], replicas_of(shape, stage)
    window = min(max(receive_window, plan.peak_in_flight(rank)), shape.num_micro_batches)
    messages = float(footprint.sample_bytes * shape.num_micro_batches * shape.slice_size * (stage == EDGE_STAGE))
    named = {instruction.channel for instruction in plan.row_of(rank) if instruction.channel is not None}
    for channel in named:
        sizes = footprint.activation_bytes if channel.flow is Flow.ACTIVATION else footprint.gradient_bytes
        if channel.destination == shape.rank_in_slice(rank):
            messages += window * sizes[channel.boundary]
        if channel.flow is Flow.GRADIENT:  # one that is being taken or given
            messages += sizes[channel.boundary]
    state = _FP32 * weights.trained * (recipe.moments + recipe.has_master)
    flat = weights.trained / replicas if recipe.is_sharded else weights.largest
    return RankMemory(
        rank=rank,
        weights=recipe.weight_bytes * (weights.trained + weights.frozen),
        gradients=(recipe.weight_bytes + _FP32 * recipe.has_master) * weights.trained,
        optimizer=state / (replicas if recipe.is_sharded else 1),
        activations=_peak(plan, rank, footprint.passes),
        messages=messages,
        closing=max(_STEP_TENSORS * _FP32 * flat, _FP32 * weights.trained * (replicas > 1)),
    )


def replicas_of(shape: PipelineShape, stage: int) -> int:
    """Return over how many ranks the states of a stage are shared out: E on the edge, D in the cloud."""
    return shape.num_replicas if stage == EDGE_STAGE else shape.num_domains


def peak_held(plan: Plan, rank: int, held: Mapping[int, float]) -> float:
    """Return the most bytes that the micro-batches in flight on a rank take at once.

    Args:
        plan: The plan.
        rank: The rank.
        held: Virtual stage of the rank -> bytes that it holds of one micro-batch of one domain.
    """
    return max((now + size for op, now, size in _walk(plan, rank, held) if op is Op.FORWARD), default=0.0)


def _peak(plan: Plan, rank: int, passes: tuple[PassBytes, ...]) -> float:
    stages = {stage: passes[stage].held for stage in plan.shape.virtual_stages_of(plan.shape.stage_of(rank))}
    forward = max(passes[stage].forward_peak - held for stage, held in stages.items())
    backward = max(passes[stage].backward_peak for stage in stages)
    in_flight = max((now + size for op, now, size in _walk(plan, rank, stages) if op is Op.FORWARD), default=0.0)
    return in_flight + max(forward, backward, 0.0)


def _walk(plan: Plan, rank: int, held: Mapping[int, float]) -> Iterator[tuple[Op, float, float]]:
    """Yield for each compute of a rank what is held when it begins, and what it holds of its micro-batch.

    A virtual stage holds a micro-batch from its forward to the end of its backward, of both halves if it is split.
    """
    now = 0.0
    for instruction in plan.row_of(rank):
        compute = instruction.compute
        if compute is None:
            continue
        stage = compute.virtual_stage
        yield compute.op, now, held[stage]
        if compute.op is Op.FORWARD:
            now += held[stage]
        elif compute.op is (Op.WEIGHT if plan.shape.splits(stage) else Op.BACKWARD):
            now -= held[stage]
