"""Backward passes in two halves: linear layers put the gradients of their weights off.

While a virtual stage runs forward inside :meth:`WeightLedger.deferring`, each ``torch.nn.functional.linear`` is
replaced by one whose backward gives the gradients of input and bias only, and enters what the gradient of the weight
takes (the input, the gradient of the output) into the ledger. :meth:`WeightLedger.settle` makes it later:

    grad of weight (out, in) += (grad of output as (N, out))^T @ (input as (N, in))

Everything else gets its gradients in the backward pass as ever: norms, embeddings, convolutions, and linear layers
whose weight is computed (not a leaf), has gradient hooks or is of a type of its own, or that are used under
autocast or inside a checkpoint that a layer makes on its own. So a model is right whatever it is made of; only the
share of the work that can wait differs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

_PLAIN = (Tensor, nn.Parameter)


class WeightLedger:
    """What weight gradients are still to be made from, by the backward pass that put them off."""

    def __init__(self) -> None:
        self._accounts: dict[Hashable, list[tuple[Tensor, Tensor, Tensor]]] = {}
        self._open: list[tuple[Tensor, Tensor, Tensor]] | None = None

    def deferring(self) -> TorchFunctionMode:
        """A context for a forward pass, or a part of one: its linear layers put the gradients of their weights off."""
        return _Deferring(self)

    @contextmanager
    def owed_by(self, key: Hashable) -> Iterator[None]:
        """Around a backward pass: what it puts off is entered under this key.

        Args:
            key: what :meth:`settle` will be called with.
        """
        self._open = self._accounts.setdefault(key, [])
        try:
            yield
        finally:
            self._open = None

    def enter(self, weight: Tensor, given: Tensor, grad: Tensor) -> bool:
        """Put the gradient of a weight off, if a backward pass that may do so is running.

        Args:
            weight: (out, in), a leaf.
            given: the input, (..., in).
            grad: gradient of the output, (..., out).

        Returns:
            Whether it was put off; if not the caller makes it.
        """
        if self._open is None:
            return False
        self._open.append((weight, given, grad))
        return True

    @torch.no_grad()
    def settle(self, key: Hashable) -> list[Tensor]:
        """Make the weight gradients that were put off under a key and add them to ``weight.grad``.

        Args:
            key: as given to :meth:`owed_by`.

        Returns:
            The weights, one entry for each use.
        """
        weights = []
        for weight, given, grad in self._accounts.pop(key, ()):
            if weight.grad is None:
                weight.grad = _weight_gradient(given, grad)
            else:
                weight.grad += _weight_gradient(given, grad)
            weights.append(weight)
        return weights

    def clear(self) -> None:
        """Forget everything: the step that it belongs to has failed."""
        self._accounts.clear()

    def __len__(self) -> int:
        """Number of gradients that are still to be made."""
        return sum(map(len, self._accounts.values()))


class _Deferring(TorchFunctionMode):
    def __init__(self, ledger: WeightLedger) -> None:
        super().__init__()
        self._ledger = ledger
        self._hooks = _saved_tensor_hooks()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace ``linear`` where its weight can wait; everything else runs as it is."""
        kwargs = kwargs or {}
        if func is linear:
            given, weight, bias = _linear_arguments(*args, **kwargs)
            if _can_wait(given, weight) and _saved_tensor_hooks() == self._hooks:
                return _DeferredLinear.apply(given, weight, bias, self._ledger)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


class _DeferredLinear(torch.autograd.Function):
    """``linear`` whose backward leaves the gradient of the weight to a ledger."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None, ledger: WeightLedger) -> Tensor:
        ctx.save_for_backward(given, weight)
        ctx.ledger, ctx.leaf = ledger, weight  # what a checkpoint gives back as saved is a copy without a grad
        return linear(given, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        given, weight = ctx.saved_tensors
        of_input, of_weight, of_bias, _ = ctx.needs_input_grad
        is_late = of_weight and not ctx.ledger.enter(ctx.leaf, given, grad)
        return (
            grad @ weight if of_input else None,
            _weight_gradient(given, grad) if is_late else None,
            grad.reshape(-1, grad.shape[-1]).sum(0) if of_bias else None,
            None,
        )


def _linear_arguments(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Any]:
    # Named as those of torch.nn.functional.linear, since callers may name them.
    return input, weight, bias


def _can_wait(given: Tensor, weight: Tensor) -> bool:
    """Whether the gradient of this weight may be made later, with the same result and unnoticed by anybody."""
    return (
        torch.is_grad_enabled()
        and type(given) in _PLAIN
        and type(weight) in _PLAIN
        and weight.requires_grad
        and weight.is_leaf
        and weight.dim() == 2  # noqa: PLR2004
        and not weight._backward_hooks
        and not weight._post_accumulate_grad_hooks
        and not torch.is_autocast_enabled(weight.device.type)
        and not torch.compiler.is_compiling()
    )


def _weight_gradient(given: Tensor, grad: Tensor) -> Tensor:
    return grad.reshape(-1, grad.shape[-1]).t() @ given.reshape(-1, given.shape[-1])


def _saved_tensor_hooks() -> Any:
    """The innermost hooks on saved tensors, such as a checkpoint sets.

    A checkpoint that a layer makes inside its own forward runs that part again without the mode, and would take the
    saved tensors of a plain ``linear`` for ours; so nothing waits inside hooks that the mode did not begin with.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True)
