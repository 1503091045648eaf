"""The rank arithmetic: DeepSpeed's own where the sites are equal, and consistent with itself where they are not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_ldt.config.schema import load_config
from ds_ldt.errors import ConfigError
from ds_ldt.topology.layout import Layout
from ds_ldt.topology.ranks import Coord, RankMap
from tests.bad_configs import changed


@st.composite
def rank_maps(draw: st.DrawFn) -> RankMap:
    edge = draw(st.integers(1, 4))
    tensor = draw(st.integers(1, 3))
    factor = draw(st.integers(1, 3))
    te, tc = draw(st.permutations((tensor, tensor * factor)))
    return RankMap(
        num_stages=draw(st.integers(2, 5)),
        edge_data_parallel_size=edge,
        cloud_data_parallel_size=edge * draw(st.integers(1, 4)),
        edge_tensor_parallel_size=te,
        cloud_tensor_parallel_size=tc,
    )


@pytest.mark.parametrize("num_stages", [2, 3, 4, 5])
@pytest.mark.parametrize("data", [1, 2, 3, 4])
@pytest.mark.parametrize("model", [1, 2, 3])
def test_equal_sites_are_numbered_and_grouped_as_in_deepspeed(num_stages: int, data: int, model: int) -> None:
    ranks = RankMap(
        num_stages=num_stages,
        edge_data_parallel_size=data,
        cloud_data_parallel_size=data,
        edge_tensor_parallel_size=model,
        cloud_tensor_parallel_size=model,
    )
    oracle = PipeModelDataParallelTopology(num_pp=num_stages, num_mp=model, num_dp=data)
    assert ranks.world_size == oracle.world_size()
    for rank in ranks.ranks():
        expected = oracle.get_coord(rank)
        assert ranks.coord(rank) == Coord(stage=expected.pipe, data=expected.data, model=expected.model)
        assert oracle.get_rank(pipe=expected.pipe, data=expected.data, model=expected.model) == ranks.rank(
            stage=expected.pipe, data=expected.data, model=expected.model
        )
    assert ranks.pipe_groups() == oracle.get_axis_comm_lists("pipe")
    assert ranks.data_groups() == oracle.get_axis_comm_lists("data")
    assert ranks.model_groups() == oracle.get_axis_comm_lists("model")
    if model == 1:
        two_axes = PipeDataParallelTopology(num_pp=num_stages, num_dp=data)
        assert ranks.pipe_groups() == two_axes.get_axis_comm_lists("pipe")
        assert ranks.data_groups() == two_axes.get_axis_comm_lists("data")


def test_one_edge_serves_two_domains() -> None:
    ranks = RankMap(num_stages=3, edge_data_parallel_size=1, cloud_data_parallel_size=2)
    assert (ranks.world_size, ranks.slice_size) == (5, 2)
    assert ranks.pipe_groups() == [[0, 1, 3], [0, 2, 4]]
    assert ranks.data_groups() == [[0], [1, 2], [3, 4]]
    assert ranks.stage_leaders() == [0, 1, 3]
    assert [ranks.rank_serving(stage=stage, domain=1) for stage in range(3)] == [0, 2, 4]
    assert [ranks.site(rank) for rank in ranks.ranks()] == ["edge", "cloud", "cloud", "cloud", "cloud"]
    assert [list(ranks.domains(rank)) for rank in ranks.ranks()] == [[0, 1], [0], [1], [0], [1]]
    assert [ranks.peers(rank) for rank in ranks.ranks()] == [[1, 2, 3, 4], [0, 3], [0, 4], [0, 1], [0, 2]]


def test_two_edge_replicas_serve_two_domains_each() -> None:
    ranks = RankMap(num_stages=2, edge_data_parallel_size=2, cloud_data_parallel_size=4)
    assert [list(ranks.domains(rank)) for rank in (0, 1)] == [[0, 1], [2, 3]]
    assert ranks.pipe_groups() == [[0, 2], [0, 3], [1, 4], [1, 5]]
    assert [ranks.peers(rank) for rank in ranks.ranks()] == [[2, 3], [4, 5], [0], [0], [1], [1]]


def test_peers_follow_the_visiting_order_of_the_layout() -> None:
    ranks = RankMap(num_stages=4, edge_data_parallel_size=1, cloud_data_parallel_size=1)
    layout = Layout.build([[1, 0, 5, 1], [0, 5, 0, 0], [1, 0, 0, 0]])
    stages = [virtual.stage for virtual in layout.virtual_stages]
    assert stages == [0, 2, 3, 1, 0]
    assert [ranks.peers(rank, stages=stages) for rank in ranks.ranks()] == [[1, 2], [0, 3], [0, 3], [1, 2]]


def test_rank_map_follows_the_config() -> None:
    job = load_config(changed({"ldt.edge.data_parallel_size": 2, "ldt.cloud.data_parallel_size": 4}))
    ranks = RankMap.from_config(job)
    assert ranks == RankMap(num_stages=3, edge_data_parallel_size=2, cloud_data_parallel_size=4)
    assert ranks.world_size == job.world_size
    assert ranks.slice_size == job.slice_size


@settings(deadline=None)
@given(ranks=rank_maps())
def test_coordinates_and_ranks_are_inverse_and_the_edge_comes_first(ranks: RankMap) -> None:
    coords = [ranks.coord(rank) for rank in ranks.ranks()]
    assert coords == sorted(coords)
    assert len(set(coords)) == ranks.world_size
    for rank, place in enumerate(coords):
        assert ranks.rank(stage=place.stage, data=place.data, model=place.model) == rank
        assert ranks.site(rank) == ("edge" if rank < ranks.num_edge_ranks else "cloud")


@settings(deadline=None)
@given(ranks=rank_maps())
def test_each_stage_of_each_domain_is_served_by_one_rank_per_model_index(ranks: RankMap) -> None:
    served: Counter[tuple[int, int, int]] = Counter()
    for rank in ranks.ranks():
        place = ranks.coord(rank)
        for domain in ranks.domains(rank):
            served[place.stage, domain, place.model] += 1
            assert ranks.rank_serving(stage=place.stage, domain=domain, model=place.model) == rank
    expected = {
        (stage, domain, model)
        for stage in range(ranks.num_stages)
        for domain in range(ranks.cloud_data_parallel_size)
        for model in range(ranks.model_size(stage))
    }
    assert set(served) == expected
    assert set(served.values()) == {1}


@settings(deadline=None)
@given(ranks=rank_maps())
def test_data_and_model_groups_partition_the_ranks(ranks: RankMap) -> None:
    for groups in (ranks.data_groups(), ranks.model_groups()):
        assert sorted(rank for group in groups for rank in group) == list(ranks.ranks())
    for group in ranks.data_groups():
        places = [ranks.coord(rank) for rank in group]
        assert len({(place.stage, place.model) for place in places}) == 1
        assert [place.data for place in places] == list(range(ranks.data_size(places[0].stage)))


@settings(deadline=None)
@given(ranks=rank_maps())
def test_pipelines_hold_one_rank_of_each_stage_and_each_cloud_rank_once(ranks: RankMap) -> None:
    groups = ranks.pipe_groups()
    assert len(groups) == ranks.cloud_data_parallel_size * ranks.cloud_tensor_parallel_size
    for group in groups:
        places = [ranks.coord(rank) for rank in group]
        assert [place.stage for place in places] == list(range(ranks.num_stages))
        assert places[1].data in ranks.domains(group[0])
    times = Counter(rank for group in groups for rank in group)
    assert {times[rank] for rank in range(ranks.num_edge_ranks, ranks.world_size)} == {1}


@settings(deadline=None)
@given(ranks=rank_maps())
def test_being_peers_is_mutual_and_within_one_pipeline(ranks: RankMap) -> None:
    pairs = {(rank, peer) for rank in ranks.ranks() for peer in ranks.peers(rank)}
    assert pairs == {(peer, rank) for rank, peer in pairs}
    together = {(one, other) for group in ranks.pipe_groups() for one in group for other in group}
    assert pairs <= together
    assert all(ranks.coord(rank).stage != ranks.coord(peer).stage for rank, peer in pairs)


@settings(deadline=None)
@given(ranks=rank_maps())
def test_leaders_are_the_first_rank_of_each_stage(ranks: RankMap) -> None:
    leaders = ranks.stage_leaders()
    assert [ranks.coord(rank) for rank in leaders] == [
        Coord(stage=stage, data=0, model=0) for stage in range(ranks.num_stages)
    ]


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"edge_data_parallel_size": 2, "cloud_data_parallel_size": 3}, "found 2, expected a divisor of ldt.cloud"),
        ({"edge_data_parallel_size": 4, "cloud_data_parallel_size": 2}, "found 4, expected a divisor of ldt.cloud"),
        ({"num_stages": 1}, "number of columns of ldt.pipeline_num_layers: found 1, expected a whole number >= 2"),
        ({"edge_data_parallel_size": 0}, "ldt.edge.data_parallel_size: found 0, expected a whole number >= 1"),
        ({"cloud_data_parallel_size": True}, "ldt.cloud.data_parallel_size: found true, expected a whole number"),
        (
            {"edge_tensor_parallel_size": 2, "cloud_tensor_parallel_size": 3},
            "found 3, expected a multiple or a divisor",
        ),
    ],
)
def test_sizes_that_make_no_job_are_refused(sizes: dict[str, Any], message: str) -> None:
    base = {"num_stages": 2, "edge_data_parallel_size": 1, "cloud_data_parallel_size": 1}
    with pytest.raises(ConfigError, match=message):
        RankMap(**(base | sizes))


def test_ranks_and_coordinates_outside_the_job_are_refused() -> None:
    ranks = RankMap(num_stages=2, edge_data_parallel_size=1, cloud_data_parallel_size=2)
    for rank in (-1, 3):
        with pytest.raises(IndexError, match=rf"rank {rank} does not exist: the job has ranks 0..2"):
            ranks.coord(rank)
    for place in ({"stage": 2, "data": 0}, {"stage": 0, "data": 1}, {"stage": 1, "data": 0, "model": 1}):
        with pytest.raises(IndexError, match="there is no"):
            ranks.rank(**place)
    with pytest.raises(IndexError, match="there is no domain 2: expected 0..1"):
        ranks.rank_serving(stage=1, domain=2)
