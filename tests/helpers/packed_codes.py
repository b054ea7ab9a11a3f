"""Quantised weights of every kind that the kernels read, with random codes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch import Tensor

from fastspec.kernels.common.codes import BITS, Codes, CodesKind
from fastspec.kernels.common.weights import Weight
from tests.helpers.gluon_simulator import simulated

ROW = 0  # columns of a block: all of a row
# name: format, rows and columns of a block, zero points (None: all 8), dtype that scales have in the checkpoint
KINDS = {
    "fp8": ("fp8", 1, ROW, None, torch.float32),
    "fp8 blocks": ("fp8", 128, 128, None, torch.float32),
    "fp8 groups": ("fp8", 1, 128, None, torch.float32),
    "int8": ("int8", 1, ROW, None, torch.bfloat16),
    "int8 with -128": ("int8", 1, ROW, None, torch.bfloat16),
    "int4": ("int4", 1, 128, None, torch.bfloat16),
    "int4 zeros": ("int4", 1, 128, True, torch.float16),
    "int4 64": ("int4", 1, 64, True, torch.float32),
    "int4 32": ("int4", 1, 32, True, torch.float16),
    "nvfp4": ("fp4", 1, 16, None, torch.float8_e4m3fn),
    "mxfp4": ("fp4", 1, 32, None, torch.float8_e8m0fnu),
}


@contextmanager
def modules(device: str) -> Iterator[SimpleNamespace]:
    """Dispatch, layers and the plan of quantised weights, run by stand-ins off the GPU."""
    from fastspec.kernels.product.quantised import plan

    if device == "cpu":
        with simulated() as found:
            yield SimpleNamespace(dispatch=found.dispatch, layer_tail=found.layer_tail, plan=plan)
    else:
        from fastspec.kernels.product import dispatch, layer_tail

        yield SimpleNamespace(dispatch=dispatch, layer_tail=layer_tail, plan=plan)


def kind_of(name: str, k: int) -> CodesKind:
    """The kind of that name for a matrix of K columns."""
    form, rows, columns, _, _ = KINDS[name]
    return CodesKind(form, (rows, columns or k))  # type: ignore[arg-type]


def random_codes(name: str, n: int, k: int, seed: int = 0) -> Codes:
    """Codes of every value there is, and scales as a checkpoint of that kind has them."""
    generator = torch.Generator().manual_seed(seed)
    kind, (_, _, _, zeros, dtype) = kind_of(name, k), KINDS[name]
    codes = torch.randint(0, 2 ** BITS[kind.format], (n, k), generator=generator).to(torch.uint8)
    if kind.format == "fp8":
        codes[codes & 127 == 127] = 0  # NaN
    if name == "int8":
        codes[codes == 128] = 129
    shape = kind.scales_shape((n, k))
    scales = (torch.rand(shape, generator=generator) + 0.2) * k**-0.5 / {8: 64, 4: 4}[BITS[kind.format]]
    if dtype == torch.float8_e4m3fn:
        scales = (scales * 1000).to(dtype).float() * 0.00123
    elif dtype == torch.float8_e8m0fnu:
        scales = torch.exp2(scales.log2().round())
    else:
        scales = scales.to(dtype).float()
    points = None
    if kind.format == "int4":
        points = torch.randint(0, 16, shape, generator=generator) if zeros else torch.full(shape, 8)
        points = points.to(torch.uint8)
    return Codes(kind, codes, scales, points)


def on_device(codes: Codes, device: str) -> Codes:
    """The same on another device."""
    zeros = None if codes.zeros is None else codes.zeros.to(device)
    return Codes(codes.kind, codes.codes.to(device), codes.scales.to(device), zeros)


def stored(codes: Codes, gated: bool = False, dtype: torch.dtype = torch.bfloat16) -> Weight:
    """The weight of these codes, packed."""
    weight = Weight.empty_codes(codes.shape, codes.kind, gated, dtype, codes.codes.device)
    weight.fill_codes(codes)
    return weight


def magnitudes(codes: Codes) -> Tensor:
    """fp64 [N, K]: the largest that the kernels add up for a code, which is its own or, of integers, with an offset."""
    wide = {"int4": 15.0, "int8": 256.0}.get(codes.kind.format)
    ones = Codes(codes.kind, torch.zeros_like(codes.codes), codes.scales, codes.zeros)
    if wide is None:
        return codes.dequantise(torch.float32).double().abs()
    rows, columns = codes.kind.block
    scales = ones.scales.double().repeat_interleave(rows, 0)[: codes.shape[0]]
    return wide * scales.repeat_interleave(columns, 1)[:, : codes.shape[1]]


def unfilled(name: str, n: int, k: int, gated: bool = False) -> Weight:
    """A weight of that kind without memory, as one that was filled."""
    weight = Weight.empty_codes((n, k), kind_of(name, k), gated, torch.bfloat16, torch.device("meta"))
    codes = weight.codes
    assert codes is not None
    if name == "int8 with -128":
        codes.form = "off8"
    if KINDS[name][3]:  # zero points, and scales that 16 bits do not hold where they are fp32
        assert codes.scales is not None
        codes.zeros = torch.empty_like(codes.scales)
        if KINDS[name][4] == torch.float32:
            codes.scales = codes.scales.to(torch.int64)
    return weight
