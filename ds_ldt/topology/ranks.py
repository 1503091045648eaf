"""Who is who: ranks, coordinates, groups and peers of a job, computed from five sizes.

Stage 0 (the edge) has E data-parallel replicas, every cloud stage has D. E divides D, and replica e serves the slice
of domains e*K .. e*K+K-1, K = D/E. Ranks run edge first:

    edge    rank = e*Te + t
    cloud   rank = E*Te + ((p-1)*D + d)*Tc + t

With E = D and Te = Tc this is the rank order of DeepSpeed's own (pipe, data, model) topology. Pure arithmetic: one
process can compute every rank's view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from ds_ldt.config.rules import EDGE_STAGE, MIN_STAGES, edge_divides_cloud, is_whole
from ds_ldt.errors import ConfigError

if TYPE_CHECKING:
    from ds_ldt.config.schema import JobConfig

Site = Literal["edge", "cloud"]

_KEYS = {
    "num_stages": "number of columns of ldt.pipeline_num_layers",
    "edge_data_parallel_size": "ldt.edge.data_parallel_size",
    "cloud_data_parallel_size": "ldt.cloud.data_parallel_size",
    "edge_tensor_parallel_size": "ldt.edge.tensor_parallel_size",
    "cloud_tensor_parallel_size": "ldt.cloud.tensor_parallel_size",
}


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Coord:
    """Place of a rank.

    Attributes:
        stage: Physical stage; 0 is the edge.
        data: Replica e on the edge (0 to E-1), domain d in the cloud (0 to D-1).
        model: Tensor-parallel index within the stage's site.
    """

    stage: int
    data: int
    model: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMap:
    """The rank arithmetic of a job.

    Attributes:
        num_stages: P, the edge included.
        edge_data_parallel_size: E.
        cloud_data_parallel_size: D, a multiple of E.
        edge_tensor_parallel_size: Te.
        cloud_tensor_parallel_size: Tc; one of Te and Tc divides the other.

    Raises:
        ConfigError: A size is not a whole number >= 1, P < 2, or sizes do not divide as they must.
    """

    num_stages: int
    edge_data_parallel_size: int
    cloud_data_parallel_size: int
    edge_tensor_parallel_size: int = 1
    cloud_tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        """Check the five sizes."""
        for field in fields(self):
            value = getattr(self, field.name)
            least = MIN_STAGES if field.name == "num_stages" else 1
            if not is_whole(value, least):
                raise ConfigError.of(
                    _KEYS[field.name], found=value, expected=f"a whole number >= {least}", fix="correct the size"
                )
        problem = edge_divides_cloud(self.edge_data_parallel_size, self.cloud_data_parallel_size)
        if problem is not None:
            raise ConfigError.from_problems([problem])
        te, tc = self.edge_tensor_parallel_size, self.cloud_tensor_parallel_size
        if te % tc and tc % te:
            raise ConfigError.of(
                _KEYS["cloud_tensor_parallel_size"],
                found=tc,
                expected=f"a multiple or a divisor of ldt.edge.tensor_parallel_size = {te}",
                fix="choose sizes of which one divides the other",
            )

    @classmethod
    def from_config(cls, job: JobConfig) -> RankMap:
        """Return the rank map of a loaded configuration."""
        return cls(
            num_stages=job.num_stages,
            edge_data_parallel_size=job.ldt.edge.data_parallel_size,
            cloud_data_parallel_size=job.ldt.cloud.data_parallel_size,
            edge_tensor_parallel_size=job.ldt.edge.tensor_parallel_size,
            cloud_tensor_parallel_size=job.ldt.cloud.tensor_parallel_size,
        )

    @property
    def slice_size(self) -> int:
        """K = D/E, the number of domains that each edge replica serves."""
        return self.cloud_data_parallel_size // self.edge_data_parallel_size

    @property
    def num_edge_ranks(self) -> int:
        """E*Te."""
        return self.edge_data_parallel_size * self.edge_tensor_parallel_size

    @property
    def world_size(self) -> int:
        """E*Te + (P-1)*D*Tc."""
        cloud = (self.num_stages - 1) * self.cloud_data_parallel_size * self.cloud_tensor_parallel_size
        return self.num_edge_ranks + cloud

    def ranks(self) -> range:
        """Return all ranks."""
        return range(self.world_size)

    def data_size(self, stage: int) -> int:
        """Return the number of data coordinates of a stage: E on the edge, D in the cloud."""
        return self.edge_data_parallel_size if stage == EDGE_STAGE else self.cloud_data_parallel_size

    def model_size(self, stage: int) -> int:
        """Return the tensor-parallel size of a stage: Te on the edge, Tc in the cloud."""
        return self.edge_tensor_parallel_size if stage == EDGE_STAGE else self.cloud_tensor_parallel_size

    def coord(self, rank: int) -> Coord:
        """Return the coordinates of a rank; IndexError if it does not exist."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} does not exist: the job has ranks 0..{self.world_size - 1}")
        if rank < self.num_edge_ranks:
            data, model = divmod(rank, self.edge_tensor_parallel_size)
            return Coord(stage=EDGE_STAGE, data=data, model=model)
        worker, model = divmod(rank - self.num_edge_ranks, self.cloud_tensor_parallel_size)
        stage, data = divmod(worker, self.cloud_data_parallel_size)
        return Coord(stage=stage + 1, data=data, model=model)

    def rank(self, *, stage: int, data: int, model: int = 0) -> int:
        """Return the rank at the given coordinates; IndexError if there is none."""
        sizes = {"stage": self.num_stages}
        if 0 <= stage < self.num_stages:
            sizes.update(data=self.data_size(stage), model=self.model_size(stage))
        for (name, size), value in zip(sizes.items(), (stage, data, model), strict=False):
            if not 0 <= value < size:
                raise IndexError(f"there is no {name} {value} (stage {stage}): expected 0..{size - 1}")
        if stage == EDGE_STAGE:
            return data * self.edge_tensor_parallel_size + model
        worker = (stage - 1) * self.cloud_data_parallel_size + data
        return self.num_edge_ranks + worker * self.cloud_tensor_parallel_size + model

    def site(self, rank: int) -> Site:
        """Return the site of a rank."""
        return "edge" if self.coord(rank).stage == EDGE_STAGE else "cloud"

    @property
    def sites(self) -> tuple[Site, ...]:
        """The site of every rank."""
        return tuple(self.site(rank) for rank in self.ranks())

    def domains(self, rank: int) -> range:
        """Return the domains a rank works for: K of them on the edge, one in the cloud."""
        place = self.coord(rank)
        width = self.slice_size if place.stage == EDGE_STAGE else 1
        return range(place.data * width, (place.data + 1) * width)

    def rank_serving(self, *, stage: int, domain: int, model: int = 0) -> int:
        """Return the rank that runs `stage` for `domain`; `model` counts within that stage's site."""
        if not 0 <= domain < self.cloud_data_parallel_size:
            raise IndexError(f"there is no domain {domain}: expected 0..{self.cloud_data_parallel_size - 1}")
        data = domain // self.slice_size if stage == EDGE_STAGE else domain
        return self.rank(stage=stage, data=data, model=model)

    def data_groups(self) -> list[list[int]]:
        """Return the data-parallel groups, by (stage, model): Te groups of E ranks, (P-1)*Tc groups of D ranks."""
        return [
            [self.rank(stage=stage, data=data, model=model) for data in range(self.data_size(stage))]
            for stage in range(self.num_stages)
            for model in range(self.model_size(stage))
        ]

    def pipe_groups(self) -> list[list[int]]:
        """Return the pipelines, by (domain, cloud model index): D*Tc lists of P ranks, in which edge ranks recur."""
        return [pipeline for domain in range(self.cloud_data_parallel_size) for pipeline in self._pipelines_of(domain)]

    def model_groups(self) -> list[list[int]]:
        """Return the tensor-parallel groups, by (stage, data)."""
        return [
            [self.rank(stage=stage, data=data, model=model) for model in range(self.model_size(stage))]
            for stage in range(self.num_stages)
            for data in range(self.data_size(stage))
        ]

    def stage_leaders(self) -> list[int]:
        """Return the rank with data = 0 and model = 0 of each stage, by stage."""
        return [self.rank(stage=stage, data=0) for stage in range(self.num_stages)]

    def peers(self, rank: int, *, stages: Sequence[int] | None = None) -> list[int]:
        """Return the ranks that a rank exchanges pipeline messages with, in ascending order.

        Args:
            rank: The rank whose peers are returned.
            stages: Physical stage of each virtual stage in visiting order. Without it, each stage talks to the next
                and the last one to the edge, as where every chunk but the last holds layers on every stage.
        """
        own = self.coord(rank).stage
        visited = [*range(self.num_stages), EDGE_STAGE] if stages is None else list(stages)
        hops = set(zip(visited, visited[1:], strict=False))
        neighbours = {after for before, after in hops if before == own} | {
            before for before, after in hops if after == own
        }
        pipelines = [
            pipeline
            for domain in self.domains(rank)
            for pipeline in self._pipelines_of(domain)
            if pipeline[own] == rank
        ]
        return sorted({pipeline[stage] for pipeline in pipelines for stage in neighbours})

    def _pipelines_of(self, domain: int) -> list[list[int]]:
        """Return the pipelines of a domain, one per cloud model index, each with one rank per stage."""
        return [
            [
                self.rank_serving(stage=stage, domain=domain, model=self._model_at(stage, model))
                for stage in range(self.num_stages)
            ]
            for model in range(self.cloud_tensor_parallel_size)
        ]

    def _model_at(self, stage: int, cloud_model: int) -> int:
        """Return the model index at `stage` of the pipeline that runs through `cloud_model`."""
        return cloud_model * self.model_size(stage) // self.cloud_tensor_parallel_size
