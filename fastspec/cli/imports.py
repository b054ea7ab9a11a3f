"""Imports everything that commands with a generator need, in one function."""

from __future__ import annotations

import gc
import sys


def import_all() -> None:
    """Imports the generator, then excludes all objects from Python's cycle collection.

    These imports create most objects of the process, and none of them is garbage. Scanning them would only cost time.
    """
    if "fastspec.generator" in sys.modules:
        return
    collecting = gc.isenabled()
    gc.disable()
    try:
        import fastspec.generator
        import fastspec.text.stop_strings  # noqa: F401
    finally:
        gc.freeze()
        if collecting:
            gc.enable()
