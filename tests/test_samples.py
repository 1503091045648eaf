"""What fails while samples are read or collated names the sample, in workers too, and these end with the data."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from ds_ldt.data.samples import SampleReader
from ds_ldt.data.sampling import TrainingData
from ds_ldt.errors import ConfigError, SampleError
from ds_ldt.runtime.micro_batches import MicroBatchReader

BAD = 5


class Files:
    """Sample i is i; that of `BAD` raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == BAD and self.error is not None:
            raise self.error
        return torch.tensor(index)


class ManyAtOnce(Files):
    """As the data sets of Hugging Face, which read the samples of a batch together."""

    calls = 0

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        type(self).calls += 1
        return [self[index] for index in indices]


def refuse(samples: list[Any]) -> Any:
    if any(sample == BAD for sample in samples):
        raise OSError("image file is truncated")
    return default_collate(samples)


def end_early(samples: list[Any]) -> Any:
    return next(iter([])) if any(sample == BAD for sample in samples) else default_collate(samples)


def refuse_pairs(samples: list[Any]) -> Any:
    if len(samples) > 1 and any(sample == BAD for sample in samples):
        raise ValueError("no two of a kind")
    return default_collate(samples)


def data(dataset: Any, collate_fn: Any = None, **options: Any) -> TrainingData:
    return TrainingData(
        dataset, domains=[0], num_domains=1, micro_batch_size=2, collate_fn=collate_fn, **options
    )  # samples 4 and 5 are the third micro-batch


def told(source: Any, draws: int = 3) -> SampleError:
    for _ in range(draws - 1):
        next(source)
    with pytest.raises(SampleError) as raised:
        next(source)
    return raised.value


FAULTS: dict[str, tuple[Any, Any, str]] = {
    "a file is missing": (
        Files(FileNotFoundError(2, "No such file", "five.png")),
        None,
        "sample 5 of training_data: Files.__getitem__ raised FileNotFoundError: [Errno 2] No such file: 'five.png'",
    ),
    "read together": (
        ManyAtOnce(KeyError("text")),
        None,
        "sample 5 of training_data: ManyAtOnce.__getitem__ raised Key",
    ),
    "the data set says it ends": (Files(StopIteration()), None, "Files.__getitem__ raised StopIteration"),
    "collated": (
        Files(),
        refuse,
        "sample 5 of training_data: collate_fn (refuse) raised OSError: image file is trunc",
    ),
    "collating says it ends": (
        Files(),
        end_early,
        "sample 5 of training_data: collate_fn (end_early) raised StopIter",
    ),
    "none fails alone": (
        Files(),
        refuse_pairs,
        "samples 4, 5 of training_data together: collate_fn (refuse_pairs) rai",
    ),
}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("dataset, collate_fn, text", FAULTS.values(), ids=FAULTS)
def test_S62_S89_what_fails_names_the_sample(dataset: Any, collate_fn: Any, text: str, num_workers: int) -> None:
    source = data(dataset, collate_fn, num_workers=num_workers)
    error = told(source)
    assert text in str(error)
    assert source.sample_indices == (4, 5)
    if num_workers:
        assert "Traceback" in error.__notes__[0], "where it happened stays behind in the worker"
    else:
        assert error.__cause__ is not None
    assert next(source).tolist() == [6, 7], "what comes after it can still be drawn"
    source.close()


def test_samples_that_can_be_read_together_are() -> None:
    ManyAtOnce.calls = 0
    assert next(data(ManyAtOnce())).tolist() == [0, 1]
    assert ManyAtOnce.calls == 1


def test_the_default_collate_function_names_the_sample_that_does_not_stack() -> None:
    samples = [torch.ones(2)] * 5 + [None] + [torch.ones(2)] * 2
    assert "sample 5 of training_data: collate_fn (default_collate) raised TypeError" in str(told(data(samples)))
    ragged = [torch.ones(2)] * 5 + [torch.ones(3)] + [torch.ones(2)] * 2
    assert "samples 4, 5 of training_data together: collate_fn (default_collate)" in str(told(data(ragged)))


def test_S88_workers_end_when_the_data_is_closed_whoever_holds_it() -> None:
    before = set(multiprocessing.active_children())
    source = data(Files(OSError("gone")), num_workers=2)
    kept = told(source)  # its traceback holds what was being read
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    held = source._iterator
    source.close()
    assert held is not None and kept is not None
    assert not any(worker.is_alive() for worker in workers)
    source.close()
    assert next(source).tolist() == [6, 7], "after it the data goes on where it was"
    source.close()
    assert set(multiprocessing.active_children()) <= before


