"""Split training equals unsplit training: losses, gradient norm and every weight, for every topology.

The cases of one world size run one after the other in one group of processes. `-m parity_full` runs the whole matrix;
without it, a subset in which every value of every dimension occurs. `-k ranks5` chooses those of five ranks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest

from tests.engine.cases import config, layout
from tests.engine.parity import assert_parity, oracle
from tests.engine.test_precision import NUM_RANKS_OF_UNEQUAL, UNEQUAL, check
from tests.harness import GroupPool

STEPS = 5


@dataclass(frozen=True, slots=True)
class Case:
    """One point of the matrix: stages, domains, edge replicas, micro-batches, chunks, optimizer, clipping."""

    num_stages: int
    num_domains: int
    num_replicas: int
    num_micro_batches: int
    num_chunks: int
    optimizer: str = "SGD"
    gradient_clipping: float = 0.0

    @property
    def world_size(self) -> int:
        return self.num_replicas + (self.num_stages - 1) * self.num_domains

    @property
    def topology(self) -> str:
        stages, domains, replicas = self.num_stages, self.num_domains, self.num_replicas
        return f"ranks{self.world_size}_P{stages}_D{domains}_E{replicas}_V{self.num_chunks}"

    def settings(self) -> dict[str, Any]:
        return config(
            layout(self.num_stages, self.num_chunks),
            num_domains=self.num_domains,
            num_replicas=self.num_replicas,
            num_micro_batches=self.num_micro_batches,
            optimizer=self.optimizer,
            gradient_clipping=self.gradient_clipping,
        )


COVERING = [
    Case(2, 1, 1, 1, 2),
    Case(2, 1, 1, 8, 3, "AdamW"),
    Case(2, 1, 1, 3, 2, "SGD", 0.1),
    Case(2, 2, 1, 4, 2, "SGD", 0.1),
    Case(2, 2, 1, 2, 3, "AdamW"),
    Case(2, 2, 1, 8, 2, "AdamW", 0.1),
    Case(2, 2, 2, 3, 2),
    Case(2, 2, 2, 2, 3, "SGD", 0.1),
    Case(3, 1, 1, 2, 2),
    Case(3, 1, 1, 4, 3, "SGD", 0.1),
    Case(4, 1, 1, 1, 3, "AdamW"),
    Case(4, 1, 1, 8, 2, "SGD", 0.1),
    Case(3, 2, 1, 3, 3),
    Case(3, 2, 1, 8, 2, "AdamW", 0.1),
    Case(2, 4, 1, 3, 2, "SGD", 0.1),
    Case(2, 4, 1, 1, 3, "AdamW"),
    Case(3, 2, 2, 4, 2, "AdamW"),
    Case(2, 4, 2, 4, 3, "SGD", 0.1),
    Case(4, 2, 1, 2, 2, "SGD", 0.1),
    Case(4, 2, 2, 3, 3, "AdamW", 0.1),
]

EVERYTHING = [
    Case(*point)
    for point in itertools.product((2, 3, 4), (1, 2, 4), (1, 2), (1, 2, 3, 4, 8), (2, 3), ("SGD", "AdamW"), (0.0, 0.1))
    if point[1] % point[2] == 0
]

BEYOND = [
    Case(*shape, num_micro_batches, num_chunks, optimizer, gradient_clipping)
    for shape in ((2, 3, 3), (2, 6, 2), (3, 3, 1), (5, 2, 1), (5, 2, 2))
    for num_chunks in (2, 3)
    for num_micro_batches, optimizer, gradient_clipping in ((1, "SGD", 0.0), (4, "AdamW", 0.1), (8, "SGD", 0.1))
]
"""Stages, domains and edge replicas in other numbers than those of the matrix; run with all of it."""


def _check(groups: GroupPool, cases: list[Case], *, deadline_s: float) -> None:
    world_size = cases[0].world_size
    runs = [(case.settings(), STEPS) for case in cases]
    ranks = groups.run(world_size, "tests.engine.cases:train_many", runs, deadline_s=deadline_s)
    for number, case in enumerate(cases):
        try:
            assert_parity([rank[number] for rank in ranks], oracle(case.settings(), STEPS), case.optimizer)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def test_the_subset_covers_every_value_of_every_dimension() -> None:
    for name in Case.__dataclass_fields__:
        assert {getattr(c, name) for c in COVERING} == {getattr(c, name) for c in EVERYTHING}, name
    assert max(case.world_size for case in COVERING) <= 8


@pytest.mark.parametrize("world_size", range(2, 9))
def test_split_training_equals_unsplit_training(groups: GroupPool, world_size: int) -> None:
    _check(groups, [case for case in COVERING if case.world_size == world_size], deadline_s=150)
    if world_size == NUM_RANKS_OF_UNEQUAL:
        check(groups, world_size, UNEQUAL)


@pytest.mark.parity_full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("topology", sorted({case.topology for case in EVERYTHING + BEYOND}))
def test_split_training_equals_unsplit_training_everywhere(groups: GroupPool, topology: str) -> None:
    _check(groups, [case for case in EVERYTHING + BEYOND if case.topology == topology], deadline_s=3000)
