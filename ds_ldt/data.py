"""Edge-side sampling: the samples that symmetric data parallelism over D domains would take.

DeepSpeed's pipeline engine gives data parallel rank d of D the d-th stripe of the data set and draws M micro-batches
of it per step. An edge replica stands in for K domains, so it reads K stripes and interleaves them: micro-batch 0 of
its first domain, micro-batch 0 of its second, ..., micro-batch 1 of its first domain (m-major, domain-minor).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from ds_ldt.errors import ConfigError


class SliceBatchSampler(Sampler[list[int]]):
    """Batches of indices for the domains of one edge replica, interleaved domain-minor.

    Args:
        dataset: a map-style data set.
        domains: the domains this replica serves.
        num_domains: D.
        micro_batch_size: samples per micro-batch.
        drop_last: drop a last micro-batch that is not full.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        domains: Sequence[int],
        num_domains: int,
        micro_batch_size: int,
        drop_last: bool = False,
    ) -> None:
        self._stripes = [
            BatchSampler(
                DistributedSampler(dataset, num_replicas=num_domains, rank=domain, shuffle=False),
                micro_batch_size,
                drop_last,
            )
            for domain in domains
        ]

    def __iter__(self) -> Iterator[list[int]]:
        # DistributedSampler pads, so all stripes are equally long
        for batches in zip(*self._stripes, strict=True):
            yield from batches

    def __len__(self) -> int:
        return sum(len(stripe) for stripe in self._stripes)


def build_dataloader(
    dataset: Any,
    *,
    domains: Sequence[int],
    num_domains: int,
    micro_batch_size: int,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    drop_last: bool = False,
) -> DataLoader[Any]:
    """Build the loader of one edge replica; it yields K micro-batches per micro-batch index.

    Args:
        dataset: a map-style data set (``__len__`` and ``__getitem__``).
        domains: the domains this replica serves.
        num_domains: D.
        micro_batch_size: samples per micro-batch.
        collate_fn: merges a list of samples into a micro-batch.
        drop_last: DeepSpeed's ``dataloader_drop_last``.

    Raises:
        ConfigError: the data set cannot be indexed.
    """
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ConfigError.of(
            "training_data",
            found=type(dataset).__name__,
            expected="a map-style data set with __len__ and __getitem__, which can be striped over domains",
            fix="pass an iterator to train_batch(data_iter=...) instead",
        )
    sampler = SliceBatchSampler(
        dataset,
        domains=domains,
        num_domains=num_domains,
        micro_batch_size=micro_batch_size,
        drop_last=drop_last,
    )
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate_fn)
