from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from ds_ldt.errors import ConfigError
from ds_ldt.plan import Costs, available_policies, build_plan
from ds_ldt.plan.policies import ldt_1f1b
from tests.plan.shapes import full_shape

SHAPE = full_shape(3, 3, m=5, d=2)


def test_a_plan_is_made_only_once() -> None:
    assert build_plan(SHAPE) is build_plan(full_shape(3, 3, m=5, d=2))
    assert build_plan(SHAPE, costs=Costs.uniform(SHAPE, edge=1)) is build_plan(
        SHAPE, costs=Costs.uniform(SHAPE, edge=1)
    )


def test_the_policies_are_those_of_the_manual_and_an_evaluation_has_its_own() -> None:
    assert available_policies() == ("ldt_1f1b", "closed_form", "greedy", "auto")
    assert build_plan(SHAPE, policy="auto").policy in ("ldt_1f1b", "closed_form", "greedy")
    assert build_plan(SHAPE, policy="greedy", training=False).policy == "forward_only"


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r'ldt\.schedule\.policy: found "1f1b", expected one of ldt_1f1b, closed_form, greedy, auto'
    ):
        build_plan(SHAPE, policy="1f1b")


@pytest.mark.parametrize("cap", [0, -1, True, 2.0, (1, 1), (1, 0, 1)])
def test_a_cap_that_is_no_count_is_refused(cap: object) -> None:
    with pytest.raises(ConfigError, match=r"ldt\.schedule\.max_in_flight: found .*, expected null or a whole number"):
        build_plan(SHAPE, max_in_flight=cap)  # type: ignore[arg-type]


def test_whatever_changes_the_plan_changes_the_fingerprint() -> None:
    plans = [
        build_plan(SHAPE),
        build_plan(SHAPE, training=False),
        build_plan(SHAPE, max_in_flight=2),
        build_plan(replace(SHAPE, num_micro_batches=6)),
        build_plan(replace(SHAPE, num_replicas=2)),
        build_plan(replace(SHAPE, gradient_boundaries=(False,) + (True,) * 5)),
        replace(build_plan(SHAPE), policy="other"),
    ]
    fingerprints = [plan.fingerprint for plan in plans]
    assert len(set(fingerprints)) == len(plans)
    assert all(len(fingerprint) == 64 for fingerprint in fingerprints)


def test_spelling_out_that_all_boundaries_carry_gradients_changes_nothing() -> None:
    assert build_plan(replace(SHAPE, gradient_boundaries=(True,) * 6)).fingerprint == build_plan(SHAPE).fingerprint


def test_other_processes_find_the_same_fingerprint_and_load_nothing_heavy() -> None:
    script = (
        "import sys; from ds_ldt.plan import PipelineShape, build_plan\n"
        f"print(build_plan(PipelineShape(stages={SHAPE.stages}, chunks={SHAPE.chunks}, num_stages=3,"
        " num_micro_batches=5, num_domains=2, num_replicas=1)).fingerprint)\n"
        "heavy = {'torch', 'deepspeed', 'transformers', 'numpy', 'pydantic'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    for hash_seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        ran = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=60
        )
        assert ran.stdout.splitlines() == [build_plan(SHAPE).fingerprint, "[]"]


def test_every_plan_is_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_ldt.errors import ScheduleError
    from ds_ldt.plan import planner

    def forgetful(shape, *, costs=None, limits=None):  # type: ignore[no-untyped-def]
        orders = ldt_1f1b.orders(shape)
        return {**orders, 1: orders[1][:-1]}

    monkeypatch.setattr(planner, "TRAINING", {"forgetful": forgetful})
    with pytest.raises(ScheduleError, match="never run"):
        build_plan(SHAPE, policy="forgetful")
