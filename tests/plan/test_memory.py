"""Bytes of ranks by hand."""

from __future__ import annotations

from typing import Any

import pytest

from ds_ldt.config.schema import load_config
from ds_ldt.plan import build_plan
from ds_ldt.plan.memory import Footprint, PassBytes, Recipe, StageWeights, estimate, peak_held, recipe_of
from tests.engine.cases import config
from tests.plan.shapes import full_shape

SHAPE = full_shape(2, 2, m=8, d=2)
PLAN = build_plan(SHAPE, policy="ldt_1f1b")
FOOTPRINT = Footprint(
    weights=(StageWeights(trained=100, frozen=10, largest=40), StageWeights(trained=50, frozen=0, largest=30)),
    passes=(
        PassBytes(held=1000, forward_peak=1100, backward_peak=0),
        PassBytes(held=5000, forward_peak=5100, backward_peak=700),
        PassBytes(held=2000, forward_peak=2500, backward_peak=100),
    ),
    activation_bytes=(16, 16),
    gradient_bytes=(8, 8),
    sample_bytes=3,
)


def test_fp32_with_adam_takes_16_bytes_for_a_trained_parameter_and_4_for_a_frozen_one() -> None:
    edge, cloud, _ = estimate(
        PLAN, FOOTPRINT, Recipe(weight_bytes=4, moments=2, has_master=False, is_sharded=False), receive_window=3
    )
    assert (edge.weights, edge.gradients, edge.optimizer) == (440, 400, 800)
    assert (cloud.weights, cloud.gradients, cloud.optimizer) == (200, 200, 400)
    assert edge.closing == 2 * 4 * 40, "one replica reduces nothing; the step needs two of its largest tensor"
    assert cloud.closing == 2 * 4 * 30


def test_half_precision_shares_masters_and_moments_out_over_the_replicas_of_a_stage() -> None:
    edge, cloud, _ = estimate(
        PLAN, FOOTPRINT, Recipe(weight_bytes=2, moments=2, has_master=True, is_sharded=True), receive_window=3
    )
    assert (edge.weights, edge.gradients, edge.optimizer) == (220, 600, 1200)
    assert (cloud.weights, cloud.gradients, cloud.optimizer) == (100, 300, 600 / 2)


def test_zero_1_in_fp32_shares_moments_out_and_keeps_no_copy_of_weights_or_gradients() -> None:
    recipe = Recipe(weight_bytes=4, moments=2, has_master=False, is_sharded=True)
    edge, cloud, _ = estimate(PLAN, FOOTPRINT, recipe, receive_window=3)
    assert (edge.weights, edge.gradients, edge.optimizer) == (440, 400, 800)
    assert (cloud.weights, cloud.gradients, cloud.optimizer) == (200, 200, 400 / 2)


def test_activations_are_those_of_the_plan_at_its_fullest_and_what_is_being_computed() -> None:
    edge, cloud, other = estimate(
        PLAN, FOOTPRINT, Recipe(weight_bytes=4, moments=2, has_master=False, is_sharded=False), receive_window=3
    )
    in_flight = PLAN.peak_in_flight(1)
    assert cloud.activations == other.activations == 5000 * in_flight + 700
    # The domains of a slice take turns: in flight are all of the head and at least one of the tail.
    held = peak_held(PLAN, 0, {0: 1000, 2: 2000})
    assert 2 * 1000 * (PLAN.peak_in_flight(0) - 1) + 2000 <= held <= 2 * 3000 * PLAN.peak_in_flight(0)
    assert edge.activations == held + 500
    window = max(3, in_flight)
    assert cloud.messages == window * 16 + window * 8 + 2 * 8
    assert cloud.peak == cloud.weights + cloud.gradients + cloud.optimizer + cloud.activations + cloud.messages


def test_what_is_held_does_not_grow_with_the_number_of_micro_batches() -> None:
    few, many = (build_plan(full_shape(3, 2, m=m, d=1), policy="ldt_1f1b") for m in (8, 64))
    held = {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}
    assert [peak_held(few, rank, held) for rank in range(3)] == [peak_held(many, rank, held) for rank in range(3)]


@pytest.mark.parametrize(
    "settings, recipe",
    [
        ({}, (4, 0, False, False)),
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}, (4, 1, False, False)),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "bf16": {"enabled": True}}, (2, 2, True, True)),
        ({"optimizer": {"type": "Adam"}, "fp16": {"enabled": True}}, (2, 2, True, True)),
        ({"optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 1}}, (4, 2, False, True)),
        ({"optimizer": {"type": "Lion", "params": {"lr": 0.1}}}, (4, 1, False, False)),
    ],
)
def test_a_recipe_is_read_off_the_json(settings: dict[str, Any], recipe: tuple[int, int, bool, bool]) -> None:
    job = load_config(config([[1, 1], [1, 0]]) | settings)
    weight_bytes, moments, has_master, is_sharded = recipe
    assert recipe_of(job) == Recipe(
        weight_bytes=weight_bytes, moments=moments, has_master=has_master, is_sharded=is_sharded
    )
