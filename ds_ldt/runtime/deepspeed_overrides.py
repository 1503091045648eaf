"""What DeepSpeed's pipeline engine asks of a subclass for two sites of unequal width, and nothing else.

Each override is the smallest method that does the job; the table in ``docs/architecture.md`` says what each takes the
place of, in this order, and why.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import DummyOptim
from torch import Tensor

from ds_ldt.data.sampling import TrainingData, build_training_data
from ds_ldt.runtime.initialize_checks import agree_on_coverage
from ds_ldt.runtime.module import LDTPipelineModule
from ds_ldt.runtime.optimizer import LDTShardedOptimizer, check_elementwise


class DeepSpeedOverrides(PipelineEngine):
    """A ``PipelineEngine`` whose first and last stage are one, and whose stages differ in their number of replicas.

    Args:
        kwargs: as for ``deepspeed.PipelineEngine``; ``model`` is an :class:`~ds_ldt.runtime.module.LDTPipelineModule`.
    """

    module: LDTPipelineModule
    data_iterator: Any
    _is_checking_hosts_fp16 = False
    _mean_loss: Tensor
    _norm: Tensor

    def __init__(self, **kwargs: Any) -> None:
        self._under_construction = True
        self._training_data: TrainingData | None = None
        super().__init__(training_data=None, **kwargs)
        self._under_construction = False
        self.using_sharded_optimizer = isinstance(self.optimizer, LDTShardedOptimizer)
        self.job = self.module.job
        self.site = self.grid.site

    def is_first_stage(self) -> bool:
        """True on the edge; and everywhere while the parent's constructor would greet neighbouring stages."""
        return self._under_construction or self.stage_id == 0

    def is_last_stage(self) -> bool:
        """True on the edge, which holds the loss; and everywhere during construction."""
        return self._under_construction or self.stage_id == 0

    def _loss_stage_global_rank(self) -> int:
        return 0

    def _broadcast_model(self) -> None:
        """Give every replica of a stage the weights of the first; the parent's version fails on scalar parameters."""
        if self.mpu.num_physical_replicas > 1:
            for parameter in self.module.parameters():
                dist.broadcast(parameter.data, src=self.mpu.dp_group[0], group=self.mpu.dp_proc_group)

    def _build_data_iter(self, dataset: Any, **options: Any) -> None:
        data = build_training_data(
            dataset,
            domains=self.grid.domains,
            num_domains=self.job.num_domains,
            micro_batch_size=self.micro_batch_size,
            collate_fn=self.collate_fn,
            drop_last=self.dataloader_drop_last(),
            **options,
        )
        self._training_data = data
        self.set_dataloader(data)

    def _aggregate_total_loss(self) -> Tensor:
        return self._mean_loss

    def clip_fp32_gradients(self) -> None:
        """Scale the gradients of this rank by the norm of the whole model; the parent uses its stage's alone."""
        torch.nn.utils.clip_grads_with_norm_(self.module.parameters(), self.gradient_clipping(), self._norm)

    def _configure_bf16_optimizer(self, optimizer: Any) -> LDTShardedOptimizer:
        """Make the optimizer of every half precision and of ZeRO stage 1."""
        dtype = self.get_data_types()[0]
        return LDTShardedOptimizer(
            optimizer if optimizer is not None else DummyOptim(list(self.module.parameters())),
            self.param_names,
            dtype=dtype,
            loss_scaler=CreateLossScaler(
                dtype,
                static_loss_scale=self.loss_scale(),
                dynamic_scaling=self.dynamic_loss_scale(),
                dynamic_loss_args=self.dynamic_loss_scale_args(),
            ),
            immediate_grad_update=self._config.bfloat16_config.immediate_grad_update,
            clip_grad=self.gradient_clipping(),
            allgather_bucket_size=self.zero_allgather_bucket_size(),
            dp_process_group=self.seq_data_parallel_group,
            timers=self.timers,
        )

    def _configure_zero_optimizer(self, optimizer: Any) -> LDTShardedOptimizer:
        return self._configure_bf16_optimizer(optimizer)

    def _do_optimizer_sanity_check(self, basic_optimizer: Any) -> Any:
        # The parent has an optimizer for each combination of precision and ZeRO stage; here one class does for all.
        if not self._is_sharding():
            return super()._do_optimizer_sanity_check(basic_optimizer)
        check_elementwise(basic_optimizer, allow_untested=bool(self.zero_allow_untested_optimizer()))
        return "bf16"

    def _check_for_duplicates(self, optimizer: Any) -> None:
        # Called once the optimizer is made, wherever it is from, and before its parameters are flattened.
        agree_on_coverage(self.module, optimizer.param_groups, self.mpu)
        super()._check_for_duplicates(optimizer)

    def _scheduler_from_config(self, optimizer: Any) -> Any:
        # torch's own schedulers insist on a torch optimizer; the wrapper shares its parameter groups.
        return super()._scheduler_from_config(self.basic_optimizer)

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Model dtype and gradient accumulation dtype, which is always fp32."""
        return super().get_data_types()[0], torch.float32

    @property
    def communication_data_type(self) -> torch.dtype:
        """Gradients are averaged over the replicas in fp32, whatever the model computes in."""
        return torch.float32

    def fp16_enabled(self) -> bool:
        """Whether the model computes in fp16."""
        return bool(super().fp16_enabled()) and not self._is_checking_hosts_fp16

    def _do_sanity_check(self) -> None:
        # The parent refuses fp16 on CPUs without fast kernels for it; torch computes fp16 on every CPU.
        self._is_checking_hosts_fp16 = get_accelerator().device_name() == "cpu"
        super()._do_sanity_check()
        self._is_checking_hosts_fp16 = False
        self._assert_valid_mixed_precision_config()

    def _assert_valid_mixed_precision_config(self) -> None:
        if not self._is_checking_hosts_fp16:
            super()._assert_valid_mixed_precision_config()

    @property
    def cur_scale(self) -> float:
        """The factor that losses are multiplied with before their backward passes; 1 except in fp16."""
        return self.optimizer.cur_scale if self.using_sharded_optimizer else 1.0

    def _is_sharding(self) -> bool:
        """Whether master weights and optimizer states are kept in fp32 and sharded over the replicas of a stage."""
        return self.get_data_types()[0] != torch.float32 or self.zero_optimization()
