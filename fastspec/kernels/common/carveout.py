"""Sets a kernel's shared memory carveout: the part of an SM's on-chip memory that is shared memory. The rest is L1.

L1 holds values that are being loaded, so a kernel with little L1 reads slowly. An SM keeps its carveout until a kernel
with another preference starts while the SM is idle. With programmatic dependent launch an SM is hardly ever idle.
Triton prefers the largest carveout for any kernel that needs more than 48 KiB. One such kernel in a layer would slow
down all others (measured in perf/LOG.md). So each kernel gets a preference here.

CUDA Driver API: cuFuncSetAttribute, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

PREFERRED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
RESERVED = 1024  # bytes of shared memory that the system takes for each CTA (compute capability 8.0 on)
LEAST = 14  # percent: 32 KiB on an H200. Kernels that need less shared memory get this carveout


def percent_of(programs: int, shared: int, room: int, least: int) -> int:
    """Returns the carveout, in percent, that a kernel needs.

    Args:
        programs: number of CTAs that run on one SM at the same time.
        shared: bytes of shared memory of one CTA.
        room: largest number of bytes of shared memory of an SM.
        least: lower limit of the result.
    """
    needed = -(-100 * programs * (shared + RESERVED) // room)
    return min(100, max(least, needed))


def divide(compiled: Any, least: int = LEAST) -> None:
    """Sets the shared memory carveout of a compiled kernel. Only the first call for a kernel does so.

    Args:
        compiled: result of Triton's launch of the kernel on the current device. None (Triton's interpreter): nothing is
            set.
        least: lower limit of the carveout, in percent.

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
            f"setting a kernel's shared memory, the CUDA driver reports error {result}, of this call or of an earlier "
            "kernel: set CUDA_LAUNCH_BLOCKING=1 to see which"
        )
