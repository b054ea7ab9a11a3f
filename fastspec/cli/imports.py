"""What commands that generate import, all at once, before they begin; other commands do without."""

from __future__ import annotations

import gc
import sys


def import_all() -> None:
    """Imports what makes generators; Python's collector of cycles looks through none of it, now or later.

    Nothing of what imports make is garbage, and it is most of what there is.
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
