"""Compiles every (kernel, launch entry) for one CUDA architecture; prints a JSON line each.

Usage: python -m tests.helpers.compile_kernels 90
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import triton
from triton import knobs
from triton._utils import find_paths_if
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

FUSED = {"enable_fp_fusion": True}  # what `launch` says where an entry says nothing
Entry = tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any], int]
T = TypeVar("T")
PDL_FROM = 90  # the first architecture whose kernels may start before their predecessor ends


def first_of_each(items: Iterable[T], key: Callable[[T], object]) -> Iterator[T]:
    """Items whose key no earlier one has."""
    seen = set()
    for item in items:
        if (mark := key(item)) not in seen:
            seen.add(mark)
            yield item


def entries(arch: int) -> Iterator[Entry]:
    """(kernel, signature, constants, options, element size) of every launch entry but the Gluon products'."""
    for stem in ("attend", "prefill_linear", "sampled", "step_kernels", "tile_linear"):
        yield from importlib.import_module(f"{__package__}.compile_{stem}").entries(arch)


def _path_of(name: str, names: list[str], signature: dict[str, Any]) -> tuple[int, ...]:
    """Where a constant stands: "name", or "name.field" of an argument that is a NamedTuple."""
    name, _, field = name.partition(".")
    return (names.index(name), *([signature[name]._fields.index(field)] if field else []))


def compiled(
    kernel: Any, signature: dict[str, Any], constants: dict[str, Any], options: dict[str, int], arch: int
) -> Any:
    names = kernel.arg_names
    full = {name: signature.get(name, "constexpr") for name in names}
    # tensors are allocated at multiples of 16 bytes, and the compiler may know
    pointers = find_paths_if(tuple(full.values()), lambda _, kind: kind.startswith("*"))
    aligned = {path: [["tt.divisibility", 16]] for path in pointers}
    constexprs = {_path_of(name, names, full): value for name, value in constants.items()}
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    source = kind(fn=kernel, signature=full, constexprs=constexprs, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={**FUSED, **options})


def _said_of(code: bytes, tool: str, *options: str) -> str:
    """What one of CUDA's tools prints of a file with this code."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(code)
        file.flush()
        run = subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=True)
    return run.stdout + run.stderr


def spilled_bytes(cubin: bytes) -> int:
    """Local memory per thread by the resource report of the machine code."""
    said = _said_of(cubin, knobs.nvidia.cuobjdump.path, "--dump-resource-usage")
    found = re.search(r"STACK:(\d+).*?LOCAL:(\d+)", said)
    assert found, said
    return int(found[1]) + int(found[2])


def one_by_one(ptx: str, arch: int) -> bool:
    """Whether each product of a warp group waits for the one before it, as the assembler says that it has to.

    It does where a register that products under way read is written before they are awaited.
    """
    if "wgmma" not in ptx:
        return False
    options = ("-v", f"--gpu-name=sm_{arch}a", "-o", os.devnull)
    said = _said_of(ptx.encode(), knobs.nvidia.ptxas.path, *options)
    assert "registers" in said, said  # it does say what it finds
    return "wgmma.mma_async instructions are serialized" in said


def main() -> None:
    arch = int(sys.argv[1])
    for kernel, signature, constants, options, size in entries(arch):
        code = compiled(kernel, signature, constants, options, arch)
        ptx = code.asm["ptx"]
        print(
            json.dumps(
                {
                    "kernel": kernel.__name__,
                    "element": size,
                    "constants": constants,
                    "registers": options.get("maxnreg"),
                    "shared": code.metadata.shared,
                    "spills": spilled_bytes(code.asm["cubin"]),
                    "mma": any(kind in ptx for kind in ("mma.sync", "wgmma", "tcgen05.mma")),
                    "one_by_one": one_by_one(ptx, arch),
                    "tf32": "tf32" in ptx,
                    "waits_first": 0 <= ptx.find("griddepcontrol.wait") < ptx.find("griddepcontrol.launch_dependents"),
                    "vector": ".v4.b32" in ptx or "cp.async.cg.shared.global [" in ptx,
                }
            )
        )


if __name__ == "__main__":
    main()
