"""Launch entries of the portable product, for compile_kernels; run as a module, the instructions of every tile.

Usage: python -m tests.helpers.compile_tile_linear 90
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from fastspec.kernels.linear import portable as tile
from fastspec.kernels.linear.portable_fp32 import fp32_kernel, fp32_pick_kernel
from fastspec.kernels.linear.portable_parts import norm_kernel
from tests.helpers.compile_kernels import PDL_FROM, Entry, compiled

ELEMENT = {2: "*bf16", 4: "*fp32"}
WHOLE = 4096  # a K of whole steps; of others the loop is masked
RAGGED = (2880, 4001)  # in pieces of 16 bytes, and in none


def entries(arch: int) -> Iterator[Entry]:
    """(kernel, signature, constants, options, element size): every tile whole, gated and picking; the norms."""
    for k in (WHOLE, *RAGGED):
        yield from _entries(arch, k)


def _entries(arch: int, k: int) -> Iterator[Entry]:
    pdl = arch >= PDL_FROM
    for kernel, signature, constants, options, size in (*_tiles(k), *_norms(k)):
        yield kernel, signature, {**constants, "PDL": pdl}, {**options, "launch_pdl": pdl}, size


def _tiles(k: int) -> Iterator[Entry]:
    seen = set()
    for (size, wide), tiles in tile.LAUNCH.items():
        block_k = tile.BLOCK_K[size]
        for each in tiles:
            if k in RAGGED and (size, each) in seen:
                continue  # how wide a result is changes nothing in the loop
            seen.add((size, each))
            shape = {"WIDTH": 16384 if wide else 4096, "K": k, "ROWS": each.rows, "BLOCK_N": each.block_n}
            options = {"num_warps": each.num_warps, "num_stages": each.num_stages}
            if size == 4:
                shape |= {"BLOCK_K": block_k, "STAGES": each.num_stages}
                yield from _of_tile(fp32_kernel, fp32_pick_kernel, ("scale_ptr",), shape, options, size)
                continue
            shape |= _sums(size)
            for norm in ("gamma_ptr", "scale_ptr") if each.rows <= tile.FUSED_ROWS else ("scale_ptr",):
                yield from _of_tile(tile.tile_kernel, tile.tile_pick_kernel, (norm,), shape, options, size)


def _norms(k: int) -> Iterator[Entry]:
    for size, num_warps in tile.NORM_WARPS.items():
        pointers = {**dict.fromkeys(("x_ptr", "gamma_ptr", "out_ptr"), ELEMENT[size]), "scale_ptr": "*fp32"}
        constants = {**_sums(size), "K": k, "STAGES": tile.NORM_STAGES}
        yield norm_kernel, {**pointers, "eps": "fp32"}, constants, {"num_warps": num_warps}, size


def _sums(size: int) -> dict[str, Any]:
    block_k = tile.BLOCK_K[size]
    return {"BLOCK_K": block_k, "STEPS": block_k.bit_length() - 1, "SHRINK": 1.0}


def _of_tile(
    product: Any, pick: Any, norm: tuple[str, ...], shape: dict[str, Any], options: dict[str, int], size: int
) -> Iterator[Entry]:
    """One tile of both kernels, with everything there is, gated and not; of whole steps with nothing as well."""
    kinds = {
        **dict.fromkeys(("x_ptr", "weight_ptr", "gamma_ptr", "bias_ptr", "residual_ptr"), ELEMENT[size]),
        **{"scale_ptr": "*fp32", "scratch_ptr": "*u64", "num_rows": "i32", "limit": "i32", "eps": "fp32"},
    }
    always = {"x_ptr", "weight_ptr", "scratch_ptr", "num_rows", "limit", "eps", "out_ptr"}
    for kernel, present, more in (
        (product, {*norm, "bias_ptr", "residual_ptr"}, {"GATED": False}),
        (product, {*norm, "bias_ptr", "residual_ptr"}, {"GATED": True}),
        (product, set(), {"GATED": False}),
        (pick, {*norm}, {}),
    ):
        out = "*i64" if kernel is pick else ELEMENT[size]
        names = [name for name in kernel.arg_names if name in kinds or name == "out_ptr"]
        signature = {name: {**kinds, "out_ptr": out}[name] for name in names if name in always | present}
        missing = {name: None for name in names if name not in signature}
        if present or shape["K"] == WHOLE:
            yield kernel, signature, {**shape, **more, **missing}, options, size


def main() -> None:
    """A JSON line a tile: its rows of x, and what the order of its sums follows from."""
    arch = int(sys.argv[1])
    for kernel, signature, constants, options, size in _entries(arch, WHOLE):
        if kernel in (tile.tile_kernel, tile.tile_pick_kernel, fp32_kernel, fp32_pick_kernel):
            code = compiled(kernel, signature, constants, options, arch).asm
            order = _instructions(code["ptx"]) if size == 2 else _reductions(code["ttgir"])
            print(json.dumps({"element": size, "rows": constants["ROWS"], "order": order}))


def _instructions(ptx: str) -> list[str]:
    """The matrix instructions."""
    return sorted(set(re.findall(r"(?:wgmma|tcgen05)\.mma[\w.:]*|mma\.sync[\w.:]*", ptx)))


def _reductions(ttgir: str) -> list[str]:
    """How the numbers that sums over threads are made of lie in them: the layouts of fp32 operands of reductions."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    operands = re.findall(r"\}\) : \(tensor<\d+x(\d+)xf32, (#\w+)>\) ->", ttgir)
    assert operands
    assert "convert_layout" not in ttgir[ttgir.index("scf.for") : ttgir.index("scf.yield")]
    return sorted({f"{size} {layouts[name]}" for size, name in operands})


if __name__ == "__main__":
    main()
