"""The key-value store in which the ranks met, as a side channel that never blocks for long.

torch's client waits without a bound for a store whose process is stopped. So each call runs in a thread that is left
behind if it takes too long, and once that has happened the store has to answer a plain socket first. Not before: for
each new connection torch's store looks up the name of the address and serves nobody meanwhile, which takes seconds
where no name server answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ds_ldt.comm.reach import greet, within

T = TypeVar("T")

_ANSWER_S = 5.0
"""Longest wait for an answer of the store, in seconds."""


class SharedStore:
    """A store of torch under a prefix.

    Args:
        store: torch's store.
        prefix: Comes before every key.
        answer_s: Longest wait for an answer in seconds.

    Attributes:
        address: Host and port of the store, None if it is none that listens.
    """

    def __init__(self, store: Any, prefix: str, *, answer_s: float = _ANSWER_S) -> None:
        self._store, self._prefix = store, prefix
        self._answer_s = min(answer_s, _ANSWER_S)
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        self.address: tuple[str, int] | None = (store.host, store.port) if hasattr(store, "port") else None
        self._was_silent = False

    @property
    def is_usable(self) -> bool:
        """Whether the store can append: torch's TCPStore and HashStore can, its FileStore cannot."""
        return bool(self._store.has_extended_api())

    def append(self, key: str, text: str) -> None:
        """Add text to the end of a value; atomic.

        Raises:
            OSError: The store is gone (`ConnectionError`) or does not answer (`TimeoutError`).
        """
        self._call(lambda store: store.append(f"{self._prefix}/{key}", text))

    def read(self, key: str) -> str:
        """Return a value, empty if there is none.

        Raises:
            OSError: As for `append`.
        """
        name = f"{self._prefix}/{key}"
        content: bytes = self._call(lambda store: store.get(name) if store.check([name]) else b"")
        return content.decode(errors="replace")

    def count(self, key: str, amount: int = 0) -> int:
        """Add to a counter, which begins at 0, and return it.

        Raises:
            OSError: As for `append`.
        """
        return int(self._call(lambda store: store.add(f"{self._prefix}/{key}", amount)))

    def _call(self, work: Callable[[Any], T]) -> T:
        if self._was_silent and self.address is not None:
            greet(*self.address, timeout_s=self._answer_s)
        try:
            return within(self._answer_s, lambda: work(self._store))
        except TimeoutError:
            self._was_silent = True
            raise
        except RuntimeError as error:
            raise ConnectionError(str(error).partition("\n")[0]) from error
