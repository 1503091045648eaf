"""A long run holds what a short one holds."""

from __future__ import annotations

from tests.engine.cases import config
from tests.harness import GroupPool


def test_S33_fifty_steps_of_ever_new_shapes_leave_nothing_behind(groups: GroupPool) -> None:
    settings = config([[2, 1], [1, 0]], num_micro_batches=4, ldt={"schedule": {"measure_steps": 0}})
    ranks = groups.run(2, "tests.engine.growth:held_after", settings, [20, 70], 16, deadline_s=90)
    for rank in ranks:
        assert rank["tensors"][1] == rank["tensors"][0]
        # 200 shapes more were seen. The longest sequences of the last step are what is larger: a few hundred rows.
        assert rank["bytes"][1] - rank["bytes"][0] < 200_000
        assert rank["objects"][1] - rank["objects"][0] < 200
        assert rank["resident_mb"][1] - rank["resident_mb"][0] < 16
