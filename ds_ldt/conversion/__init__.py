"""Conversion between Hugging Face model directories and the layer files of two sites."""

from __future__ import annotations

from ds_ldt.conversion.adapter import export_adapter, merge_adapter
from ds_ldt.conversion.to_hf import convert_to_hf
from ds_ldt.conversion.to_layers import convert_to_layers

__all__ = ["convert_to_hf", "convert_to_layers", "export_adapter", "merge_adapter"]
