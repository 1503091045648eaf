"""What may cross a boundary: the wire schema, the signatures of messages, and the guard that holds one to the other.

A boundary lies between two virtual stages. Its wire schema lists, in order, the tensors that a message over it may
hold. The guard reads every message *before* it is posted, and every announcement of shapes before a buffer is
allocated for it. What the schema does not declare does not leave the process: in doubt the step fails.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ds_ldt.errors import ConfigError, LinkError, PrivacyError

if TYPE_CHECKING:
    from ds_ldt.topology.layout import Layout

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What a tensor declared as `"float"` may be. float64 is not among them: some accelerators quietly narrow it."""

WIRE_DTYPES = (
    *FLOAT_DTYPES,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
"""Every dtype that can travel. The place in this tuple is the dtype's number in announcements: append only."""

MAX_DIMENSIONS = 8
"""No tensor on the wire has more dimensions than this."""

_FIX_BY_DECLARING = (
    "keep the tensor on its own site, or, if it may be sent, make the wire schema say so: "
    'WireTensor(name=..., dtype="{dtype}", ndim={ndim}, reveals=...)'
)
_FIX_BY_CONVERTING = 'convert it before the boundary to a dtype that can travel, such as float32 (declared as "float")'


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name without the prefix `torch.`, e.g. `bfloat16`."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True, kw_only=True)
class WireTensor:
    """Declares one tensor of a message.

    Attributes:
        name: What error messages and the printed statement call it.
        dtype: `"float"` (float32, bfloat16 or float16, whichever the model computes in) or the name of a torch dtype
            that can travel, e.g. `"int32"` or `"bool"`. Never float64.
        ndim: Number of dimensions; None allows any.
        max_numel: Largest number of elements of one message.
        gradient: Whether its gradient may return over the same boundary. Floating-point tensors only.
        optional: Whether messages may lack it. Only trailing tensors can be optional.
        reveals: What whoever reads it learns, in plain words, for the printed statement.

    Raises:
        ConfigError: an unknown dtype or float64, a gradient on a tensor that has none, a limit that is not positive.
    """

    name: str
    dtype: str
    ndim: int | None = None
    max_numel: int = 2**31
    gradient: bool = False
    optional: bool = False
    reveals: str = ""

    def __post_init__(self) -> None:
        names = ["float", *map(dtype_name, WIRE_DTYPES)]
        if self.dtype not in names:
            expected = f"one of {', '.join(names)} (float64 never crosses a boundary)"
            raise self._problem("dtype", self.dtype, expected=expected, fix="declare the dtype that is sent")
        if self.gradient and not self.dtype.startswith(("float", "bfloat")):
            expected = "gradient=True only on a floating-point tensor"
            raise self._problem("gradient", self.gradient, expected=expected, fix="drop gradient=True")
        if self.ndim is not None and not 0 <= self.ndim <= MAX_DIMENSIONS:
            raise self._problem("ndim", self.ndim, expected=f"0 to {MAX_DIMENSIONS} or None", fix="reshape the tensor")
        if self.max_numel < 1:
            raise self._problem("max_numel", self.max_numel, expected="at least 1", fix="give the largest size")

    def _problem(self, setting: str, found: object, *, expected: str, fix: str) -> ConfigError:
        return ConfigError.of(f"wire tensor {self.name!r}, {setting}", found=found, expected=expected, fix=fix)

    @property
    def allowed_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes that this declaration allows."""
        if self.dtype == "float":
            return FLOAT_DTYPES
        return tuple(dtype for dtype in WIRE_DTYPES if dtype_name(dtype) == self.dtype)

    def mismatch(self, signature: TensorSignature) -> str | None:
        """Why a tensor of this signature is not the declared one, or None if it is. Gradient bits are not compared."""
        if signature.dtype not in self.allowed_dtypes:
            return f"its dtype is {dtype_name(signature.dtype)}, declared is {self.dtype}"
        if self.ndim is not None and len(signature.shape) != self.ndim:
            return f"it has {len(signature.shape)} dimensions, declared are {self.ndim}"
        if signature.numel > self.max_numel:
            return f"it has {signature.numel} elements, declared are at most {self.max_numel}"
        return None

    def __str__(self) -> str:
        dtype = "float (float32, bfloat16 or float16)" if self.dtype == "float" else self.dtype
        dimensions = "any number of dimensions" if self.ndim is None else f"{self.ndim} dimensions"
        parts = [dtype, dimensions, f"at most {self.max_numel} elements"]
        if self.gradient:
            parts.append("its gradient returns")
        if self.optional:
            parts.append("optional")
        return f"{self.name}: {', '.join(parts)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WireSchema:
    """The tensors that may cross each boundary.

    Attributes:
        tensors: The declared tensors of a message, in order; the same at every boundary that `per_boundary` lacks.
        uniform: True when a boundary between cloud stages carries the shapes of the one before it (transformers);
            False when the shapes behind each virtual stage have to be traced.
        per_boundary: Boundary -> its own list.

    Raises:
        ConfigError: an optional tensor stands before one that is not.
    """

    tensors: tuple[WireTensor, ...]
    uniform: bool
    per_boundary: Mapping[int, tuple[WireTensor, ...]] | None = None

    def __post_init__(self) -> None:
        for declared in (self.tensors, *(self.per_boundary or {}).values()):
            for before, after in zip(declared, declared[1:], strict=False):
                if before.optional and not after.optional:
                    raise ConfigError.of(
                        f"wire tensor {before.name!r}, optional",
                        found=True,
                        expected="optional tensors at the end of the list only",
                        fix=f"move it behind {after.name!r} or make {after.name!r} optional too",
                    )

    @classmethod
    def by_modality(
        cls, layout: Layout, tensors: Mapping[str, tuple[WireTensor, ...]], *, uniform: bool = True
    ) -> WireSchema:
        """Make the schema of a model whose modalities send different tensors.

        Args:
            layout: Says which boundary carries the hidden states of which modality.
            tensors: Modality -> the tensors of its messages.
            uniform: See the attribute.
        """
        boundaries = range(layout.num_boundaries)
        per_boundary = {boundary: tensors[layout.modality_of_boundary(boundary)] for boundary in boundaries}
        return cls(tensors=(), uniform=uniform, per_boundary=per_boundary)

    def tensors_at(self, boundary: int) -> tuple[WireTensor, ...]:
        """The declared tensors of a message over this boundary, in order."""
        return (self.per_boundary or {}).get(boundary, self.tensors)

    def describe(self) -> str:
        """The schema as a statement in plain words: what is sent over the link, and what that reveals."""
        lines = ["What is sent between the virtual stages (every message is held to this list before it leaves):"]
        if self.tensors:
            lines += _statement("every boundary" if not self.per_boundary else "every other boundary", self.tensors)
        for declared, alike in groupby(sorted((self.per_boundary or {}).items()), key=itemgetter(1)):
            boundaries = [boundary for boundary, _ in alike]
            title = f"boundary {boundaries[0]}" if len(boundaries) == 1 else f"boundaries {_ranges(boundaries)}"
            lines += _statement(title, declared)
        lines += [
            "Besides, the sites exchange the shapes of the micro-batches at the start of a step, the mean loss and",
            "the gradient norm at its end, and once the settings that they must share and how long layers and",
            "messages take. Samples, token ids, labels, pixels, file names and the weights of the edge stay there,",
            "unless a line above declares them.",
            "What this does not promise: activations and gradients depend on the samples. A cloud operator who knows",
            "the base model can, with effort, recover much of the samples from them, even behind several edge layers.",
        ]
        return "\n".join(lines)


DEFAULT_SCHEMA = WireSchema(
    tensors=(WireTensor(name="activation", dtype="float", gradient=True),),
    uniform=False,
)
"""One floating-point tensor whose gradient returns: what a plain list of layers exchanges."""


def _ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers briefly, e.g. `0-3, 5`."""
    starts = [number for number in numbers if number - 1 not in numbers]
    stops = [number for number in numbers if number + 1 not in numbers]
    return ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in zip(starts, stops, strict=True))


