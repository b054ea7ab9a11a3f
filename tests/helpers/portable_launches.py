"""Calls of products with weights of rows, whose launches are compiled ahead of time: see `recorder`."""

from __future__ import annotations

from functools import partial

from fastspec.kernels.product.portable import products as portable
from tests.helpers.recorder import DTYPES, I64, Calls, on_meta

EPS = 1e-5

WHOLE = 4096  # a K of whole steps; of others the loop is masked
RAGGED = (2880, 4001)  # in pieces of 16 bytes, and in none
ALL_FUSED = "norm+bias+residual"


def portable_product(size: int, k: int, width: int, rows: int, fused: str, pdl: bool) -> object:
    """One product with a weight of rows."""
    dtype, words = DTYPES[size], fused.split("+")
    n = 2 * width if "gated" in words else width
    x, weight = on_meta((rows, k), dtype), on_meta((n, k), dtype)
    norm = (on_meta((k,), dtype), EPS) if "norm" in words else None
    if "pick" in words:
        return portable.tile_argmax(x, weight, n - 1, on_meta((rows + 1,), I64), norm=norm, pdl=pdl)
    bias = on_meta((n,), dtype) if "bias" in words else None
    residual = on_meta((rows, width), dtype) if "residual" in words else None
    return portable.tile_linear(x, weight, bias, norm=norm, residual=residual, gated="gated" in words, pdl=pdl)


def portables(k: int, arch: int) -> Calls:
    """Every tile with everything there is, gated and not, and picking; of whole steps with nothing as well."""
    seen = set()
    for (size, wide), tiles in portable.LAUNCH.items():
        for tile in tiles:
            if k in RAGGED and (size, tile) in seen:
                continue  # how wide a result is changes nothing in the loop
            seen.add((size, tile))
            for fused in (ALL_FUSED, f"{ALL_FUSED}+gated", "norm+pick", *(("", "pick") if k == WHOLE else ())):
                width = 16384 if wide else 4096
                call = partial(portable_product, size, k, width, tile.rows, fused, arch >= 90)
                yield f"{size} bytes {k} {fused} {tile.rows} {wide}", call
