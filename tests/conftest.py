"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.harness import GroupPool

# No time limit for one example: on a busy machine it measures the neighbours.
settings.register_profile("ds_ldt", deadline=None)
settings.load_profile("ds_ldt")


@pytest.fixture(scope="session")
def groups() -> Iterator[GroupPool]:
    """Pools of real processes with a gloo group: `groups.run(world_size, "tests.module:function", ...)`."""
    pool = GroupPool()
    yield pool
    pool.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test that starts processes through `groups` carries the marker `distributed`."""
    for item in items:
        if "groups" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.distributed)
