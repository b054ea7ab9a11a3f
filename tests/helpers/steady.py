"""What a steady loop on the device must not do: wait, allocate, or launch more than one graph a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile


@contextmanager
def waits_raise() -> Iterator[None]:
    """A context in which every wait of the host for the device raises RuntimeError."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_nothing_waits_or_allocates(steps: Iterator[object], count: int) -> None:
    """Makes `count` steps of a loop that has begun."""
    with waits_raise():
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
        for _ in range(count):
            next(steps)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated


def calls_of(steps: Iterator[object], count: int) -> Counter[str]:
    """Calls of the CUDA runtime and driver in `count` steps behind the first one, by name."""
    next(steps)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(count):
            next(steps)
    return Counter(event.name for event in trace.events() if event.name.startswith(("cuda", "cu")))


def check_one_launch(steps: Iterator[object], count: int) -> None:
    """Makes `count` steps behind the first one; each must be the launch of one graph and nothing else."""
    calls = calls_of(steps, count)
    assert calls.pop("cudaGraphLaunch") == count
    calls.pop("cudaStreamIsCapturing", None)  # what replay() asks the runtime first
    # the profiler waits for the device when it stops
    assert calls == {"cudaDeviceSynchronize": 1}, calls
