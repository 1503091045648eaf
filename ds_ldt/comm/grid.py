"""The DeepSpeed face of the topology: ``ProcessTopology`` and ``PipelineParallelGrid`` for two unequal sites.

:mod:`ds_ldt.topology.ranks` knows which rank sits where; this module gives that knowledge the two shapes which
DeepSpeed asks for, and creates the few process groups that collectives need.
"""

from __future__ import annotations

import contextlib
from collections import namedtuple
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, ProcessTopology

from ds_ldt.comm.rendezvous import gather_in_call
from ds_ldt.errors import LinkError
from ds_ldt.topology.ranks import RankMap

_NUMBERS = count(1)


def destroy_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Destroy process groups; those that are gone already, with the world, are passed over."""
    for group in groups:
        with contextlib.suppress(ValueError):
            dist.destroy_process_group(group)


class LDTTopology(ProcessTopology):
    """A ``ProcessTopology`` in which stage 0 has E data coordinates and every other stage has D.

    It is not a cartesian product, so the ranks come from a :class:`~ds_ldt.topology.ranks.RankMap`. With E = D and
    equal tensor parallel sizes it equals DeepSpeed's ``PipeDataParallelTopology`` (or
    ``PipeModelDataParallelTopology`` where a tensor parallel size is not 1) rank by rank.

    Args:
        rank_map: sizes and rank numbering.
    """

    def __init__(self, rank_map: RankMap) -> None:
        tensor_parallel_size = max(rank_map.edge_tensor_parallel_size, rank_map.cloud_tensor_parallel_size)
        self.rank_map = rank_map
        self.axes = ["pipe", "data"]
        self.dims = [rank_map.num_stages, rank_map.cloud_data_parallel_size]
        if tensor_parallel_size > 1:
            self.axes.append("model")
            self.dims.append(tensor_parallel_size)
        coord_type: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]
        self.ProcessCoord = coord_type
        self.mapping: dict[Any, int] = {}
        for rank in range(rank_map.world_size):
            coord = rank_map.coord(rank)
            place = [coord.stage, coord.data, coord.model][: len(self.axes)]
            self.mapping[coord_type(*place)] = rank

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Rank lists along ``axis``; along ``"pipe"`` there are D of them and edge ranks recur."""
        groups = {
            "pipe": self.rank_map.pipe_groups,
            "data": self.rank_map.data_groups,
            "model": self.rank_map.model_groups,
        }
        return groups[axis]() if axis in self.axes else []