class Module:
    """As much of a pipeline module as reading a micro-batch concerns."""

    local_layers = frozenset[int]()
    loss_reduction = "token"
    sent_shapes = None

    def __init__(
        self, batch_fn: Callable[[Any], Any] | None = None, count_targets: Callable[[Any], int] = len
    ) -> None:
        self.batch_fn = batch_fn
        self.count_targets = count_targets


def read(module: Any, source: Any, draws: int = 3) -> SampleError:
    reader = MicroBatchReader(module)

    def read_all() -> None:
        for number in range(draws):
            reader.read(source, f"micro-batch {number} of domain 0", with_loss=True)

    with pytest.raises(SampleError) as raised:
        read_all()
    return raised.value


def bad_rows(batch: torch.Tensor) -> Any:
    if bool((batch == BAD).any()):
        raise LookupError("no such row")
    return batch, batch


def bad_counts(labels: torch.Tensor) -> int:
    return int(next(iter([]))) if bool((labels == BAD).any()) else 1


def pair(batch: torch.Tensor) -> Any:
    return batch, batch


def ends(batch: torch.Tensor) -> Any:
    return next(iter([])) if bool((batch == BAD).any()) else (batch, batch)


@pytest.mark.parametrize(
    "module, text",
    [
        (Module(bad_rows), "batch_fn raised LookupError: no such row"),
        (Module(ends), "batch_fn raised StopIteration"),
        (Module(pair, bad_counts), "count_targets raised StopIteration"),
    ],
)
def test_S89_functions_of_the_user_are_named_with_micro_batch_and_sample(module: Any, text: str) -> None:
    wanted = f"micro-batch 2 of domain 0, sample 5 of training_data: {text}"
    assert wanted in str(read(module, data(Files())))
    batches = [torch.tensor([n, n + 1]) for n in range(0, 8, 2)]
    assert f"micro-batch 2 of domain 0: {text}" in str(read(module, iter(batches)))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_S89_a_loader_of_the_user_does_not_end_where_its_collate_function_does(num_workers: int) -> None:
    loader = DataLoader(Files(), batch_size=2, collate_fn=end_early, num_workers=num_workers)
    error = read(Module(pair), iter(loader))
    assert "micro-batch 2 of domain 0: __getitem__ or collate_fn of the data loader raised StopIteration" in str(error)
    with pytest.raises(StopIteration):
        read(Module(pair), iter(DataLoader(Files(), batch_size=6, num_workers=num_workers)))


def test_S62_an_iterator_of_the_user_names_micro_batch_and_row() -> None:
    def fail() -> Any:
        yield torch.ones(2)
        raise OSError("cat.png is truncated")

    error = read(Module(pair), fail())
    assert "micro-batch 1 of domain 0: the data iterator (generator) raised OSError: cat.png is truncated" in str(
        error
    )

    class Refusing:
        def __next__(self) -> Any:
            raise SampleError.at("somewhere", "something", row=1)

    error = read(Module(pair), Refusing())
    assert "micro-batch 0 of domain 0, row 1: " in str(error) and error.row == 1


@pytest.mark.parametrize("found", [[torch.ones(2)], torch.utils.data.DataLoader([1])])
def test_what_is_no_iterator_is_refused_with_the_way_out(found: Any) -> None:
    with pytest.raises(ConfigError, match=r"data_iter: found .*, expected an iterator. Fix: pass iter"):
        MicroBatchReader(Module(pair)).read(found, "micro-batch 0 of domain 0", with_loss=True)


@pytest.mark.parametrize("found", [None, torch.ones(2), (torch.ones(2),)])
def test_a_batch_fn_that_returns_something_else_is_told(found: Any) -> None:
    with pytest.raises(ConfigError, match=r"batch_fn: found .* expected \(inputs, labels\)"):
        MicroBatchReader(Module(lambda batch: found)).read(iter([1]), "micro-batch 0 of domain 0", with_loss=True)


def test_an_error_keeps_its_row_on_its_way_out_of_a_worker() -> None:
    error = pickle.loads(pickle.dumps(SampleError.at("sample 5", "too long", row=3)))
    assert (str(error), error.row) == ("Unusable sample: sample 5: too long", 3)


def test_a_sample_is_read_alone_by_its_index() -> None:
    assert SampleReader(Files()).read_alone(7).tolist() == [7]
