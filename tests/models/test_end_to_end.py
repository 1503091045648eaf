"""A Hugging Face model is converted, trained over two sites, exported, and equals the model trained in one piece."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ds_ldt.conversion import convert_to_hf, convert_to_layers
from ds_ldt.models import count_targets
from tests.conversion.models import save_model, tensors_of
from tests.harness import GroupPool
from tests.models.end_to_end import KINDS, STEPS
from tests.models.tiny import ROWS, batch_of

LEARNING_RATE = 0.1


def train_unsplit(directory: Path) -> tuple[list[float], dict[str, Tensor]]:
    """What transformers computes: one loss over the targets of all micro-batches, one step of SGD."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    batches = [batch_of(kind) for kind in KINDS]
    counts = [count_targets(batch["labels"]) for batch in batches]
    losses = []
    for _ in range(STEPS):
        parts = [model(**batch, use_cache=False).loss * n for batch, n in zip(batches, counts, strict=True)]
        loss = sum(parts) / sum(counts)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


@pytest.mark.parametrize(
    "family, tied, num_domains, split, options",
    [
        ("qwen2", True, 1, False, {}),
        ("llama", False, 2, True, {"activation_checkpoint_interval": 1}),
    ],
)
def test_S30_trained_and_exported_model_equals_the_unsplit_one(
    groups: GroupPool, tmp_path: Path, family: str, tied: bool, num_domains: int, split: bool, options: dict[str, Any]
) -> None:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": len(KINDS) // num_domains,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}},
        "ldt": {
            "pipeline_num_layers": [[1, 2], [1, 0]],
            "cloud": {"data_parallel_size": num_domains},
            "schedule": {"split_backward": split},
        },
    }
    hf = save_model(tmp_path / "hf", family=family, tie_word_embeddings=tied)
    convert_to_layers(hf, config=config, edge=tmp_path / "ldt/edge", cloud=tmp_path / "ldt/cloud")
    losses = groups.run(
        1 + num_domains, "tests.models.end_to_end:train", str(tmp_path / "ldt"), config, str(tmp_path), options
    )
    convert_to_hf(tmp_path / "edge", tmp_path / "cloud", tmp_path / "out", hf_config=hf)

    wanted_losses, wanted = train_unsplit(hf)
    assert losses == [pytest.approx(wanted_losses, abs=1e-5)] * (1 + num_domains)
    found = tensors_of(tmp_path / "out")
    assert found.keys() == wanted.keys()
    errors = {key: float((found[key] - tensor).detach().abs().max()) for key, tensor in wanted.items()}
    assert {key: error for key, error in errors.items() if not error <= 1e-5} == {}