class LDTPipelineGrid(PipelineParallelGrid):
    """Process groups of this rank and the ``mpu`` interface for two sites of unequal size.

    ``get_data_parallel_world_size()`` answers the *logical* D on every rank, so that batch arithmetic agrees
    everywhere, while ``get_data_parallel_group()`` is the *physical* group of the replicas of this stage: E ranks on
    the edge, D ranks in the cloud. ``get_model_parallel_group()`` is the world; the model parallel rank and size only
    name the checkpoint slots, one per stage.

    The parent's constructor assumes a cartesian topology and creates dozens of groups, which costs 0.3-0.4 s each
    at 40 ms round trip; this one creates one per stage, one per site and one that joins the two sites, and none twice.

    Args:
        topology: where each rank sits.
        timeout_s: how long a collective may take, in seconds.

    Attributes:
        number: tells this grid from others of the same processes; the same on every rank.
    """

    def __init__(self, topology: LDTTopology, *, timeout_s: float) -> None:
        self.global_rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._topo = topology
        self.rank_map = topology.rank_map
        self.timeout_s = timeout_s
        self.number = next(_NUMBERS)
        self.data_parallel_size = self.rank_map.cloud_data_parallel_size
        self.pipe_parallel_size = self.rank_map.num_stages
        self.model_parallel_size = max(topology.get_dim("model"), 1)
        self.slice_parallel_size = self.model_parallel_size

        self.stage_id = self.get_stage_id()
        self.data_parallel_id = self.get_data_parallel_id()
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == 0
        self.p2p_groups: list[list[int]] = []

        self.ds_model_proc_group = dist.group.WORLD
        self.ds_model_world_size = self.pipe_parallel_size
        self.ds_model_rank = self.stage_id

        self._closed = False
        sites = [[r for r in range(self.world_size) if self.rank_map.site(r) == site] for site in ("edge", "cloud")]
        self.site = self.rank_map.site(self.global_rank)
        self.site_leaders = [ranks[0] for ranks in sites]
        self.dp_groups = self.rank_map.data_groups()
        self.dp_group = self._mine(self.dp_groups)
        self.site_ranks = self._mine(sites)
        self._groups = self._create_groups({"stage": self.dp_groups, "site": sites, "leaders": [self.site_leaders]})

    def _mine(self, rank_lists: Sequence[Sequence[int]]) -> list[int]:
        return next(list(ranks) for ranks in rank_lists if self.global_rank in ranks)

    def _create_groups(self, wanted: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, dist.ProcessGroup]:
        """Create a group for each list of ranks, once, on every rank in the same order.

        Args:
            wanted: what for -> lists of ranks, of which this rank is in one at most.

        Returns:
            What for -> the group that holds this rank.
        """
        timeout = timedelta(seconds=self.timeout_s)
        distinct = dict.fromkeys(tuple(ranks) for rank_lists in wanted.values() for ranks in rank_lists)
        made = {ranks: dist.new_group(list(ranks), timeout=timeout) for ranks in distinct}
        return {
            name: made[tuple(ranks)]
            for name, rank_lists in wanted.items()
            for ranks in rank_lists
            if self.global_rank in ranks
        }

    def _group(self, name: str) -> dist.ProcessGroup | None:
        """A group of this rank, None where it is in none. A closed one must not pass for None, which is the world."""
        if self._closed:
            raise LinkError(
                f"rank {self.global_rank}: the process groups of this module are closed, for its engine was "
                "destroyed. Build a new LDTPipelineModule and pass it to ds_ldt.initialize."
            )
        return self._groups.get(name)

    @property
    def dp_proc_group(self) -> dist.ProcessGroup | None:
        """The replicas of this stage."""
        return self._group("stage")

    @property
    def site_group(self) -> dist.ProcessGroup | None:
        """The ranks of this site."""
        return self._group("site")

    @property
    def leader_group(self) -> dist.ProcessGroup | None:
        """The first ranks of both sites; None on every other rank."""
        return self._group("leaders")

    @property
    def is_closed(self) -> bool:
        """True after :meth:`close`: the ranks can no longer talk through this grid."""
        return self._closed

    def close(self) -> None:
        """Destroy the groups of this rank; who asks for one afterwards gets a :class:`~ds_ldt.errors.LinkError`."""
        self._closed = True
        groups, self._groups = self._groups, {}
        destroy_groups(dict.fromkeys(groups.values()))

    def gather(self, call: str) -> None:
        """Wait until every rank of both sites has come to a call; for one that prepares its data, as long as it does.

        Args:
            call: its name, for messages.

        Raises:
            LinkError: a rank did not come within ``timeout_s``; it is named.
        """
        sites = self.rank_map.sites
        gather_in_call(dist, call=call, number=self.number, timeout_s=self.timeout_s, sites=sites)

    @property
    def domains(self) -> range:
        """The domains this rank serves: K of them on the edge, one in the cloud."""
        return self.rank_map.domains(self.global_rank)

    @property
    def num_physical_replicas(self) -> int:
        """Size of this stage's physical data parallel group: E on the edge, D in the cloud."""
        return len(self.dp_group)

    @property
    def is_site_leader(self) -> bool:
        """True for the one rank of each site that exchanges step summaries with the other site."""
        return self.global_rank in self.site_leaders

    @property
    def other_site_leader(self) -> int:
        """The first rank of the site that this rank is not of."""
        edge, cloud = self.site_leaders
        return cloud if self.site == "edge" else edge

    def get_slice_parallel_group(self) -> None:
        """There is no tensor parallel group: ``ds_ldt`` accepts tensor parallel sizes of 1 only for now."""
        return None

    def get_pipe_parallel_group(self) -> None:
        """There is no pipe group: an edge replica belongs to K pipelines, so one group per rank cannot exist."""
        return None
