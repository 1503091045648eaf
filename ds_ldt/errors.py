"""The errors of ds_ldt: one class for each kind of fault, all of them `LDTError`."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

_SHOWN_CHARACTERS = 120


class LDTError(Exception):
    """Base class of every error that ds_ldt raises on purpose."""


class ScheduleError(LDTError):
    """A plan that cannot be run: an instruction is missing, doubled, out of order, or the plan deadlocks."""


class PrivacyError(LDTError):
    """The edge was about to send a tensor that the wire schema does not declare. Nothing has been sent."""


class LinkError(LDTError, RuntimeError):
    """A message did not come, came malformed, or its peer is gone.

    Attributes:
        wait: The `ds_ldt.comm.waits.Wait` that failed, until the other ranks have been asked about theirs; None if
            there is none to ask about.
    """

    wait: Any = None

    @classmethod
    def of(cls, wait: Any, text: str) -> LinkError:
        """Build the error for a wait that failed."""
        error = cls(text)
        error.wait = wait
        return error


class CheckpointError(LDTError):
    """A checkpoint is incomplete, belongs to another layout, or differs between the sites."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigProblem:
    """One fault of a configuration.

    Attributes:
        key: Path of the setting, e.g. `ldt.cloud.data_parallel_size`.
        found: The value found, or a phrase in `Absent`.
        expected: What would have been accepted.
        fix: What to do about it.
    """

    key: str
    found: object
    expected: str
    fix: str

    def __str__(self) -> str:
        """Return the problem as one line: key, value found, what was expected, the fix."""
        return f"{self.key}: found {shown(self.found)}, expected {self.expected}. Fix: {self.fix}."


@dataclass(frozen=True, slots=True)
class Absent:
    """Stands for a value that is not there, or that is better described than quoted."""

    phrase: str = "nothing"

    def __str__(self) -> str:
        """Return the phrase."""
        return self.phrase


class ConfigError(LDTError, ValueError):
    """A setting, or a combination of settings, that cannot be run.

    The text names the key path, the value found, what was expected and the fix. Where several settings are at fault
    the first line is a summary and each further line is one of them.

    Attributes:
        problems: The faults, in the order of the text. Empty if the error was raised with a plain text.
    """

    problems: tuple[ConfigProblem, ...] = ()
    heading: ClassVar[str] = "Configuration error"

    @classmethod
    def of(cls, key: str, *, found: object, expected: str, fix: str) -> ConfigError:
        """Build the error for one setting.

        Args:
            key: Path of the setting, e.g. `ldt.edge.data_parallel_size`.
            found: The value found (or an `Absent`).
            expected: What would have been accepted, without a full stop.
            fix: What to do about it, without a full stop.
        """
        return cls.from_problems([ConfigProblem(key=key, found=found, expected=expected, fix=fix)])

    @classmethod
    def from_problems(cls, problems: Iterable[ConfigProblem], *, where: str | None = None) -> ConfigError:
        """Build one error out of all the faults found.

        Args:
            problems: At least one fault.
            where: Name of the file they were found in, if there is one.
        """
        listed = tuple(problems)
        place = f" in {where}" if where else ""
        if len(listed) == 1:
            text = f"{cls.heading}{place}: {listed[0]}"
        else:
            lines = "".join(f"\n  {number}. {problem}" for number, problem in enumerate(listed, start=1))
            text = f"{cls.heading}{place}: {len(listed)} settings are at fault:{lines}"
        error = cls(text)
        error.problems = listed
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep the attributes, such as the list of problems, when the error crosses a process boundary."""
        return type(self), self.args, dict(vars(self))


class SampleError(ConfigError):
    """A sample, or a micro-batch made of samples, that cannot be trained on.

    It is raised on the edge alone. The cloud learns that the edge failed and nothing of the text, which may quote a
    sample.

    Attributes:
        row: Row of the micro-batch that is at fault, counted from 0; None if it is not one row.
    """

    row: int | None = None
    heading: ClassVar[str] = "Unusable sample"

    @classmethod
    def at(cls, place: str, cause: str, *, row: int | None = None) -> SampleError:
        """Build the error for something wrong at a place.

        Args:
            place: Where: the micro-batch, the sample or the row, e.g. `sample 37 of training_data`.
            cause: What is wrong there.
            row: Row of the micro-batch.
        """
        error = cls(f"{cls.heading}: {place}: {cause}")
        error.row = row
        return error

    @classmethod
    def of_row(cls, row: int | None, problem: ConfigProblem) -> SampleError:
        """Build the error for a fault of a row of a micro-batch, or of the micro-batch (None)."""
        error = cls(f"{cls.heading}: {problem}" if row is None else f"{cls.heading}: row {row}: {problem}")
        error.problems, error.row = (problem,), row
        return error


class CallbackError(LDTError, RuntimeError):
    """A function of the user's raised StopIteration inside a step, where it cannot mean the end of the data."""


def end_inside_a_step(error: StopIteration) -> CallbackError:
    """Return what is to be raised in place of a StopIteration that no data iterator raised.

    Args:
        error: As it was caught; its traceback says which function raised it.
    """
    last = traceback.extract_tb(error.__traceback__)[-1]
    return CallbackError(
        f"{last.name} ({last.filename}, line {last.lineno}) raised StopIteration while a step ran. In "
        "loss_fn, in a layer or in a hook it does not mean the end of the data, which a data iterator alone can tell. "
        "Fix: catch it there, or call next() with a default."
    )


def cause_of(error: Exception) -> str:
    """Return what an error says, without the heading of a `ConfigError`, and with the class of any other."""
    if isinstance(error, ConfigError) and error.problems:
        return "; ".join(map(str, error.problems))
    if isinstance(error, SampleError):
        return str(error).removeprefix(f"{error.heading}: ")
    try:
        said = str(error)
    except Exception:  # noqa: BLE001 - an error of a library may fail at its own text, which must not hide the sample
        said = ""
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def enumerated(items: Sequence[object], *, most: int | None = None) -> str:
    """Return e.g. `a, b, c`, or with ``most=2`` `a, b and 1 more`."""
    named = ", ".join(map(str, items[:most]))
    return named if most is None or len(items) <= most else f"{named} and {len(items) - most} more"


def shown(value: object) -> str:
    """Return a value as JSON users wrote it (true, null, "text"), cut to a readable length."""
    if isinstance(value, Absent):
        return str(value)
    text = _json_like(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 4]} ..."


def _json_like(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{key}": {_json_like(item)}' for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_json_like(item) for item in value) + "]"
    return repr(value)
