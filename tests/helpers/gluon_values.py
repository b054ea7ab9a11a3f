"""What stand-ins for Gluon's language compute with: tensors, numbers, places in memory, shared memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

KINDS = {
    "int1": np.bool_,
    "uint8": np.uint8,
    "float8e4nv": np.uint8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "uint32": np.uint32,
    "uint64": np.uint64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
}
DTYPES = {kind: np.dtype(kept) for kind, kept in KINDS.items()}
OF_TORCH = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float8_e4m3fn: "float8e4nv",
    torch.uint8: "uint8",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint64: "uint64",
    torch.bool: "int1",
}


def widened(values: np.ndarray, kind: str) -> np.ndarray:
    if kind == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def rounded(values: np.ndarray, kind: str) -> np.ndarray:
    """fp32 -> `kind`, to nearest even; a bfloat16 is held as its 16 bits."""
    if kind == "bfloat16":
        as_torch = torch.from_numpy(np.ascontiguousarray(values)).bfloat16()
        return as_torch.view(torch.int16).numpy().view(np.uint16)
    return values.astype(KINDS[kind])


class Layout:
    """Any layout: none is modelled."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.parent = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout)

    __hash__ = None  # type: ignore[assignment]


class Values:
    """A tensor of the language. There are millions of them in a test, so that one is made of little."""

    __slots__ = ("array", "kind")
    type = SimpleNamespace(layout=Layout())

    def __init__(self, array: Any, kind: str) -> None:
        self.array, self.kind = np.asarray(array, DTYPES[kind]), kind

    @property
    def shape(self) -> list[int]:
        return list(self.array.shape)

    @property
    def dtype(self) -> str:
        return self.kind

    def __index__(self) -> int:
        return int(self.array)

    def to(self, kind: str, bitcast: bool = False) -> Values:
        if bitcast:
            return Values(np.ascontiguousarray(self.array).view(KINDS[kind]), kind)
        if kind in ("bfloat16", "float16"):
            return Values(rounded(self.array, kind), kind)
        return Values(widened(self.array, self.kind) if kind == "float32" else self.array.astype(KINDS[kind]), kind)

    def _with(self, other: Any, operation: Any, kind: str | None = None) -> Values:
        if isinstance(other, Values):
            return Values(operation(self.array, other.array), kind or ("int64" if other.kind == "int64" else self.kind))
        return Values(operation(self.array, self.array.dtype.type(other)), kind or self.kind)

    def __bool__(self) -> bool:
        return bool(self.array.item())  # of one value: of several, a branch would not know which way

    def __add__(self, other: Any) -> Any:
        return other + self if isinstance(other, Pointer) else self._with(other, np.add)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Values:
        return self._with(other, np.subtract)

    def __rsub__(self, other: Any) -> Values:
        return self._with(other, lambda mine, theirs: theirs - mine)

    def __mul__(self, other: Any) -> Values:
        return self._with(other, np.multiply)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Values:
        return self._with(other, np.divide)

    def __rtruediv__(self, other: Any) -> Values:
        return self._with(other, lambda mine, theirs: theirs / mine)

    def __floordiv__(self, other: Any) -> Values:
        return self._with(other, np.floor_divide)

    def __mod__(self, other: Any) -> Values:
        return self._with(other, np.mod)

    def __and__(self, other: Any) -> Values:
        return self._with(other, np.bitwise_and)

    def __or__(self, other: Any) -> Values:
        return self._with(other, np.bitwise_or)

    def __xor__(self, other: Any) -> Values:
        return self._with(other, np.bitwise_xor)

    def __lshift__(self, other: Any) -> Values:
        return self._with(other, np.left_shift)

    def __rshift__(self, other: Any) -> Values:
        return self._with(other, np.right_shift)

    def __neg__(self) -> Values:
        return Values(-self.array, self.kind)

    def __lt__(self, other: Any) -> Values:
        return self._with(other, np.less, "int1")

    def __le__(self, other: Any) -> Values:
        return self._with(other, np.less_equal, "int1")

    def __gt__(self, other: Any) -> Values:
        return self._with(other, np.greater, "int1")

    def __ge__(self, other: Any) -> Values:
        return self._with(other, np.greater_equal, "int1")

    def __eq__(self, other: Any) -> Values:  # type: ignore[override]
        return self._with(other, np.equal, "int1")

    def __ne__(self, other: Any) -> Values:  # type: ignore[override]
        return self._with(other, np.not_equal, "int1")

    __hash__ = None  # type: ignore[assignment]


