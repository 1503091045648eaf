"""What the edge draws: containers of every kind train alike; what cannot be used names itself, on the edge alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.cases import config, layout
from tests.engine.intake import BAD, FAILURES, IN_BATCHES, IN_SAMPLES, SECRET
from tests.engine.parity import assert_parity, oracle
from tests.harness import GroupPool

TARGETS = "tests.engine.intake:"
STEPS = 2
SETTINGS = config(layout(2, 2), num_micro_batches=2, ldt={"schedule": {"measure_steps": 0}})


@pytest.mark.parametrize("checkpointed", [False, True])
def test_S83_S84_inputs_in_every_container_train_as_the_unsplit_model(groups: GroupPool, checkpointed: bool) -> None:
    """Two halves of a point, in what torch's default collate and what collators of transformers return."""
    ranks = groups.run(2, TARGETS + "train_containers", SETTINGS, STEPS, checkpointed, deadline_s=120)
    expected = oracle(SETTINGS, STEPS)
    for name in (*IN_SAMPLES, *IN_BATCHES):
        assert_parity([rank[name] for rank in ranks], expected, "SGD")
    for name in IN_BATCHES:
        edge, cloud = (rank[name]["moved"] for rank in ranks)
        assert edge == 3 * 2 * STEPS, f"{name}: both halves and the targets of each micro-batch go to the device"
        assert cloud == 0


WANTED = {
    "missing file": ("SampleError", f"Photographs.__getitem__ raised FileNotFoundError: {SECRET}"),
    "data set ends": ("SampleError", f"Photographs.__getitem__ raised StopIteration: {SECRET}"),
    "collate_fn ends": ("SampleError", "collate_fn (collate_to_the_end) raised StopIteration"),
    "collate_fn raises": ("SampleError", f"collate_fn (collate_refusing) raised LookupError: {SECRET}"),
    "batch_fn ends": ("SampleError", "batch_fn raised StopIteration"),
    "batch_fn raises": ("SampleError", f"batch_fn raised LookupError: {SECRET}"),
    "sent_shapes ends": ("SampleError", "sent_shapes raised StopIteration"),
    "count_targets ends": ("SampleError", "count_targets raised StopIteration"),
    "loss_fn ends": ("CallbackError", "losing ("),
}
UNNAMED = ("sent_shapes ends", "loss_fn ends")
"""Where the sample is not known: a step that runs, and shapes of a micro-batch that is already taken apart."""


def test_S62_S89_what_fails_on_the_edge_names_itself_there_and_the_cloud_learns_only_that_it_failed(
    groups: GroupPool,
) -> None:
    """Two domains: sample 5 is in micro-batch 1 of domain 1."""
    settings = config(layout(2, 2), num_domains=2, num_micro_batches=2, timeout_s=30)
    edge, *cloud = groups.run(3, TARGETS + "fail_in_turn", settings, list(FAILURES), deadline_s=120)
    for name, (kind, text) in WANTED.items():
        found, message, _ = edge[name]
        assert (found, text in message) == (kind, True), f"{name}: {found}: {message}"
        if name not in UNNAMED:
            assert f"micro-batch 1 of domain 1, sample {BAD} of training_data: " in message
        for told in cloud:
            assert told[name][0] == "LinkError", f"{name}: {told[name]}"
            assert told[name][2] < 15, "the cloud waited for its timeout instead of being told"
            assert SECRET not in told[name][1] and "sample 5" not in told[name][1]
            if name != "loss_fn ends":
                assert "the edge (rank 0) failed to draw the micro-batches" in told[name][1]


def test_S62_a_bad_sample_of_one_edge_replica_ends_every_rank(groups: GroupPool) -> None:
    """Two replicas: sample 5 is read by the second."""
    settings = config(layout(2, 2), num_domains=2, num_replicas=2, num_micro_batches=2, timeout_s=30)
    names = ["missing file", "batch_fn ends"]
    ranks = groups.run(4, TARGETS + "fail_in_turn", settings, names, deadline_s=120)
    for name in names:
        first, second, *cloud = (rank[name] for rank in ranks)
        assert second[0] == "SampleError" and f"sample {BAD} of training_data" in second[1]
        assert first[0] == "LinkError" and "another edge replica failed to draw" in first[1]
        assert [told[0] for told in cloud] == ["LinkError"] * 2
        assert all(told[2] < 15 and SECRET not in told[1] for told in (first, *cloud))


ROWS: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": 61}, "batch.input_ids: found 61 at position 2"),
    ({"input_ids": -1}, "batch.input_ids: found -1 at position 2"),
    ({"labels": -1}, "batch.labels: found -1 at position 2"),
    ({"labels": [1, 2, 3]}, "stack expects each tensor to be equal size"),
    ({"input_ids": [0.5] * 6}, "batch.input_ids: found dtype torch.float32"),
]


@pytest.mark.parametrize("own_iterator", [False, True])
def test_S66_bad_token_ids_and_labels_name_the_sample_before_a_layer_runs(
    groups: GroupPool, own_iterator: bool
) -> None:
    settings = config([[1, 1], [1, 0]], num_micro_batches=4)
    rows = [changes for changes, _ in ROWS]
    edge, cloud = groups.run(2, TARGETS + "refuse_tokens", settings, rows, own_iterator, deadline_s=120)
    for (kind, message), (told, text), (_, wanted) in zip(edge, cloud, ROWS, strict=True):
        assert kind == "SampleError" and wanted in message, message
        assert "micro-batch 2 of domain 0" in message
        if not own_iterator:
            assert f"sample {BAD} of training_data" in message or "samples 4, 5 of training_data together" in message
        elif " at position " in wanted:
            assert "row 1" in message
        assert told == "LinkError" and "failed to draw" in text
        assert "61" not in text and "sample 5" not in text


def test_S88_no_process_that_reads_ahead_outlives_the_engine(groups: GroupPool) -> None:
    """Of training_data, whoever holds it, and of a loader that the engine was given to iterate."""
    edge, cloud = groups.run(2, TARGETS + "workers_of_engines", config(layout(2, 2)), deadline_s=120)
    assert edge == [(2, 0)] * 4
    assert cloud == [(0, 0)] * 4
