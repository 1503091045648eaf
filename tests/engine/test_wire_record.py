"""What leaves the edge, recorded at torch.distributed itself: neither token ids nor labels."""

from __future__ import annotations

from tests.engine.cases import config
from tests.harness import GroupPool


def test_token_ids_and_labels_are_in_no_message_of_any_rank(groups: GroupPool) -> None:
    measuring = {"schedule": {"measure_steps": 1}}  # what was measured is sent too
    settings = config([[1, 1], [1, 0]], num_micro_batches=4, ldt=measuring)
    edge, cloud = groups.run(2, "tests.engine.wire_record:train_and_record", settings, deadline_s=90)
    for rank in (edge, cloud):
        assert rank["control"], "the search finds nothing at all"
        assert rank["num_sent"] > 20
        recorded, counted = rank["num_bytes"]
        assert recorded >= counted > 0, "messages passed the record by"
        assert rank["found"] == []
        assert "torch.float64" not in rank["dtypes"], "S54: some accelerators quietly narrow float64"
    assert edge["losses"] == cloud["losses"]
