"""Reading samples and collating them into micro-batches so that a failure names its sample. Edge only.

A worker process of a torch data loader passes an exception on as text, and a ``StopIteration`` of a data set or of a
collate function ends the loader as if the data had ended. So nothing is raised where samples are read: a failure is a
value, which comes back like a micro-batch and is raised by whoever draws it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, default_collate, get_worker_info

from ds_ldt.errors import SampleError, cause_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A micro-batch with the indices of its samples, or why there is none.

    Attributes:
        indices: of the samples in the data set, in the order in which they were collated.
        batch: what the collate function returned.
        failure: the error to raise in its place.
    """

    indices: tuple[int, ...]
    batch: Any = None
    failure: SampleError | None = None


class SampleReader(Dataset[Drawn]):
    """Micro-batches of a data set: read at a list of sample indices, it gives them collated.

    Args:
        dataset: a map-style data set; read through its ``__getitems__`` if it has one, as torch's loader does.
        collate_fn: merges a list of samples into a micro-batch; None for torch's default.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None = None) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn or default_collate

    def __getitem__(self, indices: Sequence[int]) -> Drawn:
        """Read and collate; what fails comes back as a failure."""
        called, alone = f"{type(self._dataset).__name__}.__getitem__", self._sample
        try:
            samples = self._samples(indices)
            called, alone = f"collate_fn ({_name(self._collate_fn)})", self.read_alone
            return Drawn(indices=tuple(indices), batch=self._collate_fn(samples))
        except Exception as error:
            sample, cause = blame(error, indices, alone)
            failure = SampleError.at(sample, f"{called} raised {cause_of(cause)}")
            failure.__cause__ = cause
            if get_worker_info() is not None:  # the cause stays behind in the worker, only its text gets out
                failure.add_note("".join(traceback.format_exception(cause)))
            return Drawn(indices=tuple(indices), failure=failure)

    def read_alone(self, index: int) -> Any:
        """Read one sample and collate it alone."""
        return self._collate_fn([self._sample(index)])

    def _sample(self, index: int) -> Any:
        return self._dataset[index]

    def _samples(self, indices: Sequence[int]) -> list[Any]:
        read_all = getattr(self._dataset, "__getitems__", None)
        if read_all:
            samples: list[Any] = read_all(list(indices))
            return samples
        return [self._dataset[index] for index in indices]


def blame(error: Exception, indices: Sequence[int], alone: Callable[[int], Any]) -> tuple[str, Exception]:
    """Find the sample of a micro-batch at fault by using each of them alone.

    Args:
        error: what the whole micro-batch ended in.
        indices: of its samples.
        alone: does with the sample of an index what failed with all of them.

    Returns:
        The name of the sample, or of all where none fails alone; and the error that says what is wrong with it.
    """
    found = {index: failure for index in indices if (failure := _failure(alone, index)) is not None}
    if not found:
        return f"samples {_listed(indices)} of training_data together", error
    row = getattr(error, "row", None)
    if row is not None and row < len(indices) and indices[row] in found:
        return f"sample {indices[row]} of training_data", error
    index = next(iter(found))
    return f"sample {index} of training_data", found[index]


def _failure(alone: Callable[[int], Any], index: int) -> Exception | None:
    try:
        alone(index)
    except Exception as error:
        return error
    return None


def _listed(indices: Iterable[int]) -> str:
    return ", ".join(map(str, indices))


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))
