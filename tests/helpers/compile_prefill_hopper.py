"""Compiles every tile of the prompt's product for Hopper; prints a JSON line each.

Usage: python -m tests.helpers.compile_prefill_hopper
"""

from __future__ import annotations

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from fastspec.kernels.linear import prefill_sm90 as hopper
from tests.helpers.compile_kernels import FUSED, one_by_one, spilled_bytes


def main() -> None:
    for tile in hopper.TILES:
        for gated in (False, True):
            for out in ("*bf16", "*fp32"):
                code = compiled(tile, gated, out)
                ptx = code.asm["ptx"]
                report = {
                    "tile": str(tile),
                    "gated": gated,
                    "shared": code.metadata.shared,
                    "spills": spilled_bytes(code.asm["cubin"]),
                    "one_by_one": one_by_one(ptx, 90),
                    "mma": f"wgmma.mma_async.sync.aligned.m64n{tile.columns}k16" in ptx,
                    "vector": "st.global.v4.b32" in ptx and "st.global.b" not in ptx,
                }
                print(json.dumps(report))


def compiled(tile: hopper.Tile, gated: bool, out: str) -> Any:
    kernel = hopper._hopper_kernel
    pointers = ["out_ptr"] if gated else ["bias_ptr", "residual_ptr", "out_ptr"]
    given = {**dict.fromkeys(pointers, "*bf16"), "out_ptr": out, "num_rows": "i32"}
    given["x_desc"] = _descriptor([tile.rows, 64])
    given["weight_desc"] = _descriptor([tile.columns // 16, 8, 64])
    constants = {
        **dict.fromkeys(("bias_ptr", "residual_ptr")),
        **{"N": 4112, "K": 4096, "ROWS": tile.rows, "COLUMNS": tile.columns},
        **{"STAGES": tile.stages, "GATED": gated, "WARPS": tile.rows // 16},
    }
    names = kernel.arg_names
    source = GluonASTSource(
        fn=kernel,
        signature={name: given.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items() if name not in given},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in pointers},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={**FUSED, "num_warps": tile.rows // 16})


def _descriptor(block: list[int]) -> str:
    return f"tensordesc<bf16{block},{NVMMASharedLayout(128, 16, len(block))!r}>"


if __name__ == "__main__":
    main()
