"""What a command is doing, on stderr, once it has taken a while."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

_PATIENCE_S = 2.0
_REFRESH_S = 0.5


class Progress:
    """A line that appears if a command takes longer than two seconds: its phase and the time that it has taken.

    A phase is one long computation that knows nothing of the line, so a thread keeps it up to date.

    Args:
        num_phases: How many there will be.
        patience_s: Seconds until the line appears.
    """

    def __init__(self, num_phases: int, *, patience_s: float = _PATIENCE_S) -> None:
        self._num_phases = num_phases
        self._patience_s = patience_s
        self._num_begun = 0
        self._phase = ""
        self._began = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __call__(self, phase: str) -> None:
        """Begin the next phase.

        Args:
            phase: What is done in it.
        """
        self._num_begun += 1
        self._phase = phase

    @property
    def is_shown(self) -> bool:
        """Whether the line is there, or may still appear."""
        return self._thread.is_alive()

    def __enter__(self) -> Progress:
        """Begin to count the seconds."""
        self._began = time.time()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove the line."""
        self._is_over.set()
        self._thread.join()

    def _show(self) -> None:
        if self._is_over.wait(self._patience_s):
            return
        from tqdm import tqdm

        with tqdm(
            total=self._num_phases,
            file=sys.stderr,
            leave=False,
            delay=_REFRESH_S,  # it is written below, not at once
            bar_format="ds-ldt: {desc}{n_fmt} of {total_fmt} phases done, {elapsed}",
        ) as bar:
            bar.start_t = self._began
            written = ""
            while not self._is_over.is_set():
                if sys.stderr.isatty() or self._phase != written:  # a file gets a line for each phase
                    bar.n, written = max(0, self._num_begun - 1), self._phase
                    bar.set_description(written)  # this writes it too
                self._is_over.wait(_REFRESH_S)
