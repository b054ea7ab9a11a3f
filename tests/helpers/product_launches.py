"""Calls of products whose launches are compiled ahead of time, dense and quantised: see `recorder`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from fastspec.kernels.common.weights import Weight
from fastspec.kernels.embed import embed
from fastspec.kernels.gpu import Gpu
from fastspec.kernels.product import plan
from fastspec.kernels.product.dispatch import packed_argmax, packed_linear
from fastspec.kernels.product.launch import Call, launch_tma, tile_for
from fastspec.kernels.product.layer_tail import layer_tail
from fastspec.kernels.product.prefill import prefill_linear
from fastspec.kernels.product.quantised.prompts import dequantise
from tests.helpers.packed_codes import KINDS, unfilled
from tests.helpers.recorder import BF16, F32, I64, Calls, on_meta

EPS = 1e-5

# (N, K), what is fused: a layer and the head of two Llamas; long and ragged sums; the smallest weights there are
LAYERS = [
    (6144, 4096, "norm"),
    (4096, 4096, "residual"),
    (28672, 4096, "norm+gated"),
    (4096, 14336, "residual"),
    (128256, 4096, "norm+fp32"),
    (128256, 4096, "norm+pick"),
    (3072, 2048, "norm"),
    (16384, 2048, "norm+gated"),
    (2048, 8192, "residual"),
    (10240, 8192, "norm+bias"),
    (5120, 2880, "norm+bias"),
    (9728, 896, "norm+gated"),
    (3584, 18944, "residual"),
    (16, 64, "norm+bias"),
    (1152, 896, "norm+pick"),
    (1152, 896, "norm+pick+ids"),
]
LAYER_SIZES = [(4096, 14336, 6144), (2048, 8192, 3072), (896, 4864, 1152)]  # hidden, inner and qkv's N
ROWS = range(1, 161)  # every number of them that one program of the ring takes: each change of kernel and of tile


def packed(n: int, k: int, dtype: torch.dtype = BF16, *, gated: bool = False) -> Weight:
    """A packed weight [N, K] without memory."""
    return Weight(on_meta((n // 16, k // 32, 16, 32), dtype), "packed", gated)


def product(n: int, k: int, fused: str, rows: int, pdl: bool, dtype: torch.dtype = BF16) -> object:
    """One product with a packed weight."""
    return multiplied(packed(n, k, dtype, gated="gated" in fused), fused, rows, pdl)


def multiplied(weight: Weight, fused: str, rows: int, pdl: bool) -> object:
    """One product with this weight."""
    words, (n, k), dtype = fused.split("+"), weight.shape, weight.dtype
    x = on_meta((rows, k), dtype)
    norm = (on_meta((k,), dtype), EPS) if "norm" in words else None
    if "pick" in words:
        ids = on_meta((n,), I64) if "ids" in words else None
        return packed_argmax(x, weight, n, on_meta((ROWS[-1] + 1,), I64), norm=norm, pdl=pdl, ids=ids)
    return packed_linear(
        x,
        weight,
        on_meta((n,), dtype) if "bias" in words else None,
        norm=norm,
        residual=on_meta((rows, n // 2 if "gated" in words else n), dtype) if "residual" in words else None,
        gated="gated" in words,
        out_dtype=F32 if "fp32" in words else None,
        pdl=pdl,
    )


def tail(hidden: int, inner: int, qkv: int, rows: int) -> object:
    """What lies between two attentions, on sm_90."""
    names = {"o": (hidden, hidden), "gate_up": (2 * inner, hidden), "down": (hidden, inner), "qkv": (qkv, hidden)}
    given: dict[str, Any] = {name: packed(n, k, gated=name == "gate_up") for name, (n, k) in names.items()}
    given |= {f"{name}_bias": None for name in names} | {
        name: on_meta((hidden,)) for name in ("input_norm", "post_norm")
    }
    layer: Any = SimpleNamespace(**given)
    x = on_meta((rows, 1, hidden))
    return layer_tail(x, x, layer, layer, EPS, True)


def products(layers: slice, arch: int) -> Calls:
    """Every product of some of the layers above."""
    for n, k, fused in LAYERS[layers]:
        for rows in ROWS:
            yield f"{n}x{k} {fused} {rows}", partial(product, n, k, fused, rows, arch >= 90)


def tree(n: int, k: int, ranks: int) -> Weight:
    """One rank's part of a weight [N, K] whose K is cut."""
    return replace(packed(n, k // ranks), whole=(n, k), tree=True)


def trees(arch: int) -> Calls:
    """Products whose K ranks share, whole and cut."""
    for n, k in ((4096, 4096), (4096, 14336), (2048, 8192)):
        for ranks in (1, 2, 4):
            for rows in (8, 40):
                call = partial(multiplied, tree(n, k, ranks), "residual", rows, arch >= 90)
                yield f"tree {n}x{k} {ranks} {rows}", call


def tails(sizes: tuple[int, int, int], arch: int) -> Calls:
    """What lies between two attentions on sm_90."""
    for rows in ROWS[plan.max_few_rows(Gpu((9, 0), 132)) :] if arch == 90 else ():
        yield f"{sizes[0]}, {sizes[1]} {rows}", partial(tail, *sizes, rows)


def products_in_fp16(arch: int) -> Calls:
    for rows in (8, 64):
        named = "norm+gated+bias+residual"
        yield f"fp16 {rows}", partial(product, 3072, 2048, named, rows, arch >= 90, torch.float16)


def quantised(arch: int) -> Calls:
    """Each kind once, and what else changes the code: many rows, a long K, what is fused."""
    for name in KINDS:
        yield f"{name} 8", partial(_quantised, name, 3072, 2048, "norm+gated", 8, arch >= 90)
    for name, k, fused, rows in (
        *(("fp8", 2048, "bias+fp32", 16), ("fp8", 4096, "residual", 64), ("fp8", 14336, "residual", 8)),
        *(("int4 zeros", 2048, "residual", 32), ("nvfp4", 2048, "pick", 1)),
    ):
        yield f"{name} {k} {rows}", partial(_quantised, name, 3072, k, fused, rows, arch >= 90)


def quantised_wide(arch: int) -> Calls:
    """Many rows, on sm_90: by the TMA ring."""
    for name, n, k, fused, rows in (
        *(
            ("int4", 28672, 4096, "norm+gated", 64),
            ("int4", 4096, 14336, "residual", 32),
            ("fp8", 4096, 4096, "bias", 64),
        ),
        *(
            ("int4 zeros", 6144, 4096, "norm", 32),
            ("int4 64", 3072, 2048, "pick", 32),
            ("int8", 3072, 2048, "pick+ids", 32),
            ("fp8 blocks", 6144, 4096, "norm", 64),
        ),
        ("int8 with -128", 4096, 4096, "fp32", 64),
    ):
        yield f"{name} {n} {k} {rows}", partial(_quantised, name, n, k, fused, rows, True)
    if arch == 90:  # the TMA ring alone writes rows so
        yield "int8 28672 4096 32, regrouped and raised", partial(_raised, unfilled("int8", 28672, 4096, True), 32)


def _raised(weight: Weight, rows: int) -> object:
    """A gated product of many rows whose result is for one with codes of 8 bits."""
    n, k = weight.shape
    call = Call(on_meta((rows, k)), weight, on_meta((rows, n // 2)), gated=True)
    tile: Any = tile_for(weight, rows, whole=True)
    return launch_tma(tile, call, None, True, regroup_out=True, raise_out=True)


def _quantised(name: str, n: int, k: int, fused: str, rows: int, pdl: bool) -> object:
    return multiplied(unfilled(name, n, k, "gated" in fused), fused, rows, pdl)


def quantised_values(arch: int) -> Calls:
    """Rows of an embedding and slices for prompts."""
    scratch = on_meta((64 * 2048,))
    for name in KINDS:
        weight = unfilled(name, 3072, 2048)
        yield f"embed {name}", partial(embed, weight, on_meta((4, 2), I64))
        yield f"dequantise {name}", partial(dequantise, weight, 64, 64, scratch)


def prompts(arch: int) -> Calls:
    """Products of prompts: every tile, whole, gated and masked."""
    for rows in (64, 128, 256, 512, 4096):
        for n, fused in ((4096, ""), (4096, "gated"), (4096, "bias+residual"), (4112, "bias+residual"), (4112, "fp32")):
            yield f"prompt {n} {fused} {rows}", partial(_prompt, rows, n, fused)
        for ranks in (1, 2) if arch == 90 else ():
            x, weight = on_meta((rows, 4096 // ranks)), tree(4096, 4096, ranks)
            yield f"prompt, tree of {ranks} {rows}", partial(prefill_linear, x, weight, out_dtype=F32)


def _prompt(rows: int, n: int, fused: str) -> object:
    words = fused.split("+")
    bias, residual = (on_meta((n,)), on_meta((rows, n))) if "bias" in words else (None, None)
    weight, norm = packed(n, 4096, gated="gated" in words), (on_meta((4096,)), EPS)
    more: dict[str, Any] = {"gated": "gated" in words, "out_dtype": F32 if "fp32" in words else None}
    return prefill_linear(on_meta((rows, 4096)), weight, bias, norm=norm, residual=residual, **more)
