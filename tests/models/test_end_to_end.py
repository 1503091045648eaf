"""A Hugging Face model is converted, trained over two sites, exported, and equals the model trained in one piece."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ds_ldt.checkpointing.from_hf import convert_to_layers
from ds_ldt.checkpointing.to_hf import convert_to_hf
from ds_ldt.models import count_targets
from tests.conversion.models import MATRIX, THREE_CHUNKS, save_model, tensors_of
from tests.harness import GroupPool
from tests.models.end_to_end import FEW_TARGETS, KINDS, STEPS
from tests.models.tiny import ROWS, batch_of

LEARNING_RATE = 0.1


def train_unsplit(directory: Path, kinds: tuple[str, ...]) -> tuple[list[float], dict[str, Tensor]]:
    """What transformers computes: the mean over the targets of all micro-batches together, one step of SGD."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    batches = [batch_of(kind) for kind in kinds]
    num_targets = sum(count_targets(batch["labels"]) for batch in batches)
    losses = []
    for _ in range(STEPS):
        loss = sum(model(**batch, use_cache=False, num_items_in_batch=num_targets).loss for batch in batches)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


@pytest.mark.parametrize(
    "family, tied, matrix, num_domains, num_replicas, kinds, split, options",
    [
        ("qwen2", True, MATRIX, 1, 1, KINDS, False, {}),
        ("llama", False, THREE_CHUNKS, 2, 1, KINDS, True, {"activation_checkpoint_interval": 1}),
        ("qwen3", False, MATRIX, 2, 2, FEW_TARGETS, False, {}),
    ],
)
def test_S30_trained_and_exported_model_equals_the_unsplit_one(  # noqa: PLR0913 - what varies
    groups: GroupPool,
    tmp_path: Path,
    family: str,
    tied: bool,
    matrix: list[list[int]],
    num_domains: int,
    num_replicas: int,
    kinds: tuple[str, ...],
    split: bool,
    options: dict[str, Any],
) -> None:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": len(kinds) // num_domains,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}},
        "ldt": {
            "pipeline_num_layers": matrix,
            "edge": {"data_parallel_size": num_replicas},
            "cloud": {"data_parallel_size": num_domains},
            "schedule": {"split_backward": split},
        },
    }
    hf = save_model(tmp_path / "hf", family=family, tie_word_embeddings=tied, num_hidden_layers=sum(map(sum, matrix)))
    convert_to_layers(hf, config=config, edge=tmp_path / "ldt/edge", cloud=tmp_path / "ldt/cloud")
    arguments = (str(tmp_path / "ldt"), config, str(tmp_path), options, kinds)
    losses = groups.run(num_replicas + num_domains, "tests.models.end_to_end:train", *arguments)
    convert_to_hf(tmp_path / "edge", tmp_path / "cloud", tmp_path / "out", hf_config=hf)

    wanted_losses, wanted = train_unsplit(hf, kinds)
    assert losses == [pytest.approx(wanted_losses, abs=1e-5)] * (num_replicas + num_domains)
    found = tensors_of(tmp_path / "out")
    assert found.keys() == wanted.keys()
    errors = {key: float((found[key] - tensor).detach().abs().max()) for key, tensor in wanted.items()}
    assert {key: error for key, error in errors.items() if not error <= 1e-5} == {}
