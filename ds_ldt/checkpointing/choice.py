"""Which checkpoint do two sites load? A pure function of what each of them holds.

Each site surveys its own directory and tells the other. A tag is whole if both sites hold the same save of it. Under
one tag a site may hold two, the second put aside while the first was being committed: a job that ended in between left
one site with the new and the other with the old.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_ldt.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A save that a site holds.

    Attributes:
        save: Its identity, the same on both sites.
        run: The run that saved it.
        step: Training steps done.
        saved_at: When, as a text that sorts by time.
    """

    save: str
    run: str
    step: int
    saved_at: str

    def __str__(self) -> str:
        """Return what tells it from others."""
        return f"run {self.run} (save {self.save}, step {self.step}, {self.saved_at})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What a site holds in a directory.

    Attributes:
        latest: The tag that its file `latest` names; None without that file.
        tags: Tag -> the saves of it, the one in place first.
    """

    latest: str | None
    tags: Mapping[str, Sequence[Held]]

    def as_text(self, *, wanted: str | None, max_bytes: int) -> str:
        """Return it as JSON for the other site; where not all fits, of other tags than the needed the newest.

        Args:
            wanted: A tag that has to be in it, beside `latest`.
            max_bytes: Longest text, in bytes of UTF-8.
        """
        needed = {wanted, self.latest}
        by_age = sorted(self.tags, key=lambda tag: (tag in needed, max(held.saved_at for held in self.tags[tag])))
        while True:
            content = {tag: [[h.save, h.run, h.step, h.saved_at] for h in self.tags[tag]] for tag in by_age}
            text = json.dumps({"latest": self.latest, "tags": content})
            if len(text.encode()) <= max_bytes or not by_age:
                return text
            del by_age[0]

    @classmethod
    def from_text(cls, text: str) -> Survey:
        """Return what a site has told by :meth:`as_text`."""
        content: dict[str, Any] = json.loads(text)
        return cls(
            latest=content["latest"],
            tags={
                tag: [Held(save=save, run=run, step=step, saved_at=at) for save, run, step, at in saves]
                for tag, saves in content["tags"].items()
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The checkpoint to load.

    Attributes:
        tag: Its tag.
        held: The save that both sites hold of it.
        newer: Tags that both sites hold whole and that are of a later step or moment, and are not loaded.
    """

    tag: str
    held: Held
    newer: tuple[str, ...] = ()


def common_save(edge: Sequence[Held], cloud: Sequence[Held]) -> Held | None:
    """Return the save of one tag that both sites hold, the newest of them; None if there is none."""
    there = {held.save for held in cloud}
    return max((held for held in edge if held.save in there), key=lambda held: held.saved_at, default=None)


def choose(edge: Survey, cloud: Survey, wanted: str | None) -> Choice | None:
    """Return the checkpoint to load: the tag that is wanted, else the one that `latest` names.

    Where the sites' files `latest` differ, as a job leaves them that ended between writing the one and the other, it
    is the later of the two tags, if both sites hold it whole.

    Args:
        edge: What the edge holds.
        cloud: What the cloud holds.
        wanted: A tag, or None.

    Returns:
        The choice; None if no tag is wanted, neither site holds any and neither has a file `latest`.

    Raises:
        CheckpointError: Both hold no whole checkpoint of that name, or neither says which is the latest.
    """
    whole = {
        tag: held
        for tag in edge.tags.keys() & cloud.tags.keys()
        if (held := common_save(edge.tags[tag], cloud.tags[tag])) is not None
    }
    if wanted is not None:
        candidates = [wanted]
    else:
        candidates = [latest for latest in dict.fromkeys([edge.latest, cloud.latest]) if latest is not None]
        if not edge.tags and not cloud.tags and not candidates:
            return None
    found = [tag for tag in candidates if tag in whole]
    if not found:
        raise CheckpointError(_refusal(edge, cloud, candidates, wanted))
    tag = max(found, key=lambda name: whole[name].saved_at)
    newer = sorted(
        name for name, held in whole.items() if held.step > whole[tag].step or held.saved_at > whole[tag].saved_at
    )
    return Choice(tag=tag, held=whole[tag], newer=tuple(newer))


def _refusal(edge: Survey, cloud: Survey, candidates: Sequence[str], wanted: str | None) -> str:
    for tag in candidates:
        if tag in edge.tags and tag in cloud.tags:
            return (
                f"load_checkpoint: {tag!r} is not of one save on both sites: the edge holds that of "
                f"{edge.tags[tag][0]}, the cloud that of {cloud.tags[tag][0]}. Halves of different runs or moments "
                "make no model. Fix: name a tag of one run, or the directory where its other half is"
            )
    holds = f"the edge holds {sorted(edge.tags)}, the cloud holds {sorted(cloud.tags)}"
    if wanted is not None:
        asked = f"with tag {wanted!r} on both sites"
    elif candidates:
        asked = f"with the tag that latest names ({' or '.join(map(repr, candidates))}) on both sites"
    else:
        return f"load_checkpoint: neither site has a file `latest`, while {holds}. Fix: name one with tag="
    return (
        f"load_checkpoint: no committed checkpoint {asked}: {holds}. Fix: name a tag that both hold, or the directory "
        "where it is"
    )
