"""A tiny model with a tokenizer, and the example scripts as targets for groups of processes."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import logger

import ds_ldt
from examples import finetune, finetune_vl


def write_tiny_model(directory: Path) -> Path:
    """Write a Hugging Face directory: a Llama of 6 small layers, tied, and a tokenizer trained on the spot."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<eos>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(list(topics.values())[:5], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(directory)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=400,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )
        LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def run_finetune(words: dict[str, list[str]]) -> tuple[str, Any, list[str]]:
    """What examples/finetune.py does with a site's words: (error class or "", result or message, warnings)."""
    torch.set_num_threads(1)
    return _run(finetune, words["edge" if os.environ["RANK"] == "0" else "cloud"])


def run_finetune_vl(runs: list[list[str]]) -> list[tuple[str, Any, list[str]]]:
    """What examples/finetune_vl.py does, several times."""
    torch.set_num_threads(1)
    return [_run(finetune_vl, words) for words in runs]


def _run(script: Any, words: list[str]) -> tuple[str, Any, list[str]]:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        return "", script.finetune(script.arguments(words)), lines
    except ds_ldt.LDTError as error:
        return type(error).__name__, str(error), lines
    finally:
        logger.removeHandler(handler)
