"""Where the training data of an edge replica is, saved with a checkpoint. The files stay on the edge.

Saved is the state of what the data comes from, if it has ``state_dict`` and ``load_state_dict``: ``training_data``
always, and an iterator or a data loader of the user's own that has both (torchdata's ``StatefulDataLoader`` has). Of
other iterators the user can keep the position in ``client_state``.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import logger

from ds_ldt.checkpointing.manifest import check_content
from ds_ldt.checkpointing.trainer import Trainer
from ds_ldt.data.sampling import TrainingData
from ds_ldt.errors import CheckpointError

_TRAINING_DATA = "training_data"


def file_name(replica: int) -> str:
    """Name of the file of an edge replica inside a tag directory."""
    return f"data_replica_{replica:02d}.pt"


def position_of(engine: Trainer) -> dict[str, Any] | None:
    """What :func:`read` finds of this rank; None in the cloud, and where no position is known.

    Raises:
        CheckpointError: the data's ``state_dict()`` failed, or holds what ``torch.load(weights_only=True)`` refuses.
    """
    source = _source(engine)
    if not hasattr(source, "state_dict"):
        return None
    try:
        position = {"kind": _kind(source), "num_replicas": engine.job.num_replicas, "state": source.state_dict()}
        buffer = io.BytesIO()
        torch.save(position, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:  # whatever user code raises: all ranks must hear of it
        raise CheckpointError(
            f"the position of the data cannot be saved, state_dict() of {type(source).__name__}: {error}"
        ) from error
    return position


class Position:
    """A position that was read from a checkpoint and belongs to the data at hand.

    Args:
        engine: whose data it is.
        state: what the data's ``state_dict()`` returned.
    """

    def __init__(self, engine: Trainer, state: Any) -> None:
        self._engine = engine
        self._state = state
        self._before: Any = None

    def put(self) -> None:
        """Bring the data to the position.

        Raises:
            CheckpointError: the data's ``load_state_dict()`` failed.
        """
        self._before = _source(self._engine).state_dict()
        self._move(self._state)

    def take_back(self) -> None:
        """Bring the data back to where it was before :meth:`put`, if that was called."""
        if self._before is not None:
            self._move(self._before)

    def _move(self, state: Any) -> None:
        source = _source(self._engine)
        try:
            source.load_state_dict(state)
        except Exception as error:
            raise CheckpointError(
                f"the position of the data cannot be restored, load_state_dict() of {type(source).__name__}: {error}"
            ) from error
        if self._engine.training_dataloader is source:
            self._engine.set_dataloader(source)  # a loader takes its position when it is iterated anew


def read(engine: Trainer, directory: Path, files: Mapping[str, str]) -> Position | None:
    """Read where the data of this rank was when a checkpoint was saved; where that is of no use, say so.

    Args:
        engine: its data is what ``training_data``, ``set_dataloader`` or ``set_dataiterator`` gave it.
        directory: of the tag.
        files: names of the checkpoint's files -> identities of their contents.

    Returns:
        The position; None in the cloud, and where there is none that belongs to this data.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    if engine.site != "edge":
        return None
    source, found = _source(engine), _read(engine, directory, files)
    if found is None:
        if hasattr(source, "load_state_dict"):
            logger.warning(f"load_checkpoint: {directory} holds no position of the data, which stays where it is")
        return None
    problem = _problem(engine, source, found)
    if problem is not None:
        logger.warning(f"load_checkpoint: the position of the data is not restored: {problem}")
        return None
    return Position(engine, found["state"])


def _problem(engine: Trainer, source: Any, found: dict[str, Any]) -> str | None:
    """Why a position that was found does not belong to the data at hand."""
    kind, replicas = found["kind"], engine.job.num_replicas
    if source is None:
        return f"it is that of {kind}, and this engine has no data yet. Fix: call set_dataiterator() before loading"
    if kind != _kind(source):
        return f"it is that of {kind}, and this engine reads {_kind(source)}"
    if not hasattr(source, "load_state_dict"):
        return f"{type(source).__name__} has no load_state_dict()"
    if kind != _TRAINING_DATA and found["num_replicas"] != replicas:
        return f"{kind} was read by {found['num_replicas']} edge replicas, and now by {replicas}"
    return None


def _kind(source: Any) -> str:
    return _TRAINING_DATA if isinstance(source, TrainingData) else "data_iter"


def _source(engine: Trainer) -> Any:
    """What holds the position: the loader that the iterator was made from, else the iterator."""
    if engine.site != "edge":
        return None
    return engine.data_iterator if engine.training_dataloader is None else engine.training_dataloader


def _read(engine: Trainer, directory: Path, files: Mapping[str, str]) -> dict[str, Any] | None:
    """The file of this replica, else of the first: replicas of training_data are all at the same position."""
    for replica in (engine.grid.data_parallel_id, 0):
        if file_name(replica) in files:
            path = check_content(directory, files, file_name(replica))
            found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            return found
    return None
