"""What one rank takes from a checkpoint: first all is read and checked, then it is put in.

The parts of a model lie on many ranks. If one of them finds that it cannot load its own, none may have changed
anything: a model of which the edge is replaced and the cloud is not trains on without a word.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import logger
from torch import Tensor
from torch.nn import Module

from ds_ldt.checkpointing import data_position
from ds_ldt.checkpointing.layer_files import layer_file_name, read_layer, shape_problems
from ds_ldt.checkpointing.manifest import CheckpointManifest, check_content, check_numbers, manifest_name
from ds_ldt.checkpointing.optimizer_files import OptimizerFiles, stage_file
from ds_ldt.checkpointing.optimizer_states import names_of, shard_for, whole_for
from ds_ldt.checkpointing.trainer import Trainer
from ds_ldt.errors import CheckpointError

COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def real_optimizer(engine: Trainer) -> Any:
    """The optimizer of an engine that trains; None of one that only evaluates."""
    optimizer = engine.optimizer
    return optimizer if optimizer is not None and getattr(optimizer, "using_real_optimizer", True) else None


class Restoration:
    """The way of one rank from a checkpoint to a restored engine, in the order of its methods.

    Args:
        engine: the engine to restore.
        directory: of the tag, on this site.
        strict: whether missing or unexpected keys of a layer are an error.
        optimizer: restore the optimizer.
        scheduler: restore the LR scheduler.
        position: restore the counters and the position of the data.

    Attributes:
        manifest: what was committed; known once it is read.
        stage_state: the scheduler, the counters and the caller's own values; known once they are read.
    """

    manifest: CheckpointManifest
    stage_state: dict[str, Any]

    def __init__(
        self,
        engine: Trainer,
        directory: Path,
        *,
        strict: bool,
        optimizer: bool,
        scheduler: bool,
        position: bool,
    ) -> None:
        self._engine = engine
        self._directory = directory
        self._strict = strict
        self._with_optimizer = optimizer and real_optimizer(engine) is not None
        self._with_scheduler = scheduler and engine.lr_scheduler is not None
        self._with_position = position
        self._layers: dict[int, dict[str, Tensor]] = {}
        self._optimizer_state: dict[str, Any] | None = None
        self._position: data_position.Position | None = None
        self._before: dict[str, Any] = {}
        self._replaced: list[tuple[Module, dict[str, Tensor]]] = []

    # -- read and check -----------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Read all that this rank needs, and check that it fits. Nothing is changed.

        Raises:
            CheckpointError: something is missing, damaged, of another model or of another shape.
        """
        engine = self._engine
        self.manifest = CheckpointManifest.read(self._directory, engine.site)
        self._check_model()
        for index, layer in engine.module.owned_layers().items():
            self._read_layer(index, layer)
        files = OptimizerFiles(self._directory, self._files, stage=engine.stage_id)
        path = check_content(self._directory, self._files, stage_file(files.nearest_stage()))
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        # copied, as tensors would stay mapped from the file
        self.stage_state = copy.deepcopy({key: value for key, value in state.items() if key != "optimizer"})
        if self._with_optimizer:
            self._optimizer_state = self._read_optimizer(files)
        if self._with_position:
            self._position = data_position.read(engine, self._directory, self._files)

    @property
    def _files(self) -> dict[str, str]:
        """The files of this site; of both where they saved into one directory, so that a layer may change sides."""
        other = "cloud" if self._engine.site == "edge" else "edge"
        if not (self._directory / manifest_name(other)).is_file():
            return self.manifest.files
        beside = CheckpointManifest.read(self._directory, other)
        return self.manifest.files | (beside.files if beside.save == self.manifest.save else {})

    def _check_model(self) -> None:
        module, saved = self._engine.module, self.manifest
        if module.fingerprint is not None and saved.model is not None:
            settings = saved.model.config_differences(module.fingerprint)
            if settings:
                raise CheckpointError(
                    f"checkpoint {saved} is of another model: {saved.model}, this run has {module.fingerprint}. They "
                    f"differ in {'; '.join(settings[:4])}. Fix: load it into the model that it was trained from"
                )
            if saved.frozen_excluded and saved.model.weights != module.fingerprint.weights:
                raise CheckpointError(
                    f"checkpoint {saved} holds only what was trained on top of {saved.model}, while this run is built "
                    f"on {module.fingerprint}. Fix: start from the weights that it was trained on"
                )
        if self._strict and saved.lora is not None and module.adapters is not None:
            here = module.adapters.settings.model_dump()
            other = [key for key in here if key != "lora_dropout" and here[key] != saved.lora.get(key)]
            if other:
                shown = ", ".join(f"{key} {saved.lora.get(key)!r}, here {here[key]!r}" for key in other)
                raise CheckpointError(
                    f"the adapters of checkpoint {saved} were trained with other settings of ldt.lora: {shown}. Fix: "
                    "give ldt.lora as it was, or pass load_module_strict=False"
                )

    def _read_layer(self, index: int, layer: Module) -> None:
        expected, name = layer.state_dict(), layer_file_name(index)
        if name not in self._files:
            if not expected:
                return
            raise CheckpointError(
                f"{self._directory} holds no {name} of layer {index}. It was saved with pipeline_num_layers "
                f"{self.manifest.pipeline_num_layers} and is loaded with {self._engine.module.layout.configured}, "
                f"which puts that layer on the {self._engine.site}. Fix: keep every layer on the site that it was on, "
                "or export the model and convert it anew"
            )
        state = read_layer(self._directory / name)
        wrong = [
            problem
            for problem in shape_problems({key: tuple(value.shape) for key, value in expected.items()}, state)
            if not self._is_accepted(problem, layer)
        ]
        if wrong:
            raise CheckpointError(
                f"{self._directory / name} does not fit the layer: {', '.join(wrong)}. Fix: give ldt.lora and "
                "ldt.freeze as they were when it was saved, or pass load_module_strict=False"
            )
        if self._strict:
            check_content(self._directory, self._files, name)
        else:
            check_numbers(self._directory / name)
        self._layers[index] = {key: value for key, value in state.items() if key in expected}

    def _is_accepted(self, problem: str, layer: Module) -> bool:
        """Frozen parameters may be missing where the checkpoint was saved without them; and what is not asked for."""
        kind, _, key = problem.partition(": ")
        if kind not in ("missing", "unexpected"):
            return False
        frozen = {name for name, parameter in layer.named_parameters() if not parameter.requires_grad}
        return not self._strict or (kind == "missing" and self.manifest.frozen_excluded and key in frozen)

    def _read_optimizer(self, files: OptimizerFiles) -> dict[str, Any] | None:
        engine, optimizer = self._engine, real_optimizer(self._engine)
        sharded, whole = engine.using_sharded_optimizer, next(files.whole(), None)
        if files.is_sharded != sharded and (files.is_sharded or whole is not None):
            raise CheckpointError(
                f"the optimizer state in {self._directory} is {'sharded' if files.is_sharded else 'whole'}, while "
                f"this run keeps it {'sharded' if sharded else 'whole'} (fp16, bf16 and ZeRO stage 1 shard it). Fix: "
                "load with the precision and the ZeRO stage that it was saved with, or with "
                "load_optimizer_states=False"
            )
        names = names_of(engine.module.owned_layers())
        if not sharded:
            return whole_for(optimizer, names, files.whole()) if whole is not None else None
        groups = [[((layer, name), size) for layer, name, size in members] for members in optimizer.named_sizes(names)]
        return shard_for(groups, optimizer.slices(), files.sharded()) if files.is_sharded else None

    # -- put in -------------------------------------------------------------------------------------------------------

    def put_what_can_be_undone(self) -> None:
        """Put in what code of others takes, which may refuse it: weights, optimizer, scheduler, position of data."""
        engine, state = self._engine, self.stage_state
        base = self._base_optimizer()
        if base is not None and self._optimizer_state is not None:
            self._before["optimizer"] = base.state_dict()
            base.load_state_dict(self._optimizer_state.get("base", self._optimizer_state))
        if self._with_scheduler and state["lr_scheduler"] is not None:
            self._before["scheduler"] = copy.deepcopy(engine.lr_scheduler.state_dict())
            engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
        if self._position is not None:
            self._position.put()
        for index, layer in engine.module.owned_layers().items():
            if index in self._layers:  # what was read goes as what was there is kept: no more memory than before
                self._replaced.append((layer, _tensors_of(layer)))
                layer.load_state_dict(self._layers.pop(index), strict=False)

    def undo(self) -> None:
        """Take back what :meth:`put_what_can_be_undone` has put in, on a rank where it succeeded or failed."""
        base, before = self._base_optimizer(), self._before
        if "optimizer" in before and base is not None:
            _try("optimizer", lambda: base.load_state_dict(before["optimizer"]))
        if "scheduler" in before:
            _try("scheduler", lambda: self._engine.lr_scheduler.load_state_dict(before["scheduler"]))
        if self._position is not None:
            _try("position of the data", self._position.take_back)
        for layer, tensors in self._replaced:
            _put_back(layer, tensors)

    def _base_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer that remembers something, inside the one that keeps master weights."""
        if not self._with_optimizer:
            return None
        optimizer = real_optimizer(self._engine)
        base: torch.optim.Optimizer = optimizer.optimizer if self._engine.using_sharded_optimizer else optimizer
        return base

    def put_tensors(self) -> None:
        """Put in master weights and counters; that they fit was checked."""
        engine = self._engine
        self._replaced.clear()
        optimizer = real_optimizer(engine)
        if optimizer is not None and engine.using_sharded_optimizer:
            optimizer.refresh_fp32_params()
            if self._optimizer_state is not None:
                optimizer.load_shard(self._optimizer_state)
        if self._with_position:
            for counter in COUNTERS:
                setattr(engine, counter, self.stage_state[counter])


def _tensors_of(layer: Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers of a layer, in main memory."""
    named = (*layer.named_parameters(), *layer.named_buffers())
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in named}


@torch.no_grad()
def _put_back(layer: Module, tensors: dict[str, Tensor]) -> None:
    """Give a layer what :func:`_tensors_of` returned, past any code of its own."""
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        tensor.copy_(tensors[name])


def _try(what: str, action: Callable[[], object]) -> None:
    """Take something back whose own code may refuse that too; the error that is under way says what went wrong."""
    try:
        action()
    except Exception as error:
        logger.error(f"load_checkpoint: the {what} refuses the state that it had before as well: {error}")
