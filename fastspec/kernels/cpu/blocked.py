"""`Blocked`: a matrix in the layouts of the CPU libraries that torch brings, and products whose rows are independent.

| way | operands | values of the matrix | library |
|---|---|---|---|
| "half" | fp32 | fp16, times a power of two; only where that is exact | FBGEMM |
| "fp32" | fp32 | fp32, in blocks | oneDNN |
| "bf16" | bf16 | bf16, in blocks; results are rounded to bf16 | oneDNN |

A library chooses its kernel by the number of rows, and the order of sums may change with it. So each matrix is tried at
`ROW_COUNTS` when it is filled. A count is used if it gives the bits of `_BASE` rows, for every place of a row. Products
are made of such counts alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Way = Literal["half", "fp32", "bf16"]

ROW_COUNTS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 48, 64, 128, 256)
HEAD_ROW_COUNTS = tuple(rows for rows in ROW_COUNTS if rows <= 32)  # no pass over prompts multiplies with a head
DTYPES = (torch.float32, torch.bfloat16)
_BASE = 8  # rows of the products whose bits are the definition
_SAMPLE = 4096  # values that are tried first: most matrices that do not fit in fp16 are known by them
_LARGEST = 14  # exponent of the largest value in fp16: leaves the widest range below


class RowCounts:
    """Row counts with the bits of `_BASE` rows, by way and shape. One object serves all matrices of a model."""

    def __init__(self) -> None:
        self._found: dict[tuple[Way, int, int, bool], tuple[int, ...]] = {}

    def of(self, matrix: Blocked, counts: tuple[int, ...]) -> tuple[int, ...]:
        """The counts of a filled matrix, ascending; measured for the first matrix of a shape."""
        assert matrix.way is not None, "it is filled"
        key = (matrix.way, *matrix.shape, counts == HEAD_ROW_COUNTS)
        if key not in self._found:
            made = torch.Generator("cpu").manual_seed(0)
            size = max(counts) + 1, matrix.shape[1]
            rows = torch.randn(size, generator=made, dtype=torch.float32, device="cpu")
            self._found[key] = same_bits(matrix.multiply, rows.to(matrix.operand), counts)
        return self._found[key]


def same_bits(product: Callable[[Tensor], Tensor], rows: Tensor, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Selects the `counts` at which every row of a product has the bits of a product of `_BASE` rows.

    Args:
        product: function of [R, K], for any R. Row r of its exact result depends on row r alone.
        rows: [R, K], more than the largest count.
        counts: numbers of rows. _BASE is always among the result.
    """
    padded = F.pad(rows, (0, 0, 0, -len(rows) % _BASE))
    wanted = torch.cat([product(part) for part in padded.split(_BASE)])

    def equal(count: int) -> bool:
        if not torch.equal(product(rows[:count]), wanted[:count]):
            return False
        return count == 1 or torch.equal(product(rows[1 : count + 1].flip(0)).flip(0), wanted[1 : count + 1])

    return tuple(sorted({_BASE} | {count for count in counts if equal(count)}))


