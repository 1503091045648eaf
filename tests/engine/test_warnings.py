"""What the engine warns of when it starts."""

from __future__ import annotations

from unittest import mock

import pytest
from deepspeed.utils import logger

from tests.engine.cases import config, layout, toy_engine
from tests.harness import GroupPool


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
