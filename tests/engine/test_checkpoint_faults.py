"""Checkpoints that do not belong together, are damaged, or cannot be written: all or nothing, said on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.disks import small_disk
from tests.engine.cases import config, layout
from tests.engine.checkpoint_faults import CLIENT_STATES, TAGS
from tests.engine.test_checkpoints import BF16, FP16, WARMUP, ZERO_1
from tests.harness import GroupPool

TARGETS = "tests.engine.checkpoint_faults:"
AS_HINTED = {"schedule": {"measure_steps": 0}}

OF_P3 = [[1, 2, 2], [1, 0, 0]]
OF_V3 = [[1, 1, 1], [0, 1, 1], [1, 0, 0]]
OF_P2 = [[1, 4], [1, 0]]
OF_EDGE = [[2, 1, 2], [1, 0, 0]]


def settings(matrix: list[list[int]] | None = None, **options: Any) -> dict[str, Any]:
    return config(matrix or layout(2, 2), **{"optimizer": "AdamW", "ldt": AS_HINTED, **options})


def joined(ranks: list[dict[str, Any]], what: str) -> dict[int, Any]:
    return {index: layer for rank in ranks for index, layer in rank[what].items()}


PRECISIONS = {"fp32": {}, "fp32, ZeRO 1": ZERO_1, "bf16": BF16, "fp16": FP16}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_S78_a_checkpoint_of_one_chunking_loads_exactly_into_another(
    groups: GroupPool, tmp_path: Path, precision: str
) -> None:
    def job(matrix: list[list[int]], num_domains: int = 1) -> tuple[int, dict[str, Any]]:
        extra = {"num_domains": num_domains, "num_micro_batches": 4 // num_domains, **PRECISIONS[precision]}
        return 1 + (len(matrix[0]) - 1) * num_domains, settings(matrix, **extra)

    size, saving = job(OF_P3, 2)
    before = groups.run(size, TARGETS + "save_and_go_on", saving, str(tmp_path), 2, deadline_s=90)
    now, later = joined(before, "now"), joined(before, "later")
    exact = {"atol": 0.0, "rtol": 0.0} if precision == "fp32" else {"atol": 2e-3, "rtol": 0.0}
    for matrix, num_domains in ((OF_V3, 2), (OF_P2, 1), (OF_P2, 2), (OF_P3, 1)):
        size, loading = job(matrix, num_domains)
        after = groups.run(size, TARGETS + "load_and_go_on", loading, str(tmp_path), 2, False, {}, deadline_s=90)
        torch.testing.assert_close(joined(after, "now"), now, atol=0, rtol=0)
        same_sums = exact if num_domains == 2 else {"atol": 2e-3, "rtol": 0.0}
        torch.testing.assert_close(joined(after, "later"), later, **same_sums)
        assert after[0]["losses"] == pytest.approx(before[0]["losses"], rel=1e-5 if precision == "fp32" else 2e-2)
    size, loading = job(OF_V3, 2)
    without = groups.run(
        size,
        *(TARGETS + "load_and_go_on", loading, str(tmp_path), 2, False, {"load_optimizer_states": False}),
        deadline_s=90,
    )
    difference = (joined(without, "later")[2]["linear.weight"] - later[2]["linear.weight"]).abs().max()
    assert difference > 5e-3, "moments that are not restored would go unnoticed"


def test_S78_a_layer_that_changed_sides_is_refused_naming_both_layouts_and_nothing_has_changed(
    groups: GroupPool, tmp_path: Path
) -> None:
    groups.run(3, TARGETS + "save_and_go_on", settings(OF_P3), str(tmp_path), 1, deadline_s=90)
    ranks = groups.run(3, TARGETS + "load_and_go_on", settings(OF_EDGE), str(tmp_path), 1, False, {}, deadline_s=90)
    assert all(rank["unchanged"] for rank in ranks)
    assert f"{OF_P3} and is loaded with {OF_EDGE}, which puts that layer on the edge" in ranks[0]["told"]
    assert all("1 other rank(s) failed (0)" in rank["told"] for rank in ranks[1:])


def test_S56_halves_of_two_runs_are_refused_and_a_resumed_run_remembers_its_ancestor(
    groups: GroupPool, tmp_path: Path
) -> None:
    ranks = groups.run(2, TARGETS + "mixed_halves", settings(), str(tmp_path), deadline_s=90)
    first, second = ranks[0]["runs"]
    for rank in ranks:
        for told in (rank["mixed"], rank["mixed by tag"]):
            assert f"the edge holds that of run {first}" in told
            assert f"the cloud that of run {second}" in told
        assert rank["unchanged"]
        assert rank["manifest"]["run"] == {"id": rank["third"], "resumed_from": [first]}
    assert ranks[0]["manifest"]["save"] == ranks[1]["manifest"]["save"]
    assert len({first, second, ranks[0]["third"]}) == 3
    assert ranks[0]["third"] == ranks[1]["third"]


def test_S57_a_run_begun_anew_is_resumed_and_not_the_one_that_went_further(groups: GroupPool, tmp_path: Path) -> None:
    for rank in groups.run(2, TARGETS + "abandoned", settings(), str(tmp_path), deadline_s=60):
        assert (Path(rank["path"]).name, rank["step"]) == ("global_step1", 1)
        assert rank["same"]
        assert len(rank["logged"]) == int(rank["leads"])
        assert not rank["leads"] or "Not loaded: 'global_step3'" in rank["logged"][0]


@pytest.mark.parametrize("sharded", [False, True], ids=["fp32", "bf16"])
def test_S79_a_load_that_fails_on_one_rank_changes_nothing_on_any(
    groups: GroupPool, tmp_path: Path, sharded: bool
) -> None:
    job = settings(scheduler=WARMUP, **(BF16 if sharded else {}))
    edge, cloud = groups.run(2, TARGETS + "damaged", job, str(tmp_path), sharded, deadline_s=120)
    assert len(edge) == (4 if sharded else 9)
    for name in edge:
        assert (edge[name][1], cloud[name][1]) == (True, True), name
        told = {edge[name][0], cloud[name][0]}
        assert "no error" not in told, name
        assert any("1 other rank(s) failed" in text for text in told), name


def test_S79_sharded_states_are_refused_before_anything_has_changed(groups: GroupPool, tmp_path: Path) -> None:
    for number, (saved, loaded) in enumerate(((ZERO_1, {}), ({}, BF16))):
        root = str(tmp_path / str(number))
        for told, is_unchanged in groups.run(
            2, TARGETS + "settings_differ", settings(**saved), settings(**loaded), root, deadline_s=60
        ):
            assert "this run keeps it" in told
            assert is_unchanged


def test_S82_S85_what_could_not_be_read_back_and_tags_that_are_paths_are_refused_at_save(
    groups: GroupPool, tmp_path: Path
) -> None:
    ranks = groups.run(2, TARGETS + "refused_saves", settings(timeout_s=30), str(tmp_path / "here"), deadline_s=60)
    edge, cloud = (rank["told"] for rank in ranks)
    for name in CLIENT_STATES:
        assert "client_state['odd'] is of type" in cloud[name], name
        assert "could not be read back" in cloud[name], name
        assert "1 other rank(s) failed (1)" in edge[name], name
    for tag in TAGS:
        assert edge[f"tag {tag}"] == cloud[f"tag {tag}"].replace("rank 1 (cloud)", "rank 0 (edge)")
        assert f"tag {tag!r}: " in edge[f"tag {tag}"]
    for rank in ranks:
        assert rank["there"] == []
        assert rank["client_state"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here"]


@pytest.mark.parametrize("behind", ["edge", "cloud"])
def test_S92_a_tag_saved_twice_and_a_site_that_ends_in_between_leave_the_old_one_whole(
    groups: GroupPool, tmp_path: Path, behind: str
) -> None:
    for rank in groups.run(2, TARGETS + "one_site_ends", settings(), str(tmp_path), behind, deadline_s=60):
        assert rank == {"loaded": [1, 1], "same": [True, True], "last": 3, "hidden": []}


@pytest.mark.parametrize("site", ["edge", "cloud"])
def test_S92_a_site_that_cannot_commit_leaves_both_with_what_they_had(
    groups: GroupPool, tmp_path: Path, site: str
) -> None:
    for rank in groups.run(2, TARGETS + "one_site_cannot_commit", settings(), str(tmp_path), site, deadline_s=60):
        assert "could not commit checkpoint 't'" in rank["told"]
        assert rank["same"]
        assert rank["again"] == "no error"
        assert rank["there"] == ["latest", "t"]


def test_S61_a_full_disk_is_said_with_path_and_bytes_and_the_last_good_checkpoint_is_kept(
    groups: GroupPool, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "cloud", 256 * 1024) as disk:
        roots = {"edge": str(tmp_path / "edge"), "cloud": str(disk)}
        edge, cloud = groups.run(2, TARGETS + "full_disk", settings(), roots, deadline_s=60)
    assert f"no space to write {disk / '.bad.cloud.partial'}" in cloud["told"]
    assert "bytes are needed" in cloud["told"]
    assert "1 other rank(s) failed (1)" in edge["told"]
    for rank in (edge, cloud):
        assert rank["there"] == ["good", "latest"]
        assert rank["loaded"] == ("good", 1)
