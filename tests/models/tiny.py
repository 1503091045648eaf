"""Tiny random models of every family, the batches to run them on, and their pipeline layers run one after another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from deepspeed.pipe import TiedLayerSpec
from torch import Tensor, nn
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from ds_ldt.models import build_layers, causal_lm_loss, family_of

FAMILY_NAMES = ("llama", "mistral", "qwen2", "qwen3")
VOCABULARY = 61
ROWS, LENGTH = 3, 11

_CONFIGS: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": partial(MistralConfig, sliding_window=None),
    "qwen2": Qwen2Config,
    "qwen3": partial(Qwen3Config, head_dim=8),
}


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """A config of a few thousand parameters with grouped-query attention."""
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "architectures": [family_of(_CONFIGS[family]()).model_class.__name__],
    }
    return _CONFIGS[family](**{**settings, **changes})


def tiny_model(config: PreTrainedConfig, *, seed: int = 0, attention: str = "sdpa") -> PreTrainedModel:
    """The model of transformers with random weights; biases and norms are random too, so that none goes unnoticed."""
    config._attn_implementation = attention
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = family_of(config).model_class(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def batch_of(kind: str, *, seed: int = 1) -> dict[str, Tensor]:
    """A batch of 3 rows of 11 tokens: `plain`, `ones`, `right`, `left`, `packed`; `ignored` or `untargeted` labels."""
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    batch = {"input_ids": ids, "labels": ids.clone()}
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 2, 5)):
        if kind == "right" and padding:
            mask[row, -padding:] = 0
        if kind == "left":
            mask[row, :padding] = 0
    if kind in ("right", "left", "ones"):
        batch["attention_mask"] = mask
        batch["input_ids"] = ids.masked_fill(mask == 0, 0)
        batch["labels"] = ids.masked_fill(mask == 0, -100)
    if kind == "packed":
        starts = ((4, 3, 4), (11,), (1, 10))
        batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in starts])
    if kind == "ignored":
        batch["labels"][:2, : LENGTH - 2] = -100
    if kind == "untargeted":
        batch["labels"][:] = -100
    return batch


def samples_of(*lengths: int, seed: int = 1) -> list[dict[str, list[int]]]:
    """Samples of these lengths, as a data set of token ids has them."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


class Sequence:
    """All pipeline layers of a model in one process: what the pipeline computes, without a pipeline."""

    def __init__(self, config: PreTrainedConfig, **options: Any) -> None:
        self.specs = build_layers(config, **options)
        self.keys = family_of(config).key_map(config)
        self.local_layers = family_of(config).local_layers(config)
        self.read = family_of(config).batches(config)
        self.modules: dict[int, nn.Module] = {}
        self.funcs: list[Callable[[Any], Any]] = []
        for index, spec in enumerate(self.specs):
            if isinstance(spec, TiedLayerSpec) and spec.forward_fn is not None:
                self.funcs.append(partial(spec.forward_fn, self.modules[self.keys.embedding]))
            else:
                self.modules[index] = spec.build()
                self.funcs.append(self.modules[index])

    def load(self, model: PreTrainedModel) -> Sequence:
        """Take over the weights of a model of transformers."""
        weights = {self.keys.locate(name): tensor for name, tensor in model.state_dict().items()}
        for index, module in self.modules.items():
            module.load_state_dict({key: weights[index, key] for key in module.state_dict()})
        return self

    def logits(self, batch: Any) -> Tensor:
        """Run all layers on a batch."""
        values, _, *local = self.read(batch)
        for index, func in enumerate(self.funcs):
            values = func(values, *local) if index in self.local_layers else func(values)
        return values

    def loss(self, batch: Any) -> Tensor:
        """Run all layers on a batch and compute the loss."""
        return causal_lm_loss(self.logits(batch), self.read(batch)[1])

    def named(self, of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
        """What `of` returns of each parameter, under transformers' names."""
        found = {
            self.keys.hf_key(index, key): of(parameter)
            for index, module in self.modules.items()
            for key, parameter in module.named_parameters()
        }
        assert all(value is not None for value in found.values())
        return found
