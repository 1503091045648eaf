"""Runs a sequence of layers, with or without activation checkpoints; in training and in dry runs alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ds_ldt.config.schema import JobConfig
from ds_ldt.runtime.rng import seed_generators

Payload = Tensor | tuple[Tensor, ...]
"""What flows between layers, as in DeepSpeed: a tensor or a tuple of tensors."""

Func = Callable[[Any], Any]
"""A layer, from payload to payload."""


def intervals_by_chunk(job: JobConfig, num_chunks: int, *, default: int = 0) -> tuple[int, ...]:
    """Return for each chunk after how many layers activations are checkpointed; 0 for a chunk without checkpoints.

    Args:
        job: ``ldt.activation_checkpoint_interval`` wins over DeepSpeed's own setting in its ``pipeline`` section.
        num_chunks: V.
        default: what holds where the configuration says nothing.
    """
    by_chunk = job.ldt.activation_checkpoint_interval
    alike = job.deepspeed.get("pipeline", {}).get("activation_checkpoint_interval", default)
    return tuple(by_chunk or (alike,) * num_chunks)


def run_segments(
    funcs: Sequence[Func],
    inputs: Payload,
    *,
    interval: int,
    reentrant: bool,
    is_checkpointable: Callable[[slice], bool],
    preserve_rng_state: bool = True,
) -> Any:
    """Run layers one after the other.

    Args:
        funcs: the layers.
        inputs: payload of the first.
        interval: checkpoint activations every so many layers; 0 for no checkpoints.
        reentrant: use torch's reentrant kind.
        is_checkpointable: whether the layers of a segment may be checkpointed.
        preserve_rng_state: run a segment again with the random numbers of its first run.

    Returns:
        What the last layer returns.
    """
    if interval == 0 or not torch.is_grad_enabled():
        return _run(funcs, inputs)
    for start in range(0, len(funcs), interval):
        segment = slice(start, start + interval)
        if is_checkpointable(segment):
            inputs = _run_checkpointed(funcs[segment], inputs, reentrant, preserve_rng_state)
        else:
            inputs = _run(funcs[segment], inputs)
    return inputs


def _run_checkpointed(funcs: Sequence[Func], inputs: Payload, reentrant: bool, preserve_rng_state: bool) -> Any:
    """Run layers without keeping what is inside them; the backward pass computes it again.

    Reentrant checkpointing drops the gradients of a segment none of whose inputs needs one (token ids), so such a
    segment always uses the other kind.
    """
    is_plain = type(inputs) is tuple  # other containers hold a micro-batch, which needs no gradients: passed as it is
    tensors = inputs if is_plain else (inputs,)

    def run(*args: Any) -> Any:
        return _run(funcs, args if is_plain else args[0])

    return checkpoint(
        run,
        *tensors,
        use_reentrant=reentrant and any(isinstance(one, Tensor) and one.requires_grad for one in tensors),
        preserve_rng_state=preserve_rng_state,
    )


def _run(funcs: Sequence[Func], inputs: Any) -> Any:
    for func in funcs:
        inputs = func(inputs)
    return inputs


def with_local(func: Callable[..., Any], local: tuple[Tensor, ...], inputs: Payload) -> Any:
    """Call a layer that takes what stays on the edge besides."""
    return func(inputs, local)


def inside_of(inside: Callable[[], AbstractContextManager[Any]], func: Func, inputs: Payload) -> Any:
    """Call a layer inside a context."""
    with inside():
        return func(inputs)


def seeded(seed: int, func: Func, inputs: Payload) -> Any:
    """Call a layer with generators seeded for it."""
    seed_generators(seed)
    return func(inputs)