class Number(int):
    """An integer that a kernel computes with: it can be converted."""

    def to(self, _: str) -> Number:
        return self

    def _kept(self, result: Any) -> Any:
        return result if result is NotImplemented else Number(result)

    def __add__(self, other: Any) -> Any:
        return self._kept(int.__add__(self, other))

    def __sub__(self, other: Any) -> Any:
        return self._kept(int.__sub__(self, other))

    def __mul__(self, other: Any) -> Any:
        return self._kept(int.__mul__(self, other))

    def __floordiv__(self, other: Any) -> Any:
        return self._kept(int.__floordiv__(self, other))

    def __mod__(self, other: Any) -> Any:
        return self._kept(int.__mod__(self, other))

    __radd__, __rmul__ = __add__, __mul__


class Constant(int):
    """A number that is known when a kernel is compiled."""

    @property
    def value(self) -> int:
        return int(self)


class Pointer:
    """Places in the memory of one tensor."""

    def __init__(self, memory: np.ndarray, kind: str, at: Any = 0) -> None:
        self.memory, self.kind, self.at = memory, kind, np.asarray(at, dtype=np.int64)
        self.dtype = SimpleNamespace(element_ty=kind)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.kind, self.at + (offset.array if isinstance(offset, Values) else offset))

    def chosen(self, mask: Values | bool | None) -> tuple[np.ndarray, np.ndarray | None]:
        """Places, 0 where the mask has none; and the mask as wide as these, or None where all are wanted."""
        if mask is None:
            at, seen = self.at, None
        else:
            at = np.where(mask.array if isinstance(mask, Values) else mask, self.at, 0)
            seen = np.broadcast_to(mask.array if isinstance(mask, Values) else mask, at.shape)
        if at.size:
            first, last, size = at.min(), at.max(), self.memory.size
            assert 0 <= first <= last < size, f"places {first} to {last} of a memory of {size} elements"
        return at, seen


class Shared:
    """Shared memory: what nothing was stored in is NaN."""

    def __init__(self, kind: str, shape: list[int], value: Values | None = None) -> None:
        self.kind, self.dtype, self.shape = kind, kind, list(shape)
        nothing = {"bfloat16": 0x7FC0, "int32": 0x7FC07FC0, "uint8": 0x7F}.get(kind, np.nan)
        self.array = np.full(shape, nothing, KINDS[kind]) if value is None else value.array.copy()

    def store(self, value: Values) -> None:
        assert list(value.array.shape) == self.shape
        self.array[...] = value.array

    def load(self, _: Layout) -> Values:
        return Values(self.array.copy(), self.kind)

    def index(self, place: int) -> Shared:
        """A part that is written through."""
        part = Shared(self.kind, [0])
        part.array, part.shape = self.array[place], self.shape[1:]
        return part

    def _reinterpret(self, kind: str, shape: list[int], _: Layout) -> Pieces:
        """Tiles [COUNT, ROWS, D] as pieces of fewer rows and values."""
        return Pieces(self, shape)

    def slice(self, start: int, length: int) -> Shared:
        """Some of the first axis, written through."""
        part = Shared(self.kind, [0])
        part.array, part.shape = self.array[start : start + length], [length, *self.shape[1:]]
        return part

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.kind, [self.shape[axis] for axis in order], Values(self.array.transpose(order), self.kind))


class Pieces:
    """Tiles [COUNT, ROWS, D] of 16-bit values, swizzled by 128 bytes, as they lie in memory: 64 values of all rows, and
    so on; in pieces [size, rows, 64]. Of 8-bit values: all D.
    """

    def __init__(self, tiles: Shared, shape: list[int]) -> None:
        size, rows, width = shape
        count, height, whole = tiles.shape
        assert width == (whole if tiles.kind == "uint8" else 64), shape
        self.width = width
        assert size * rows * width == count * height * whole, (shape, tiles.shape)
        self.tiles, self.rows, self.across, self.shape = tiles, rows, whole // width, shape

    def index(self, place: int) -> Shared:
        """A piece that is written through."""
        down = self.tiles.shape[1] // self.rows
        tile, part, piece = place // (self.across * down), place // down % self.across, place % down
        found = Shared(self.tiles.kind, [0])
        rows, columns = (
            slice(piece * self.rows, (piece + 1) * self.rows),
            slice(part * self.width, (part + 1) * self.width),
        )
        found.array, found.shape = self.tiles.array[tile, rows, columns], [self.rows, self.width]
        return found
