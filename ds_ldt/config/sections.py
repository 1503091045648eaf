"""What the sections of the JSON have in common, and those of them that stand on their own."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, field_validator


class Section(BaseModel):
    """A JSON object in which every key is known and no value is converted in silence."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class TraceConfig(Section):
    """Which steps are recorded.

    Attributes:
        path: Directory of this site into which each rank writes `rank_<rank>.json`.
        steps: The first and the last training step to record, counted from 1.
    """

    path: str = Field(min_length=1, description="the path of a directory", examples=["trace"])
    steps: tuple[int, int] = Field(description="two whole numbers, first <= last, from 1 on", examples=[[3, 4]])

    @field_validator("steps", mode="before")
    @classmethod
    def _range(cls, value: object) -> object:
        if isinstance(value, list | tuple) and len(value) == 2:  # noqa: PLR2004
            first, last = value
            if all(type(step) is int for step in value) and 1 <= first <= last:
                return (first, last)
        raise ValueError("no range of steps")
