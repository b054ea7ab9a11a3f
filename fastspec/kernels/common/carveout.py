"""Sets how an SM's memory is divided while a kernel runs: shared memory for its CTAs, the rest for L1.

L1 holds values that are being loaded, so a kernel with little L1 reads slowly. A division stays until a kernel with
another preference starts on an idle SM. With programmatic dependent launch an SM is hardly ever idle. Triton prefers
all shared memory for any kernel that needs more than 48 KiB. One such kernel in a layer would slow down all others
(measured in perf/LOG.md). So each kernel gets a preference here.

CUDA Driver API: cuFuncSetAttribute, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

PREFERRED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
RESERVED = 1024  # bytes of shared memory that the system takes for each CTA (compute capability 8.0 on)
LEAST = 14  # percent; 32 KiB on an H200. Kernels that need less use this


def percent_of(programs: int, shared: int, room: int, least: int) -> int:
    """Returns the percentage of an SM's `room` bytes that `programs` CTAs of `shared` bytes need; at least `least`."""
    needed = -(-100 * programs * (shared + RESERVED) // room)
    return min(100, max(least, needed))


def divide(compiled: Any, least: int = LEAST) -> None:
    """Sets the preference of a compiled kernel that has been launched on the current device. Later calls do nothing.

    Args:
        compiled: result of a launch. Triton's interpreter returns None, and nothing is set.
        least: least percent of the memory that is shared memory.

    Raises:
        RuntimeError: the driver reports an error of this call or of an earlier kernel.
    """
    if compiled is not None and compiled.metadata.target.backend == "cuda":
        _divide(compiled.function, compiled.metadata.num_warps * 32, compiled.metadata.shared, least)


@cache
def _divide(function: int, threads: int, shared: int, least: int) -> None:
    driver, programs = _driver(), ctypes.c_int()
    handle = ctypes.c_void_p(function)
    _check(
        driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(programs), handle, threads, ctypes.c_size_t(shared)
        )
    )
    room = torch.cuda.get_device_properties().shared_memory_per_multiprocessor
    _check(driver.cuFuncSetAttribute(handle, PREFERRED_CARVEOUT, percent_of(programs.value, shared, room, least)))


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(result: int) -> None:
    if result:
        raise RuntimeError(
            f"the CUDA driver reports error {result} as a kernel's shared memory is set, of this call or of an earlier "
            "kernel: CUDA_LAUNCH_BLOCKING=1 shows which"
        )
