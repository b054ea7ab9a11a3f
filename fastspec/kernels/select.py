"""Which implementation of the ops a device gets."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from fastspec.kernels.ops import TORCH_OPS, Ops


def ops_for(device: torch.device) -> Ops:
    """Triton's ops on CUDA where Triton is installed, torch's elsewhere."""
    if device.type != "cuda" or find_spec("triton") is None:
        return TORCH_OPS
    from fastspec.kernels.triton_ops import TRITON_OPS

    return TRITON_OPS
