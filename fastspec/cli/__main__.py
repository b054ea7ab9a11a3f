"""The `fastspec` command, and `python -m fastspec.cli`, the same without an installed script."""

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
    """Runs the command line; Ctrl-C while torch is imported ends it as it does later."""
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
    """Ends the process once all is written, and does not take apart what it has imported, which takes long.

    The system frees memory of process and devices either way. Returns where Python has more to do: threads to wait for,
    an exit code that is a text, output that nobody takes, a profiler in the process.
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
    """Whether a profiler or a checker of NVIDIA's is in this process."""
    with suppress(OSError):
        files = MAPPED.read_text(encoding="utf-8", errors="replace")
        return any(name in files for name in WATCHED)
    return False


if __name__ == "__main__":
    main()
