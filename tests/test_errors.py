"""The errors: their family tree and the form of a configuration error's text."""

from __future__ import annotations

import pickle

import pytest

from ds_ldt.errors import (
    Absent,
    CheckpointError,
    ConfigError,
    ConfigProblem,
    LDTError,
    LinkError,
    PrivacyError,
    ScheduleError,
    cause_of,
    shown,
)


@pytest.mark.parametrize(
    "error, parents",
    [
        (ConfigError, (LDTError, ValueError)),
        (ScheduleError, (LDTError,)),
        (PrivacyError, (LDTError,)),
        (LinkError, (LDTError, RuntimeError)),
        (CheckpointError, (LDTError,)),
    ],
)
def test_every_error_is_an_ldt_error_and_pickles(error: type[LDTError], parents: tuple[type, ...]) -> None:
    assert all(issubclass(error, parent) for parent in parents)
    copied = pickle.loads(pickle.dumps(error("why")))
    assert type(copied) is error
    assert str(copied) == "why"


def test_one_problem_is_one_line() -> None:
    error = ConfigError.of("ldt.timeout_s", found="300", expected="seconds", fix='write "timeout_s": 300')
    assert str(error) == (
        'Configuration error: ldt.timeout_s: found "300", expected seconds. Fix: write "timeout_s": 300.'
    )
    assert [problem.key for problem in error.problems] == ["ldt.timeout_s"]


def test_several_problems_follow_a_summary() -> None:
    problems = [
        ConfigProblem(key=key, found=Absent(), expected="a number", fix="write one") for key in ("first", "second")
    ]
    error = ConfigError.from_problems(problems, where="job.json")
    assert str(error).splitlines() == [
        "Configuration error in job.json: 2 settings are at fault:",
        "  1. first: found nothing, expected a number. Fix: write one.",
        "  2. second: found nothing, expected a number. Fix: write one.",
    ]
    assert error.problems == tuple(problems)


def test_config_error_with_a_plain_text_has_no_problems() -> None:
    assert ConfigError("why").problems == ()


@pytest.mark.parametrize(
    "value, text",
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        ("true", '"true"'),
        (1, "1"),
        (1.0, "1.0"),
        ([1, None, "a"], '[1, null, "a"]'),
        ((1, (2,)), "[1, [2]]"),
        ({"a": [True]}, '{"a": [true]}'),
        (Absent(), "nothing"),
        (Absent("3 processes"), "3 processes"),
    ],
)
def test_values_are_shown_as_in_json(value: object, text: str) -> None:
    assert shown(value) == text


def test_S62_an_error_that_cannot_say_its_text_is_named_by_its_class() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert cause_of(MuteError()) == "MuteError"


def test_long_values_are_cut() -> None:
    text = shown(list(range(1000)))
    assert len(text) == 120
    assert text.endswith(" ...")
