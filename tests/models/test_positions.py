"""Samples that are longer than the model was made for are warned of, once and with both numbers."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import logger
from transformers import LlamaConfig, Qwen2_5_VLConfig

from ds_ldt.cli import main as cli
from ds_ldt.models.batch import prepare_batch
from ds_ldt.models.positions import WatchedBatches, beyond_limit, position_limit
from tests.engine.cases import config

SCALED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}


def llama(**settings: Any) -> LlamaConfig:
    return LlamaConfig(hidden_size=16, num_attention_heads=4, max_position_embeddings=16, **settings)


class Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def heard() -> Iterator[list[str]]:
    handler = Heard()
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)


@pytest.mark.parametrize(
    "model, limit",
    [
        (llama(), 16),
        (llama(rope_parameters=SCALED), 64),
        (llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), 32),
        (Qwen2_5_VLConfig(text_config={"max_position_embeddings": 48}), 48),
    ],
)
def test_limit_is_that_of_the_config_with_its_scaling(model: Any, limit: int) -> None:
    assert position_limit(model) == limit
    assert beyond_limit(model, limit) is None
    assert f"{limit + 1} positions" in str(beyond_limit(model, limit + 1))


def test_S76_samples_beyond_the_limit_are_said_once_with_both_numbers(heard: list[str]) -> None:
    watched = WatchedBatches(prepare_batch, llama())
    short, long = torch.zeros(2, 16, dtype=torch.int64), torch.zeros(1, 40, dtype=torch.int64)
    watched({"input_ids": short, "labels": short})
    # Three sequences packed into one row of 40 are short ones.
    packed = torch.arange(40)[None] % 14
    watched({"input_ids": long, "labels": long, "position_ids": packed})
    assert heard == []
    for _ in range(3):
        (ids, _), _ = watched({"input_ids": long, "labels": long})
        assert ids.equal(long)
    assert len(heard) == 1
    assert "reach 40 positions, while the model was made for 16 (max_position_embeddings" in heard[0]


def test_S76_positions_of_pictures_and_text_are_looked_at(heard: list[str]) -> None:
    model = Qwen2_5_VLConfig(text_config={"max_position_embeddings": 16})
    ids = torch.zeros(1, 40, dtype=torch.int64)
    for positions in (torch.zeros(3, 1, 40), torch.arange(40).repeat(3, 1, 1)):
        WatchedBatches(lambda batch, p=positions: ((batch, batch), ids, (ids, p)), model)(None)
    assert len(heard) == 1


def test_S76_the_estimate_of_memory_says_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama(vocab_size=32, intermediate_size=32, num_hidden_layers=4).save_pretrained(tmp_path / "model")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config([[1, 2], [1, 0]])))
    words = ["plan", str(path), "--memory", "--model", str(tmp_path / "model"), "--sequence-length"]
    assert cli.main([*words, "16"]) == 0
    assert "max_position_embeddings" not in capsys.readouterr().err
    assert cli.main([*words, "40"]) == 0
    said = capsys.readouterr()
    assert "--sequence-length: samples reach 40 positions, while the model was made for 16" in said.err
    assert "memory in MB" in said.out
