"""From what a data iterator yields to micro-batches. Edge only.

Functions of the user's run here: the iterator itself, ``batch_fn``, ``count_targets``. Whatever they raise becomes an
error that names the micro-batch, the function and, where ``training_data`` is read, the sample. Only the iterator may
say that the data ends: a ``StopIteration`` out of any other function is an error like all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ds_ldt.data import TrainingData
from ds_ldt.errors import Absent, ConfigError, LDTError, SampleError, cause_of
from ds_ldt.module import LDTPipelineModule
from ds_ldt.samples import blame


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """A micro-batch as the edge drew it.

    Attributes:
        inputs: what the head takes.
        labels: what the loss function takes.
        local: what the local layers take besides, in whichever virtual stage of the edge they are.
        num_targets: how many targets its loss is a mean over; 0 where the loss is a mean over micro-batches.
        loss_weight: factor of its loss: 1, or its share of the targets where the loss is a mean over targets.
    """

    inputs: Any
    labels: Any
    local: tuple[torch.Tensor, ...] = ()
    num_targets: int = 0
    loss_weight: float = 1.0


class MicroBatchReader:
    """Draws micro-batches and takes them apart.

    Args:
        module: says how.
    """

    def __init__(self, module: LDTPipelineModule) -> None:
        self._module = module

    def read(self, data_iterator: Iterator[Any], place: str, *, with_loss: bool) -> MicroBatch:
        """Draw the next micro-batch.

        Args:
            data_iterator: yields micro-batches.
            place: which micro-batch it is, for errors.
            with_loss: whether a loss is computed, so that labels are needed.

        Raises:
            StopIteration: the iterator has ended.
            SampleError: a sample cannot be read or used, or a function of the user's failed.
            ConfigError: the micro-batch has another form than the module takes.
        """
        batch = self._draw(data_iterator, place)
        inputs, labels, local = self._call("batch_fn", self._parts, batch, place=place, source=data_iterator)
        num_targets = self._call("count_targets", self._count, labels, with_loss, place=place)
        return MicroBatch(inputs=inputs, labels=labels, local=local, num_targets=num_targets)

    def sent_shapes(self, batch: MicroBatch, boundary: int, place: str) -> Any:
        """What the module says of the shapes that the edge sends over a boundary; None if they are to be traced."""
        if self._module.sent_shapes is None:
            return None
        return self._call("sent_shapes", self._module.sent_shapes, batch.inputs, batch.local, boundary, place=place)

    def _draw(self, data_iterator: Iterator[Any], place: str) -> Any:
        if not hasattr(data_iterator, "__next__"):
            raise ConfigError.of(
                "data_iter", found=Absent(type(data_iterator).__name__), expected="an iterator", fix="pass iter(it)"
            )
        try:
            return next(data_iterator)
        except SampleError as error:
            raise SampleError.at(place, cause_of(error)) from error
        except (StopIteration, LDTError):
            raise
        except Exception as error:
            raise SampleError.at(
                place, f"the data iterator ({type(data_iterator).__name__}) raised {cause_of(error)}"
            ) from error

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any, place: str, source: Any = None) -> Any:
        """Call a function of the user's; whatever it raises names it, the micro-batch and the sample."""
        try:
            return function(*arguments)
        except Exception as error:
            if isinstance(error, LDTError) and not isinstance(error, SampleError):
                raise
            cause: Exception = error
            if isinstance(source, TrainingData):
                sample, cause = blame(
                    error, source.sample_indices, lambda index: self._parts(source.reader.read_alone(index))
                )
                place = f"{place}, {sample}"
            elif isinstance(error, SampleError) and error.row is not None:
                place = f"{place}, row {error.row}"
            what = cause_of(cause) if isinstance(cause, SampleError) else f"{name} raised {cause_of(cause)}"
            raise SampleError.at(place, what) from error

    def _parts(self, batch: Any) -> tuple[Any, Any, tuple[torch.Tensor, ...]]:
        """Inputs, labels and what stays on the edge besides; lists (torch's collate makes them of tuples) as tuples."""
        found = _pair(batch) if self._module.batch_fn is None else self._module.batch_fn(batch)
        if not isinstance(found, tuple | list) or len(found) < 2:
            raise ConfigError.of(
                "batch_fn",
                found=Absent(f"{len(found)} values" if isinstance(found, tuple | list) else type(found).__name__),
                expected="(inputs, labels)",
                fix="return a tuple",
            )
        inputs, labels, *rest = found
        return _as_tuple(inputs), labels, self._local([_as_tuple(one) for one in rest])

    def _local(self, rest: list[Any]) -> tuple[torch.Tensor, ...]:
        """What the micro-batch brings for the local layers: the third value of ``batch_fn``."""
        found = rest[0] if rest else ()
        if len(rest) > 1 or not isinstance(found, tuple) or (self._module.local_layers and not rest):
            raise ConfigError.of(
                "batch_fn",
                found=Absent(f"{2 + len(rest)} values"),
                expected="(inputs, labels, local), local being a tuple of tensors for the local layers",
                fix="return a third value, or build the module without local_layers=",
            )
        return found

    def _count(self, labels: Any, with_loss: bool) -> int:
        if self._module.loss_reduction != "token" or self._module.count_targets is None or not with_loss:
            return 0
        if labels is None:
            raise ConfigError.of(
                "batch.labels",
                found=Absent(),
                expected="labels, since a loss is computed",
                fix="add them in the collate function, or call eval_batch with compute_loss=False",
            )
        return self._module.count_targets(labels)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ConfigError.of(
            "training_data",
            found=type(batch).__name__,
            expected="micro-batches that are (inputs, labels)",
            fix="return such a pair from collate_fn, or give the module a batch_fn that makes one",
        )
    return batch[0], batch[1]
