"""Which shapes cross each boundary, known before any layer runs.

A receiver posts its buffers ahead of the data, so it must know their sizes. The edge announces, for every micro-batch
of a step, the signature of what each of its virtual stages will send; every rank derives the boundaries between cloud
stages itself: they are the same where the wire schema says so (transformers), else the layers in between are run once
per signature on the meta device, which costs neither memory nor arithmetic.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from ds_ldt.comm.wire import Signature, TensorSignature, WireSchema
from ds_ldt.config.rules import EDGE_STAGE
from ds_ldt.data.containers import map_tensors, tensors_in
from ds_ldt.errors import Absent, ConfigError
from ds_ldt.plan.recent import Recent
from ds_ldt.topology.layout import Layout

Shapes = tuple[tuple[torch.dtype, tuple[int, ...]], ...]
"""dtype and shape of each tensor of a payload, the input of a trace."""


REMEMBERED = 4096
"""Answers of each kind that a :class:`ShapeTracer` keeps; in a run of ever new shapes the oldest are dropped."""


class ShapeTracer:
    """Answers what crosses a boundary, and remembers the last `REMEMBERED` answers of each kind.

    Args:
        layer_specs: every layer of the model, as given to the pipeline module.
        layout: which layers lie between two boundaries.
        wire: the wire schema.
        dtype: dtype of the model's parameters, which the meta copies take on; None leaves them as built.
        local_layers: the layers that also take what stays on the edge.
    """

    def __init__(
        self,
        layer_specs: Sequence[Any],
        layout: Layout,
        wire: WireSchema,
        *,
        dtype: torch.dtype | None = None,
        local_layers: Collection[int] = (),
    ) -> None:
        self._layer_specs = layer_specs
        self._layout = layout
        self._wire = wire
        self._dtype = dtype
        self._local_layers = frozenset(local_layers)
        self._funcs: dict[int, list[Callable[..., Any]]] = {}
        self._tied: dict[str, nn.Module] = {}
        self._sent = lru_cache(REMEMBERED)(self._find_sent)
        self._between = lru_cache(REMEMBERED)(self._find_between)
        self._structured: Recent[tuple[str, Shapes], Signature] = Recent(REMEMBERED)

    def sent_by_head(self, inputs: Any, local: Shapes = ()) -> Signature:
        """What the edge sends over boundary 0.

        Args:
            inputs: a micro-batch: a tensor, a tuple of tensors, or tensors in other containers, which the first layer
                then has to take as they are.
            local: as for :meth:`sent_by_edge`.

        Raises:
            ConfigError: the inputs hold something else, or the layers do not run on the meta device.
        """
        check_inputs(inputs)
        if isinstance(inputs, Tensor) or (type(inputs) is tuple and all(isinstance(one, Tensor) for one in inputs)):
            return self.sent_by_edge(0, shapes_of(inputs), local)
        key = repr(map_tensors(lambda tensor: (tensor.dtype, tuple(tensor.shape)), inputs)), local
        return self._structured.get(key, lambda: self.declare(0, self._run_on_meta(0, _like(inputs), _on_meta(local))))

    def sent_by_edge(self, boundary: int, shapes: Shapes, local: Shapes = ()) -> Signature:
        """What the edge sends over one of its boundaries.

        Args:
            boundary: index of the virtual stage of the edge that sends, and of the boundary behind it.
            shapes: of the micro-batch for boundary 0, else of what crosses the boundary before.
            local: of what stays on the edge and its layers take besides.
        """
        return self._sent(boundary, shapes, local)

    def _find_sent(self, boundary: int, shapes: Shapes, local: Shapes) -> Signature:
        stage = self._layout.virtual_stages[boundary]
        takes_local = not self._local_layers.isdisjoint(range(stage.start, stage.stop))
        same = self._wire.uniform and boundary > 0 and not takes_local
        return self.declare(boundary, shapes if same else self._trace(boundary, shapes, local))

    def boundaries(self, announced: tuple[Signature, ...]) -> tuple[Signature, ...]:
        """The signature at every boundary, given those at the boundaries over which the edge sends.

        Args:
            announced: signatures at `layout.edge_boundaries`, in order. Where only the first are known the answer
                ends before the next one.
        """
        return self._between(announced)

    def _find_between(self, announced: tuple[Signature, ...]) -> tuple[Signature, ...]:
        found: list[Signature] = []
        known = dict(zip(self._layout.edge_boundaries, announced, strict=False))
        for boundary, virtual_stage in enumerate(self._layout.virtual_stages[:-1]):
            if virtual_stage.stage == EDGE_STAGE:
                if boundary not in known:
                    break
                found.append(known[boundary])
                continue
            shapes = without_gradients(found[-1])
            found.append(self.declare(boundary, shapes if self._wire.uniform else self._trace(boundary, shapes)))
        return tuple(found)

    def declare(self, boundary: int, shapes: Shapes) -> Signature:
        """Attach to shapes the gradient flags that the wire schema declares for a boundary."""
        declared = self._wire.tensors_at(boundary)
        return tuple(
            TensorSignature(
                dtype=dtype, shape=shape, gradient=position < len(declared) and declared[position].gradient
            )
            for position, (dtype, shape) in enumerate(shapes)
        )

    def _trace(self, virtual_stage: int, shapes: Shapes, local: Shapes = ()) -> Shapes:
        return self._run_on_meta(virtual_stage, _on_meta(shapes), _on_meta(local))

    def _run_on_meta(self, virtual_stage: int, payload: Any, kept: tuple[Tensor, ...]) -> Shapes:
        payload = payload[0] if isinstance(payload, tuple) and len(payload) == 1 else payload
        start = self._layout.virtual_stages[virtual_stage].start
        try:
            with torch.no_grad(), torch.device("meta"), torch.random.fork_rng(devices=[]):
                for layer, func in enumerate(self._meta_funcs(virtual_stage), start=start):
                    payload = func(payload, kept) if layer in self._local_layers else func(payload)
        except Exception as error:
            raise ConfigError.of(
                "layers",
                found=f"virtual stage {virtual_stage}, which does not run on the meta device: {error}",
                expected="layers whose output shapes follow from their input shapes",
                fix="declare wire=WireSchema(..., uniform=True) if every boundary carries the same shapes, "
                "and sent_shapes= if a virtual stage of the edge cannot be traced",
            ) from error
        return shapes_of(payload)

    def _meta_funcs(self, virtual_stage: int) -> list[Callable[..., Any]]:
        if virtual_stage not in self._funcs:
            cell = self._layout.virtual_stages[virtual_stage]
            self._funcs[virtual_stage] = [self._copy(layer) for layer in self._layer_specs[cell.start : cell.stop]]
        return self._funcs[virtual_stage]

    def _copy(self, layer: Any) -> Callable[..., Any]:
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self._tied:
                self._tied[layer.key] = self._build(layer)
            module = self._tied[layer.key]
            forward_fn = layer.forward_fn
            return module if forward_fn is None else partial(forward_fn, module)
        if isinstance(layer, LayerSpec):
            return self._build(layer)
        if isinstance(layer, nn.Module):
            return copy.deepcopy(layer).to(device="meta", dtype=self._dtype)
        func: Callable[..., Any] = layer
        return func

    def _build(self, spec: LayerSpec) -> nn.Module:
        module: nn.Module = spec.build()
        return module.to(device="meta", dtype=self._dtype)


def without_gradients(signature: Signature) -> Shapes:
    """Dtype and shape of every tensor of a message."""
    return tuple((tensor.dtype, tensor.shape) for tensor in signature)


def _on_meta(shapes: Shapes) -> tuple[Tensor, ...]:
    return tuple(torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in shapes)


def _like(payload: Any) -> Any:
    return map_tensors(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), payload)


def check_inputs(inputs: Any) -> None:
    """Check that the inputs of the first layer are made of tensors.

    Raises:
        ConfigError: they hold something else, or nothing.
    """
    if not tensors_in(inputs):
        raise ConfigError.of(
            "inputs",
            found=Absent(f"{type(inputs).__name__} without a tensor"),
            expected="a tensor, a tuple of tensors, or a mapping of tensors",
            fix="let collate_fn or batch_fn make tensors of them",
        )


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
