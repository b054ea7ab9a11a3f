"""Runs Gluon kernels on a CPU that Triton has no interpreter for: packed products, attention over long caches.

Their sources are executed with stand-ins for Gluon's language, in numpy. A tensor is an array; layouts say where its
elements lie and are not modelled. Loads and stores outside of an array raise, shared memory begins as NaN, and an
asynchronous copy lands as late as a wait allows, or at once: both must give the same. The tensor core's sums are
modelled as rounded to fp32 once for every 16 values of K, so that an order of summation shows in the bits. Warps that
do different things are threads, of which one runs until it waits.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from fastspec.kernels.linear import plan
from tests.helpers.gluon_values import (
    KINDS,
    OF_TORCH,
    Constant,
    Layout,
    Number,
    Pointer,
    Shared,
    Values,
    rounded,
    widened,
)
from tests.helpers.limits import HANGS

KERNELS = Path(__file__).parents[2] / "fastspec" / "kernels"
ATTENTION = ["query_rows", "mma_layouts", "mma_tiles", "kv_loads", "tma_parts", "decode_tma_sm90", "combine"]
MODULES = [
    "k_steps",
    "epilogue",
    "small_m",
    "large_m",
    "tma_sm90",
    "norm",
    "split_k",
    "launches",
    "quantised/conversion",
    "quantised/loads",
    "quantised/small_m",
    "quantised/wide_sm90",
    "quantised/launches",
    "layer_tail",
    "dispatch",
    "argmax",
]


class Machine:
    """The program that runs, and its asynchronous copies."""

    def __init__(self) -> None:
        self.ids, self.counts, self.late = (0, 0, 0), (1, 1, 1), True
        self.turn, self.stuck = threading.Condition(), threading.Event()
        self.failed: list[BaseException] = []
        self.open: list[Any] = []
        self.groups: deque[list[Any]] = deque()

    def copy(self, to: Shared, pointer: Pointer, mask: Values | None = None) -> None:
        value = load(pointer, mask, 0)
        if self.late:
            self.open.append((to, value))
        else:
            to.store(value)

    def commit(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait(self, pending: int) -> None:
        while len(self.groups) > pending:
            for to, value in self.groups.popleft():
                to.store(value)


MACHINE = Machine()


class Barrier:
    """A barrier in shared memory: a phase ends with an arrival, or when all bytes that it expects have come."""

    def __init__(self) -> None:
        self.phases, self.expected = 0, 0
        self.copies: list[tuple[Shared, Values]] = []

    def end(self) -> None:
        for to, value in self.copies:
            to.store(value)
        self.phases, self.expected, self.copies = self.phases + 1, 0, []
        MACHINE.turn.notify_all()

    def expect(self, nbytes: int) -> None:
        assert self.expected == 0, "a phase that expects bytes already"
        self.expected = nbytes

    def wait(self, parity: int) -> None:
        """Until the phase of this parity is over: the one at hand has the other."""
        MACHINE.stuck.set()
        over = MACHINE.turn.wait_for(lambda: self.phases % 2 != parity or MACHINE.failed, HANGS)
        assert not MACHINE.failed, MACHINE.failed
        assert over, "warps wait for each other"


class Barriers:
    """An array of them."""

    def __init__(self, count: int) -> None:
        self.each = [Barrier() for _ in range(count)]

    def index(self, place: int) -> Barrier:
        return self.each[place]


class Described:
    """A tensor as the copy engine takes it: block by block, with zeros for what is not there."""

    def __init__(self, tensor: torch.Tensor, block: list[int]) -> None:
        pointer = _pointer(tensor)
        self.array, self.kind, self.block = pointer.memory.reshape(tensor.shape), pointer.kind, block

    def at(self, place: list[int]) -> Values:
        value = np.zeros(self.block, self.array.dtype)
        firsts = [int(first) for first in place]
        there = self.array[tuple(slice(first, first + size) for first, size in zip(firsts, self.block, strict=True))]
        value[tuple(slice(size) for size in there.shape)] = there
        return Values(value, self.kind)


def engine_copy(described: Described, place: list[int], barrier: Barrier, to: Shared) -> None:
    """Lands at once, or when all has come that the barrier expects; till then nothing is there."""
    value = described.at(place)
    nothing = Shared(to.kind, to.shape)
    to.store(Values(nothing.array, to.kind) if MACHINE.late else value)
    barrier.copies.append((to, value))
    if sum(each.array.nbytes for _, each in barrier.copies) == barrier.expected:
        barrier.end()


def specialized(parts: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
    """The first part here, the others in threads; these begin as late as may be, or run as far as they can before."""
    failed = MACHINE.failed = []

    def worked(function: Any, given: tuple[Any, ...]) -> None:
        try:
            with MACHINE.turn:
                function(*given)
        except BaseException as error:
            failed.append(error)
            raise
        finally:
            MACHINE.stuck.set()
            with MACHINE.turn:
                MACHINE.turn.notify_all()

    threads = [threading.Thread(target=worked, args=part, daemon=True) for part in parts[1:]]
    for thread in threads:
        MACHINE.stuck.clear()
        thread.start()
        if not MACHINE.late:
            MACHINE.stuck.wait(HANGS)
    try:
        worked(*parts[0])
    finally:
        for thread in threads:
            thread.join(HANGS)
    assert not failed, failed


def shared(kind: str, shape: list[int], layout: Any, value: Values | None = None) -> Any:
    return Barriers(shape[0]) if isinstance(layout, BarrierLayout) else Shared(kind, shape, value)


class BarrierLayout(Layout):
    """Of barriers."""


def load(pointer: Pointer, mask: Values | None = None, other: Any = 0, **_: Any) -> Values:
    at, seen = pointer.chosen(mask)
    rest = other.array if isinstance(other, Values) else np.asarray(other).astype(pointer.memory.dtype)
    return Values(np.where(seen, pointer.memory[at], rest), pointer.kind)


def store(pointer: Pointer, value: Values, mask: Values | None = None, **_: Any) -> None:
    assert value.kind == pointer.kind or pointer.kind == "int64", (value.kind, pointer.kind)
    at, seen = pointer.chosen(mask)
    pointer.memory[at[seen]] = np.broadcast_to(value.array, seen.shape)[seen]


def assembly(text: str, _: str, given: list[Values], dtype: Any, is_pure: bool, pack: int) -> Any:
    """The few instructions that the kernels spell out, told by their names."""
    if "ex2.approx" in text:
        return Values(np.exp2(given[0].array), "float32")
    if "fence.proxy" in text or "griddepcontrol" in text or "prefetch" in text:
        return None
    if given[0].kind == "uint8":
        return _of_e4m3(given[0], dtype)
    if "prmt.b32" in text:
        return _permuted(given[0], text)
    kind = "bfloat16" if "bf16x2" in text else "float16"
    halves = [[np.ascontiguousarray(each.array).view(KINDS[kind])[..., half::2] for half in (0, 1)] for each in given]
    if "cvt.f32" in text:
        return tuple(Values(widened(half, kind), "float32") for half in halves[0])
    assert "fma.rn.bf16x2" in text or "mul.rn.f16x2" in text
    three = [[widened(each[half], kind) for each in halves] for half in (0, 1)]
    products = [rounded(a * b + (c[0] if c else 0), kind) for a, b, *c in three]
    return Values(np.stack(products, -1).reshape(*products[0].shape[:-1], -1).view(np.int32), "int32")


def _of_e4m3(codes: Values, kind: str) -> Values:
    """E4m3 numbers as 16-bit floats, NaN as the number that its bits would be."""
    numbers = torch.from_numpy(codes.array.copy()).view(torch.float8_e4m3fn).float()
    beyond = torch.from_numpy(np.where(codes.array & 128, -480.0, 480.0)).float()
    return Values(rounded(numbers.where(numbers.isfinite(), beyond).numpy(), kind), kind)


def _permuted(words: Values, text: str) -> Values:
    """Bytes of each word as the last operand of prmt names them, the lowest by its last digit."""
    digits = text.rstrip(";").split("0x")[1]
    held = np.ascontiguousarray(words.array).view(np.uint8).reshape(*words.shape, 4)
    order = [int(digit) for digit in reversed(digits)]
    return Values(np.ascontiguousarray(held[..., order]).view(np.int32)[..., 0], "int32")


def mma(left: Values, right: Values, total: Values) -> Values:
    """16 values of K at a time: of 64, or of 32, those whose words are equally placed in the two halves."""
    a, b = widened(left.array, left.kind).astype(np.float64), widened(right.array, right.kind).astype(np.float64)
    out = total.array
    unit = min(64, a.shape[2])
    for first in range(0, a.shape[2], unit):
        for pair in range(0, unit // 8, 2):
            at = [
                first + half * (unit // 2) + lane * (unit // 8) + pair + one
                for half in (0, 1)
                for lane in range(4)
                for one in (0, 1)
            ]
            with np.errstate(invalid="ignore", over="ignore"):
                out = (out + a[:, :, at] @ b[:, at, :]).astype(np.float32)
    return Values(out, "float32")


def group_mma(left: Values | Shared, right: Shared, total: Values, is_async: bool = False) -> Values:
    """Of [R, K], [K, N] and [R, N], 16 values of K at a time."""
    a, b = widened(left.array, left.kind).astype(np.float64), widened(right.array, right.kind).astype(np.float64)
    out = total.array
    for first in range(0, a.shape[1], 16):
        with np.errstate(invalid="ignore", over="ignore"):
            out = (out + a[:, first : first + 16] @ b[first : first + 16]).astype(np.float32)
    return Values(out, "float32")


def fused(a: Values, b: Values, c: Values) -> Values:
    exact = a.array.astype(np.float64) * b.array.astype(np.float64) + c.array.astype(np.float64)
    return Values(exact.astype(np.float32), "float32")


def atomic(pointer: Pointer, value: Any, operation: Any, mask: Values | None) -> Any:
    at, seen = pointer.chosen(mask)
    old = pointer.memory[at].copy()
    values = np.broadcast_to(value.array if isinstance(value, Values) else value, seen.shape)
    pointer.memory[at[seen]] = operation(old, values)[seen]
    return Values(old, pointer.kind) if old.ndim else int(old)


def _language() -> ModuleType:
    gl = ModuleType("simulated.language")
    for kind in KINDS:
        setattr(gl, kind, kind)
    for name in ("SliceLayout", "BlockedLayout", "DotOperandLayout", "NVMMADistributedLayout"):
        setattr(gl, name, Layout)
    for name in ("DistributedLinearLayout", "SharedLinearLayout", "SwizzledSharedLayout", "NVMMASharedLayout"):
        setattr(gl, name, Layout)

    def array(value: Any) -> np.ndarray:
        return value.array if isinstance(value, Values) else np.asarray(value)

    def full(shape: list[int], value: Any, kind: str, layout: Any = None) -> Values:
        return Values(np.full(shape, value), kind)

    def same(operation: Any) -> Any:
        def apply(*given: Any) -> Any:
            if not any(isinstance(each, Values) for each in given):
                return Number(operation(*given))
            kind = next(each.kind for each in given if isinstance(each, Values))
            return Values(operation(*(array(each) for each in given)), kind)

        return apply

    def where(mask: Values | bool, left: Any, right: Any) -> Any:
        if not isinstance(mask, Values):
            return left if mask else right
        kind = next((each.kind for each in (left, right) if isinstance(each, Values)), "int64")
        return Values(np.where(mask.array, array(left), array(right)), kind)

    def log2(value: Values) -> Values:
        with np.errstate(divide="ignore"):
            return Values(np.log2(value.array), value.kind)

    def reduced(operation: Any) -> Any:
        def apply(value: Values, axis: int) -> Any:
            found = Values(operation(value.array, axis), value.kind)
            return Number(found) if not found.shape and value.kind == "int32" else found

        return apply

    def broadcast(left: Values, right: Values) -> tuple[Values, Values]:
        shape = np.broadcast_shapes(left.array.shape, right.array.shape)
        return tuple(Values(np.broadcast_to(each.array, shape), each.kind) for each in (left, right))  # type: ignore[return-value]

    plain = {
        "constexpr": lambda value: Constant(value) if type(value) is int else value,
        "static_range": range,
        "static_assert": lambda *given: None,
        "program_id": lambda axis: Number(MACHINE.ids[axis]),
        "num_programs": lambda axis: Number(MACHINE.counts[axis]),
        "arange": lambda first, last, layout=None: Values(np.arange(first, last), "int32"),
        "expand_dims": lambda value, axis: Values(np.expand_dims(value.array, axis), value.kind),
        "reshape": lambda value, shape: Values(value.array.reshape(shape), value.kind),
        "permute": lambda value, order: Values(value.array.transpose(order), value.kind),
        "join": lambda left, right: Values(np.stack((left.array, right.array), -1), left.kind),
        "split": lambda value: tuple(Values(value.array[..., half], value.kind) for half in (0, 1)),
        "convert_layout": lambda value, layout, assert_trivial=False: value,
        "broadcast": broadcast,
        "zeros": lambda shape, kind, layout=None: full(shape, 0, kind),
        "full": full,
        "full_like": lambda value, fill: full(value.shape, fill, value.kind),
        "minimum": same(np.minimum),
        "maximum": same(np.maximum),
        "where": where,
        "fma": fused,
        "exp": lambda value: Values(np.exp(value.array), value.kind),
        "rsqrt": lambda value: Values(1 / np.sqrt(value.array), value.kind),
        "exp2": lambda value: Values(np.exp2(value.array), value.kind),
        "log2": log2,
        "max": reduced(np.max),
        "min": reduced(np.min),
        "sum": reduced(np.sum),
        "load": load,
        "store": store,
        "inline_asm_elementwise": assembly,
        "allocate_shared_memory": shared,
        "warp_specialize": specialized,
        "atomic_max": lambda at, value, mask=None, sem=None: atomic(at, value, np.maximum, mask),
        "atomic_add": lambda at, value, mask=None, sem=None: atomic(at, value, np.add, mask),
        "atomic_xchg": lambda at, value, mask=None, sem=None: atomic(at, value, lambda old, new: new, mask),
    }
    for name, function in plain.items():
        setattr(gl, name, function)
    return gl


def _stand_ins() -> dict[str, ModuleType]:
    def decorate(function: Any = None, **_: Any) -> Any:
        return function if function is not None else lambda real: real

    gluon, language = ModuleType("gluon"), _language()
    gluon.jit = gluon.constexpr_function = decorate  # type: ignore[attr-defined]
    gluon.language = language  # type: ignore[attr-defined]
    experimental, ampere, cuda = ModuleType("experimental"), ModuleType("ampere"), ModuleType("cuda")
    hopper = ModuleType("hopper")
    experimental.gluon = gluon  # type: ignore[attr-defined]
    ampere.mma_v2 = mma  # type: ignore[attr-defined]
    ampere.async_copy = SimpleNamespace(  # type: ignore[attr-defined]
        commit_group=MACHINE.commit, wait_group=MACHINE.wait
    )
    hopper.warpgroup_mma = group_mma  # type: ignore[attr-defined]
    hopper.warpgroup_mma_wait = lambda pending, deps: deps if len(deps) > 1 else deps[0]  # type: ignore[attr-defined]
    hopper.fence_async_shared = lambda: None  # type: ignore[attr-defined]
    hopper.mbarrier = SimpleNamespace(  # type: ignore[attr-defined]
        MBarrierLayout=BarrierLayout,
        init=lambda barrier, count: None,
        expect=Barrier.expect,
        arrive=lambda barrier, count: barrier.end(),
        wait=Barrier.wait,
    )
    cuda.gdc_wait = cuda.gdc_launch_dependents = lambda: None  # type: ignore[attr-defined]
    names = ModuleType("names")
    names.load_block, names.copy_to_shared, names.thread_barrier = engine_copy, MACHINE.copy, lambda: None  # type: ignore[attr-defined]
    names.REINTERPRETS = False  # type: ignore[attr-defined]
    triton = ModuleType("triton")
    triton.cdiv = lambda a, b: -(-a // b)  # type: ignore[attr-defined]
    triton.next_power_of_2 = lambda number: 1 << (number - 1).bit_length()  # type: ignore[attr-defined]
    return {
        "triton": triton,
        "triton.experimental": experimental,
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": language,
        "triton.experimental.gluon.language.nvidia.ampere": ampere,
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
        "triton.language.extra.cuda": cuda,
        "fastspec.kernels.common.gluon_compat": names,
    }


def launch(kernel: Any, grid: tuple[int, ...], *given: Any, **options: Any) -> None:
    """Every program in turn, the last one first: they may not depend on an order."""
    for name in ("num_warps", "num_ctas", "launch_pdl", "enable_fp_fusion", "maxnreg", "least_shared"):
        options.pop(name, None)
    arguments = [_argument(each) for each in given]
    MACHINE.counts = (*grid, 1, 1)[:3]
    for ids in reversed(list(np.ndindex(*MACHINE.counts))):
        MACHINE.ids, MACHINE.open, MACHINE.groups = ids, [], deque()
        kernel(*arguments, **options)


def _argument(given: Any) -> Any:
    if isinstance(given, torch.Tensor):
        return _pointer(given)
    if hasattr(given, "_fields"):
        return type(given)(*map(_argument, given))
    return Number(given) if type(given) is int else given


def _pointer(tensor: torch.Tensor) -> Pointer:
    kind = OF_TORCH[tensor.dtype]
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((span,), (1,))
    if kind == "bfloat16":
        return Pointer(flat.view(torch.int16).numpy().view(np.uint16), kind)
    if kind == "float8e4nv":
        return Pointer(flat.view(torch.uint8).numpy(), kind)
    return Pointer(flat.numpy(), kind)


@contextmanager
def _loaded(stems: list[str]) -> Iterator[list[Any]]:
    """These files of fastspec/kernels, each of which may import from those before it, run by stand-ins."""
    names = [f"fastspec.kernels.{stem.replace('/', '.')}" for stem in stems]
    kept = {name: sys.modules.get(name) for name in (*_stand_ins(), *names)}
    sys.modules.update(_stand_ins())
    loaded = []
    try:
        for stem, name in zip(stems, names, strict=True):
            spec = importlib.util.spec_from_file_location(name, KERNELS / f"{stem}.py")
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
            for replaced, by in (("launch", launch), ("described", Described)):
                if hasattr(module, replaced):
                    setattr(module, replaced, by)
            loaded.append(module)
        yield loaded
    finally:
        for name, module in kept.items():  # type: ignore[assignment]
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


@contextmanager
def simulated(capability: tuple[int, int] = (9, 0), late: bool = True) -> Iterator[SimpleNamespace]:
    """The modules of kernels/linear by name, run by stand-ins, as on a GPU of `capability`."""
    with _loaded([f"linear/{name}" for name in MODULES]) as modules:
        loaded = dict(zip([name.replace("/", "_") for name in MODULES], modules, strict=True))
        for name in ("launches", "quantised_launches"):
            loaded[name].gpu_of = lambda device: plan.Gpu(capability, 132)
        MACHINE.late = late
        yield SimpleNamespace(**loaded, plan=plan)


def experts_in_mxfp4() -> Any:
    """The kernel of experts/mxfp4.py, for `launch`."""
    needed = [
        *(f"linear/{name}" for name in ("k_steps", "epilogue", "small_m", "quantised/conversion")),
        "experts/mxfp4",
    ]
    with _loaded(needed) as modules:
        return modules[-1].mxfp4_kernel


def attention_by_tma() -> dict[str, Any]:
    """The kernels of decode_tma_sm90.py and combine.py, for `launch`; `MACHINE.late` says how copies land."""
    with _loaded([f"attention/{name}" for name in ATTENTION]) as modules:
        return {"shares_kernel": modules[-2].shares_kernel, "gather_kernel": modules[-1].gather_kernel}
