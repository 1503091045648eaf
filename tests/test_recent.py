"""What is remembered is bounded, however many different things a run meets."""

from __future__ import annotations

import pytest

from ds_ldt.plan.recent import Recent


def test_the_answer_asked_for_longest_ago_goes_first() -> None:
    made: list[int] = []
    recent: Recent[int, int] = Recent(2)
    for key in (1, 2, 1, 3, 1, 2):
        assert recent.get(key, lambda key=key: made.append(key) or 10 * key) == 10 * key
    assert made == [1, 2, 3, 2]
    assert len(recent) == 2


def test_what_cannot_be_made_is_not_kept() -> None:
    recent: Recent[int, float] = Recent(2)
    with pytest.raises(ZeroDivisionError):
        recent.get(1, lambda: 1 / 0)
    assert len(recent) == 0
