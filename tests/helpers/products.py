"""Inputs of a product with what stands before and after it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastspec.kernels.common.weights import Weight

EPILOGUES = [  # of `product_case`
    "plain",
    "bias",
    "residual",
    "norm",
    "norm+bias+residual",
    "gated",
    "norm+gated+bias+residual",
    "norm+fp32",
]


def product_case(
    rows: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: str,
    epilogue: str = "plain",
    seed: int = 0,
    *,
    residual_width: int | None = None,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """x, row-major weight and keyword arguments of one call.

    Args:
        epilogue: words joined by "+": norm, bias, residual, gated, fp32, or plain.
        residual_width: columns of the residual; by default those of the result.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(device)

    words = epilogue.split("+")
    x, weight = draw(rows, k), draw(n, k, scale=k**-0.5)
    columns = residual_width or (n // 2 if "gated" in words else n)
    gamma, bias, residual = draw(k), draw(n), draw(rows, columns)
    given = {
        "norm": ("norm", (gamma, 1e-5)),
        "bias": ("bias", bias),
        "residual": ("residual", residual),
        "gated": ("gated", True),
        "fp32": ("out_dtype", torch.float32),
    }
    return x, weight, dict(given[word] for word in words if word in given)


def widened(value: Any) -> Any:
    """A tensor, a `Weight`, or a norm's weight and epsilon, in fp64; anything else as it is."""
    if isinstance(value, Weight):
        return replace(value, data=value.data.double())
    if isinstance(value, Tensor):
        return value.double()
    return (value[0].double(), value[1]) if isinstance(value, tuple) else value
