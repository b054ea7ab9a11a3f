"""Imports everything that commands with a generator need, and keeps it out of Python's cycle collection."""

from __future__ import annotations

import gc
import sys

from fastspec import collection_off


def import_all() -> None:
    """Imports the generator, then excludes all objects from Python's cycle collection.

    These imports create most objects of the process, and none of them is garbage. Scanning them would only cost time.
    """
    if "fastspec.generator" in sys.modules:
        return
    with collection_off():
        import fastspec.generator
        import fastspec.text.stop_strings  # noqa: F401

        gc.freeze()


def leave_out_of_collection() -> None:
    """Collects garbage, then excludes all objects that exist from Python's cycle collection.

    A collection of all objects stops every thread for tenths of a second. After this call it scans only newer objects,
    so it does not interrupt the answers of a server.
    """
    gc.collect()
    gc.freeze()
