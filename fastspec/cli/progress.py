"""A progress line on the terminal. It names the running stage while nothing else is printed."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

LOADING = "loading models and capturing steps"
PAUSE = 1.0  # seconds between two updates of the line, and before the first one
_CLEAR = "\r\x1b[K"


class Progress:
    """Shows the name of the running stage and the seconds since the command began. It is a context manager.

    The line of the stage is not written if the stream is not a terminal.

    Args:
        stream: terminal to write to. None: stderr.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._stage: str | None = None
        self._began = time.monotonic()
        self._lock, self._over = threading.Lock(), threading.Event()
        self._drawn = False
        shown = self._stream is not None and self._stream.isatty()
        self._thread = threading.Thread(target=self.follow, args=(self._over.wait,), daemon=True) if shown else None

    def stage(self, name: str | None) -> None:
        """Sets the name of the running stage. None clears the line, so that other output can follow."""
        with self._lock:
            self._stage = name
            if name is None:
                self._clear()

    def tell(self, line: str) -> None:
        """Writes a line that stays, also to a stream that is not a terminal."""
        if self._stream is None:  # closed before the command began
            return
        with self._lock:
            self._clear()
            self._write(f"fastspec: {line}\n")

    def follow(self, wait: Callable[[float], bool]) -> None:
        """Updates the line until the context is left.

        Args:
            wait: waits for the given seconds. Returns True once the context is left.
        """
        while not wait(PAUSE):
            with self._lock:
                if self._stage is not None:
                    line = f"fastspec: {self._stage} ({time.monotonic() - self._began:.0f} s)"
                    self._write(f"{_CLEAR}{line[: shutil.get_terminal_size().columns - 1]}")
                    self._drawn = True

    def _clear(self) -> None:
        if self._drawn:
            self._write(_CLEAR)
            self._drawn = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def __enter__(self) -> Progress:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self._clear()
