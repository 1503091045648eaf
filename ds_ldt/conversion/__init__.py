"""Conversion between Hugging Face model directories and the layer files of two sites."""

from __future__ import annotations

from ds_ldt.checkpointing.adapter import export_adapter, merge_adapter
from ds_ldt.checkpointing.from_hf import convert_to_layers
from ds_ldt.checkpointing.to_hf import convert_to_hf

__all__ = ["convert_to_hf", "convert_to_layers", "export_adapter", "merge_adapter"]
