"""Lines on stderr that say what goes on while nothing else is printed."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

FIRST, LATER = 1.5, 10.0  # seconds of silence before the first line about a stage, and between later ones


def to_stderr(line: str) -> None:
    """Writes a line, where there is a stderr to write to."""
    if sys.stderr is not None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


class Progress:
    """Names the stage that runs, once it has been silent for a while. Used as a context.

    Args:
        write: takes a line.
    """

    def __init__(self, write: Callable[[str], object] = to_stderr) -> None:
        self._write = write
        self._stage: str | None = None
        self._since = time.monotonic()
        self._news, self._over = threading.Event(), False
        self._thread = threading.Thread(target=self.follow, args=(self._news.wait,), daemon=True)

    def stage(self, name: str | None) -> None:
        """What goes on from now; None: something that shows itself."""
        self._stage, self._since = name, time.monotonic()
        self._news.set()

    def follow(self, wait: Callable[[float], bool]) -> None:
        """Writes lines until the context is left.

        Args:
            wait: waits so many seconds, or until there is news; returns whether there is.
        """
        pause = FIRST
        while not self._over:
            if wait(pause):
                self._news.clear()
                pause = FIRST
            elif self._stage is not None:
                self._write(f"fastspec: {self._stage} ({time.monotonic() - self._since:.0f} s so far)")
                pause = LATER

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._news.set()
        self._thread.join()
