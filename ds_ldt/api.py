"""``ds_ldt.initialize``: DeepSpeed's entry point with the engine of this package."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.utils import logger
from deepspeed.utils.logging import print_dist

from ds_ldt.checkpointing.output_paths import check_together, output_paths_of
from ds_ldt.comm.launch import prepare_environment
from ds_ldt.config.rules import is_whole
from ds_ldt.config.schema import JobConfig, load_config
from ds_ldt.errors import Absent, ConfigError
from ds_ldt.plan.cost_file import known_from_config, memory_warning
from ds_ldt.runtime.engine import LDTPipelineEngine
from ds_ldt.runtime.initialize_checks import agree_on_arguments, agree_that_all_have_one, given_parameters
from ds_ldt.runtime.module import LDTPipelineModule
from ds_ldt.runtime.optimizer_arguments import steps_without_learning
from ds_ldt.runtime.parameter_count import count_parameters
from ds_ldt.topology.ranks import RankMap


def initialize(
    args: Any = None,
    model: LDTPipelineModule | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | JobConfig | None = None,
    mesh_param: Any = None,
    config_params: Any = None,
    *,
    shuffle_seed: int | None = None,
    num_workers: int = 0,
) -> tuple[LDTPipelineEngine, Any, Any, Any]:
    """Create the engine of this rank; the counterpart of ``deepspeed.initialize``, with its signature and a bit more.

    Every rank of both sites calls it. Arguments that make no sense for a pipeline over two sites are refused.

    Args:
        args: may carry ``deepspeed_config``, a path, in place of ``config``.
        model: an ``LDTPipelineModule``.
        optimizer: a ``torch.optim.Optimizer`` over this rank's parameters, or a callable that makes one of
            ``model_parameters``; it wins over the JSON. It holds all that is trained here, in groups as you like;
            frozen parameters may be among them.
        model_parameters: what to optimize, tensors or groups; default all parameters of this rank.
        training_data: map-style data set; used on the edge, ignored and never opened in the cloud.
        lr_scheduler: a scheduler, or a callable that makes one from the optimizer; it wins over the JSON.
        distributed_port: not accepted: the module has already joined the process group.
        mpu: not accepted: the module brings its own.
        dist_init_required: True is not accepted, as ``distributed_port``.
        collate_fn: merges samples into a micro-batch.
        config: the configuration that the module was built with; default that one.
        mesh_param: not accepted.
        config_params: older name of ``config``.
        shuffle_seed: None to read ``training_data`` in order; else each epoch has an order of its own, that of torch's
            ``DistributedSampler`` with this seed, which is the same on all edge replicas.
        num_workers: processes of each edge replica that read ``training_data`` ahead; 0 for none.

    Returns:
        ``(engine, optimizer, training_dataloader, lr_scheduler)``; the data loader is None in the cloud.

    Raises:
        ConfigError: an argument is not accepted, ``config`` differs from the module's, or the module has an engine; on
            every rank: the optimizer of some rank lacks a parameter that is trained, or holds one that is not the
            module's; some rank cannot write where the configuration says (``ldt.trace``, ``ldt.measured_costs``,
            tensorboard, csv_monitor), or was given an object that cannot be what it is passed for.
        LinkError: a rank did not call it within ``ldt.timeout_s``; it is named. Ranks that prepare their data are
            waited for longer (see ``ds_ldt.preparing_data``).
    """
    _refuse(
        distributed_port=distributed_port,
        mpu=mpu,
        dist_init_required=dist_init_required or None,
        mesh_param=mesh_param,
    )
    if not isinstance(model, LDTPipelineModule):
        raise ConfigError.of(
            "model",
            found=type(model).__name__,
            expected="an LDTPipelineModule",
            fix="build it with ds_ldt.LDTPipelineModule(layers=..., config=...) or ds_ldt.models.from_pretrained(...)",
        )
    _check_same_config(model, config or config_params or getattr(args, "deepspeed_config", None))
    _check_whole_numbers(shuffle_seed=0 if shuffle_seed is None else shuffle_seed, num_workers=num_workers)

    _check_open(model)
    grid = model.mpu()
    grid.gather("ds_ldt.initialize")
    given = {"optimizer": optimizer, "lr_scheduler": lr_scheduler, "model_parameters": model_parameters}
    agree_on_arguments(model, {**given, "collate_fn": collate_fn, "training_data": training_data})
    check_together(output_paths_of(model.job, grid.global_rank), grid, what="ds_ldt.initialize (output paths)")
    model.inject_adapters()
    agree_that_all_have_one(bool(optimizer or model.job.deepspeed.get("optimizer", {}).get("type")), grid)
    engine = LDTPipelineEngine(
        args=None,
        model=model,
        optimizer=optimizer,
        model_parameters=given_parameters(model, model_parameters),
        training_data=training_data,
        shuffle_seed=shuffle_seed,
        num_workers=num_workers,
        lr_scheduler=lr_scheduler,
        mpu=grid,
        collate_fn=collate_fn,
        config=model.job.deepspeed,
        config_class=DeepSpeedConfig(model.job.deepspeed, grid),
    )
    model.has_engine = True
    _describe(engine)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def site_of_this_rank(config: str | os.PathLike[str] | Mapping[str, Any] | JobConfig) -> str:
    """The site that this process belongs to, which the launcher's variables tell before any process group exists.

    A script asks for it to read and tokenise its data before the model is built, on the edge alone.

    Args:
        config: the DeepSpeed JSON with its "ldt" section.

    Returns:
        ``"edge"`` or ``"cloud"``.

    Raises:
        ConfigError: the configuration or the launcher's variables are wrong.
    """
    launched = prepare_environment()
    return RankMap.from_config(load_config(config, world_size=launched.world_size)).site(launched.rank)


def _check_open(model: LDTPipelineModule) -> None:
    if model.mpu().is_closed:
        raise ConfigError.of(
            "model",
            found=Absent("a module whose engine was destroyed"),
            expected="one whose process groups are open",
            fix="build a new LDTPipelineModule",
        )
    if model.has_engine:  # in half precision the weights would move to the second engine, and the first train nothing
        raise ConfigError.of(
            "model",
            found=Absent("a module that an engine trains already"),
            expected="a module for each engine",
            fix="build a new LDTPipelineModule, or go on with the engine that there is",
        )


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ConfigError.of(name, found=value, expected="nothing", fix=f"leave {name}= out of ds_ldt.initialize")


def _describe(engine: LDTPipelineEngine) -> None:
    """Log what job this is, once, and what may be too large for it; every rank calls it."""
    total, trained = count_parameters(engine.module, engine.grid, engine.device)
    if engine.global_rank != 0:
        return
    logger.info(f"ds_ldt on {get_accelerator().device_name()}: {engine.describe()}")
    print_dist(
        f"ds_ldt: the model has {total} parameters ({total / 1e6:.3f}M), {trained} of them trained "
        f"({trained / 1e6:.3f}M); each counts once (DeepSpeed's TOTAL_PARAMS counts those of every replica)",
        ranks=[0],
    )
    _say_steps_without_learning(engine)
    warning = memory_warning(engine.job, known_from_config(engine.job, engine.module.layout), running=True)
    if warning is not None:
        logger.warning(warning)


def _say_steps_without_learning(engine: LDTPipelineEngine) -> None:
    """Say how many first steps the schedule runs at a learning rate of 0, as DeepSpeed's warm-ups do."""
    schedule = engine.lr_scheduler
    optimizer = getattr(schedule, "optimizer", None)
    if optimizer is None or not hasattr(schedule, "step"):
        return
    steps = steps_without_learning(schedule, optimizer)
    if steps:
        logger.warning(
            f"ds_ldt: {type(schedule).__name__} gives the first {steps} training step{'s' if steps > 1 else ''} of a "
            "new run a learning rate of 0, so the weights stay as they are in them"
        )


def _check_whole_numbers(**values: Any) -> None:
    for name, value in values.items():
        if not is_whole(value, 0):
            raise ConfigError.of(name, found=value, expected="a whole number >= 0", fix=f"write e.g. {name}=2")


def _check_same_config(model: LDTPipelineModule, config: Any) -> None:
    if config is None:
        return
    job = load_config(config, world_size=model.world_size)
    if (job.ldt, job.deepspeed) != (model.job.ldt, model.job.deepspeed):
        raise ConfigError.of(
            "config",
            found="another configuration than the module's",
            expected="the configuration that the module was built with",
            fix="pass the same config to the module and to ds_ldt.initialize, or leave it out of the latter",
        )
