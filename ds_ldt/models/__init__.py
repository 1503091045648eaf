"""Hugging Face model families as pipeline layers.

One place per family says what its layers are, how its weights are named and what crosses the link.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ds_ldt.models.batch import count_targets, prepare_batch
from ds_ldt.models.causal_lm import causal_lm_loss
from ds_ldt.models.families import FAMILIES
from ds_ldt.models.family import ModelFamily
from ds_ldt.models.registry import build_layers, checked_config, family_of, read_hf_config
from ds_ldt.models.weight_names import NUM_LEADING, NUM_TRAILING, KeyMap

if TYPE_CHECKING:
    from ds_ldt.runtime.pretrained import from_pretrained

__all__ = [
    "FAMILIES",
    "NUM_LEADING",
    "NUM_TRAILING",
    "KeyMap",
    "ModelFamily",
    "build_layers",
    "causal_lm_loss",
    "checked_config",
    "count_targets",
    "family_of",
    "from_pretrained",
    "prepare_batch",
    "read_hf_config",
]


def __getattr__(name: str) -> Any:
    """Import `from_pretrained` on first use: it builds a module of the runtime, which imports this package."""
    if name == "from_pretrained":
        return import_module("ds_ldt.runtime.pretrained").from_pretrained
    raise AttributeError(f"module 'ds_ldt.models' has no attribute '{name}'")
