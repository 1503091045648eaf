"""The samples of a step are those that symmetric data parallelism over D domains would take."""

from __future__ import annotations

from itertools import islice
from typing import Any
from unittest import mock

import pytest
from deepspeed.utils import logger
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from ds_ldt.data.sampling import TrainingData, build_training_data
from ds_ldt.errors import ConfigError


@given(
    size=st.integers(1, 40),
    replicas=st.integers(1, 3),
    slice_size=st.integers(1, 3),
    micro_batch_size=st.integers(1, 4),
    drop_last=st.booleans(),
    shuffle_seed=st.none() | st.integers(0, 3),
)
def test_each_domain_gets_the_micro_batches_of_its_own_stripe(
    size: int, replicas: int, slice_size: int, micro_batch_size: int, drop_last: bool, shuffle_seed: int | None
) -> None:
    dataset, num_domains = list(range(size)), replicas * slice_size
    for replica in range(replicas):
        domains = range(replica * slice_size, (replica + 1) * slice_size)
        data = build_training_data(
            dataset,
            domains=domains,
            num_domains=num_domains,
            micro_batch_size=micro_batch_size,
            collate_fn=list,
            drop_last=drop_last,
            shuffle_seed=shuffle_seed,
        )
        for epoch in range(2):
            drawn = list(islice(data, len(data)))
            assert data.epoch == (epoch if drawn else data.epoch)
            for place, domain in enumerate(domains):
                sampler = DistributedSampler(
                    dataset,
                    num_replicas=num_domains,
                    rank=domain,
                    shuffle=shuffle_seed is not None,
                    seed=shuffle_seed or 0,
                )
                sampler.set_epoch(epoch)
                stock = DataLoader(
                    dataset, batch_size=micro_batch_size, sampler=sampler, collate_fn=list, drop_last=drop_last
                )
                assert list(islice(drawn, place, None, slice_size)) == list(stock)


def reader(size: int, num_domains: int, micro_batch_size: int, **options: Any) -> TrainingData:
    """The training data of the only edge replica of D domains."""
    return TrainingData(
        list(range(size)),
        domains=range(num_domains),
        num_domains=num_domains,
        micro_batch_size=micro_batch_size,
        collate_fn=list,
        **options,
    )


@given(
    size=st.integers(1, 40),
    num_domains=st.integers(1, 3),
    micro_batch_size=st.integers(1, 4),
    steps=st.integers(0, 30),
    shuffle_seed=st.none() | st.integers(0, 3),
)
def test_S39_a_restored_position_goes_on_with_the_next_sample(
    size: int, num_domains: int, micro_batch_size: int, steps: int, shuffle_seed: int | None
) -> None:
    first = reader(size, num_domains, micro_batch_size, shuffle_seed=shuffle_seed)
    for _ in range(steps * num_domains):
        next(first)
    second = reader(size, num_domains, micro_batch_size, shuffle_seed=shuffle_seed)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert list(islice(second, 60)) == list(islice(first, 60))


@pytest.mark.parametrize("num_domains, micro_batch_size", [(1, 2), (3, 2), (2, 3), (1, 12)])
def test_S39_a_position_holds_for_other_domains_and_micro_batches(num_domains: int, micro_batch_size: int) -> None:
    """12 samples of 48 were taken by 2 domains in micro-batches of 2."""
    first = reader(48, 2, 2, shuffle_seed=5)
    taken = {sample for _ in range(6) for sample in next(first)}
    second = reader(48, num_domains, micro_batch_size, shuffle_seed=5)
    second.load_state_dict(first.state_dict())
    left = {sample for batch in islice(second, (48 - 12) // micro_batch_size) for sample in batch}
    assert len(taken) == 12
    assert not taken & left


def test_S39_a_position_that_does_not_fit_is_told_with_both_values() -> None:
    state = reader(40, 2, 2).state_dict() | {"epoch": 2, "samples": 12}
    with mock.patch.object(logger, "warning") as warning:
        longer = reader(41, 2, 2)
        longer.load_state_dict(state)
        assert (longer.epoch, next(longer)) == (0, [0, 2])
        assert "num_samples = 40, but here it is 41" in warning.call_args.args[0]
        shuffled = reader(40, 2, 2, shuffle_seed=3)
        shuffled.load_state_dict(state)
        assert shuffled.state_dict()["samples"] == 0
        assert "shuffle_seed = None, but here it is 3" in warning.call_args.args[0]
        coarse = reader(40, 1, 5)
        coarse.load_state_dict(state)
        assert (coarse.epoch, next(coarse)) == (2, [10, 11, 12, 13, 14])
        assert "12 samples into epoch 2" in warning.call_args.args[0]
        assert "2 samples are taken a second time" in warning.call_args.args[0]


def test_S39_what_workers_have_read_ahead_does_not_count() -> None:
    first = reader(24, 2, 2, shuffle_seed=1, num_workers=1)
    drawn = [next(first) for _ in range(6)]
    second = reader(24, 2, 2, shuffle_seed=1, num_workers=1)
    second.load_state_dict(first.state_dict())
    drawn += [next(second) for _ in range(6)]
    assert drawn == list(islice(reader(24, 2, 2, shuffle_seed=1), 12))


def test_S08_data_without_a_micro_batch_ends_at_once() -> None:
    with pytest.raises(StopIteration):
        next(reader(3, 1, 4, drop_last=True))


def test_S08_data_without_a_micro_batch_is_told_before_it_ends() -> None:
    with mock.patch.object(logger, "warning") as warning:
        build_training_data([1, 2, 3], domains=[0], num_domains=1, micro_batch_size=4, drop_last=True)
        assert "its 3 samples make no micro-batch of 4 samples" in warning.call_args.args[0]
        warning.reset_mock()
        build_training_data([1, 2, 3], domains=[0], num_domains=1, micro_batch_size=4)
        warning.assert_not_called()


def test_a_data_set_that_cannot_be_striped_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match="pass an iterator to train_batch"):
        build_training_data(iter([1]), domains=[0], num_domains=1, micro_batch_size=1)
