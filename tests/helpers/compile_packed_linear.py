"""Compiles what the packed products launch, for one CUDA architecture and without a GPU; prints a JSON line each.

Usage: python -m tests.helpers.compile_packed_linear 90
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fastspec.kernels.common.weights import Weight
from fastspec.kernels.linear import launches as packed_launches
from fastspec.kernels.linear import layer_tail, plan, split_k
from fastspec.kernels.linear import norm as packed_norm
from fastspec.kernels.linear.launches import Call
from tests.helpers.compile_kernels import FUSED, first_of_each, one_by_one, spilled_bytes

KIND = {
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
}
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
    (1152, 896, "norm+bias"),
    (9728, 896, "norm+gated"),
    (3584, 18944, "residual"),
    (16, 128, "norm+bias"),
    (1152, 896, "norm+pick"),
]
LAYER_SIZES = [(4096, 14336, 6144), (2048, 8192, 3072), (896, 4864, 1152)]  # hidden, inner and qkv's N
ROWS = range(1, 161)  # every number of them that one program of the ring takes: each change of kernel and of tile
Launch = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]


def launches(n: int, k: int, fused: str, rows: int, dtype: torch.dtype, arch: int) -> list[Launch]:
    """What one call would launch, caught in front of the launcher, with tensors that have no data."""
    words = fused.split("+")
    width = n // 2 if "gated" in words else n
    out_dtype = torch.float32 if "fp32" in words else torch.int64 if "pick" in words else dtype

    def empty(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    call = Call(
        empty(rows, k),
        Weight(empty(n // 16, k // 32, 16, 32), "packed", "gated" in words),
        empty(rows, of=out_dtype) if "pick" in words else empty(rows, width, of=out_dtype),
        empty(n) if "bias" in words else None,
        (empty(k), 1e-5) if "norm" in words else None,
        empty(rows, width) if "residual" in words else None,
        empty(65, of=torch.int64) if "pick" in words else None,
        gated="gated" in words,
    )
    return _caught(lambda: packed_launches.run(call, arch >= 90), arch)


def between_launches(hidden: int, inner: int, qkv: int, rows: int) -> list[Launch]:
    """What lies between two attentions, on sm_90, caught in the same way."""

    def weight(n: int, k: int) -> Weight:
        return Weight(torch.empty(n // 16, k // 32, 16, 32, dtype=torch.bfloat16, device="meta"), "packed")

    x, norm = (torch.empty(*shape, hidden, dtype=torch.bfloat16, device="meta") for shape in ((rows, 1), ()))
    names = {"o": (hidden, hidden), "gate_up": (2 * inner, hidden), "down": (hidden, inner), "qkv": (qkv, hidden)}
    given: dict[str, Weight | Tensor | None] = {name: weight(*shape) for name, shape in names.items()}
    given |= {f"{name}_bias": None for name in names} | {"input_norm": norm, "post_norm": norm}
    layer: Any = SimpleNamespace(**given)
    return _caught(lambda: layer_tail.layer_tail(x, x, layer, layer, 1e-5, True), 90)


def _caught(call: Callable[[], object], arch: int) -> list[Launch]:
    caught: list[Launch] = []
    for module in (packed_launches, packed_norm, split_k):
        module.launch = lambda kernel, grid, *given, **options: caught.append((kernel, grid, given, options))  # type: ignore[attr-defined]
    packed_launches.gpu_of = lambda device: plan.Gpu(divmod(arch, 10), 132)
    call()
    return caught


def compiled(kernel: Any, given: tuple[Any, ...], options: dict[str, Any], arch: int) -> Any:
    names = kernel.arg_names
    signature: dict[str, str] = {}
    constants: dict[Any, Any] = {}
    aligned: dict[Any, Any] = {}
    for place, (name, value) in enumerate(zip(names, given, strict=False)):
        if value is None:
            signature[name], constants[(place,)] = "constexpr", None
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{KIND[value.base.dtype][1:]}{list(value.block_shape)},{value.layout!r}>"
        elif isinstance(value, Tensor):
            # tensors are allocated at multiples of 16 bytes, and the compiler may know
            signature[name], aligned[(place,)] = KIND[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if name == "N":
                aligned[(place,)] = [["tt.divisibility", 16]]
    for name in names[len(given) :]:
        signature[name], constants[(names.index(name),)] = "constexpr", options[name]
    left = {name: value for name, value in options.items() if name not in names}
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={**FUSED, **left})


def facts(kernel: str, ptx: str) -> dict[str, Any]:
    wait, next_one = ptx.find("griddepcontrol.wait"), ptx.find("griddepcontrol.launch_dependents")
    before = ptx[: max(wait, 0)]
    if kernel == "ring_kernel":  # the warps that multiply wait for what is fetched: their code may stand in front
        before = before[before.rfind("st.global") + 1 :]
    lets_next = "no" if next_one < 0 else "first" if next_one < wait else "later"
    early = {"starts_early": wait > 0, "lets_next": lets_next, "mma": None}
    early["stays"] = re.search(r"st\.global\.L1::evict_last\.L2::cache_hint", ptx) is not None
    early["waits"] = ptx.count("griddepcontrol.wait")
    early["single_stores"] = len(re.findall(r"st\.global[\w.:]*\.b16", ptx))
    if kernel not in ("narrow_kernel", "wide_kernel", "ring_kernel"):
        return early
    weights = r"ld\.global\.L1::evict_first\.L2::cache_hint\.v4\.b32|cp\.async\.cg\.shared\.global [^;]*, 0x10"
    weights += r"|cp\.async\.bulk\.tensor\.3d"
    return early | {
        "mma": re.search(r"mma.sync.aligned.m16n8k16|wgmma.mma_async.sync.aligned.m64n\d+k16", ptx) is not None,
        "wide_loads": len(re.findall(weights, ptx)),
        "narrow_loads": len(re.findall(r"evict_first\.L2::cache_hint\.(?:v2\.)?b32|cp\.async\.ca", ptx)),
        "weights_before": len(re.findall(weights, before)),
        "others_before": len(re.findall(r"ld\.global(?!\.L1::evict_first)|bulk\.tensor\.2d", before)),
    }


def entries(arch: int) -> Iterator[tuple[str, Launch]]:
    """Everything launched for these layers, by its name and rows of x: much of it more than once."""
    for n, k, fused in LAYERS:
        for rows in ROWS:
            for launch in launches(n, k, fused, rows, torch.bfloat16, arch):
                yield f"{n}x{k} {fused} {rows}", launch
    for hidden, inner, qkv in LAYER_SIZES if arch == 90 else []:
        for rows in ROWS[plan.small_rows((9, 0)) :]:
            for launch in between_launches(hidden, inner, qkv, rows):
                yield f"{hidden}, {inner} {rows}", launch
    for rows in (8, 64):
        for launch in launches(3072, 2048, "norm+gated+bias+residual", rows, torch.float16, arch):
            yield f"fp16 {rows}", launch


def distinct(launches: Iterable[tuple[str, Launch]]) -> Iterator[tuple[str, Launch]]:
    """Those that are compiled on their own, each where it comes first."""

    def key(named: tuple[str, Launch]) -> object:
        kernel, _grid, given, options = named[1]
        kinds = tuple(value.dtype if isinstance(value, Tensor) else type(value) for value in given)
        compiled_by = {name: value for name, value in options.items() if name != "least_shared"}
        return kernel.__name__, kinds, str(compiled_by)

    return first_of_each(launches, key)


def main() -> None:
    arch = int(sys.argv[1])
    for name, (kernel, grid, given, options) in distinct(entries(arch)):
        code, arguments = compiled(kernel, given, options, arch), dict(zip(kernel.arg_names, given, strict=False))
        out = arguments.get("out_ptr")
        report = {
            "name": name,
            "kernel": kernel.__name__,
            "programs": math.prod(grid),
            "apart": arguments.get("parts_ptr") is not None,
            "last": out is not None and out.dtype.itemsize > 2,
            "norm": arguments.get("gamma_ptr") is not None,
            "factors": arguments.get("squares_ptr") is not None,
            "shares": options.get("maxnreg") is not None,
            "shared": code.metadata.shared,
            "spills": spilled_bytes(code.asm["cubin"]),
            "one_by_one": one_by_one(code.asm["ptx"], arch),
            **facts(kernel.__name__, code.asm["ptx"]),
        }
        print(json.dumps(report))


if __name__ == "__main__":
    main()
