"""The topology as DeepSpeed sees it."""

from __future__ import annotations

import itertools

import pytest
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology

from ds_ldt.comm.grid import LDTPipelineGrid, LDTTopology
from ds_ldt.topology.ranks import RankMap


def topology(num_stages: int, replicas: int, domains: int, tensor: int = 1) -> LDTTopology:
    return LDTTopology(
        RankMap(
            num_stages=num_stages,
            edge_data_parallel_size=replicas,
            cloud_data_parallel_size=domains,
            edge_tensor_parallel_size=tensor,
            cloud_tensor_parallel_size=tensor,
        )
    )


@pytest.mark.parametrize("sizes", list(itertools.product((2, 3, 4), (1, 2, 4))))
@pytest.mark.parametrize("tensor", [1, 2])
def test_with_equal_sites_it_equals_deepspeeds_topology_rank_by_rank(sizes: tuple[int, int], tensor: int) -> None:
    stages, width = sizes
    ours = topology(stages, width, width, tensor)
    stock = (
        PipeDataParallelTopology(num_pp=stages, num_dp=width)
        if tensor == 1
        else PipeModelDataParallelTopology(num_pp=stages, num_mp=tensor, num_dp=width)
    )
    assert ours.get_axis_names() == stock.get_axis_names()
    assert ours.world_size() == stock.world_size()
    for axis in ("pipe", "data", "model"):
        assert ours.get_dim(axis) == stock.get_dim(axis)
        assert ours.get_axis_comm_lists(axis) == stock.get_axis_comm_lists(axis)
    for rank in range(stock.world_size()):
        assert ours.get_coord(rank)._asdict() == stock.get_coord(rank)._asdict()
        assert ours.get_rank_repr(rank) == stock.get_rank_repr(rank)
        assert ours.get_rank(**stock.get_coord(rank)._asdict()) == rank
    for stage in range(stages):
        assert ours.get_axis_list("pipe", stage) == stock.get_axis_list("pipe", stage)
        assert ours.filter_match(pipe=stage) == stock.filter_match(pipe=stage)


def test_with_unequal_sites_edge_ranks_recur_along_the_pipe() -> None:
    ours = topology(3, 1, 2)
    assert ours.world_size() == 5
    assert ours.get_axis_comm_lists("pipe") == [[0, 1, 3], [0, 2, 4]]
    assert ours.get_axis_comm_lists("data") == [[0], [1, 2], [3, 4]]
    assert ours.get_axis_comm_lists("model") == []
    assert ours.get_dim("data") == 2
    assert [tuple(ours.get_coord(rank)) for rank in range(5)] == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize(
    "sizes, groups",
    [
        ((2, 1, 2), [[0], [1, 2], [0, 1]]),
        ((2, 1, 1), [[0], [1], [0, 1]]),
        ((3, 1, 2), [[0], [1, 2], [3, 4], [1, 2, 3, 4], [0, 1]]),
    ],
)
def test_every_rank_creates_the_same_groups_and_none_twice(
    sizes: tuple[int, int, int], groups: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group costs some round trips, and has threads of its own."""
    topo = topology(*sizes)
    rank_map = topo.rank_map
    for rank in range(topo.world_size()):
        made: list[list[int]] = []
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(dist, "get_world_size", topo.world_size)
        monkeypatch.setattr(dist, "new_group", lambda ranks, timeout, made=made: made.append(ranks) or tuple(ranks))
        grid = LDTPipelineGrid(topo, timeout_s=9)
        assert made == groups
        assert grid.dp_proc_group == tuple(grid.dp_group) == tuple(rank_map.data_groups()[grid.stage_id])
        assert grid.site_group == tuple(grid.site_ranks)
        assert rank in grid.site_ranks
        assert {rank_map.site(other) for other in grid.site_ranks} == {grid.site}
        assert grid.leader_group == (tuple(grid.site_leaders) if rank in grid.site_leaders else None)
