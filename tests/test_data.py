"""The samples of a step are those that symmetric data parallelism over D domains would take."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from ds_ldt.data import build_dataloader
from ds_ldt.errors import ConfigError


@given(
    size=st.integers(1, 40),
    replicas=st.integers(1, 3),
    slice_size=st.integers(1, 3),
    micro_batch_size=st.integers(1, 4),
    drop_last=st.booleans(),
)
def test_each_domain_gets_the_micro_batches_of_its_own_stripe(
    size: int, replicas: int, slice_size: int, micro_batch_size: int, drop_last: bool
) -> None:
    dataset, num_domains = list(range(size)), replicas * slice_size
    for replica in range(replicas):
        domains = range(replica * slice_size, (replica + 1) * slice_size)
        loader = build_dataloader(
            dataset,
            domains=domains,
            num_domains=num_domains,
            micro_batch_size=micro_batch_size,
            collate_fn=list,
            drop_last=drop_last,
        )
        drawn = list(loader)
        assert len(drawn) == len(loader)
        for place, domain in enumerate(domains):
            stock = DataLoader(
                dataset,
                batch_size=micro_batch_size,
                sampler=DistributedSampler(dataset, num_replicas=num_domains, rank=domain, shuffle=False),
                collate_fn=list,
                drop_last=drop_last,
            )
            assert list(islice(drawn, place, None, slice_size)) == list(stock)


def test_a_data_set_that_cannot_be_striped_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match="pass an iterator to train_batch"):
        build_dataloader(iter([1]), domains=[0], num_domains=1, micro_batch_size=1)
