"""Compiles one launch entry of every kernel in plain Triton for an AMD GPU, gfx942; prints a JSON line each.

Nothing of this was ever run on one: a report of what the compiler takes. Kernels in Gluon name NVIDIA's instructions
and are left out.

Usage: python -m tests.helpers.compile_for_amd
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.errors import TritonError

from tests.helpers.compile_kernels import FUSED, Entry, _path_of, entries, first_of_each

TARGET = GPUTarget("hip", "gfx942", 64)
PLAINEST = 80  # the architecture whose entries have nothing that came with a later one
FOR_NVIDIA = ("maxnreg", "launch_pdl")  # options


def first_entries() -> Iterator[Entry]:
    """One entry of each kernel."""
    plain = (entry for entry in entries(PLAINEST) if not entry[0].is_gluon())
    return first_of_each(plain, lambda entry: entry[0].__name__)


def compiled(kernel: Any, signature: dict[str, str], constants: dict[str, Any], options: dict[str, Any]) -> Any:
    names = kernel.arg_names
    full = {name: signature.get(name, "constexpr") for name in names}
    constexprs = {_path_of(name, names, full): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=full, constexprs=constexprs)
    options = {name: value for name, value in options.items() if name not in FOR_NVIDIA}
    return triton.compile(source, target=TARGET, options={**FUSED, **options})


def main() -> None:
    for kernel, signature, constants, options, _size in first_entries():
        report = {"kernel": kernel.__name__, "compiled": True}
        try:
            report["shared"] = compiled(kernel, signature, constants, options).metadata.shared
        except (TritonError, RuntimeError, ValueError) as error:  # of its front end, its passes, its checks
            report |= {"compiled": False, "why": str(error)}
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
