"""Choice of the ops for a device. Importing this module imports no Triton."""

from __future__ import annotations

from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Final

import torch

from fastspec.kernels.cpu.ops import CPU_OPS
from fastspec.kernels.ops import TORCH_OPS, Ops

KERNELS: Final = "fastspec.kernels.triton_ops"  # imports every kernel


def ops_for(device: torch.device) -> Ops:
    """Triton's ops on CUDA where Triton is installed, else torch's; those of the CPU on the CPU."""
    if device.type == "cpu":
        return CPU_OPS
    if device.type != "cuda" or find_spec("triton") is None:
        return TORCH_OPS
    from fastspec.kernels.triton_ops import TRITON_OPS

    return TRITON_OPS


def compilers(rank: int, ranks: int) -> AbstractContextManager[Executor | None]:
    """The executor that compiles Triton's kernels; None without Triton.

    It starts at once if this machine has compiled no kernel before.

    Args:
        rank: of this process.
        ranks: processes on this machine that share the work.
    """
    if find_spec("triton") is None:
        return nullcontext()
    from fastspec.kernels.common.compilers import Compilers, nothing_compiled, of_this_machine

    return Compilers(of_this_machine(ranks), kernels=KERNELS, now=nothing_compiled(), rank=rank, ranks=ranks)
