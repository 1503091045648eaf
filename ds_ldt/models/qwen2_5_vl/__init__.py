"""Qwen2.5-VL: a vision encoder and a decoder as one list of pipeline layers."""

from __future__ import annotations

from ds_ldt.models.qwen2_5_vl.batch import VisionBatches
from ds_ldt.models.qwen2_5_vl.family import QWEN2_5_VL

__all__ = ["QWEN2_5_VL", "VisionBatches"]
