"""Gluon's language in numpy, of the simulator of Gluon kernels: see `gluon_simulator`."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch

from tests.helpers.gluon_machine import MACHINE, load, shared, specialized, store
from tests.helpers.gluon_values import KINDS, Constant, Layout, Number, Pointer, Shared, Values, rounded, widened


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
            out = (out + a[:, :, at] @ b[:, at, :]).astype(np.float32)
    return Values(out, "float32")


def group_mma(left: Values | Shared, right: Shared, total: Values, is_async: bool = False) -> Values:
    """Of [R, K], [K, N] and [R, N], 16 values of K at a time."""
    a, b = widened(left.array, left.kind).astype(np.float64), widened(right.array, right.kind).astype(np.float64)
    out = total.array
    for first in range(0, a.shape[1], 16):
        out = (out + a[:, first : first + 16] @ b[first : first + 16]).astype(np.float32)
    return Values(out, "float32")


def fused(a: Values, b: Values, c: Values) -> Values:
    exact = a.array.astype(np.float64) * b.array.astype(np.float64) + c.array.astype(np.float64)
    return Values(exact.astype(np.float32), "float32")


def atomic(pointer: Pointer, value: Any, operation: Any, mask: Values | None) -> Any:
    at, seen = pointer.chosen(mask)
    old = pointer.memory[at].copy()
    made = operation(old, np.broadcast_to(value.array if isinstance(value, Values) else value, at.shape))
    if seen is None:
        pointer.memory[at] = made
    else:
        pointer.memory[at[seen]] = made[seen]
    return Values(old, pointer.kind) if old.ndim else int(old)


def language_module() -> ModuleType:
    """What kernels import as `gl`."""
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
        "log2": lambda value: Values(np.log2(value.array), value.kind),
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
