"""What a Hugging Face model takes, found by running its layers on tensors without memory.

Each virtual stage runs forward and backward once on fake tensors: they have shapes, dtypes and a device, and no data.
So the same kernels are chosen as in training, and the same counter counts what autograd saves
(:class:`ds_ldt.profiling.activation_memory.HeldBytes`), while neither weights nor activations are allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import TiedLayerSpec
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig
from transformers.initialization import no_init_weights

from ds_ldt.config.schema import JobConfig
from ds_ldt.errors import ConfigError
from ds_ldt.models.causal_lm import causal_lm_loss, default_position_ids
from ds_ldt.models.lora import plan_adapters
from ds_ldt.models.positions import beyond_limit
from ds_ldt.models.registry import CONFIG_FILE, checked_config, family_of, layout_of, read_hf_config
from ds_ldt.plan.memory import Footprint, PassBytes, StageWeights
from ds_ldt.profiling.activation_memory import HeldBytes, LiveBytes
from ds_ldt.runtime.layer_runner import intervals_by_chunk, run_segments
from ds_ldt.runtime.module import freeze_parameters, frozen_parameters
from ds_ldt.runtime.pretrained import dtype_of
from ds_ldt.topology.layout import Layout, VirtualStage

_ID_BYTES = 8 + 8 + 4
"""Of a token: its id and its label as int64, its position as int32."""


@dataclass(slots=True, kw_only=True)
class _Layer:
    func: Callable[[Any], Any]
    module: nn.Module


def footprint_of(job: JobConfig, model: str, *, sequence_length: int) -> Footprint:
    """Find what a model takes, cut as configured.

    Args:
        job: The configuration.
        model: A Hugging Face directory, or the `config.json` in it. No weights are read.
        sequence_length: Tokens of a sample, S; a micro-batch is full and has no padding.

    Raises:
        ConfigError: The model is not supported or does not fit the configuration.
    """
    path = Path(model)
    config = checked_config(read_hf_config(path.parent if path.name == CONFIG_FILE else path))
    if isinstance(family_of(config).depths(config), dict):
        raise ConfigError.of(
            "--model",
            found=model,
            expected="a model of text only: how much a picture takes depends on its size",
            fix="leave --model out and name in --costs the file that a run wrote (ldt.measured_costs)",
        )
    layout = layout_of(job.ldt.pipeline_num_layers, config, allow_exposed_edge=job.ldt.allow_exposed_edge)
    layers = _build(job, config)
    with FakeTensorMode():
        _without_memory(layer.module for layer in layers)
        found = _Run(job, layout, layers, sequence_length).footprint()
    return replace(found, warning=beyond_limit(config, sequence_length))


def _build(job: JobConfig, config: PreTrainedConfig) -> list[_Layer]:
    """Build every layer on the meta device, with its adapters, and freeze what is not trained."""
    family = family_of(config)
    specs = family.layers(config)
    modules: dict[int, nn.Module] = {}
    places: dict[str, int] = {}
    with no_init_weights(), torch.device("meta"):
        for index, spec in enumerate(specs):
            first = places.setdefault(spec.key, index) if isinstance(spec, TiedLayerSpec) else index
            modules[index] = modules[first] if first != index else spec.build()
    if job.ldt.lora is not None:
        keys = family.key_map(config)
        names = [keys.module_name(index) for index in range(keys.num_layers)]
        adapters = plan_adapters(job.ldt.lora, specs, names=names, model_type=family.name)
        for index in modules:
            if adapters.names[index] is not None:
                modules[index] = adapters.put_into(modules[index], index, seed=0)
    freeze_parameters(modules, frozen_parameters(job.ldt.freeze, family.parts(config)))
    for module in modules.values():
        module.to(dtype_of(job))
    return [_Layer(func=_function(spec, modules[index]), module=modules[index]) for index, spec in enumerate(specs)]


def _function(spec: Any, module: nn.Module) -> Callable[[Any], Any]:
    forward_fn = spec.forward_fn if isinstance(spec, TiedLayerSpec) else None
    return module if forward_fn is None else lambda inputs: forward_fn(module, inputs)


def _without_memory(modules: Iterable[nn.Module]) -> None:
    """Move modules from the meta device to fake tensors of the CPU, which run the kernels of a real run.

    PEFT moves what it makes to the device of its base, which modules of fake tensors cannot do.
    """
    moved: dict[int, Tensor] = {}
    for module in {id(part): part for whole in modules for part in whole.modules()}.values():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = moved.setdefault(id(tensor), _fake(tensor))  # type: ignore[assignment]


def _fake(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


class _Run:
    """Runs all virtual stages one after the other, on fake tensors."""

    def __init__(self, job: JobConfig, layout: Layout, layers: Sequence[_Layer], sequence_length: int) -> None:
        self._layout = layout
        self._layers = layers
        self._size = (job.micro_batch_size, sequence_length)
        self._intervals = intervals_by_chunk(job, layout.num_chunks)
        self._reentrant = bool(job.deepspeed.get("pipeline", {}).get("use_reentrant", False))

    def footprint(self) -> Footprint:
        """Return what was found."""
        ids = torch.zeros(self._size, dtype=torch.int64)
        payload: tuple[Tensor, ...] = (ids, default_position_ids(ids))
        passes, sent, returned = [], [], []
        is_trained = False
        for stage in self._layout.virtual_stages:
            is_trained = is_trained or any(p.requires_grad for p in self._parameters((stage,)))
            found, outputs = self._measured(stage, payload, ids)
            passes.append(found)
            payload = tuple(_received(tensor, gradient=is_trained) for tensor in outputs)
            sent.append(sum(tensor.nbytes for tensor in payload))
            returned.append(sum(tensor.nbytes for tensor in payload if tensor.requires_grad))
        return Footprint(
            weights=tuple(self._weights(stage) for stage in range(self._layout.num_stages)),
            passes=tuple(passes),
            activation_bytes=tuple(sent[:-1]),
            gradient_bytes=tuple(returned[:-1]),
            sample_bytes=self._size[0] * self._size[1] * _ID_BYTES,
        )

    def _measured(
        self, stage: VirtualStage, inputs: tuple[Tensor, ...], labels: Tensor
    ) -> tuple[PassBytes, tuple[Tensor, ...]]:
        """Run a virtual stage twice: the second time the gradients of its weights are there, as in most of a step."""
        modules = [layer.module for layer in self._layers[stage.start : stage.stop]]
        excluded = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        found = PassBytes(held=0)
        for _ in range(2):
            held = HeldBytes(excluded)
            with LiveBytes() as live:
                begin = live.restart()
                with held.counting():
                    outputs = self._forward(stage, inputs)
                    last = stage.index == self._layout.num_boundaries
                    roots = (causal_lm_loss(outputs[0], labels),) if last else outputs
                forward_peak = live.peak - begin
                held.add((*inputs, *(() if last else outputs)))
                roots = tuple(tensor for tensor in roots if tensor.requires_grad)
                given = [torch.empty_like(tensor) for tensor in roots]
                del outputs
                begin = live.restart()
                if roots:
                    torch.autograd.backward(roots, given)
                peak = live.peak - begin
            kept = tuple(tensor.detach() for tensor in roots)
            found = PassBytes(
                held=held.num_bytes,
                forward_peak=forward_peak + sum(tensor.nbytes for tensor in inputs),
                backward_peak=peak,
            )
            del roots, given
        with torch.no_grad():
            sent = kept if last else self._forward(stage, inputs)
        return found, sent

    def _forward(self, stage: VirtualStage, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        funcs = [layer.func for layer in self._layers[stage.start : stage.stop]]
        payload = run_segments(
            funcs,
            inputs if len(inputs) > 1 else inputs[0],
            interval=self._intervals[stage.chunk],
            reentrant=self._reentrant,
            is_checkpointable=lambda segment: any(isinstance(func, nn.Module) for func in funcs[segment]),
            preserve_rng_state=False,  # there are no numbers to be drawn
        )
        return payload if isinstance(payload, tuple) else (payload,)

    def _parameters(self, stages: Sequence[VirtualStage]) -> list[nn.Parameter]:
        modules = [layer.module for stage in stages for layer in self._layers[stage.start : stage.stop]]
        return list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))

    def _weights(self, stage: int) -> StageWeights:
        parameters = self._parameters(self._layout.virtual_stages_of(stage))
        trained = [parameter.numel() for parameter in parameters if parameter.requires_grad]
        return StageWeights(
            trained=sum(trained),
            frozen=sum(parameter.numel() for parameter in parameters) - sum(trained),
            largest=max(trained, default=0),
        )


def _received(tensor: Tensor, *, gradient: bool) -> Tensor:
    """A tensor as the next virtual stage has it, in memory of its own."""
    return torch.empty_like(tensor).requires_grad_(gradient and tensor.is_floating_point())
