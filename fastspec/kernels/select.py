"""Chooses the ops for a device. Importing this module does not import Triton."""

from __future__ import annotations

from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Final

import torch

from fastspec.kernels.cpu.ops import CPU_OPS
from fastspec.kernels.ops import TORCH_OPS, Ops

KERNELS: Final = "fastspec.kernels.triton_ops"  # module that imports every kernel


def ops_for(device: torch.device) -> Ops:
    """Returns `TRITON_OPS` for CUDA if Triton is installed, `CPU_OPS` for a CPU, else `TORCH_OPS`."""
    if device.type == "cpu":
        return CPU_OPS
    if device.type != "cuda" or find_spec("triton") is None:
        return TORCH_OPS
    from fastspec.kernels.triton_ops import TRITON_OPS

    return TRITON_OPS


def compilers(rank: int, ranks: int) -> AbstractContextManager[Executor | None]:
    """Returns a context that yields an executor for compiling Triton kernels. It yields None without Triton.

    If Triton's disk cache is empty, the compiling processes start at once. Otherwise they start with the first kernel
    that is not in the cache.

    Args:
        rank: index of this rank.
        ranks: number of ranks on this machine, which share the compilations.
    """
    if find_spec("triton") is None:
        return nullcontext()
    from fastspec.kernels.common.compilers import Compilers, nothing_compiled, of_this_machine

    return Compilers(of_this_machine(ranks), kernels=KERNELS, now=nothing_compiled(), rank=rank, ranks=ranks)
