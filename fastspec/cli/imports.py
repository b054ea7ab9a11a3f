"""Imports of the commands that make a generator, all at once. Other commands need none of them."""

from __future__ import annotations

import gc
import sys


def import_all() -> None:
    """Imports the generator. Python's cycle collector skips all objects that these imports create.

    They are most of the objects in the process, and none of them is garbage.
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
