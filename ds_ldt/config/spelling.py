"""Unknown keys: the nearest known one is suggested, or the section that the key belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from ds_ldt.errors import ConfigProblem

_LISTED_AT_MOST = 12


def unknown_key(
    key: str,
    found: object,
    *,
    known: Iterable[str],
    owner: str,
    elsewhere: Mapping[str, str] | None = None,
    unwanted: Mapping[str, str] | None = None,
) -> ConfigProblem:
    """Return the problem of a key that nobody reads.

    Args:
        key: Path of the key; the last part is compared with `known`.
        found: Its value.
        known: The keys that would have been read.
        owner: Who would read them, e.g. "DeepSpeed".
        elsewhere: Keys of other sections -> their paths: a key that is spelt like one of them belongs there.
        unwanted: Keys that would be refused -> what is said of each: none of them is suggested.
    """
    names, unwanted = sorted(known), unwanted or {}
    spelled = key.rpartition(".")[2]
    listed = f", which are {', '.join(names)}" if len(names) <= _LISTED_AT_MOST else ""
    path = (elsewhere or {}).get(spelled)
    near = nearest(spelled, [*names, *unwanted])
    if path is not None:
        fix = f"move it to {path}, or remove it"
    elif near is None:
        fix = "remove it"
    elif near in unwanted:
        fix = f'remove it. If "{near}" was meant: {unwanted[near]}'
    else:
        fix = f'did you mean "{near}"? Rename it or remove it'
    return ConfigProblem(key=key, found=found, expected=f"one of the keys of {owner}{listed}", fix=fix)


def nearest(spelled: str, names: Iterable[str]) -> str | None:
    """Return the name that is spelt most like another, or None; capitals do not matter."""
    # "LDT" and "Train_Batch_Size" are near misses too.
    by_lower = {name.lower(): name for name in names}
    found = get_close_matches(spelled.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None
