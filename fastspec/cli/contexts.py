"""How a command that generates begins: the driver makes the context of a GPU while torch and the rest are imported."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from contextlib import suppress

LIBRARY = "libcuda.so.1"


def import_beside_context(device: str | None, ranks: int | None = None) -> None:
    """`make_context_ahead`, and `import_all` meanwhile."""
    make_context_ahead(device, ranks)
    import_all()


def import_all() -> None:
    """Imports what commands that generate need; Python's collector of cycles looks through none of it, now or later.

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


def make_context_ahead(
    device: str | None, ranks: int | None = None, *, rank: int | None = None
) -> threading.Thread | None:
    """Begins to make the context that torch will use, in a thread; what fails there, torch will meet and name.

    Args:
        device: that the command was asked to use; None: the first GPU.
        ranks: that the command was asked for. Of several, each makes its own: a copied process cannot use this one.
        rank: this process is that one of several; None: it is none of them.

    Returns:
        The thread; None: there is nothing to make.
    """
    kind, _, index = (device or "cuda").partition(":")
    index = index if rank is None else str(rank)
    several = ranks not in (None, 1) and rank is None
    if sys.platform != "linux" or several or kind != "cuda" or not (index or "0").isdecimal():
        return None
    thread = threading.Thread(target=_make, args=(int(index or 0),), name="fastspec-context", daemon=True)
    thread.start()
    return thread


def _make(index: int) -> None:
    """Makes the primary context of a device, which torch's runtime takes where there is one."""
    with suppress(OSError):  # no driver
        driver = ctypes.CDLL(LIBRARY)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
