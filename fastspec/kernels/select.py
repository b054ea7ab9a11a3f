"""Which implementation of the ops a device gets."""

from __future__ import annotations

from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec

import torch

from fastspec.kernels.ops import TORCH_OPS, Ops


def ops_for(device: torch.device) -> Ops:
    """Triton's ops on CUDA where Triton is installed, torch's elsewhere."""
    if device.type != "cuda" or find_spec("triton") is None:
        return TORCH_OPS
    from fastspec.kernels.triton_ops import TRITON_OPS

    return TRITON_OPS


def compilers(rank: int, ranks: int) -> AbstractContextManager[Executor | None]:
    """What compiles Triton's kernels; begun at once where none ever was. So many ranks share them on this machine."""
    if find_spec("triton") is None:
        return nullcontext()
    from fastspec.kernels.common.compilers import Compilers, nothing_compiled, of_this_machine

    return Compilers(of_this_machine(ranks), now=nothing_compiled(), rank=rank, ranks=ranks)