def _statement(title: str, declared: Sequence[WireTensor]) -> list[str]:
    lines = [f"  {title}:"]
    for position, tensor in enumerate(declared, start=1):
        lines.append(f"    {position}. {tensor}")
        lines.append(f"       reveals: {tensor.reveals or 'not stated by the author of the schema'}")
    return lines


@dataclass(frozen=True, slots=True)
class TensorSignature:
    """What has to be known of a tensor to receive it.

    Attributes:
        dtype: One of `WIRE_DTYPES`.
        shape: Dimensions.
        gradient: Whether the sender wants its gradient back.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    gradient: bool

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, as `torch.Tensor.nbytes`."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}{list(self.shape)}{' with gradient' if self.gradient else ''}"


Signature = tuple[TensorSignature, ...]
"""The signature of a message: of each of its tensors, in order."""


def signature_of(tensors: Iterable[Tensor]) -> Signature:
    """Signature of a message that holds these tensors; a tensor's gradient bit is its `requires_grad`."""
    return tuple(TensorSignature(tensor.dtype, tuple(tensor.shape), tensor.requires_grad) for tensor in tensors)


def gradient_signature(signature: Signature) -> Signature:
    """Signature of the gradient message that answers an activation message: its tensors with a gradient, in order."""
    return tuple(TensorSignature(one.dtype, one.shape, False) for one in signature if one.gradient)


