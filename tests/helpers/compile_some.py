"""Compiles some launches of every kernel: a quick look at whether a Triton takes them. Prints a JSON line each.

`make newest` runs it with the newest Triton, whose Gluon has other names now and then. What the machine code is like,
and every launch that there is, tests/kernels looks at with the Triton of the environment.

Usage: python -m tests.helpers.compile_some
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton

from fastspec.kernels.linear import prefill_sm90
from tests.helpers import compile_kernels, compile_packed_linear, compile_prefill_hopper
from tests.helpers.compile_packed_linear import LAYERS, Launch, distinct

ARCHITECTURES = (90, 100, 80)  # by warp groups, by neither
KINDS = ("norm", "norm+gated", "residual", "norm+pick")  # of what is fused with a product
ROWS = (8, 16, 40)  # a norm on the way, a kernel of its own, and kernels for many rows
HIDDEN, INNER, QKV = 4096, 14336, 6144


def launches() -> Iterator[tuple[str, int, Callable[[], object]]]:
    """(kernel, architecture, what compiles it)."""
    every = ((arch, entry) for arch in ARCHITECTURES for entry in compile_kernels.entries(arch))
    for arch, (kernel, *launch, _size) in compile_kernels.first_of_each(every, _kind):
        yield kernel.__name__, arch, partial(compile_kernels.compiled, kernel, *launch, arch)
    for arch in ARCHITECTURES:
        for name, (kernel, _grid, given, options) in distinct(packed(arch)):
            yield name, arch, partial(compile_packed_linear.compiled, kernel, given, options, arch)
    for gated in (False, True):
        yield "_hopper_kernel", 90, partial(compile_prefill_hopper.compiled, prefill_sm90.TILES[0], gated, "*bf16")


def _kind(of: tuple[int, compile_kernels.Entry]) -> tuple[str, int, bool]:
    """By kernel and size of its elements, and apart those that record log-probabilities."""
    kernel, _signature, constants, _options, size = of[1]
    return kernel.__name__, size, bool(constants.get("TOP"))


def packed(arch: int) -> Iterator[tuple[str, Launch]]:
    """Products of one layer and its head, and on sm_90 what lies between two attentions."""
    found = [
        launch
        for n, k, fused in LAYERS
        for rows in ROWS
        if fused in KINDS and HIDDEN in (n, k)
        for launch in compile_packed_linear.launches(n, k, fused, rows, torch.bfloat16, arch)
    ]
    if arch == 90:
        found += compile_packed_linear.between_launches(HIDDEN, INNER, QKV, ROWS[-1])
    return ((launch[0].__name__, launch) for launch in found)


def main() -> None:
    for kernel, arch, compile_it in launches():
        compile_it()
        print(json.dumps({"triton": triton.__version__, "kernel": kernel, "arch": arch}), flush=True)


if __name__ == "__main__":
    main()
