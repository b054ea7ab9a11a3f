"""Ops of the step. `reference` holds the torch definition of each; a file per op holds its Triton kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from fastspec.kernels import reference


@dataclass(frozen=True, slots=True)
class Ops:
    """The ops that have more than one implementation.

    Attributes:
        name: "triton" or "torch".
        paged_attention: signature and meaning of `reference.paged_attention`.
    """

    name: str
    paged_attention: Callable[..., Tensor]


TORCH_OPS = Ops("torch", reference.paged_attention)


def ops_for(device: torch.device) -> Ops:
    """Triton's ops on CUDA where Triton is installed, torch's elsewhere."""
    if device.type != "cuda" or find_spec("triton") is None:
        return TORCH_OPS
    from fastspec.kernels.paged_attention import paged_attention

    return Ops("triton", paged_attention)
