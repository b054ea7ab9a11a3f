"""The `fastspec` command, which `python -m fastspec.cli` runs too."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

MAPPED = Path("/proc/self/maps")  # the files of which parts are in this process's memory, on Linux
WATCHED = ("nsight", "sanitizer")  # in paths of tools that write what they found when a process is taken apart


def main() -> None:
    """Runs the command line. Ctrl-C during the import of torch ends it with code 130, too."""
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
    """Flushes output and ends the process without freeing its objects one by one, which takes long.

    The system frees the memory of process and devices. Returns if Python must end the process itself: a thread still
    runs, the exit code is a text, output cannot be written, or a profiler is in the process.
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
    """True if a profiler or checker of NVIDIA is loaded in this process."""
    with suppress(OSError):
        files = MAPPED.read_text(encoding="utf-8", errors="replace")
        return any(name in files for name in WATCHED)
    return False


if __name__ == "__main__":
    main()
