"""Replaces the caller's torch settings while this package works, and restores them afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache

import torch
from torch.overrides import _get_current_function_mode_stack


@contextmanager
def shielded(device: torch.device | None = None, threads: int | None = None) -> Iterator[None]:
    """Context with the torch settings that this package needs. Restores the caller's settings at its end.

    It resets the default device and autocast. On CUDA it also turns deterministic algorithms off, because with them
    torch raises an error for cuBLAS matrix products. The default dtype is not changed, because it is global to all
    threads. So every allocation of this package names its dtype. Gradient and inference mode are left to the callers.

    Args:
        device: device of the work. None: not known yet.
        threads: number of CPU threads that torch uses for operations of this thread. None: unchanged. (A thread that
            first uses torch inside this context gets this number, too.)
    """
    changes = _changes(threads)
    with _algorithms().any() if device is not None and device.type == "cuda" else nullcontext():
        if not changes:  # every step of a call comes here, and usually nothing has to be changed
            yield
            return
        with ExitStack() as stack:
            for change in changes:
                stack.enter_context(change)
            yield


def _changes(threads: int | None) -> list[AbstractContextManager[object]]:
    """Returns contexts, each of which changes one torch setting of this thread to the value that this package needs.

    Settings that have this value already are left out.

    Args:
        threads: see `shielded`.
    """
    changes: list[AbstractContextManager[object]] = []
    if _has_default_device():
        changes.append(torch.device("cpu"))
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            changes.append(torch.autocast(kind, enabled=False))
    if threads is not None and threads != torch.get_num_threads():
        changes.append(using_threads(threads))
    return changes


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Context in which torch uses `count` CPU threads for operations of this thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _has_default_device() -> bool:
    """True if the caller has set torch's default device to a device other than the CPU."""
    if not _get_current_function_mode_stack():
        return False  # a default device is a mode of torch functions
    try:
        return torch.get_default_device().type != "cpu"
    except (AssertionError, RuntimeError):  # torch allocates a tensor there to find out, and the device does not exist
        return True


class _Algorithms:
    """Turns torch's deterministic algorithms off while a thread is in the context `any`, then restores the setting.

    The setting holds for the whole process, so all threads share one object of this class.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._asked = (False, False)  # (deterministic, warn_only) of the caller

    @contextmanager
    def any(self) -> Iterator[None]:
        """Context in which torch may also use nondeterministic algorithms."""
        with self._lock:
            if not self._inside:
                asked = torch.are_deterministic_algorithms_enabled()
                self._asked = asked, torch.is_deterministic_algorithms_warn_only_enabled()
                if asked:
                    torch.use_deterministic_algorithms(False)
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                deterministic, warn_only = self._asked
                # if the caller has set it meanwhile, that value stays
                if not self._inside and deterministic and not torch.are_deterministic_algorithms_enabled():
                    torch.use_deterministic_algorithms(True, warn_only=warn_only)


@cache
def _algorithms() -> _Algorithms:
    return _Algorithms()
