from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from ds_ldt.errors import ConfigError
from ds_ldt.plan import Flow, PipelineShape
from ds_ldt.topology.ranks import RankMap
from tests.plan.shapes import full_shape, shape_of, shapes

U = full_shape(3, 2, m=4, d=2)


@given(shape=shapes())
def test_ranks_are_those_of_the_topology(shape: PipelineShape) -> None:
    ranks = RankMap(
        num_stages=shape.num_stages,
        edge_data_parallel_size=shape.num_replicas,
        cloud_data_parallel_size=shape.num_domains,
    )
    assert shape.num_ranks == ranks.world_size
    for rank in range(shape.num_ranks):
        assert shape.stage_of(rank) == ranks.coord(rank).stage
        assert list(shape.domains_of(rank)) == list(ranks.domains(rank))
    for domain in range(shape.num_domains):
        for virtual_stage, stage in enumerate(shape.stages):
            assert shape.rank_of(virtual_stage, domain) == ranks.rank_serving(stage=stage, domain=domain)


def test_a_channel_runs_forward_for_activations_and_back_for_gradients() -> None:
    forth = U.channel(boundary=0, domain=1, flow=Flow.ACTIVATION)
    back = U.channel(boundary=0, domain=1, flow=Flow.GRADIENT)
    assert (forth.source, forth.destination) == (0, 2)
    assert (back.source, back.destination) == (2, 0)


def test_equal_shapes_are_one_key() -> None:
    assert len({U, full_shape(3, 2, m=4, d=2)}) == 1
    assert replace(U, num_micro_batches=5) != U


def test_empty_middle_cells_leave_a_single_pass() -> None:
    assert shape_of([[2, 1, 1], [0, 0, 0], [1, 0, 0]], m=1).is_single_pass
    assert not full_shape(3, 3, m=1).is_single_pass


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_micro_batches": 0}, "num_micro_batches is 0"),
        ({"num_micro_batches": True}, "num_micro_batches is True"),
        ({"num_domains": 3, "num_replicas": 2}, "multiple of the edge's"),
        ({"chunks": (0, 0, 0)}, "one entry per virtual stage"),
        ({"stages": (0, 1, 3, 0)}, "names stage 3"),
        ({"stages": (1, 2, 0, 1)}, "begin and end on the edge"),
        ({"stages": (0, 1, 2, 2, 0), "chunks": (0, 0, 0, 1, 1)}, "virtual stages 2 and 3 are both on stage 2"),
        ({"gradient_boundaries": (True,)}, "each of 3 boundaries"),
        ({"gradient_boundaries": (True, False, True)}, "boundary 0 carries gradients but boundary 1"),
    ],
)
def test_what_is_no_pipeline_is_refused_with_its_numbers(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(U, **change)


def test_S45_a_stage_without_layers_is_named() -> None:
    with pytest.raises(ConfigError, match="stage 2 runs no virtual stage"):
        replace(U, stages=(0, 1, 0), chunks=(0, 0, 1))
