"""Edge-side sampling: the samples that symmetric data parallelism over D domains would take, from a known position on.

DeepSpeed's pipeline engine gives data parallel rank d of D the d-th stripe of the data set and draws M micro-batches
of it per step. An edge replica stands in for K domains, so it reads K stripes and interleaves them: micro-batch 0 of
its first domain, micro-batch 0 of its second, ..., micro-batch 1 of its first domain (m-major, domain-minor).

All stripes advance together. So the samples that were taken in an epoch are always the first few of its order, and one
number says how many, whatever D, E and the size of a micro-batch are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from deepspeed.utils import logger
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from ds_ldt.data.samples import Drawn, SampleReader
from ds_ldt.errors import ConfigError, ConfigProblem


class SliceBatchSampler(Sampler[list[int]]):
    """Batches of indices for the domains of one edge replica, interleaved domain-minor.

    Args:
        dataset: a map-style data set.
        domains: the domains this replica serves.
        num_domains: D.
        micro_batch_size: samples per micro-batch.
        drop_last: drop a last micro-batch that is not full.
        shuffle_seed: None for the order of the data set; else each epoch has an order of its own, that of torch's
            ``DistributedSampler`` with this seed.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        domains: Sequence[int],
        num_domains: int,
        micro_batch_size: int,
        drop_last: bool = False,
        shuffle_seed: int | None = None,
    ) -> None:
        self._samplers: list[DistributedSampler[Any]] = [
            DistributedSampler(
                dataset,
                num_replicas=num_domains,
                rank=domain,
                shuffle=shuffle_seed is not None,
                seed=shuffle_seed or 0,
            )
            for domain in domains
        ]
        self._stripes = [BatchSampler(sampler, micro_batch_size, drop_last) for sampler in self._samplers]
        self._first = 0

    def start_at(self, epoch: int, first: int) -> None:
        """What the next iteration yields.

        Args:
            epoch: number of the epoch, which decides its order.
            first: how many micro-batches of each domain it leaves out at the beginning.
        """
        self._first = first
        for sampler in self._samplers:
            sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        # DistributedSampler pads, so all stripes are equally long
        for batches in islice(zip(*self._stripes, strict=True), self._first, None):
            yield from batches

    def __len__(self) -> int:
        return sum(len(stripe) for stripe in self._stripes)


