"""What the engine warns of when it starts."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from deepspeed.utils import logger

import ds_ldt
from tests.engine.cases import config, initialize, layout, toy_engine
from tests.harness import GroupPool
from tests.models.tiny import tiny_config


def warnings_at_the_start(settings: list[dict[str, object]]) -> list[list[str]]:
    """For each configuration what this rank has warned of while its engine was made."""
    found = []
    for one in settings:
        with mock.patch.object(logger, "warning") as warning:
            toy_engine(one).destroy()
        found.append([str(call.args[0]) for call in warning.call_args_list if "memory_gb" in str(call.args[0])])
    return found


@pytest.mark.distributed
def test_a_bound_on_memory_that_limits_nothing_is_said_once_on_the_first_rank(groups: GroupPool) -> None:
    unsized = config(layout(2, 2), ldt={"schedule": {"memory_gb": 2, "measure_steps": 0}})
    to_be_measured = config(layout(2, 2), ldt={"schedule": {"memory_gb": 2}})
    sized = config(layout(2, 2), ldt={"schedule": {"memory_gb": 2, "layer_activation_mb": 1}})
    cases = [unsized, to_be_measured, sized]
    edge, cloud = groups.run(2, "tests.engine.test_warnings:warnings_at_the_start", cases, deadline_s=60)
    assert [len(said) for said in edge] == [1, 0, 0]
    assert "memory_gb limits nothing here" in edge[0][0]
    assert "layer_activation_mb" in edge[0][0]
    assert cloud == [[], [], []]


def warnings_without_targets(settings: dict[str, object], labels: list[list[int]]) -> list[int]:
    """How often this rank has warned of missing targets after two steps on each of these labels."""
    counts = []
    for label in labels:
        rows = [{"input_ids": torch.arange(3, 9), "labels": torch.tensor(label)} for _ in range(8)]
        module = ds_ldt.models.from_pretrained(tiny_config("llama"), config=settings)
        engine = initialize(model=module, training_data=rows if module.mpu().site == "edge" else None)
        with mock.patch.object(logger, "warning") as warning:
            engine.train_batch()
            engine.train_batch()
        counts.append(sum("has a target" in str(call.args[0]) for call in warning.call_args_list))
        engine.destroy()
    return counts


@pytest.mark.distributed
def test_S66_a_step_without_any_target_is_said_once_on_the_edge(groups: GroupPool) -> None:
    settings = config([[1, 1], [1, 0]], num_micro_batches=2)
    labels = [[-100] * 6, [-100] * 5 + [4], [4] * 6]
    target = "tests.engine.test_warnings:warnings_without_targets"
    edge, cloud = groups.run(2, target, settings, labels, deadline_s=60)
    assert edge == [1, 0, 0]
    assert cloud == [0, 0, 0]
