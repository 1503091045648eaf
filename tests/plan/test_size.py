"""Steps that are too large are refused, and all others are planned within seconds."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from ds_ldt.errors import ConfigError
from ds_ldt.plan import Costs, PipelineShape, build_plan, lower_bound
from ds_ldt.plan.simulate import simulate_slice
from ds_ldt.plan.size import MOST_COMPUTES, check_size, for_search, num_computes
from tests.plan.shapes import full_shape, split

LARGEST = MOST_COMPUTES // 8  # micro-batches of four virtual stages and one domain


def hints(shape: PipelineShape) -> Costs:
    """What the defaults of the configuration say of four layers on a cloud stage."""
    return Costs.uniform(shape, edge=0.002, cloud=0.008, latency=0.02, bandwidth=1.25e8, message_bytes=10**6)


@pytest.mark.parametrize("policy", ["ldt_1f1b", "closed_form", "greedy", "auto"])
def test_S91_one_micro_batch_too_many_is_refused_with_the_limit(policy: str) -> None:
    shape = full_shape(3, 2, m=LARGEST + 1)
    with pytest.raises(ConfigError) as caught:
        build_plan(shape, policy=policy)
    text = str(caught.value)
    assert f"gradient_accumulation_steps: found {LARGEST + 1}, expected at most {LARGEST}" in text
    assert "4 virtual stages, 1 domains of an edge replica" in text
    assert "raise train_micro_batch_size_per_gpu instead" in text
    check_size(replace(shape, num_micro_batches=LARGEST))


def test_S91_an_evaluation_has_a_limit_of_its_own() -> None:
    shape = full_shape(3, 2, m=2 * LARGEST)
    check_size(shape, training=False)
    with pytest.raises(ConfigError, match="num_micro_batches of an evaluation: found .* evaluate in several calls"):
        build_plan(replace(shape, num_micro_batches=2 * LARGEST + 1), training=False)


def test_S91_replicas_count_once_and_the_domains_of_each_count() -> None:
    shape = full_shape(3, 2, m=LARGEST, d=64, e=64)
    check_size(shape)
    with pytest.raises(ConfigError, match=f"at most {LARGEST // 2} here.*or raise ldt.edge.data_parallel_size"):
        check_size(replace(shape, num_replicas=32))


def test_S91_more_domains_than_one_edge_replica_can_be_planned_for() -> None:
    with pytest.raises(ConfigError, match="ldt.cloud.data_parallel_size: found 50000, expected at most 25000 domains"):
        check_size(full_shape(3, 2, m=1, d=50_000))


def test_S91_halves_of_backwards_count() -> None:
    whole = full_shape(3, 2, m=10)
    halves = split(whole)
    assert num_computes(halves) == num_computes(whole) + 2 * 10
    # The same, whatever is trained: it is asked before that is known.
    assert num_computes(replace(halves, gradient_boundaries=(False, False, True))) == num_computes(halves)


@pytest.mark.parametrize(
    "shape",
    [
        full_shape(3, 2, m=4096, d=2),
        full_shape(3, 3, m=2500, d=2),
        split(full_shape(3, 2, m=4096)),
        full_shape(16, 2, m=128, d=512, e=64),
    ],
    ids=["two domains", "three chunks", "split", "512 domains"],
)
def test_S91_a_long_step_is_planned_within_seconds_and_as_well_as_a_short_one(shape: PipelineShape) -> None:
    costs = hints(shape)
    began = time.process_time()
    plan = build_plan(shape, policy="auto", costs=costs)
    seconds = time.process_time() - began
    assert lower_bound(shape, costs) / simulate_slice(plan, costs).makespan >= 0.99
    assert seconds < 12  # 1 to 4 on an idle core; the machines that test are busy


def test_a_search_is_shorter_only_where_a_step_is_long_and_never_too_short_for_the_depth() -> None:
    short, long = full_shape(3, 2, m=512, d=2), full_shape(3, 2, m=10_000)
    assert for_search(short, deepest=20) is short
    assert for_search(long, deepest=20).num_micro_batches == 5000
    assert for_search(long, deepest=2000).num_micro_batches == 8000
    assert for_search(long, deepest=2500) is long
    assert for_search(split(long), deepest=20).num_micro_batches == 2000


def test_a_long_step_gets_the_depth_of_a_shorter_one() -> None:
    """What is found by fewer micro-batches is played with all of them."""
    for name in ("closed_form", "greedy"):
        peaks = []
        for m in (2500, 4000):
            shape = full_shape(3, 2, m=m, d=2)
            assert for_search(shape, deepest=20).num_micro_batches == 2500
            plan = build_plan(shape, policy=name, costs=hints(shape))
            peaks.append([plan.peak_in_flight(rank) for rank in range(shape.num_ranks)])
        assert peaks[0] == peaks[1]
