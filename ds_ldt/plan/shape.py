"""All that a plan depends on, as plain integers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ds_ldt.config.rules import EDGE_STAGE, is_whole
from ds_ldt.errors import ConfigError
from ds_ldt.plan.instructions import Channel, Flow

if TYPE_CHECKING:
    from ds_ldt.topology.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """The shape of a split pipeline: which stage runs which virtual stage, how often, for whom.

    Two shapes that compare equal have equal plans, on every rank and every machine.

    Attributes:
        stages: Physical stage of each virtual stage; the first and the last are 0, neighbours differ.
        chunks: Chunk of each virtual stage.
        num_stages: Physical stages P, the edge included.
        num_micro_batches: Micro-batches M of each domain.
        num_domains: Domains D.
        num_replicas: Replicas E of the edge; E divides D.
        gradient_boundaries: Whether boundary `b` carries gradients, for each of the boundaries; None means all do.
            Gradients arrive from the tail, so once a boundary carries them every later one must.
        split_backward: Whether the backward of a virtual stage is asked to run in two halves, for each of them; None
            means of none. `splits` says where that is done.

    Raises:
        ConfigError: The values describe no pipeline of this kind.
    """

    stages: tuple[int, ...]
    chunks: tuple[int, ...]
    num_stages: int
    num_micro_batches: int
    num_domains: int
    num_replicas: int
    gradient_boundaries: tuple[bool, ...] | None = None
    split_backward: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse what is no pipeline."""
        _check_counts(self)
        _check_stages(self)
        _check_gradient_boundaries(self)
        if self.split_backward is not None and len(self.split_backward) != self.num_virtual_stages:
            raise ConfigError(
                f"split_backward {self.split_backward} needs one entry for each of {self.num_virtual_stages} virtual "
                "stages"
            )

    @classmethod
    def from_layout(
        cls,
        layout: Layout,
        *,
        num_micro_batches: int,
        num_domains: int,
        num_replicas: int,
        gradient_boundaries: tuple[bool, ...] | None = None,
        split_backward: bool = False,
    ) -> PipelineShape:
        """Return the shape of a layout.

        Args:
            layout: The cells and their virtual stages.
            num_micro_batches: Micro-batches M of each domain.
            num_domains: Domains D.
            num_replicas: Replicas E of the edge.
            gradient_boundaries: Which boundaries carry gradients; None means all.
            split_backward: Run the backwards of the cloud in two halves. Those of the edge stay whole: it has time to
                spare, and of the output layer it would have to keep the gradient of the logits.
        """
        return cls(
            stages=tuple(virtual_stage.stage for virtual_stage in layout.virtual_stages),
            chunks=tuple(virtual_stage.chunk for virtual_stage in layout.virtual_stages),
            num_stages=layout.num_stages,
            num_micro_batches=num_micro_batches,
            num_domains=num_domains,
            num_replicas=num_replicas,
            gradient_boundaries=gradient_boundaries,
            split_backward=tuple(virtual_stage.stage != EDGE_STAGE for virtual_stage in layout.virtual_stages)
            if split_backward
            else None,
        )

    @property
    def num_virtual_stages(self) -> int:
        """Virtual stages S."""
        return len(self.stages)

    @property
    def num_boundaries(self) -> int:
        """Boundaries, S - 1."""
        return len(self.stages) - 1

    @property
    def slice_size(self) -> int:
        """Domains K = D / E that one replica of the edge serves."""
        return self.num_domains // self.num_replicas

    @property
    def num_ranks(self) -> int:
        """Ranks at tensor parallel size 1: E of the edge, then D of each cloud stage."""
        return self.num_replicas + (self.num_stages - 1) * self.num_domains

    @property
    def one_slice(self) -> PipelineShape:
        """The shape of one edge replica with its K domains. Replicas share nothing within a step and do the same."""
        if self.num_replicas == 1:
            return self
        return replace(self, num_domains=self.slice_size, num_replicas=1)

    @property
    def is_single_pass(self) -> bool:
        """Whether a micro-batch meets each cloud stage once: edge, stages 1..P-1, edge."""
        return self.stages == (*range(self.num_stages), EDGE_STAGE)

    def rank_of(self, virtual_stage: int, domain: int) -> int:
        """Return the rank that runs a virtual stage for a domain."""
        stage = self.stages[virtual_stage]
        if stage == EDGE_STAGE:
            return domain // self.slice_size
        return self.num_replicas + (stage - 1) * self.num_domains + domain

    def stage_of(self, rank: int) -> int:
        """Return the physical stage of a rank."""
        if rank < self.num_replicas:
            return EDGE_STAGE
        return 1 + (rank - self.num_replicas) // self.num_domains

    def domains_of(self, rank: int) -> range:
        """Return the domains that a rank serves: the slice of an edge replica, the one domain of a cloud rank."""
        if rank < self.num_replicas:
            return range(rank * self.slice_size, (rank + 1) * self.slice_size)
        domain = (rank - self.num_replicas) % self.num_domains
        return range(domain, domain + 1)

    def replica_of(self, rank: int) -> int:
        """Return the edge replica in whose slice a rank is."""
        return self.domains_of(rank)[0] // self.slice_size

    def rank_in_slice(self, rank: int) -> int:
        """Return the number of a rank among those of its slice, as `one_slice` counts them."""
        stage = self.stage_of(rank)
        if stage == EDGE_STAGE:
            return 0
        return 1 + (stage - 1) * self.slice_size + self.domains_of(rank)[0] % self.slice_size

    def ranks_of_slice(self, replica: int) -> tuple[int, ...]:
        """Return the ranks of the slice of an edge replica, in the sequence of their numbers in `one_slice`."""
        domains = range(replica * self.slice_size, (replica + 1) * self.slice_size)
        cloud = (
            self.num_replicas + (stage - 1) * self.num_domains + domain
            for stage in range(1, self.num_stages)
            for domain in domains
        )
        return (replica, *cloud)

    def virtual_stages_of(self, stage: int) -> tuple[int, ...]:
        """Return the virtual stages of a physical stage, in visiting order."""
        return tuple(index for index, owner in enumerate(self.stages) if owner == stage)

    def carries_gradient(self, boundary: int) -> bool:
        """Return whether gradients cross a boundary."""
        return self.gradient_boundaries is None or self.gradient_boundaries[boundary]

    def has_gradient(self, virtual_stage: int) -> bool:
        """Return whether a gradient reaches a virtual stage: from the loss at the tail, else over its boundary."""
        return virtual_stage == self.num_boundaries or self.carries_gradient(virtual_stage)

    def splits(self, virtual_stage: int) -> bool:
        """Return whether the backward of a virtual stage runs in two halves: if asked to, and if it sends a gradient.

        Where nobody waits for the gradient of the inputs, as on the head, the backward stays whole.
        """
        asked = self.split_backward is not None and self.split_backward[virtual_stage]
        return asked and virtual_stage > 0 and self.carries_gradient(virtual_stage - 1)

    @property
    def split_stages(self) -> tuple[int, ...]:
        """The virtual stages whose backward runs in two halves."""
        return tuple(index for index in range(self.num_virtual_stages) if self.splits(index))

    def channel(self, *, boundary: int, domain: int, flow: Flow) -> Channel:
        """Return the channel over a boundary for a domain and a flow."""
        before, after = self.rank_of(boundary, domain), self.rank_of(boundary + 1, domain)
        source, destination = (before, after) if flow is Flow.ACTIVATION else (after, before)
        return Channel(domain=domain, boundary=boundary, flow=flow, source=source, destination=destination)

    def channels(self) -> dict[tuple[int, int, Flow], Channel]:
        """Return every possible channel, by (boundary, domain, flow)."""
        return {
            (boundary, domain, flow): self.channel(boundary=boundary, domain=domain, flow=flow)
            for boundary in range(self.num_boundaries)
            for domain in range(self.num_domains)
            for flow in Flow
        }

    def describe_rank(self, rank: int) -> str:
        """Return for example `rank 3 (cloud stage 1, domain 1)`."""
        if rank < self.num_replicas:
            return f"rank {rank} (edge replica {rank})"
        return f"rank {rank} (cloud stage {self.stage_of(rank)}, domain {self.domains_of(rank)[0]})"


