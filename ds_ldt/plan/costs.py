"""What the computes and the messages of a plan cost: the input of the simulator, the bound and the list scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_ldt.plan.instructions import Compute, Op
from ds_ldt.plan.shape import EDGE_STAGE, PipelineShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of every compute and of every message.

    Only hops that touch the edge cost anything: the cloud's own network is taken as free next to the link.

    Attributes:
        forward: (chunk, stage) of a virtual stage -> seconds of one forward.
        backward_ratio: Seconds of a backward over those of the forward. A virtual stage that no gradient reaches
            has nothing to do in its backward, which then costs nothing.
        latency: One-way seconds of a hop that touches the edge.
        bandwidth: Bytes per second of an edge replica, for each direction; None means unlimited. All messages that
            the replica sends share it, and so do all that it receives.
        message_bytes: Bytes of one activation or gradient message.
    """

    forward: Mapping[tuple[int, int], float]
    backward_ratio: float = 2.0
    latency: float = 0.0
    bandwidth: float | None = None
    message_bytes: int = 0

    def __post_init__(self) -> None:
        """Refuse negative costs, which would let time run backwards."""
        numbers = {"backward_ratio": self.backward_ratio, "latency": self.latency, "message_bytes": self.message_bytes}
        numbers |= {f"forward[{cell}]": seconds for cell, seconds in self.forward.items()}
        for name, value in numbers.items():
            if not value >= 0:
                raise ValueError(f"{name} is {value}; expected a number of at least 0")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise ValueError(
                f"bandwidth is {self.bandwidth}; expected bytes per second above 0, or None for unlimited"
            )

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

    def seconds(self, compute: Compute, shape: PipelineShape) -> float:
        """Return the seconds that a compute keeps its rank busy."""
        virtual_stage = compute.virtual_stage
        forward = self.forward[shape.chunks[virtual_stage], shape.stages[virtual_stage]]
        if compute.op is Op.FORWARD:
            return forward
        return forward * self.backward_ratio if shape.has_gradient(virtual_stage) else 0.0

    @property
    def transfer_seconds(self) -> float:
        """Seconds for which one message occupies its direction of the link."""
        return 0.0 if self.bandwidth is None else self.message_bytes / self.bandwidth

    def hop_seconds(self, boundary: int, shape: PipelineShape) -> float:
        """Return the seconds from the end of a compute to the arrival of its message on an unloaded link."""
        return self.latency + self.transfer_seconds if touches_edge(boundary, shape) else 0.0


def touches_edge(boundary: int, shape: PipelineShape) -> bool:
    """Return whether the messages over a boundary cross the link between the sites."""
    return EDGE_STAGE in (shape.stages[boundary], shape.stages[boundary + 1])
