"""The caller's settings of torch, kept away from our work: set aside while we work, and put back afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache

import torch
from torch.overrides import _get_current_function_mode_stack


@contextmanager
def shielded(device: torch.device | None = None, threads: int | None = None) -> Iterator[None]:
    """Settings of torch as this package needs them, whatever the caller's are; the caller's come back at the end.

    Set aside are the default device, autocast, and on CUDA deterministic algorithms, which would refuse the library's
    products. The default dtype is for the whole process, other threads of the caller included, so it stays as it is:
    everything we allocate names its dtype. Gradients and inference mode are seen to by who does the work.

    Args:
        device: where the work runs; None: not known yet.
        threads: of torch's operations on the CPU, for this thread. None: as they are. (Torch gives the number to a
            thread that uses it for the first time meanwhile, too.)
    """
    changes = _changes(threads)
    with _algorithms().any() if device is not None and device.type == "cuda" else nullcontext():
        if not changes:  # every step of a call passes here, and mostly there is nothing to set aside
            yield
            return
        with ExitStack() as stack:
            for change in changes:
                stack.enter_context(change)
            yield


def _changes(threads: int | None) -> list[AbstractContextManager[object]]:
    """Contexts that set aside what the caller has set in this thread."""
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
    """So many threads for torch's operations on the CPU, in this thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _has_default_device() -> bool:
    """True if tensors that are made without a device are not in host memory."""
    if not _get_current_function_mode_stack():
        return False  # a default device is a mode of torch functions
    try:
        return torch.get_default_device().type != "cpu"
    except (AssertionError, RuntimeError):  # torch asks a tensor that it makes there, and there is no such device
        return True


class _Algorithms:
    """Deterministic algorithms, a setting of the whole process: off while anybody here works, then the caller's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._asked = (False, False)  # deterministic, and only a warning where there are none

    @contextmanager
    def any(self) -> Iterator[None]:
        """Any algorithm will do."""
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
                # if the caller has set it meanwhile, that stays
                if not self._inside and deterministic and not torch.are_deterministic_algorithms_enabled():
                    torch.use_deterministic_algorithms(True, warn_only=warn_only)


@cache
def _algorithms() -> _Algorithms:
    return _Algorithms()
