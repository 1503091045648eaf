"""DeepSpeed's bf16 optimizer with a gradient norm that is right over two sites of unequal size."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor


class LDTBF16Optimizer(BF16_Optimizer):
    """fp32 master weights and fp32 gradient accumulation for bf16 parameters, sharded over the replicas of a stage.

    The parent sums squared norms over a model parallel group in which every stage occurs once. No such group exists
    where E differs from D, so the engine computes the norm of the whole model beforehand
    (:func:`ds_ldt.reduce.global_norm`) and leaves it in ``global_norm``.
    """

    global_norm: Tensor

    def get_grads_for_norm(self, for_clipping: bool = False) -> Any:
        """What the parent takes the norm of: the finished norm itself; and what it clips: every gradient."""
        if for_clipping:
            return super().get_grads_for_norm(for_clipping=True)
        return [self.global_norm], {}
