"""Unknown keys: the nearest known one is suggested."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from ds_ldt.errors import ConfigProblem

_LISTED_AT_MOST = 12


def unknown_key(key: str, found: object, *, known: Iterable[str], owner: str) -> ConfigProblem:
    """Return the problem of a key that nobody reads.

    Args:
        key: Path of the key; the last part is compared with `known`.
        found: Its value.
        known: The keys that would have been read.
        owner: Who would read them, e.g. "DeepSpeed".
    """
    names = sorted(known)
    spelled = key.rpartition(".")[2]
    # Compared without case, since "LDT" and "Train_Batch_Size" are near misses too.
    by_lower = {name.lower(): name for name in names}
    near = [by_lower[name] for name in get_close_matches(spelled.lower(), by_lower, n=1, cutoff=0.6)]
    listed = f", which are {', '.join(names)}" if len(names) <= _LISTED_AT_MOST else ""
    fix = f'did you mean "{near[0]}"? Rename it or remove it' if near else "remove it"
    return ConfigProblem(key=key, found=found, expected=f"one of the keys of {owner}{listed}", fix=fix)