class TrainingData:
    """Endless micro-batches of one edge replica: epoch after epoch, from a position that can be saved and restored.

    What counts is what was taken out of it, not what workers have read ahead. Restoring reads no sample that is left
    out. It has a ``state_dict`` and a ``load_state_dict``, as torchdata's ``StatefulDataLoader`` has.

    Args:
        dataset: a map-style data set.
        domains: the domains this replica serves.
        num_domains: D.
        micro_batch_size: samples per micro-batch.
        collate_fn: merges a list of samples into a micro-batch.
        drop_last: drop a last micro-batch that is not full.
        shuffle_seed: as for :class:`SliceBatchSampler`.
        num_workers: processes that read ahead; 0 for none.

    Attributes:
        epoch: number of the epoch from which the last micro-batch was drawn, from 0 on.
        loader: torch's data loader of one epoch; what it yields are `ds_ldt.data.samples.Drawn`.
        reader: reads and collates samples.
        sample_indices: of the samples in the last micro-batch.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        domains: Sequence[int],
        num_domains: int,
        micro_batch_size: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        shuffle_seed: int | None = None,
        num_workers: int = 0,
    ) -> None:
        self._sampler = SliceBatchSampler(
            dataset,
            domains=domains,
            num_domains=num_domains,
            micro_batch_size=micro_batch_size,
            drop_last=drop_last,
            shuffle_seed=shuffle_seed,
        )
        self.reader = SampleReader(dataset, collate_fn)
        self.loader: DataLoader[Drawn] = DataLoader(
            self.reader, batch_size=None, sampler=self._sampler, collate_fn=_as_it_is, num_workers=num_workers
        )
        self.epoch = 0
        self.sample_indices: tuple[int, ...] = ()
        self._num_samples = len(dataset)  # type: ignore[arg-type]
        self._shuffle_seed = shuffle_seed
        self._slice_size = len(domains)
        self._per_index = num_domains * micro_batch_size
        self._drawn = 0
        self._iterator: Iterator[Drawn] | None = None

    def __len__(self) -> int:
        """Micro-batches that this replica draws in an epoch."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next micro-batch.

        Raises:
            StopIteration: an epoch has no micro-batch at all.
            SampleError: a sample cannot be read or collated; the micro-batch counts as taken.
        """
        if self._drawn >= len(self):
            self._move(self.epoch + 1, 0)
        if self._iterator is None:
            self._sampler.start_at(self.epoch, self._drawn // self._slice_size)
            self._iterator = iter(self.loader)
        drawn = next(self._iterator)
        self._drawn += 1
        self.sample_indices = drawn.indices
        if drawn.failure is not None:
            raise drawn.failure
        return drawn.batch

    def close(self) -> None:
        """End the processes that read ahead. To draw again starts them anew, where it was left."""
        iterator, self._iterator = self._iterator, None
        # They end with the iterator, but the traceback of an error may keep that; torch has no public name for this.
        shut_down = getattr(iterator, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()

    def _move(self, epoch: int, drawn: int) -> None:
        self.close()
        self.epoch, self._drawn = epoch, drawn

    def state_dict(self) -> dict[str, int | None]:
        """The position: which epoch, and how many samples of its order all D domains have taken.

        It is the same on all edge replicas between two steps.
        """
        epoch, drawn = (self.epoch, self._drawn) if self._drawn < len(self) else (self.epoch + 1, 0)
        return {
            "epoch": epoch,
            "samples": drawn // self._slice_size * self._per_index,
            "num_samples": self._num_samples,
            "shuffle_seed": self._shuffle_seed,
        }

    def load_state_dict(self, state: Mapping[str, int | None]) -> None:
        """Go on from a position, which another D, E or micro-batch size may have been at.

        Where the data set has another length or another order than that of the position, it is read from its beginning
        with a warning. Where the position lies inside a micro-batch, that is taken as a whole, with a warning.

        Args:
            state: what :meth:`state_dict` has returned.
        """
        mine = self.state_dict()
        for name in ("num_samples", "shuffle_seed"):
            if state[name] != mine[name]:
                logger.warning(
                    f"training_data: its saved position belongs to {name} = {state[name]}, but here it is "
                    f"{mine[name]}: the data starts from its beginning"
                )
                self._move(0, 0)
                return
        epoch, samples = int(state["epoch"] or 0), int(state["samples"] or 0)
        if samples % self._per_index:
            logger.warning(
                f"training_data: its saved position, {samples} samples into epoch {epoch}, lies inside a micro-batch: "
                f"the domains take {self._per_index} samples at a time here. {samples % self._per_index} samples are "
                "taken a second time"
            )
        self._move(epoch, samples // self._per_index * self._slice_size)


def _as_it_is(drawn: Any) -> Any:
    return drawn


def data_problems(dataset: Any) -> Iterator[ConfigProblem]:
    """Yield why a data set cannot be striped over domains, if it cannot."""
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        yield ConfigProblem(
            key="training_data",
            found=type(dataset).__name__,
            expected="a map-style data set with __len__ and __getitem__, which can be striped over domains",
            fix="pass an iterator to train_batch(data_iter=...) instead",
        )


def build_training_data(
    dataset: Any,
    *,
    domains: Sequence[int],
    num_domains: int,
    micro_batch_size: int,
    **options: Any,
) -> TrainingData:
    """Build what an edge replica draws from; see :class:`TrainingData`.

    Args:
        dataset: a map-style data set (``__len__`` and ``__getitem__``).
        domains: the domains this replica serves.
        num_domains: D.
        micro_batch_size: samples per micro-batch.
        options: as for :class:`TrainingData`.

    Raises:
        ConfigError: the data set cannot be indexed.
    """
    problems = list(data_problems(dataset))
    if problems:
        raise ConfigError.from_problems(problems)
    data = TrainingData(
        dataset, domains=domains, num_domains=num_domains, micro_batch_size=micro_batch_size, **options
    )
    if not len(data):
        logger.warning(
            f"training_data: its {len(dataset)} samples make no micro-batch of {micro_batch_size} samples for each of "
            f"{num_domains} domains, so the first step ends with StopIteration. Give more samples, or set "
            '"dataloader_drop_last" to false'
        )
    return data
