"""The files of a site's checkpoint that hold optimizer states: their names, and how they are read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ds_ldt.checkpointing.manifest import check_content, check_numbers
from ds_ldt.checkpointing.optimizer_states import ShardedStage
from ds_ldt.errors import CheckpointError

_STAGE_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_SHARD_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


def stage_file(stage: int) -> str:
    """Name of the file with the optimizer, if it is whole, the scheduler and the counters of a stage."""
    return f"mp_rank_{stage:02d}_model_states.pt"


def shard_file(stage: int, replica: int, *, is_bf16: bool) -> str:
    """Name of the file with the optimizer shard of one replica of a stage."""
    return f"{'bf16_' if is_bf16 else ''}zero_pp_rank_{replica}_mp_rank_{stage:02d}_optim_states.pt"


class OptimizerFiles:
    """The files of a site's checkpoint that hold optimizer states.

    Args:
        directory: of the tag.
        files: names of the files of this site -> identities of their contents.
        stage: whose file to read first: where the layout is the same, no other is needed.
    """

    def __init__(self, directory: Path, files: Mapping[str, str], *, stage: int) -> None:
        self._directory, self._files = directory, files
        self._stage = stage
        self._shards: dict[int, dict[int, str]] = {}
        for name in files:
            match = _SHARD_FILE.fullmatch(name)
            if match is not None:
                self._shards.setdefault(int(match[2]), {})[int(match[1])] = name

    @property
    def is_sharded(self) -> bool:
        """Whether it was saved in shards."""
        return bool(self._shards)

    def nearest_stage(self) -> int:
        """The stage that has a file and is this one, or else the last below it, or else the first.

        Raises:
            CheckpointError: there is no such file.
        """
        stages = self._stages()
        if not stages:
            raise CheckpointError(f"{self._directory} holds no {stage_file(self._stage)}, nor that of another stage")
        return max((stage for stage in stages if stage <= self._stage), default=stages[0])

    def whole(self) -> Iterator[Mapping[str, Any]]:
        """Read what `whole_state` of :mod:`~ds_ldt.checkpointing.optimizer_states` gave, of this stage first."""
        for stage in self._in_order(self._stages()):
            optimizer = self._read(stage_file(stage))["optimizer"]
            if optimizer is not None:
                yield optimizer

    def sharded(self) -> Iterator[ShardedStage]:
        """Read the shards of each stage, this one's first."""
        for stage in self._in_order(self._shards):
            names = self._shards[stage]
            missing = set(range(max(names) + 1)) - names.keys()
            if missing:
                raise CheckpointError(
                    f"{self._directory} lacks the optimizer shards {sorted(missing)} of stage {stage}"
                )
            shards = [self._read(names[replica], numbers=False)["optimizer"] for replica in range(len(names))]
            yield ShardedStage(shards, before_reading=partial(self._check, names))

    def _stages(self) -> list[int]:
        return sorted(int(match[1]) for name in self._files if (match := _STAGE_FILE.fullmatch(name)) is not None)

    def _in_order(self, stages: Iterable[int]) -> list[int]:
        return sorted(stages, key=lambda stage: (stage != self._stage, stage))

    def _check(self, names: Mapping[int, str], replica: int) -> None:
        check_numbers(self._directory / names[replica])

    def _read(self, name: str, *, numbers: bool = True) -> dict[str, Any]:
        path = check_content(self._directory, self._files, name, numbers=numbers)
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return state
