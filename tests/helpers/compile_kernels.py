"""Compiles every (kernel, launch entry) for one CUDA architecture; prints a JSON line each.

Usage: python -m tests.helpers.compile_kernels 90
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastspec.kernels import paged_attention as attention

ELEMENT = {2: "*bf16", 4: "*fp32"}


def attention_entries() -> Iterator[tuple[Any, dict[str, str], dict[str, Any], dict[str, int], int]]:
    """(kernel, signature, constants, options, element size) of every launch entry, windowed and not."""
    for (size, block_d), entry in attention.LAUNCH.items():
        shape = {"KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": block_d, "BLOCK_D": block_d, "ROWS": entry.rows}
        for window in (0, 4096):
            constants = {"WINDOW": window, "PAGE_SIZE": 64, "BLOCK_N": entry.block_n, **shape}
            signature = {
                **dict.fromkeys(("query_ptr", "key_ptr", "value_ptr"), ELEMENT[size]),
                **dict.fromkeys(("table_ptr", "position_ptr"), "*i64"),
                **dict.fromkeys(("sum_ptr", "top_ptr", "total_ptr"), "*fp32"),
                **dict.fromkeys(("num_queries", "table_stride", "table_width", "num_pages", "split_keys"), "i32"),
                "scale": "fp32",
            }
            options = {"num_warps": entry.num_warps, "num_stages": entry.num_stages}
            yield attention._split_kernel, signature, constants, options, size
        signature = {
            **dict.fromkeys(("sum_ptr", "top_ptr", "total_ptr"), "*fp32"),
            "position_ptr": "*i64",
            "out_ptr": ELEMENT[size],
            **dict.fromkeys(("num_queries", "num_splits", "split_keys"), "i32"),
        }
        yield attention._combine_kernel, signature, shape, {"num_warps": 1}, size


def compiled(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], options: dict[str, int], arch: int
) -> Any:
    names = kernel.arg_names
    full = {name: signature.get(name, "constexpr") for name in names}
    # tensors are allocated at multiples of 16 bytes, and the compiler may know
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in full.items() if kind.startswith("*")}
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=full, constexprs=constexprs, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def spilled_bytes(cubin: bytes) -> int:
    """Local memory per thread by the resource report of the machine code."""
    tool = shutil.which("cuobjdump") or str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"STACK:(\d+).*?LOCAL:(\d+)", report.stdout)
    assert found, report.stdout
    return int(found[1]) + int(found[2])


def main() -> None:
    arch = int(sys.argv[1])
    for kernel, signature, constants, options, size in attention_entries():
        code = compiled(kernel, signature, constants, options, arch)
        ptx = code.asm["ptx"]
        print(
            json.dumps(
                {
                    "kernel": kernel.__name__,
                    "element": size,
                    "constants": constants,
                    "shared": code.metadata.shared,
                    "spills": spilled_bytes(code.asm["cubin"]),
                    "mma": "mma.sync" in ptx or "wgmma" in ptx,
                    "vector": ".v4.b32" in ptx or "cp.async.cg.shared.global [" in ptx,
                }
            )
        )


if __name__ == "__main__":
    main()