def _check_counts(shape: PipelineShape) -> None:
    minimums = {"num_stages": 2, "num_micro_batches": 1, "num_domains": 1, "num_replicas": 1}
    for name, minimum in minimums.items():
        value = getattr(shape, name)
        if not is_whole(value, minimum):
            raise ConfigError(f"{name} is {value!r}; expected a whole number of at least {minimum}")
    if shape.num_domains % shape.num_replicas:
        raise ConfigError(
            f"num_domains is {shape.num_domains} and num_replicas is {shape.num_replicas}; every edge replica serves "
            "equally many domains, so choose a cloud data parallel size that is a multiple of the edge's"
        )


def _check_stages(shape: PipelineShape) -> None:
    stages = shape.stages
    if len(shape.chunks) != len(stages):
        raise ConfigError(f"chunks {shape.chunks} and stages {stages} must name one entry per virtual stage")
    foreign = [stage for stage in stages if not 0 <= stage < shape.num_stages]
    if foreign:
        raise ConfigError(f"stages {stages} names stage {foreign[0]}; expected 0..{shape.num_stages - 1}")
    idle = [stage for stage in range(shape.num_stages) if stage not in stages]
    if idle:
        raise ConfigError(f"stage {idle[0]} runs no virtual stage in {stages}; give it a layer or lower num_stages")
    if stages[0] != EDGE_STAGE or stages[-1] != EDGE_STAGE:
        raise ConfigError(
            f"stages {stages} must begin and end on the edge (stage 0), where the samples and labels are"
        )
    for boundary in range(len(stages) - 1):
        if stages[boundary] == stages[boundary + 1]:
            raise ConfigError(
                f"virtual stages {boundary} and {boundary + 1} are both on stage {stages[boundary]}; merge them, "
                "a boundary lies between two ranks"
            )


def _check_gradient_boundaries(shape: PipelineShape) -> None:
    carries = shape.gradient_boundaries
    if carries is None:
        return
    if len(carries) != shape.num_boundaries:
        raise ConfigError(
            f"gradient_boundaries {carries} needs one entry for each of {shape.num_boundaries} boundaries"
        )
    for boundary, (here, later) in enumerate(zip(carries, carries[1:], strict=False)):
        if here and not later:
            raise ConfigError(
                f"gradient_boundaries {carries}: boundary {boundary} carries gradients but boundary {boundary + 1}, "
                "from which they would arrive, does not"
            )
