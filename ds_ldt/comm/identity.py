"""Which model, and which run: what tells the halves of one job from those of another.

Edge and cloud hold halves of a model on two disks. Tags of checkpoints repeat in every run and directories are copied
by hand, so names prove nothing. What is compared instead:

- a `ModelFingerprint`: the settings of a model's config and a digest of its weights before training;
- a run, drawn once when an engine is made, with the runs that it was resumed from;
- a save, drawn once for each checkpoint and the same in the manifests of both sites.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_SHOWN_DIFFERENCES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFingerprint:
    """A model before its training.

    Attributes:
        family: transformers' `model_type`.
        settings: Settings of its config that differ from the defaults of the family, without those that say nothing
            about the model (see :func:`ds_ldt.checkpointing.fingerprint.settings_of`).
        weights: Digest of its weights, or where they come from if they were never on a disk.
    """

    family: str
    settings: dict[str, Any]
    weights: str

    def __str__(self) -> str:
        """Return family, digest of the settings and weights in one line."""
        text = json.dumps(self.settings, sort_keys=True)
        return f"{self.family} (config {hashlib.sha256(text.encode()).hexdigest()[:12]}, weights {self.weights[:24]})"

    def as_json(self) -> dict[str, Any]:
        """Return what a manifest keeps of it."""
        return {"family": self.family, "settings": self.settings, "weights": self.weights}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ModelFingerprint:
        """Return the fingerprint that a manifest keeps.

        Raises:
            KeyError, TypeError: it is not one.
        """
        return cls(family=str(content["family"]), settings=dict(content["settings"]), weights=str(content["weights"]))

    def facts(self) -> dict[str, Any]:
        """Return what it consists of by name, one entry for each setting."""
        return {"model": self.family, "model weights": self.weights} | {
            f"model config {key}": value for key, value in _flat(self.settings).items()
        }

    def config_differences(self, other: ModelFingerprint) -> list[str]:
        """Name the settings in which the config of another model differs, as `key: this one's, the other's`.

        Dropout is left out: a model may be trained on with more or less of it.
        """
        if self.family != other.family:
            return [f"model_type: {self.family}, {other.family}"]
        mine, others = _flat(self.settings), _flat(other.settings)
        return [
            f"{key}: {_shown(mine, key)}, {_shown(others, key)}"
            for key in sorted(mine.keys() | others.keys())
            if "dropout" not in key and mine.get(key) != others.get(key)
        ]

    def difference(self, other: ModelFingerprint) -> str | None:
        """Say in one phrase how another model differs (this one's value first); None if it is the same."""
        settings = self.config_differences(other)
        if settings:
            more = f" and {len(settings) - _SHOWN_DIFFERENCES} more" if len(settings) > _SHOWN_DIFFERENCES else ""
            return "; ".join(settings[:_SHOWN_DIFFERENCES]) + more
        if self.weights != other.weights:
            return f"weights: {self.weights[:24]}, {other.weights[:24]}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """One run of training.

    Attributes:
        run: Drawn at random when its engine was made.
        resumed_from: The runs whose checkpoints it went on from, the oldest first.
    """

    run: str
    resumed_from: tuple[str, ...] = field(default=())

    def resuming(self, earlier: RunIdentity) -> RunIdentity:
        """Return this run after it has loaded a checkpoint of an earlier one."""
        lineage = (*earlier.resumed_from, earlier.run)
        return RunIdentity(run=self.run, resumed_from=tuple(dict.fromkeys(r for r in lineage if r != self.run)))


def draw_identity() -> str:
    """Return a name that no other run or save has: 16 hexadecimal digits drawn at random."""
    return secrets.token_hex(8)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def _shown(settings: Mapping[str, Any], key: str) -> str:
    text = json.dumps(settings[key]) if key in settings else "default"
    return text if len(text) <= 40 else f"{text[:36]} ..."