class WireGuard:
    """Holds messages to a wire schema, on one site.

    Args:
        schema: What may be sent.
        site: `"edge"`: violations are a `PrivacyError`; `"cloud"`: they are a `LinkError`.
    """

    def __init__(self, schema: WireSchema, site: Literal["edge", "cloud"]) -> None:
        self.schema = schema
        self.site = site
        # What has passed once passes again: the schema never changes.
        self._passed: dict[tuple[int, bool], list[tuple[torch.dtype, torch.Size, bool]]] = {}

    def check_send(self, boundary: int, tensors: Sequence[Tensor], *, gradients: bool = False) -> None:
        """Checks a message that is about to be sent.

        Args:
            boundary: The boundary it crosses.
            tensors: What it holds, in order.
            gradients: True for a gradient message: its tensors have to be gradients of declared tensors, in order.

        Raises:
            PrivacyError: on the edge, if the schema does not declare it.
            LinkError: the same on the cloud.
        """
        for position, tensor in enumerate(tensors):
            if tensor.layout != torch.strided:
                signature = signature_of(tensors)
                raise self._error(boundary, signature, position, f"its layout is {tensor.layout}, not dense", "Send")
        kind = [(tensor.dtype, tensor.shape, tensor.requires_grad) for tensor in tensors]
        if self._passed.get((boundary, gradients)) == kind:
            return
        signature = signature_of(tensors)
        if gradients:
            self._check_gradients(boundary, signature)
        else:
            self._check(boundary, signature, "Send")
        self._passed[boundary, gradients] = kind

    def check_announced(self, boundary: int, signature: Signature) -> None:
        """Checks a signature that was announced, by this site or to it, before buffers of its size are allocated.

        Raises:
            PrivacyError: on the edge, if the schema does not declare such a message.
            LinkError: the same on the cloud.
        """
        self._check(boundary, signature, "Announcement")

    def _check(self, boundary: int, signature: Signature, what: str) -> None:
        declared = self.schema.tensors_at(boundary)
        for position, one in enumerate(signature):
            reason = _never_travels(one)
            if reason is None and position >= len(declared):
                reason = f"it is not declared (the schema ends after {len(declared)})"
            if reason is None:
                reason = declared[position].mismatch(one)
            if reason is None and one.gradient and not declared[position].gradient:
                reason = f"it requires a gradient, but {declared[position].name!r} is declared without one"
            if reason is not None:
                raise self._error(boundary, signature, position, reason, what)
        missing = [one.name for one in declared[len(signature) :] if not one.optional]
        if missing:
            reason = f"{missing[0]!r} is missing"
            raise self._error(boundary, signature, len(signature), reason, what)

    def _check_gradients(self, boundary: int, signature: Signature) -> None:
        candidates = iter([one for one in self.schema.tensors_at(boundary) if one.gradient])
        for position, one in enumerate(signature):
            reason = _never_travels(one)
            if reason is None and not any(declared.mismatch(one) is None for declared in candidates):
                reason = "it is the gradient of no declared tensor (or not in the declared order)"
            if reason is not None:
                raise self._error(boundary, signature, position, reason, "Gradient")

    def _error(
        self, boundary: int, signature: Signature, position: int, reason: str, what: str
    ) -> PrivacyError | LinkError:
        kind = PrivacyError if self.site == "edge" else LinkError
        one = signature[position] if position < len(signature) else None
        lines = [
            f"{what} refused on the {self.site}, before anything left or was allocated: boundary {boundary}, "
            f"tensor {position + 1} of {len(signature)}{f' ({one})' if one else ''}: {reason}.",
            f"Declared at boundary {boundary}:",
            *(f"  {place}. {tensor}" for place, tensor in enumerate(self.schema.tensors_at(boundary), start=1)),
            f"Fix: {_fix(one)}.",
        ]
        return kind("\n".join(lines))


def _fix(signature: TensorSignature | None) -> str:
    if signature is None:
        return "let the layer before the boundary return every declared tensor, or declare trailing ones optional=True"
    if signature.dtype not in WIRE_DTYPES:
        return _FIX_BY_CONVERTING
    dtype = "float" if signature.dtype in FLOAT_DTYPES else dtype_name(signature.dtype)
    return _FIX_BY_DECLARING.format(dtype=dtype, ndim=len(signature.shape))


def _never_travels(signature: TensorSignature) -> str | None:
    if signature.dtype not in WIRE_DTYPES:
        return f"{dtype_name(signature.dtype)} never crosses a boundary"
    if len(signature.shape) > MAX_DIMENSIONS:
        return f"it has {len(signature.shape)} dimensions, at most {MAX_DIMENSIONS} can travel"
    if any(size < 0 for size in signature.shape):
        return "its shape has a negative size"
    return None
