"""What the computes and the messages of a plan cost: the input of the simulator, the bound and the policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace

from ds_ldt.config.rules import EDGE_STAGE
from ds_ldt.plan.instructions import Compute, Op
from ds_ldt.plan.shape import PipelineShape

Cell = tuple[int, int]
"""(chunk, stage) of a virtual stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of every compute and of every message. Immutable and hashable: part of what a plan is made from.

    Unless `hop_latency` says otherwise only hops that touch the edge cost anything: the cloud's own network is taken
    as free next to the link.

    Attributes:
        forward: (chunk, stage) of a virtual stage -> seconds of one forward.
        backward_ratio: Seconds of a backward over those of the forward. A virtual stage that no gradient reaches
            has nothing to do in its backward, which then costs nothing.
        backward: (chunk, stage) -> seconds of one backward, where it is known better than by the ratio.
        weight_share: The part of a backward that its weight gradients take, 0 to 1, where it is split. The gradients
            of inputs and of weights take about as long as each other.
        latency: One-way seconds of a hop that touches the edge.
        bandwidth: Bytes per second of an edge replica, for each direction; None means unlimited. All messages that
            the replica sends share it, and so do all that it receives.
        message_bytes: Bytes of one activation or gradient message.
        hop_latency: Boundary -> one-way seconds of its hops, in place of `latency` (or of 0 inside the cloud).
        hop_bytes: Boundary -> bytes of one of its messages, in place of `message_bytes`.

    Raises:
        ValueError: A cost is negative or no number, which would let time run backwards, or a share is above 1.
    """

    forward: Mapping[Cell, float]
    backward_ratio: float = 2.0
    backward: Mapping[Cell, float] = field(default_factory=dict)
    latency: float = 0.0
    bandwidth: float | None = None
    message_bytes: int = 0
    hop_latency: Mapping[int, float] = field(default_factory=dict)
    hop_bytes: Mapping[int, int] = field(default_factory=dict)
    weight_share: float = 0.5

    def __post_init__(self) -> None:
        """Copy the mappings, so that nobody changes them, and refuse negative costs."""
        for name in ("forward", "backward", "hop_latency", "hop_bytes"):
            object.__setattr__(self, name, dict(getattr(self, name)))
        for label, value in self._numbers():
            if not 0 <= value < float("inf"):
                raise ValueError(f"{label} is {value}; expected a number of at least 0")
        if self.weight_share > 1:
            raise ValueError(f"weight_share is {self.weight_share}; expected a part, 0 to 1")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise ValueError(
                f"bandwidth is {self.bandwidth}; expected bytes per second above 0, or None for unlimited"
            )

    def _numbers(self) -> Iterator[tuple[str, float]]:
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, Mapping):
                yield from ((f"{one.name}[{key}]", item) for key, item in value.items())
            elif one.name != "bandwidth":
                yield one.name, value

    def __hash__(self) -> int:
        """Hash the values, in an order that does not depend on how the mappings were made."""
        values = (getattr(self, one.name) for one in fields(self))
        return hash(tuple(tuple(sorted(value.items())) if isinstance(value, Mapping) else value for value in values))

    @classmethod
    def uniform(
        cls,
        shape: PipelineShape,
        *,
        edge: float,
        cloud: float = 1.0,
        backward_ratio: float = 2.0,
        latency: float = 0.0,
        bandwidth: float | None = None,
        message_bytes: int = 0,
    ) -> Costs:
        """Return costs in which all virtual stages of a site cost the same.

        Args:
            shape: The shape whose virtual stages get a cost.
            edge: Seconds of one forward of one virtual stage on the edge.
            cloud: Seconds of one forward of one virtual stage in the cloud.
            backward_ratio: See `Costs`.
            latency: See `Costs`.
            bandwidth: See `Costs`.
            message_bytes: See `Costs`.
        """
        cells = zip(shape.chunks, shape.stages, strict=True)
        return cls(
            forward={(chunk, stage): edge if stage == EDGE_STAGE else cloud for chunk, stage in cells},
            backward_ratio=backward_ratio,
            latency=latency,
            bandwidth=bandwidth,
            message_bytes=message_bytes,
        )

    def with_margin(self, factor: float) -> Costs:
        """Return costs with latencies that many times as long, to plan for a link that is not always at its best.

        Too high a latency costs memory only, too low a one costs time: plan for a high percentile.

        Args:
            factor: At least 1.
        """
        longer = {boundary: seconds * factor for boundary, seconds in self.hop_latency.items()}
        return replace(self, latency=self.latency * factor, hop_latency=longer)

    def seconds(self, compute: Compute, shape: PipelineShape) -> float:
        """Return the seconds that a compute keeps its rank busy."""
        cell = shape.chunks[compute.virtual_stage], shape.stages[compute.virtual_stage]
        if compute.op is Op.FORWARD:
            return self.forward[cell]
        if not shape.has_gradient(compute.virtual_stage):
            return 0.0
        known = self.backward.get(cell)
        whole = self.forward[cell] * self.backward_ratio if known is None else known
        if not shape.splits(compute.virtual_stage):
            return whole
        return whole * (self.weight_share if compute.op is Op.WEIGHT else 1 - self.weight_share)

    def bytes_over(self, boundary: int) -> int:
        """Return the bytes of one message over a boundary."""
        return self.hop_bytes.get(boundary, self.message_bytes)

    def transfer_seconds(self, boundary: int) -> float:
        """Return the seconds for which a message over a boundary occupies its direction of the link."""
        return 0.0 if self.bandwidth is None else self.bytes_over(boundary) / self.bandwidth

    def latency_seconds(self, boundary: int, shape: PipelineShape) -> float:
        """Return the seconds that a message over a boundary travels after it has left."""
        return self.hop_latency.get(boundary, self.latency if touches_edge(boundary, shape) else 0.0)

    def hop_seconds(self, boundary: int, shape: PipelineShape) -> float:
        """Return the seconds from the end of a compute to the arrival of its message on an unloaded link."""
        transfer = self.transfer_seconds(boundary) if touches_edge(boundary, shape) else 0.0
        return transfer + self.latency_seconds(boundary, shape)


def touches_edge(boundary: int, shape: PipelineShape) -> bool:
    """Return whether the messages over a boundary cross the link between the sites."""
    return EDGE_STAGE in (shape.stages[boundary], shape.stages[boundary + 1])
