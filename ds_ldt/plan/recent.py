"""A mapping that remembers what was used last, and no more than it may."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

REMEMBERED_PLANS = 16
"""Plans of which a rank remembers what follows from them: those of training, and of evaluations of several lengths."""


class Recent(Generic[K, V]):
    """Answers that were made once and are kept while they are asked for.

    Args:
        size: The most answers that are kept, at least 1; the one that was asked for longest ago goes first.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the answer for a key, making it if it is not kept.

        Args:
            key: What is asked for.
            make: Makes the answer; what it raises is raised here, and nothing is kept.
        """
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        made = self._kept[key] = make()
        while len(self._kept) > self._size:
            self._kept.popitem(last=False)
        return made

    def __len__(self) -> int:
        """Number of answers kept."""
        return len(self._kept)
