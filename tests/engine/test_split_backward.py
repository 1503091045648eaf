"""Training with backwards in two halves equals unsplit training, and the second half is really late."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.cases import config, layout
from tests.engine.parity import assert_parity, oracle
from tests.engine.test_behaviour import tied_oracle
from tests.harness import GroupPool

STEPS = 2


def halves(matrix: list[list[int]], **options: Any) -> dict[str, Any]:
    """A configuration for a far link, so that weight gradients of several micro-batches are owed at once."""
    schedule = {"split_backward": True, "policy": options.pop("policy", "greedy"), "layer_forward_ms": 20}
    return config(matrix, ldt={"schedule": schedule}, **options)


def train(groups: GroupPool, world_size: int, runs: list[tuple[str, dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    target = "tests.engine.split_backward:train_all"
    ranks = groups.run(world_size, target, [(kind, settings, STEPS) for kind, settings in runs], deadline_s=150)
    return [[rank[number] for rank in ranks] for number in range(len(runs))]


def is_late(order: list[str]) -> bool:
    """Whether something stands between a backward and its weight gradients."""
    return any(
        one[0] == "B" and f"W{one[1:]}" in order and after != f"W{one[1:]}"
        for one, after in zip(order, order[1:], strict=False)
    )


def test_three_ranks_train_as_one(groups: GroupPool) -> None:
    plain = halves([[1, 4, 4], [1, 0, 0]], num_micro_batches=8, gradient_clipping=0.1)
    chunks = halves(layout(3, 3), num_micro_batches=4, optimizer="AdamW")
    domains = halves(layout(2, 2), num_domains=2, policy="closed_form")
    kept = [
        halves(layout(3, 3), pipeline={"activation_checkpoint_interval": 1, "use_reentrant": reentrant})
        for reentrant in (False, True)
    ]
    tied = halves([[2, 2], [2, 0]], num_domains=2, optimizer="AdamW", gradient_clipping=0.1)
    runs = [("toy", settings) for settings in (plain, chunks, domains, *kept)] + [("tied", tied)]
    found = train(groups, 3, [*runs, ("forgetful", plain)])
    for (kind, settings), ranks in zip(runs, found, strict=False):
        expected = tied_oracle(settings, STEPS) if kind == "tied" else oracle(settings, STEPS)
        assert_parity(ranks, expected, settings["optimizer"]["type"])
        assert ranks[0]["made"] == 0, "the edge keeps whole backwards"
        for rank in ranks[1:]:  # a layer is a linear one, with at most a norm, and runs once for each micro-batch
            num_linear = sum(row[rank["stage"]] for row in settings["ldt"]["pipeline_num_layers"])
            assert rank["made"] == num_linear * settings["gradient_accumulation_steps"]
        assert all(rank["left"] == 0 for rank in ranks)
    assert all(is_late(rank["order"]) for rank in found[0][1:])
    with pytest.raises(AssertionError, match=r"loss|norm|w_ref"):
        assert_parity(found[-1], oracle(plain, STEPS), "SGD")


def test_two_domains_of_two_cloud_stages_train_as_one(groups: GroupPool) -> None:
    settings = halves(layout(3, 2), num_domains=2, num_micro_batches=6, gradient_clipping=0.1, policy="auto")
    (ranks,) = train(groups, 5, [("toy", settings)])
    assert_parity(ranks, oracle(settings, STEPS), "SGD")
    assert [rank["made"] for rank in ranks] == [0, 6, 6, 6, 6]


def test_bf16_and_frozen_weights_train_as_with_whole_backwards(groups: GroupPool) -> None:
    def settings(split: bool, **options: Any) -> dict[str, Any]:
        made = halves(layout(3, 2), num_micro_batches=6, gradient_clipping=0.5, **options)
        made["ldt"]["schedule"]["split_backward"] = split
        return made

    bf16 = {"bf16": {"enabled": True}}
    kinds = [("bf16", bf16), ("frozen", {})]
    found = train(groups, 3, [(kind, settings(split, **more)) for kind, more in kinds for split in (True, False)])
    for late, whole in (found[0:2], found[2:4]):
        for one, other in zip(late, whole, strict=True):
            assert one["losses"] == pytest.approx(other["losses"], rel=1e-5)
            assert one["norms"] == pytest.approx(other["norms"], rel=1e-5)
            for index, layer in one["weights"].items():
                torch.testing.assert_close(layer, other["weights"][index])
    assert [[rank["made"] for rank in ranks] for ranks in found] == [[0, 6, 6], [0, 0, 0], [0, 0, 6], [0, 0, 0]]
