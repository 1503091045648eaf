"""From what a data iterator yields to micro-batches. Edge only.

Functions of the user's run here: the iterator itself, ``batch_fn``, ``count_targets``. Whatever they raise becomes an
error that names the micro-batch, the function and, where ``training_data`` is read, the sample. Only the iterator may
say that the data ends: a ``StopIteration`` out of any other function is an error like all others.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ds_ldt.data.samples import blame
from ds_ldt.data.sampling import TrainingData
from ds_ldt.errors import Absent, ConfigError, LDTError, SampleError, cause_of
from ds_ldt.runtime.module import LDTPipelineModule

MicroBatchKey = tuple[int, int]
"""(micro-batch, domain)"""


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

    def read(
        self, data_iterator: Iterator[Any], place: str, *, with_loss: bool, is_generated: bool = False
    ) -> MicroBatch:
        """Draw the next micro-batch.

        Args:
            data_iterator: yields micro-batches.
            place: which micro-batch it is, for errors.
            with_loss: whether a loss is computed, so that labels are needed.
            is_generated: the iterator is that of ``generate``, whose errors are about no sample and stay as they are.

        Raises:
            StopIteration: the iterator has ended.
            SampleError: a sample cannot be read or used, or a function of the user's failed.
            ConfigError: the micro-batch has another form than the module takes.
        """
        batch = next(data_iterator) if is_generated else _draw(data_iterator, place)

        def count(parts: tuple[Any, ...]) -> int:
            return self._count(parts[1], with_loss)

        def count_again(batch: Any) -> int:
            return count(self._parts(batch))

        source = data_iterator if isinstance(data_iterator, TrainingData) else None
        found = _called("batch_fn", self._parts, batch, place=place, source=source, again=self._parts)
        num_targets = _called("count_targets", count, found, place=place, source=source, again=count_again)
        inputs, labels, local = found
        return MicroBatch(inputs=inputs, labels=labels, local=local, num_targets=num_targets)

    def sent_shapes(self, batch: MicroBatch, boundary: int, place: str) -> Any:
        """What the module says of the shapes that the edge sends over a boundary; None if they are to be traced."""
        if self._module.sent_shapes is None:
            return None
        return _called("sent_shapes", self._module.sent_shapes, batch.inputs, batch.local, boundary, place=place)

    def _parts(self, batch: Any) -> tuple[Any, Any, tuple[torch.Tensor, ...]]:
        """Inputs, labels and what stays on the edge besides; tuples, of which torch's collate makes lists, again."""
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


def _called(
    name: str,
    function: Callable[..., Any],
    *arguments: Any,
    place: str,
    source: TrainingData | None = None,
    again: Callable[[Any], Any] | None = None,
) -> Any:
    """Call a function of the user's; whatever it raises names it, the micro-batch and the sample.

    Args:
        name: what the user calls the function.
        function: the function.
        arguments: its arguments.
        place: which micro-batch it is about.
        source: the data that the micro-batch is from, if that can say which samples it has.
        again: does the same with the micro-batch of a single sample.
    """
    try:
        return function(*arguments)
    except Exception as error:
        if isinstance(error, LDTError) and not isinstance(error, SampleError):
            raise
        cause, row = error, error.row if isinstance(error, SampleError) else None
        if source is not None and again is not None:
            read, use = source.reader.read_alone, again
            sample, cause = blame(error, source.sample_indices, lambda index: use(read(index)))
            place = f"{place}, {sample}"
        elif row is not None:
            place = f"{place}, row {row}"
        what = cause_of(cause) if isinstance(cause, SampleError) else f"{name} raised {cause_of(cause)}"
        raise SampleError.at(place, what, row=row) from error


def _draw(data_iterator: Iterator[Any], place: str) -> Any:
    if not hasattr(data_iterator, "__next__"):
        raise ConfigError.of(
            "data_iter", found=Absent(type(data_iterator).__name__), expected="an iterator", fix="pass iter(it)"
        )
    try:
        return next(data_iterator)
    except SampleError as error:
        if isinstance(data_iterator, TrainingData):  # it has named the sample
            raise SampleError(f"{error.heading}: {place}, {cause_of(error)}") from error
        at = place if error.row is None else f"{place}, row {error.row}"
        raise SampleError.at(at, cause_of(error), row=error.row) from error
    except StopIteration as error:
        if not _is_from_a_sample(error):
            raise
        called = "__getitem__ or collate_fn of the data loader"
        raise SampleError.at(
            place, f"{called} raised StopIteration, which there is not the end of the data"
        ) from error
    except LDTError:
        raise
    except Exception as error:
        called = f"the data iterator ({type(data_iterator).__name__})"
        raise SampleError.at(place, f"{called} raised {cause_of(error)}") from error


def _is_from_a_sample(error: StopIteration) -> bool:
    """Whether a data loader of torch over a map-style data set let it out while it read or collated samples."""
    called = {frame.f_code.co_qualname for frame, _ in traceback.walk_tb(error.__traceback__)}
    return "_MapDatasetFetcher.fetch" in called or "in DataLoader worker process" in str(error)


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
