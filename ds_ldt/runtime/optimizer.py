"""The optimizer of half precision and of ZeRO stage 1: fp32 master weights, sharded over the replicas of a stage.

One class for all of them, so that there is one rule for norms, clipping and overflow. It extends DeepSpeed's
``BF16_Optimizer``, which flattens each parameter group, gives every replica an equal slice of it (the last ones
padded) and gathers the updated weights again. That is ZeRO stage 1, whatever stage the JSON names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
from deepspeed.runtime.precision_config import DeepSpeedBF16Config
from deepspeed.runtime.utils import is_optimized_parameter
from torch import Tensor

from ds_ldt.errors import Absent, ConfigError

ELEMENTWISE = frozenset(
    {
        *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
        *("DeepSpeedCPUAdagrad", "DeepSpeedCPUAdam", "DeepSpeedCPULion", "FusedAdam", "FusedLion"),
    }
)
"""Optimizers that treat each number of a parameter on its own, so that slices of a flat buffer do as well."""

_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def check_elementwise(optimizer: torch.optim.Optimizer, *, allow_untested: bool) -> None:
    """Refuse an optimizer that would see other numbers where parameters are flattened and sharded.

    Args:
        optimizer: what the user configured or passed.
        allow_untested: DeepSpeed's ``zero_allow_untested_optimizer``: the user answers for it.

    Raises:
        ConfigError: neither the class of the optimizer nor one of its bases is known to be elementwise.
    """
    names = [one.__name__ for one in type(optimizer).__mro__]
    if not allow_untested and ELEMENTWISE.isdisjoint(names):
        raise ConfigError.of(
            "optimizer.type",
            found=Absent(names[0]),
            expected="with fp16, bf16 or ZeRO stage 1 an optimizer that treats each number of a parameter on its own, "
            f"as it is given slices of flattened parameters: one of {', '.join(sorted(ELEMENTWISE))}",
            fix="choose one of them, train in fp32 with ZeRO stage 0, or set zero_allow_untested_optimizer to true if "
            "yours does",
        )


class LDTShardedOptimizer(BF16_Optimizer):
    """fp32 master weights and fp32 gradient accumulation, each replica of a stage updating its slice of them.

    fp16 adds a loss scaler: a step whose norm is not finite is left out and lowers the scale. The norm is computed
    beforehand by the engine (:func:`ds_ldt.comm.collectives.global_norm`) from gradients that no longer carry the
    scale, and left in ``global_norm``: it has the same bits on every rank, so all ranks skip the same steps.
    (The parent would sum over a group in which every stage occurs once, which does not exist where E differs from D.)

    fp32 parameters are their own master weights and their ``grad`` is the accumulator, so nothing is kept twice.

    Args:
        optimizer: torch optimizer over this rank's parameters, or DeepSpeed's ``DummyOptim``.
        param_names: names of the parameters.
        dtype: dtype of the parameters: float32, bfloat16 or float16.
        loss_scaler: DeepSpeed's; one with a scale of 1 except for fp16.
        immediate_grad_update: accumulate as each gradient is made, through hooks.
        options: as for the parent.
    """

    global_norm: Tensor

    def __init__(
        self,
        optimizer: Any,
        param_names: Mapping[Any, str],
        *,
        dtype: torch.dtype,
        loss_scaler: LossScalerBase,
        immediate_grad_update: bool = False,
        **options: Any,
    ) -> None:
        self.dtype = dtype
        self.loss_scaler = loss_scaler
        self._is_in_place = dtype == torch.float32
        super().__init__(
            optimizer,
            param_names,
            bfloat16_config=DeepSpeedBF16Config(
                enabled=True, immediate_grad_update=immediate_grad_update and not self._is_in_place
            ),
            mpu=None,
            grad_acc_dtype=torch.float32,
            **options,
        )

    @property
    def cur_scale(self) -> float:
        """The factor by which losses are multiplied before their backward passes; 1 except for fp16."""
        return float(self.loss_scaler.cur_scale)

    @property
    def loss_scale(self) -> float:
        """The same under the name that DeepSpeed's other optimizers have for it."""
        return self.cur_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the scale adapts to overflows."""
        return bool(self.loss_scaler.dynamic)

    # -- flattening -------------------------------------------------------------------------------------------------

    def _setup_for_real_optimizer(self) -> None:
        groups = [[p for p in g["params"] if is_optimized_parameter(p)] for g in self.optimizer.param_groups]
        made = [[self.optimizer.state.get(p, {}) for p in group] for group in groups]
        super()._setup_for_real_optimizer()
        self.optimizer.state.clear()
        for index, states in enumerate(made):
            if states and states[0]:  # some optimizers make their state when they are made, e.g. Adagrad
                shape = groups[index][0].shape
                self.optimizer.state[self.fp32_groups_flat_partition[index]] = {
                    name: self._slice(torch.cat([state[name].flatten() for state in states]).float(), index)
                    if isinstance(value, Tensor) and value.shape == shape
                    else value
                    for name, value in states[0].items()
                }
        if self._is_in_place:
            self._share_storage()

    def _share_storage(self) -> None:
        """Make this rank's slice of the fp32 weights the master weights."""
        for index, master in enumerate(self.fp32_groups_flat_partition):
            master.data = self.bf16_partitioned_groups[index][self._place(index)]
        self._link_all_hp_params()

    def _flatten_dense_tensors_aligned(self, tensor_list: list[Tensor], alignment: int) -> Tensor:
        if not tensor_list:  # nothing of this group is trained
            return torch.zeros(0, dtype=self.dtype, device=self.optimizer.param_groups[0]["params"][0].device)
        flat: Tensor = super()._flatten_dense_tensors_aligned(tensor_list, alignment)
        return flat

    def _update_storage_to_flattened_tensor(self, tensor_list: list[Tensor], flat_tensor: Tensor) -> None:
        if tensor_list:
            super()._update_storage_to_flattened_tensor(tensor_list, flat_tensor)

    def _place(self, group: int) -> int:
        return int(dist.get_rank(group=self.real_dp_process_group[group]))

    def slices(self) -> list[tuple[int, int]]:
        """The slice of each group's flat buffer that is this replica's, as (start, stop), padding included."""
        sizes = [partition.numel() for partition in self.fp32_groups_flat_partition]
        return [(self._place(group) * size, (self._place(group) + 1) * size) for group, size in enumerate(sizes)]

    def _slice(self, flat: Tensor, group: int) -> Tensor:
        """This rank's slice of a flat tensor of a group (without padding), padded to the slice's size."""
        padded = torch.zeros(self.bf16_groups_flat[group].numel(), dtype=flat.dtype, device=flat.device)
        padded[: flat.numel()] = flat
        size = self.fp32_groups_flat_partition[group].numel()
        return padded.narrow(0, self._place(group) * size, size).clone()

    # -- gradients --------------------------------------------------------------------------------------------------

    def clear_lp_grads(self, set_to_none: bool = False) -> None:
        """Make room for the gradients of a backward pass; fp32 parameters get their accumulators as ``grad``."""
        if not self._is_in_place:
            super().clear_lp_grads(set_to_none)
            return
        for group, gradients in zip(self.bf16_groups, self._accumulators(), strict=True):
            for parameter, gradient in zip(group, gradients, strict=True):
                if parameter.grad is not gradient:
                    parameter.grad = gradient

    def _accumulators(self) -> list[list[Tensor]]:
        """The fp32 accumulators in the shapes of the parameters."""
        if not hasattr(self, "_shaped"):
            self._shaped = [
                [gradient.view(parameter.shape) for parameter, gradient in zip(group, gradients, strict=True)]
                for group, gradients in zip(self.bf16_groups, self.fp32_groups_gradients, strict=True)
            ]
        return self._shaped

    def update_hp_grads(self, clear_lp_grads: bool = False) -> None:
        """Add the gradients of a backward pass to the accumulators, where they are not there already."""
        if not self._is_in_place:
            super().update_hp_grads(clear_lp_grads)

    def get_grads_for_norm(self, for_clipping: bool = False) -> Any:
        """What the parent takes the norm of: the finished norm itself; and what it clips: every gradient.

        The parent would clip only parameters that got a gradient on this very replica, while the average over the
        replicas has one if any of them did.
        """
        if for_clipping:
            return self.non_expert_gradients
        return [self.global_norm], {}

    def step(self, closure: Any = None) -> None:
        """Update the weights by the accumulated gradients, or skip that on every rank if their norm is not finite.

        Raises:
            Exception: on every rank, when the dynamic loss scale would have to fall below its minimum.
        """
        super().step(closure)
        self._global_grad_norm = float("inf") if self.overflow else self.global_norm.item()
        self.loss_scaler.update_scale(self.overflow)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def shard(self) -> dict[str, Any]:
        """What this replica has to remember: its slices of master weights and optimizer state, and the loss scale."""
        return {
            "base": self.optimizer.state_dict(),
            "fp32_partitions": [
                # a slice of the weights would be saved with all of them
                partition.detach().clone() if self._is_in_place else partition.detach()
                for partition in self.fp32_groups_flat_partition
            ],
            "loss_scaler": {name: getattr(self.loss_scaler, name) for name in self._scaler_state()},
        }

    def named_sizes(self, names: Mapping[int, Any]) -> list[list[tuple[Any, ...]]]:
        """Name the parameters that make up the flat buffer of each group, in order.

        Args:
            names: ``id`` of a parameter -> (layer, name within it).

        Returns:
            For each group a list of (layer, name, numbers of the parameter).
        """
        return [[(*names[id(p)], p.numel()) for p in group] for group in self.bf16_groups]

    def load_shard(self, shard: Mapping[str, Any]) -> None:
        """Take over master weights and loss scale of a shard, which another number of replicas may have saved.

        :func:`ds_ldt.checkpointing.optimizer_states.shard_for` cuts it for this replica. What its optimizer remembers
        is loaded apart, by ``optimizer.load_state_dict(shard["base"])``.
        """
        for current, saved in zip(self.fp32_groups_flat_partition, shard["fp32_partitions"], strict=True):
            current.data.copy_(saved)
        self._hp_optimizer_states_linked = False
        saved_scaler = shard.get("loss_scaler", {})
        for name in self._scaler_state():
            if name in saved_scaler:
                setattr(self.loss_scaler, name, saved_scaler[name])

    def _scaler_state(self) -> tuple[str, ...]:
        return _SCALER_STATE if self.loss_scaler.dynamic else ()
