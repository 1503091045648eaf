"""fp32, bf16 and fp16, each with ZeRO stages 0 and 1, equal the unsplit run of the same precision."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ds_ldt.errors import ConfigError
from ds_ldt.runtime.optimizer import check_elementwise
from tests.engine.cases import config, layout
from tests.engine.precision import Case, train_unsplit
from tests.harness import GroupPool

ZERO_1 = {"zero_optimization": {"stage": 1}}
BF16 = {"bf16": {"enabled": True}}
DYNAMIC = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 2}
FP16: dict[str, Any] = {"fp16": DYNAMIC}
HIGH = {"fp16": {**DYNAMIC, "initial_scale_power": 20}}
STATIC = {"fp16": {"enabled": True, "loss_scale": 128}}
AS_HINTED = {"schedule": {"measure_steps": 0}}
LOSS_TOLERANCE = {"fp32": 1e-6, "bf16": 4e-3, "fp16": 5e-4}
WEIGHT_TOLERANCE = {"fp32": 1e-5, "bf16": 8e-3, "fp16": 1e-3}


def case(
    *sections: dict[str, Any],
    matrix: list[list[int]] | None = None,
    domains: int = 2,
    replicas: int = 1,
    options: dict[str, Any] | None = None,
    **about: Any,
) -> Case:
    merged: dict[str, Any] = {name: value for section in sections for name, value in section.items()}
    recipe = {name: merged.pop(name) for name in ("optimizer", "scheduler") if isinstance(merged.get(name), dict)}
    settings = config(
        matrix or layout(2, 2),
        num_domains=domains,
        num_replicas=replicas,
        **{"num_micro_batches": 2, "ldt": AS_HINTED, **(options or {}), **merged},
    )
    return Case(settings=settings | recipe, **about)


BARE = {**AS_HINTED, "allow_exposed_edge": True}
HALVES = {"split_backward": True}
ADAMW = {"options": {"optimizer": "AdamW", "gradient_clipping": 0.1}}
CLIPPED = {"options": {"gradient_clipping": 0.1}}
DECAY: dict[str, Any] = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9}}}
"""Moves a parameter of which the gradient is zero, and shows wrong factors."""

CASES = {
    "bf16, ZeRO 1": case(BF16, ZERO_1, **ADAMW),
    "fp16, overflows at first": case(HIGH, **CLIPPED, steps=9),
    "fp16, overflow in the cloud": case(FP16, ZERO_1, spoiled=(1, 1, 1), steps=6),
    "fp16, overflow on the edge": case(FP16, spoiled=(0, 0, 2), steps=5),
    "tied, ZeRO 1": case(ZERO_1, model="tied", **ADAMW),
    "S14": case(DECAY, model="sometimes", **CLIPPED),
    "S14, ZeRO 1": case(DECAY, ZERO_1, model="sometimes", **CLIPPED),
    "S14, bf16": case(DECAY, BF16, ZERO_1, model="sometimes", **CLIPPED),
    "S15": case(ZERO_1, model="bare", matrix=[[0, 3], [0, 0]], options={"ldt": BARE}),
    "nothing trained in the cloud": case(ZERO_1, frozen=(1,)),
    "nothing trained on the edge": case(FP16, frozen=(0,)),
    # Recipes that meet the flat buffers in their own way.
    "SGD with momentum, a scheduler of torch": case(
        ZERO_1,
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
        {"scheduler": {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}}},
    ),
    "Adagrad makes its state early, a skipped step holds the scheduler": case(
        FP16,
        {"optimizer": {"type": "Adagrad", "params": {"lr": 0.05, "initial_accumulator_value": 0.1}}},
        {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 6, "warmup_num_steps": 2}}},
        spoiled=(1, 0, 1),
    ),
    "client objects": case(BF16, client="objects"),
}
"""Three ranks: an edge and two domains of one cloud stage."""

MORE = {
    "fp32, ZeRO 1": case(ZERO_1, **ADAMW),
    "bf16": case(BF16, **CLIPPED),
    "fp16, ZeRO 1, static": case(STATIC, ZERO_1, **ADAMW),
    "tied, fp16": case(FP16, ZERO_1, model="tied", **CLIPPED),
    "something frozen everywhere": case(BF16, ZERO_1, frozen="some", **ADAMW),
    "weights after the others": case(ZERO_1, options={"ldt": {"schedule": {**AS_HINTED["schedule"], **HALVES}}}),
    "OneCycle": case(
        FP16,
        {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}},
        {
            "scheduler": {
                "type": "OneCycle",
                "params": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.02, "cycle_first_step_size": 2},
            }
        },
    ),
    "client callables, ZeRO 1": case(ZERO_1, client="callables"),
}
"""The same ranks; run with the whole parity matrix."""

NUM_RANKS_OF_UNEQUAL = 6
UNEQUAL = {
    "fp16, ZeRO 1, E = 2, D = 4": case(FP16, ZERO_1, domains=4, replicas=2, spoiled=(0, 1, 1), **CLIPPED),
    "bf16, ZeRO 1, E = 2, D = 4": case(BF16, ZERO_1, domains=4, replicas=2, **ADAMW),
    "S14, E = 2, D = 4": case(DECAY, domains=4, replicas=2, model="sometimes", options={"num_micro_batches": 1}),
    "S14, bf16, E = 2, D = 4": case(
        DECAY, BF16, domains=4, replicas=2, model="sometimes", options={"num_micro_batches": 1}
    ),
}
"""Run by `test_parity`, which has them."""


def compare(name: str, one: Case, ranks: list[dict[str, Any]]) -> None:
    expected = train_unsplit(one)
    shares = {one.settings["ldt"][site]["data_parallel_size"] for site in ("edge", "cloud")} - {1}
    assert expected.uneven == (shares if one.model == "sometimes" else set()), name
    precision = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}[str(one.dtype)]
    for rank in ranks:
        for what in ("losses", "norms", "scales", "skipped", "eval"):
            assert rank[what] == ranks[0][what], f"{name}: {what} differ between ranks"
        assert rank["scales"] == expected.scales, name
        assert rank["skipped"] == expected.skipped, name
        assert rank["lrs"] == [pytest.approx(lrs) for lrs in expected.lrs], name
    assert ranks[0]["losses"] == pytest.approx(expected.trace.losses, rel=LOSS_TOLERANCE[precision]), name
    finite = [norm for norm in expected.trace.grad_norms if math.isfinite(norm)]
    assert [norm for norm in ranks[0]["norms"] if math.isfinite(norm)] == pytest.approx(finite, rel=1e-2), name
    assert [math.isfinite(n) for n in ranks[0]["norms"]] == [math.isfinite(n) for n in expected.trace.grad_norms], name
    seen = {index: layer for rank in ranks for index, layer in rank["weights"].items()}
    assert sorted(seen) == sorted(expected.trace.weights), name
    for rank in ranks:
        for index, layer in rank["weights"].items():
            for key, value in layer.items():
                assert value.equal(seen[index][key]), f"{name}: replicas of layer {index} {key} differ"
                error = (value.float() - expected.trace.weights[index][key].float()).abs().max().item()
                assert error <= WEIGHT_TOLERANCE[precision], f"{name}: layer {index} {key} is off by {error}"


def check(groups: GroupPool, world_size: int, cases: dict[str, Case]) -> list[list[dict[str, Any]]]:
    ranks = groups.run(world_size, "tests.engine.precision:train_many", list(cases.values()), deadline_s=120)
    for number, (name, one) in enumerate(cases.items()):
        compare(name, one, [rank[number] for rank in ranks])
    return ranks


def test_S14_S15_S20_S29_every_precision_with_and_without_zero_1_equals_the_unsplit_run(groups: GroupPool) -> None:
    ranks = check(groups, 3, CASES)
    found = dict(zip(CASES, ranks[0], strict=True))
    assert found["fp16, overflow in the cloud"]["skipped"] == [0, 1, 1, 1, 1, 1]
    assert found["fp16, overflow on the edge"]["skipped"] == [0, 0, 1, 1, 1]
    assert 2 <= found["fp16, overflows at first"]["skipped"][-1] <= 6
    assert found["fp16, overflow in the cloud"]["scales"][:2] == [256.0, 128.0]


def test_an_optimizer_that_needs_whole_matrices_is_refused_where_parameters_are_flattened() -> None:
    adafactor = torch.optim.Adafactor([torch.nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(
        ConfigError, match=r"optimizer\.type: found Adafactor, expected with fp16, bf16 or ZeRO stage 1"
    ):
        check_elementwise(adafactor, allow_untested=False)
    check_elementwise(adafactor, allow_untested=True)
    derived = type("Mine", (torch.optim.AdamW,), {})
    check_elementwise(derived([torch.nn.Parameter(torch.ones(2))]), allow_untested=False)


@pytest.mark.parity_full
def test_more_of_the_same(groups: GroupPool) -> None:
    check(groups, 3, MORE)
