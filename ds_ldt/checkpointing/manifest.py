"""The manifest of a checkpoint: what one site has committed under a tag, of which run, of which model.

``<dir>/<tag>/ldt_checkpoint_<site>.json``. Its presence commits the tag on that site. The manifests of both sites have
the same ``save``, which no other checkpoint has: tags repeat from run to run, and directories are copied by hand.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ds_ldt.comm.identity import ModelFingerprint, RunIdentity
from ds_ldt.errors import CheckpointError

FORMAT = 2
LATEST_FILE = "latest"
MAX_TAG_BYTES = 100

_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("site", "tag", "save", "saved_at"), str),
    **dict.fromkeys(("global_steps", "data_parallel_size"), int),
    **dict.fromkeys(("run", "files"), dict),
    **dict.fromkeys(("model", "lora"), (dict, type(None))),
    "pipeline_num_layers": (list, dict),
    "frozen_excluded": bool,
}


def manifest_name(site: str) -> str:
    """File name of a site's manifest inside a tag directory."""
    return f"ldt_checkpoint_{site}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """What one site has committed under a tag.

    Attributes:
        site: "edge" or "cloud".
        tag: Name of the checkpoint.
        save: Drawn for this checkpoint; the same on both sites.
        saved_at: When, by the clock of the edge: ISO 8601 in UTC, to the microsecond, so that texts sort as moments.
        run: Which run saved it.
        model: The model before its training; None if it was given as a list of layers.
        global_steps: Training steps done.
        pipeline_num_layers: The layout, as configured.
        data_parallel_size: Replicas of every stage of this site.
        frozen_excluded: Parameters that are not trained were left out.
        lora: Settings of the adapters; None without any.
        files: Name of each file of this site -> its :func:`content_id`.
    """

    site: str
    tag: str
    save: str
    saved_at: str
    run: RunIdentity
    model: ModelFingerprint | None
    global_steps: int
    pipeline_num_layers: list[list[int]] | dict[str, list[list[int]]]
    data_parallel_size: int
    frozen_excluded: bool
    lora: dict[str, Any] | None
    files: dict[str, str]

    def __str__(self) -> str:
        """Return what tells this checkpoint from others, in a few words."""
        return f"{self.tag!r} of run {self.run.run} (save {self.save}, step {self.global_steps}, {self.saved_at})"

    def as_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {
            "format": FORMAT,
            "site": self.site,
            "tag": self.tag,
            "save": self.save,
            "saved_at": self.saved_at,
            "run": {"id": self.run.run, "resumed_from": list(self.run.resumed_from)},
            "model": None if self.model is None else self.model.as_json(),
            "global_steps": self.global_steps,
            "pipeline_num_layers": self.pipeline_num_layers,
            "data_parallel_size": self.data_parallel_size,
            "frozen_excluded": self.frozen_excluded,
            "lora": self.lora,
            "files": self.files,
        }

    @classmethod
    def read(cls, directory: Path, site: str) -> CheckpointManifest:
        """Read the manifest of a site in a tag directory.

        Raises:
            CheckpointError: it is missing, damaged, or of another version of ds_ldt.
        """
        path = directory / manifest_name(site)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise CheckpointError(
                    f"{path} has format {content['format']}, expected {FORMAT}: it was written by another version of "
                    "ds_ldt, and does not say what this one compares. Fix: export it with the version that wrote it"
                )
            _check_values(content, site)
            model, run = content["model"], content["run"]
            return cls(
                run=RunIdentity(run=str(run["id"]), resumed_from=tuple(map(str, run["resumed_from"]))),
                model=None if model is None else ModelFingerprint.from_json(model),
                files={str(name): str(found) for name, found in content["files"].items()},
                **{name: content[name] for name in cls.__slots__ if name not in ("run", "model", "files")},
            )
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing: nothing was committed there by the {site}") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {error!r}. Fix: copy it again, or load another tag") from error


def _check_values(content: Mapping[str, Any], site: str) -> None:
    """Check what a manifest says, which somebody may have edited.

    Raises:
        ValueError, TypeError: a value is none that this module has written.
    """
    for name, kind in _KINDS.items():
        if not isinstance(content[name], kind):
            raise TypeError(f"{name} is {content[name]!r}")
    datetime.fromisoformat(content["saved_at"])
    if content["site"] != site:
        raise ValueError(f"it is that of the {content['site']}")
    paths = [name for name in content["files"] if Path(name).name != name]
    if paths:
        raise ValueError(f"files holds {paths}")


def content_id(path: Path) -> str:
    """Return an identity of the content of a file of ``torch.save``, without reading the content.

    The file is a zip archive, whose directory holds a checksum (CRC-32) and the size of every tensor.

    Raises:
        CheckpointError: it is missing, cut short or no such file.
    """
    hashed = hashlib.sha256()
    with _archive(path) as archive:
        for entry in archive.infolist():
            name = entry.filename.partition("/")[2]
            hashed.update(f"{name} {entry.CRC:08x} {entry.file_size}\n".encode())
    return hashed.hexdigest()[:16]


def check_numbers(path: Path) -> None:
    """Read a file of ``torch.save`` through and compare every tensor with its checksum, which torch does not do.

    Raises:
        CheckpointError: a number in it is not the one that was saved.
    """
    with _archive(path) as archive:
        bad = archive.testzip()
    if bad is not None:
        raise CheckpointError(
            f"{path} is damaged: the checksum of {bad} is another. Fix: copy it again, or load another tag"
        )


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, zipfile.BadZipFile, NotImplementedError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. Fix: copy it again, or load another tag") from error


def check_content(directory: Path, files: Mapping[str, str], name: str, *, numbers: bool = True) -> Path:
    """Return the path of a file that a manifest names.

    Args:
        directory: of the tag.
        files: name of each file -> identity of its content.
        name: of the file.
        numbers: read the file through as well, see :func:`check_numbers`.

    Raises:
        CheckpointError: it is missing, damaged, or is not the one that was saved.
    """
    path = directory / name
    found = content_id(path)
    if found != files[name]:
        raise CheckpointError(
            f"{path} is not the file that was saved with its manifest: content {found}, expected {files[name]}. "
            "Fix: copy the directory of the tag again, whole"
        )
    if numbers:
        check_numbers(path)
    return path


def tag_problem(tag: str) -> str | None:
    """Say why a text cannot name a checkpoint, which is a directory beside others; None if it can."""
    faults = {
        "it is empty": not tag,
        "it is a path, and a tag is the name of one directory": any(part in tag for part in ("/", "\\", os.sep)),
        "it begins with a dot, as what is being written does": tag.startswith("."),
        f"{LATEST_FILE} is the file that names the newest tag": tag == LATEST_FILE,
        "it holds control characters, or blanks at its ends": not tag.isprintable() or tag != tag.strip(),
        f"it has more than {MAX_TAG_BYTES} bytes": len(tag.encode(errors="replace")) > MAX_TAG_BYTES,
    }
    return next((fault for fault, found in faults.items() if found), None)