class Blocked:
    """A matrix [N, K] for products on the CPU.

    Args:
        shape: (N, K).
        dtype: dtype of operands and results, one of `DTYPES`.
        head: results are logits in fp32, whatever the dtype.
        embeds: rows are read too, so they are also kept as rows.
        counts: shared by the matrices of a model.

    Attributes:
        way: row of the table above. None before `fill`.
        rows: [N, K] with `embeds`, in the dtype or exactly in bf16; else None.
        kept: row counts of products, ascending.
    """

    def __init__(
        self, shape: tuple[int, int], dtype: torch.dtype, *, head: bool, embeds: bool, counts: RowCounts
    ) -> None:
        self.shape, self.dtype, self.head, self.embeds = shape, dtype, head, embeds
        self.way: Way | None = None
        self.rows: Tensor | None = None
        self.kept: tuple[int, ...] = (_BASE,)
        self._counts = counts
        self._matrix: Any = None
        self._scale = 1.0  # of the values in fp16
        self.nbytes = self._most_bytes()

    @property
    def operand(self) -> torch.dtype:
        """Dtype that the library takes."""
        return torch.bfloat16 if self.way == "bf16" else torch.float32

    def fill(self, rows: Tensor) -> None:
        """Takes values [N, K] in the dtype of this matrix. They are copied."""
        found = None if self.dtype == torch.bfloat16 and not self.head else _as_half(rows)
        if found is not None:
            self.way, (self._matrix, self._scale) = "half", found
        else:
            self.way = "bf16" if self.dtype == torch.bfloat16 and not self.head else "fp32"
            self._matrix = torch.ops.mkldnn._reorder_linear_weight(rows.to(self.operand), _BASE)
        if self.embeds:
            narrow = rows.to(torch.bfloat16)
            self.rows = narrow if torch.equal(narrow.to(rows.dtype), rows) else rows.clone()
        self.kept = self._counts.of(self, HEAD_ROW_COUNTS if self.head else ROW_COUNTS)
        values = self.shape[0] * self.shape[1] * (4 if self.way == "fp32" else 2)
        self.nbytes = values + (0 if self.rows is None else self.rows.nbytes)

    def unpack(self) -> Tensor:
        """The values [N, K] in the dtype of this matrix, copied."""
        if self.rows is not None:
            return self.rows.to(self.dtype, copy=True)
        if self.way == "half":
            values: Tensor = torch.ops.quantized.linear_unpack_fp16(self._matrix)[0]
            return (values.float() / self._scale).to(self.dtype)
        assert self.way is not None, "the matrix is filled"
        dense: Tensor = self._matrix.to_dense()
        return dense.to(self.dtype)

    def embed(self, ids: Tensor) -> Tensor:
        """Rows [..., K] at int64 ids [...], in the dtype of this matrix."""
        return (self.unpack() if self.rows is None else self.rows)[ids].to(self.dtype)

    def product(self, x: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        """x W^T [+ bias] for x [R, K]: [R, N] in `out_dtype`, by default in x's dtype.

        A row's bits do not depend on R, nor on its place.
        """
        if out_dtype == torch.float32 and self.way == "bf16":
            return self._unrounded(x, bias)
        parts = [self._counted(part) for part in x.to(self.operand).split(self.kept[-1])]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return (out if bias is None else out + bias).to(out_dtype or x.dtype)

    def multiply(self, x: Tensor) -> Tensor:
        """x W^T for x [R, K] in `operand`, by one call of the library."""
        out: Tensor
        if self.way == "half":
            out = torch.ops.quantized.linear_dynamic_fp16(x if self._scale == 1.0 else x / self._scale, self._matrix)
        else:
            out = torch.ops.mkldnn._linear_pointwise(x, self._matrix, None, "none", [], "")
        return out

    def _counted(self, x: Tensor) -> Tensor:
        """A product of at most `kept[-1]` rows, padded with zeros to one of `kept`."""
        rows = len(x)
        if rows in self.kept:
            return self.multiply(x)
        count = next(count for count in self.kept if count > rows)
        return self.multiply(F.pad(x, (0, 0, 0, count - rows)))[:rows]

    def _unrounded(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """A product with bf16 values that is not rounded. The library has none: values are widened in slices."""
        blocks = F.pad(x.float(), (0, 0, 0, -len(x) % _BASE)).split(_BASE)
        wide = [part.float() for part in self.unpack().split(8192)]
        out = torch.cat([torch.cat([F.linear(block, part) for part in wide], dim=-1) for block in blocks])[: len(x)]
        return out if bias is None else out + bias

    def _most_bytes(self) -> int:
        """Bytes at most, before the values are known."""
        size = 4 if self.head else self.dtype.itemsize
        return self.shape[0] * self.shape[1] * (size + self.dtype.itemsize * self.embeds)


def is_supported(dtype: torch.dtype) -> bool:
    """True if this machine's libraries multiply operands of this dtype in blocks."""
    if dtype not in DTYPES or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _as_half(rows: Tensor) -> tuple[Any, float] | None:
    """FBGEMM's matrix of rows times a power of two, and this power; None if fp16 does not hold all values exactly."""
    if "fbgemm" not in torch.backends.quantized.supported_engines or not rows.numel():
        return None
    largest = float(rows.abs().amax())
    if not 0.0 < largest < float("inf"):
        return None
    scale = 2.0 ** (_LARGEST - math.frexp(largest)[1])
    flat = rows.reshape(-1)
    if not (_is_half(flat[:_SAMPLE], scale) and _is_half(flat, scale)):
        return None
    return torch.ops.quantized.linear_prepack_fp16(rows.float() * scale, None), scale


def _is_half(values: Tensor, scale: float) -> bool:
    """True if fp16 holds values times `scale` exactly."""
    wide = values.float() * scale
    return torch.equal(wide.half().float(), wide)
