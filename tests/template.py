"""What the template of the test processes has imported when ranks are forked from it (see tests/harness.py).

Importing starts no thread and no process group, so a fork of it is as good as a fresh process.
"""

from __future__ import annotations

import os

os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}  # read while torch and deepspeed are imported

import deepspeed.runtime.pipe.engine
import torch.distributed.distributed_c10d
import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2

import ds_ldt.api
import ds_ldt.models

__all__ = ["deepspeed", "ds_ldt", "torch", "transformers"]
