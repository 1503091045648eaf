"""A command that takes a while says so on stderr, and one that does not says nothing."""

from __future__ import annotations

import time

import pytest

from ds_ldt.cli.progress import Progress
from ds_ldt.plan import Costs
from ds_ldt.plan.report import phases_of, report_on
from tests.plan.shapes import full_shape


def test_S91_a_long_command_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(3, patience_s=0.05) as progress:
        progress("trying greedy")
        progress("making the plan")
        time.sleep(0.3)
    told = capsys.readouterr()
    assert "ds-ldt: making the plan: 1 of 3 phases done, 00:0" in told.err
    assert told.out == ""


def test_a_short_command_says_nothing_and_does_not_wait(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    with Progress(3) as progress:
        progress("trying greedy")
    assert time.monotonic() - began < 1
    assert capsys.readouterr().err == ""


def test_the_line_ends_with_an_error_of_the_command() -> None:
    progress = Progress(1, patience_s=0.01)

    def fail() -> None:
        with progress:
            time.sleep(0.1)
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        fail()
    assert not progress.is_shown


@pytest.mark.parametrize("policy", ["auto", "greedy"])
def test_a_report_announces_as_many_phases_as_it_has(policy: str) -> None:
    shape = full_shape(3, 2, m=4)
    phases: list[str] = []
    report_on(shape, Costs.uniform(shape, edge=0.1), policy=policy, progress=phases.append)
    assert len(phases) == len(set(phases)) == phases_of(policy)
