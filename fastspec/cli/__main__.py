"""The `fastspec` command, which `python -m fastspec.cli` runs too."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

MAPPED = Path("/proc/self/maps")  # lists the files mapped into this process, on Linux
# parts of the paths of NVIDIA tools: these write their results at the normal exit of a process
WATCHED = ("nsight", "sanitizer")


def main() -> None:
    """Runs the command line. Ctrl-C ends it with code 130, also during the import of torch."""
    try:
        from fastspec.cli.app import app
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        app(prog_name="fastspec")
    except SystemExit as end:
        end_now(end.code)
        raise


def end_now(code: object) -> None:
    """Flushes output and ends the process at once. Python would free its objects one by one, which is slow.

    The operating system frees host and GPU memory. In four cases this function returns, so that Python exits normally:
    another non-daemon thread runs, the exit code is a text, output cannot be written, or an NVIDIA profiler is loaded.

    `code`: exit code, or the text that Python prints before it exits with 1. None: 0.
    """
    waits = any(not each.daemon for each in threading.enumerate() if each is not threading.current_thread())
    if waits or not isinstance(code, int | None) or _is_watched():
        return
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):
        return
    os._exit(code or 0)


def _is_watched() -> bool:
    """True if an NVIDIA profiler or compute-sanitizer is loaded in this process."""
    with suppress(OSError):
        files = MAPPED.read_text(encoding="utf-8", errors="replace")
        return any(name in files for name in WATCHED)
    return False


if __name__ == "__main__":
    main()
