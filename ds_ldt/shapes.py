"""Which shapes cross each boundary, known before any layer runs.

A receiver posts its buffers ahead of the data, so it must know their sizes. The edge announces, for every micro-batch
of a step, the signature of what its head will send over boundary 0; every rank derives the other boundaries itself:
they are the same where the wire schema says so (transformers), else the layers in between are run once per signature
on the meta device, which costs neither memory nor arithmetic.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from ds_ldt.errors import ConfigError
from ds_ldt.layout import Layout
from ds_ldt.wire import Signature, TensorSignature, WireSchema

Shapes = tuple[tuple[torch.dtype, tuple[int, ...]], ...]
"""dtype and shape of each tensor of a payload, the input of a trace."""


class ShapeTracer:
    """Answers what crosses a boundary, and remembers every answer.

    Args:
        layer_specs: every layer of the model, as given to the pipeline module.
        layout: which layers lie between two boundaries.
        wire: the wire schema.
        dtype: dtype of the model's parameters, which the meta copies take on; None leaves them as built.
    """

    def __init__(
        self, layer_specs: Sequence[Any], layout: Layout, wire: WireSchema, *, dtype: torch.dtype | None = None
    ) -> None:
        self._layer_specs = layer_specs
        self._layout = layout
        self._wire = wire
        self._dtype = dtype
        self._funcs: dict[int, list[Callable[[Any], Any]]] = {}
        self._tied: dict[str, nn.Module] = {}
        self._after_head: dict[Shapes, Signature] = {}
        self._behind: dict[Signature, tuple[Signature, ...]] = {}

    def head_signature(self, shapes: Shapes) -> Signature:
        """What the head sends over boundary 0 for a micro-batch of the given input shapes."""
        if shapes not in self._after_head:
            self._after_head[shapes] = self.declare(0, self._trace(0, shapes))
        return self._after_head[shapes]

    def boundaries(self, head_signature: Signature) -> tuple[Signature, ...]:
        """The signature at every boundary, given that of boundary 0."""
        if head_signature not in self._behind:
            found = [head_signature]
            for boundary in range(1, self._layout.num_boundaries):
                if self._wire.uniform:
                    shapes = tuple((t.dtype, t.shape) for t in head_signature)
                else:
                    shapes = self._trace(boundary, tuple((t.dtype, t.shape) for t in found[-1]))
                found.append(self.declare(boundary, shapes))
            self._behind[head_signature] = tuple(found)
        return self._behind[head_signature]

    def declare(self, boundary: int, shapes: Shapes) -> Signature:
        """Attach to shapes the gradient flags that the wire schema declares for a boundary."""
        declared = self._wire.tensors_at(boundary)
        return tuple(
            TensorSignature(
                dtype=dtype, shape=shape, gradient=position < len(declared) and declared[position].gradient
            )
            for position, (dtype, shape) in enumerate(shapes)
        )

    def _trace(self, virtual_stage: int, shapes: Shapes) -> Shapes:
        tensors = tuple(torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in shapes)
        payload: Any = tensors if len(tensors) > 1 else tensors[0]
        try:
            with torch.no_grad(), torch.device("meta"), torch.random.fork_rng(devices=[]):
                for func in self._meta_funcs(virtual_stage):
                    payload = func(payload)
        except Exception as error:
            raise ConfigError.of(
                "layers",
                found=f"virtual stage {virtual_stage}, which does not run on the meta device: {error}",
                expected="layers whose output shapes follow from their input shapes",
                fix="declare wire=WireSchema(..., uniform=True) if every boundary carries the same shapes, "
                "and head_shapes= if the head cannot be traced",
            ) from error
        return shapes_of(payload)

    def _meta_funcs(self, virtual_stage: int) -> list[Callable[[Any], Any]]:
        if virtual_stage not in self._funcs:
            cell = self._layout.virtual_stages[virtual_stage]
            self._funcs[virtual_stage] = [self._on_meta(layer) for layer in self._layer_specs[cell.start : cell.stop]]
        return self._funcs[virtual_stage]

    def _on_meta(self, layer: Any) -> Callable[[Any], Any]:
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self._tied:
                self._tied[layer.key] = self._build(layer)
            module = self._tied[layer.key]
            forward_fn = layer.forward_fn
            return module if forward_fn is None else lambda inputs: forward_fn(module, inputs)
        if isinstance(layer, LayerSpec):
            return self._build(layer)
        if isinstance(layer, nn.Module):
            return copy.deepcopy(layer).to(device="meta", dtype=self._dtype)
        func: Callable[[Any], Any] = layer
        return func

    def _build(self, spec: LayerSpec) -> nn.Module:
        module: nn.Module = spec.build()
        return module.to(device="meta", dtype=self._dtype)


def shapes_of(payload: Any) -> Shapes:
    """Dtype and shape of every tensor of a payload.

    Raises:
        TypeError: the payload is neither a tensor nor a tuple of tensors.
    """
    tensors = payload if isinstance(payload, tuple | list) else (payload,)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"expected a tensor or a tuple of tensors between layers, found {type(tensor).__name__}")
    return tuple((t.dtype, tuple(t.shape)) for t in tensors)
