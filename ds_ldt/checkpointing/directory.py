"""The checkpoint directory of one site: what is written, put in place, put aside and found in it.

Used by one process of the site, its leader. Files of a tag are written aside (``.<tag>.<site>.partial``); the commit
puts those of an earlier save of the tag aside (``.<tag>.<site>.previous``) and the new ones in place, the manifest
last. The earlier ones go when both sites have committed, so that whatever ends the job leaves one save that both hold.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from deepspeed.utils import logger

from ds_ldt.checkpointing.choice import Held, Survey
from ds_ldt.checkpointing.disk_space import writing
from ds_ldt.checkpointing.layer_files import read_latest, write_text
from ds_ldt.checkpointing.manifest import LATEST_FILE, CheckpointManifest, content_id, manifest_name, tag_problem
from ds_ldt.errors import CheckpointError


class CheckpointDirectory:
    """Where one site keeps its halves of checkpoints.

    Args:
        root: the directory; the other site may use the same one.
        site: "edge" or "cloud".
    """

    def __init__(self, root: Path, site: str) -> None:
        self.root = root
        self._site = site

    def staging(self, tag: str) -> Path:
        """Where the files of a tag are written before it is committed."""
        return self.root / f".{tag}.{self._site}.partial"

    def previous(self, tag: str) -> Path:
        """Where an earlier save of a tag is while a later one is being committed."""
        return self.root / f".{tag}.{self._site}.previous"

    # -- saving -----------------------------------------------------------------------------------------------------

    def prepare(self, tag: str) -> None:
        """Make an empty place for the files of a tag; what earlier jobs left half written goes."""
        self.root.mkdir(parents=True, exist_ok=True)
        for left in self.root.glob(f".*.{self._site}.partial"):
            shutil.rmtree(left)
        self._put_back_unfinished()
        self._check_place(tag)
        self.staging(tag).mkdir()

    def discard(self, tag: str) -> None:
        """Remove what has been written of a tag that will not be committed."""
        shutil.rmtree(self.staging(tag), ignore_errors=True)

    def content_of_staging(self, tag: str) -> dict[str, str]:
        """The files that the ranks of the site have written, with the identities of their contents."""
        return {path.name: content_id(path) for path in sorted(self.staging(tag).iterdir())}

    def commit(self, manifest: CheckpointManifest) -> None:
        """Put the files of a tag in place, its manifest last; an earlier save of it is kept aside."""
        tag = manifest.tag
        staging, target = self.staging(tag), self.root / tag
        target.mkdir(exist_ok=True)
        if (target / manifest_name(self._site)).is_file():
            self._put_aside(tag)
        _move(manifest.files, staging, target)
        staging.rmdir()
        self._replace_text(target / manifest_name(self._site), json.dumps(manifest.as_json(), indent=2) + "\n")
        _sync(self.root)

    def roll_back(self, manifest: CheckpointManifest) -> None:
        """Undo a commit, whole or begun, that the other site did not follow: an earlier save is in place again."""
        target, aside = self.root / manifest.tag, self.previous(manifest.tag)
        place = target / manifest_name(self._site)
        is_begun = target.is_dir() and not place.is_file()
        if is_begun or (place.is_file() and CheckpointManifest.read(target, self._site).save == manifest.save):
            earlier = CheckpointManifest.read(aside, self._site).files if aside.is_dir() else {}
            if all((aside / name).is_file() for name in earlier):  # else they are in place yet, and the later ones not
                place.unlink(missing_ok=True)
                _remove(target, manifest.files)
            if earlier:
                self._take_back(manifest.tag)
        shutil.rmtree(aside, ignore_errors=True)
        self._text_aside(place).unlink(missing_ok=True)
        self.discard(manifest.tag)
        with suppress(OSError):  # it holds what is the other site's, or that site was faster
            target.rmdir()

    def finish(self, tag: str) -> None:
        """Remove the earlier save of a tag: both sites have committed the later one."""
        shutil.rmtree(self.previous(tag), ignore_errors=True)

    def point_latest(self, tag: str) -> None:
        """Let ``latest`` name a tag."""
        self._replace_text(self.root / LATEST_FILE, tag)

    def _check_place(self, tag: str) -> None:
        """Refuse what could not be put aside, before anything is written."""
        target = self.root / tag
        if (target / manifest_name(self._site)).is_file():
            try:
                CheckpointManifest.read(target, self._site)
            except CheckpointError as error:
                raise CheckpointError(f"what {target} holds is not overwritten: {error}, or remove it") from error
        elif target.is_symlink() if not target.exists() else not target.is_dir():
            raise CheckpointError(f"{target} is in the way: it is no directory. Fix: remove it, or save another tag")

    # -- loading ----------------------------------------------------------------------------------------------------

    def survey(self) -> Survey:
        """Return what is committed here; what a commit left half done is undone first."""
        self._put_back_unfinished()
        tags: dict[str, list[Held]] = {}
        for directory in sorted(path for path in self.root.glob("*") if path.is_dir() and not tag_problem(path.name)):
            saves = [self._held(place) for place in (directory, self.previous(directory.name))]
            held = [one for one in saves if one is not None]
            if held:
                tags[directory.name] = held
        return Survey(latest=read_latest(self.root), tags=tags)

    def settle(self, tag: str, save: str) -> None:
        """Leave one save of a tag in place, the one that both sites hold."""
        aside = self.previous(tag)
        if aside.is_dir():
            held = self._held(aside)
            if held is not None and held.save == save:
                self._take_back(tag)
            shutil.rmtree(aside, ignore_errors=True)

    def _held(self, directory: Path) -> Held | None:
        if not (directory / manifest_name(self._site)).is_file():
            return None
        try:
            found = CheckpointManifest.read(directory, self._site)
        except CheckpointError as error:  # one bad tag must not keep the others from being found
            logger.warning(f"ds_ldt: passed over: {error}")
            return None
        return Held(save=found.save, run=found.run.run, step=found.global_steps, saved_at=found.saved_at)

    def _put_aside(self, tag: str) -> None:
        """Move what is in place aside, the manifest first: a place without one is no checkpoint."""
        target, aside = self.root / tag, self.previous(tag)
        files = CheckpointManifest.read(target, self._site).files
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        _move([manifest_name(self._site), *files], target, aside)

    def _take_back(self, tag: str) -> None:
        """Put what is aside in place, the manifest last; what is in place goes."""
        target, aside = self.root / tag, self.previous(tag)
        manifest = target / manifest_name(self._site)
        if manifest.is_file():
            names = CheckpointManifest.read(target, self._site).files
            manifest.unlink()
            _remove(target, names)
        names = CheckpointManifest.read(aside, self._site).files
        target.mkdir(exist_ok=True)
        _move([name for name in names if (aside / name).is_file()], aside, target)
        _move([manifest.name], aside, target)
        shutil.rmtree(aside)
        _sync(self.root)

    def _put_back_unfinished(self) -> None:
        """Undo commits that did not come to their end: an earlier save is aside, and no later one in place."""
        for aside in self.root.glob(f".*.{self._site}.previous"):
            tag = aside.name.removeprefix(".").removesuffix(f".{self._site}.previous")
            if not (self.root / tag / manifest_name(self._site)).is_file():
                if (aside / manifest_name(self._site)).is_file():
                    self._take_back(tag)
                else:
                    shutil.rmtree(aside)

    def _text_aside(self, path: Path) -> Path:
        return path.with_name(f".{path.name}.{self._site}.text")

    def _replace_text(self, path: Path, text: str) -> None:
        aside = self._text_aside(path)
        try:
            with writing(path, len(text)):
                write_text(aside, text)
            os.replace(aside, path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        _sync(path.parent)


def sync_files(paths: Iterable[Path]) -> None:
    """Make the content of files durable."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _move(names: Iterable[str], source: Path, destination: Path) -> None:
    """Move files in the order given, and make that durable."""
    for name in names:
        os.replace(source / name, destination / name)
    _sync(destination)


def _remove(directory: Path, names: Iterable[str]) -> None:
    for name in names:
        (directory / name).unlink(missing_ok=True)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
