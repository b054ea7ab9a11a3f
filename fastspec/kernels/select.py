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
    """Returns Triton's ops for CUDA if Triton is installed, the CPU's for the CPU, else torch's."""
    if device.type == "cpu":
        return CPU_OPS
    if device.type != "cuda" or find_spec("triton") is None:
        return TORCH_OPS
    from fastspec.kernels.triton_ops import TRITON_OPS

    return TRITON_OPS


def compilers(rank: int, ranks: int) -> AbstractContextManager[Executor | None]:
    """Returns the executor that compiles Triton's kernels. None without Triton.

    If this machine has compiled no kernel before, its processes start at once.

    Args:
        rank: number of this rank.
        ranks: number of ranks on this machine that share the work.
    """
    if find_spec("triton") is None:
        return nullcontext()
    from fastspec.kernels.common.compilers import Compilers, nothing_compiled, of_this_machine

    return Compilers(of_this_machine(ranks), kernels=KERNELS, now=nothing_compiled(), rank=rank, ranks=ranks)
