"""`ds_ldt.preparing_data`: the cloud waits as long as the edge shows signs of life, and no longer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.preparation import TIMEOUT_S
from tests.harness import ROOT, GroupSession, free_port

TARGETS = "tests.engine.preparation:"


@pytest.fixture(scope="module")
def ranks() -> Iterator[GroupSession]:
    """Two edge and two cloud ranks without a process group."""
    with GroupSession(4, init="imported") as group:
        yield group


@pytest.mark.distributed
def test_S65_ranks_wait_for_data_that_takes_twice_the_timeout_and_train_as_ever(ranks: GroupSession) -> None:
    answers = ranks.run(TARGETS + "train_after_long_preparations", deadline_s=90)
    for before, after, without in answers:
        assert before == after == without == answers[0][0]
        assert len(before) == 2


@pytest.mark.distributed
@pytest.mark.parametrize("when", ["before", "after"])
def test_S65_preparation_without_a_word_ends_in_an_error_that_names_the_setting_and_the_way_out(
    ranks: GroupSession, when: str
) -> None:
    ranks.close()
    answers = ranks.run(TARGETS + "prepare_without_a_word", when, deadline_s=60)
    for kind, message, seconds in answers[2:]:
        assert kind == "LinkError"
        for fragment in ("ldt.timeout_s", "rank 0 (edge)", "ds_ldt.preparing_data(config)", "reading or tokenising"):
            assert fragment in message.lower()
        assert "cloud" in message
        assert TIMEOUT_S - 0.5 < seconds < 2 * TIMEOUT_S + 2
    ranks.close()


@pytest.mark.distributed
@pytest.mark.parametrize("how, at_most_s", [("ends", 3.0), ("is stopped", 2 * TIMEOUT_S + 2)])
def test_S65_an_edge_that_ends_or_hangs_while_it_prepares_is_missed(
    ranks: GroupSession, how: str, at_most_s: float
) -> None:
    answers = ranks.run(TARGETS + "end_while_preparing", how, deadline_s=60, check=False, grace_s=20)
    for kind, message, seconds in answers[2:]:
        assert kind == "LinkError"
        assert "rank 0" in message
        assert seconds < at_most_s
    ranks.close()


SCRIPT = """
import os, pathlib, sys, time, torch, ds_ldt
from torch import nn
config = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "ldt": {"pipeline_num_layers": [[1, 1], [1, 0]], "timeout_s": 6},
}
with ds_ldt.preparing_data(config):
    time.sleep(8)
layers = [ds_ldt.LayerSpec(nn.Linear, 4, 4) for _ in range(3)]
module = ds_ldt.LDTPipelineModule(layers, config, nn.functional.mse_loss)
data = [(torch.ones(4), torch.ones(4))] * 8 if module.mpu().site == "edge" else None
engine = ds_ldt.initialize(model=module, training_data=data)[0]
loss = float(engine.train_batch())
pathlib.Path(sys.argv[1], "loss" + os.environ["RANK"]).write_text(str(loss))
engine.destroy()
torch.distributed.destroy_process_group()
"""


@pytest.mark.distributed
def test_S65_it_works_where_torchrun_holds_the_store(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environ = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    done = subprocess.run(
        [*launch, script, tmp_path],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second = (float((tmp_path / f"loss{rank}").read_text()) for rank in range(2))
    assert first == second > 0
