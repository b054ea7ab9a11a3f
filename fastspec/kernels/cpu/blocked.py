"""`Blocked`: a weight matrix in the layout of a CPU library of torch, with batch-invariant products.

| way | operands | values of the matrix | library |
|---|---|---|---|
| "half" | fp32 | fp16, times a power of two; only where that is exact | FBGEMM |
| "fp32" | fp32 | fp32, in blocks | oneDNN |
| "bf16" | bf16 | bf16, in blocks; results are rounded to bf16 | oneDNN |

A library chooses its kernel by the number of rows, and the order of sums may change with it. So the numbers
of rows in `ROW_COUNTS` are tried when a matrix is filled. A number is used if all rows have the bits that they have in
a product of `_BASE` rows. Every other product is split and padded, so that it consists of products with such numbers of
rows. In bf16 oneDNN needs more time for one row than for a few, so the numbers are also timed.

Prefill passes have at least `WIDE` rows, and their products give the bits of `WIDE` rows. With so large a number,
oneDNN's bf16 kernels add in another order and take half the time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Way = Literal["half", "fp32", "bf16"]

ROW_COUNTS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 48, 64, 128, 256)
WIDE = 64
WIDE_ROW_COUNTS = tuple(rows for rows in ROW_COUNTS if rows >= WIDE)
HEAD_ROW_COUNTS = tuple(rows for rows in ROW_COUNTS if rows <= 32)  # prefill passes do not multiply by an LM head
DTYPES = (torch.float32, torch.bfloat16)
_TIMED = 5  # number of times that a product is timed; the fastest time is taken
_clock = time.perf_counter
_BASE = 8  # number of rows of the product whose bits all others must have
_TRIED = 512  # number of the matrix's rows that are tried, a multiple of the columns of FBGEMM's blocks
_CANCELLED = 256  # number of different rows of W in `cancelling`
_SAMPLE = 4096  # number of values that are tried first: they tell of most matrices that these do not fit in fp16
_TESTED = 2**18  # number of values tested at a time: they fit in a CPU's caches
_LARGEST = 14  # exponent to which the largest value is scaled for fp16: leaves the widest range of small values


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of rows that x may have in one call of a library's product x W^T, ascending.

    Attributes:
        few: numbers of rows with which each row has the same bits as in a product of `_BASE` rows.
        wide: numbers of rows for prefill, with which each row has the same bits as in a product of `WIDE` rows. Empty:
            prefill uses `few`.
    """

    few: tuple[int, ...] = (_BASE,)
    wide: tuple[int, ...] = ()


class RowCounts:
    """`Counts` of all matrices of a model. They are measured for the first matrix of each library and shape."""

    def __init__(self) -> None:
        self._found: dict[tuple[Way, int, int, bool], Counts] = {}

    def of(self, matrix: Blocked, rows: Tensor) -> Counts:
        """Returns the `Counts` for products x W^T with `matrix` as W. Measures them if they are not known.

        Args:
            matrix: a filled matrix.
            rows: its values [N, K].
        """
        assert matrix.way is not None, "it is filled"
        key = (matrix.way, *matrix.shape, matrix.head)
        if key not in self._found:
            if matrix.way == "bf16":
                x, rows = cancelling(ROW_COUNTS[-1] + 1, *matrix.shape)
            else:
                x = _random((ROW_COUNTS[-1] + 1, matrix.shape[1]), matrix.operand)
            self._found[key] = self._measured(matrix, matrix.for_trial(rows), x)
        return self._found[key]

    @staticmethod
    def _measured(matrix: Blocked, product: Callable[[Tensor], Tensor], x: Tensor) -> Counts:
        few = same_bits(product, x, HEAD_ROW_COUNTS if matrix.head else ROW_COUNTS)
        if matrix.way == "bf16":
            few = worth_having(product, x, few)
        if matrix.head or WIDE in few:
            return Counts(few)
        return Counts(few, same_bits(product, x, WIDE_ROW_COUNTS, WIDE))


def same_bits(
    product: Callable[[Tensor], Tensor], rows: Tensor, counts: tuple[int, ...], base: int = _BASE
) -> tuple[int, ...]:
    """Selects the numbers of rows with which each row of a product has the same bits as in a product of `base` rows.

    Args:
        product: function of x [R, K] for any R, whose row r depends mathematically only on x[r].
        rows: x for the trials, [R, K] with R greater than the largest of `counts`.
        counts: numbers of rows to try.
        base: number of rows in the product with the wanted bits. It is always in the result.
    """
    rows = rows[: max(counts) + 1]
    padded = F.pad(rows, (0, 0, 0, -len(rows) % base))
    wanted = torch.cat([product(part) for part in padded.split(base)])

    def equal(count: int) -> bool:
        if not torch.equal(product(rows[:count]), wanted[:count]):
            return False
        return count == 1 or torch.equal(product(rows[1 : count + 1].flip(0)).flip(0), wanted[1 : count + 1])

    return tuple(sorted({base} | {count for count in counts if equal(count)}))


def cancelling(rows: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Makes x [rows, k] and W [n, k] in bf16 for which x W^T is exactly zero.

    A computed product then has only the rounding errors of its sums. So nearly every element changes if the order of a
    sum changes. With random x and W, about one of 2000 bf16 elements changes.
    """
    half = k // 2
    x, w = _random((rows, half), torch.bfloat16), _random((min(n, _CANCELLED), half), torch.bfloat16, seed=1)
    order = torch.randperm(2 * half, generator=torch.Generator("cpu").manual_seed(2), dtype=torch.int64, device="cpu")
    x, w = torch.cat((x, x), dim=1)[:, order], torch.cat((w, -w), dim=1)[:, order]
    w = w.repeat(-(-n // len(w)), 1)[:n]
    return F.pad(x, (0, k - 2 * half)), F.pad(w, (0, k - 2 * half))


def _random(size: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    made = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(size, generator=made, dtype=torch.float32, device="cpu").to(dtype)


def _in_blocks(rows: Tensor) -> Tensor:
    """Returns a copy of a matrix [N, K] in oneDNN's layout of blocks."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(rows, _BASE)
    return packed


def _multiply_blocks(x: Tensor, matrix: Tensor) -> Tensor:
    """Computes x W^T for a matrix W in oneDNN's layout of blocks."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, matrix, None, "none", [], "")
    return out


def worth_having(
    product: Callable[[Tensor], Tensor], rows: Tensor, counts: tuple[int, ...], clock: Callable[[], float] = _clock
) -> tuple[int, ...]:
    """Selects the numbers of rows that take no more time than padding x to the next larger number up to `_BASE`.

    Args:
        product, rows: see `same_bits`.
        counts: numbers of rows, ascending. Numbers above `_BASE` are kept without a trial.
        clock: function that returns the time in seconds.
    """

    def seconds(work: Callable[[], object]) -> float:
        least = math.inf
        for _ in range(_TIMED):
            start = clock()
            work()
            least = min(least, clock() - start)
        return least

    kept = [count for count in counts if count > _BASE]
    for count in reversed([count for count in counts if count <= _BASE]):
        part = rows[:count]
        if count == _BASE or seconds(partial(product, part)) <= seconds(partial(_padded, product, part, kept[0])):
            kept.insert(0, count)
    return tuple(kept)


def _padded(product: Callable[[Tensor], Tensor], x: Tensor, count: int) -> Tensor:
    """Computes a product of x [R, K] after padding it with zero rows to `count` rows. Returns its first R rows."""
    return product(F.pad(x, (0, 0, 0, count - len(x))))[: len(x)]


class Blocked:
    """Weight matrix [N, K] in the layout of a CPU library.

    Args:
        shape: (N, K).
        dtype: dtype of x and of results, one of `DTYPES`.
        head: True for an LM head, whose results are fp32 logits with any dtype.
        embeds: True if the matrix is also an embedding table, so that a row-major copy is kept.
        counts: allowed numbers of rows of x, shared by all matrices of the model.

    Attributes:
        way: library and format, see the table at the top of the file. None before `fill`.
        rows: row-major copy [N, K], in bf16 if that is exact, else in `dtype`. None without `embeds`.
        counts: numbers of rows that x may have in one call of the library.
    """

    def __init__(
        self, shape: tuple[int, int], dtype: torch.dtype, *, head: bool, embeds: bool, counts: RowCounts
    ) -> None:
        self.shape, self.dtype, self.head, self.embeds = shape, dtype, head, embeds
        self.way: Way | None = None
        self.rows: Tensor | None = None
        self.counts = Counts()
        self._row_counts = counts
        self._matrix: Any = None
        self._scale = 1.0  # of the values in fp16
        self.nbytes = self._most_bytes()

    @property
    def operand(self) -> torch.dtype:
        """Dtype in which the library takes x."""
        return torch.bfloat16 if self.way == "bf16" else torch.float32

    def fill(self, rows: Tensor) -> None:
        """Copies `rows` [N, K] into the matrix. `rows` must have the dtype of this matrix."""
        found = None if self.dtype == torch.bfloat16 and not self.head else _as_half(rows)
        if found is not None:
            self.way, (self._matrix, self._scale) = "half", found
        else:
            self.way = "bf16" if self.dtype == torch.bfloat16 and not self.head else "fp32"
            self._matrix = _in_blocks(rows.to(self.operand))
        if self.embeds:
            narrow = rows.to(torch.bfloat16)
            self.rows = narrow if torch.equal(narrow.to(rows.dtype), rows) else rows.clone()
        self.counts = self._row_counts.of(self, rows)
        values = self.shape[0] * self.shape[1] * (4 if self.way == "fp32" else 2)
        self.nbytes = values + (0 if self.rows is None else self.rows.nbytes)

    def empty(self) -> None:
        """Frees the values. The matrix cannot be used until the next `fill`."""
        self.way = self.rows = self._matrix = None

    def unpack(self) -> Tensor:
        """Returns a row-major copy of the values [N, K], in the dtype of this matrix."""
        if self.rows is not None:
            return self.rows.to(self.dtype, copy=True)
        if self.way == "half":
            values: Tensor = torch.ops.quantized.linear_unpack_fp16(self._matrix)[0]
            return (values.float() / self._scale).to(self.dtype)
        assert self.way is not None, "the matrix is filled"
        dense: Tensor = self._matrix.to_dense()
        return dense.to(self.dtype)

    def embed(self, ids: Tensor) -> Tensor:
        """Looks up rows of the matrix. `ids` are int64 [...].

        Returns [..., K] in the dtype of this matrix.
        """
        return (self.unpack() if self.rows is None else self.rows)[ids].to(self.dtype)

    def product(
        self, x: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None, *, wide: bool = False
    ) -> Tensor:
        """Computes x W^T [+ bias]. A row's bits depend neither on R nor on the row's index.

        Args:
            x: [R, K].
            bias: [N], or None.
            out_dtype: dtype of the result. None: x's dtype.
            wide: True for a prefill pass: uses `Counts.wide`, if there are any.

        Returns:
            [R, N].
        """
        if out_dtype == torch.float32 and self.way == "bf16":
            return self._unrounded(x, bias)
        counts = (wide and self.counts.wide) or self.counts.few
        rows = x.to(self.operand)
        if rows.shape[0] <= counts[-1]:  # in steps of small models each operation of torch counts
            out = self._counted(rows, counts)
        else:
            out = torch.cat([self._counted(part, counts) for part in rows.split(counts[-1])])
        return (out if bias is None else out + bias).to(out_dtype or x.dtype)

    def multiply(self, x: Tensor) -> Tensor:
        """Computes x W^T by one library call, for x [R, K] of dtype `operand`. A row's bits may depend on R."""
        out: Tensor
        if self.way == "half":
            out = torch.ops.quantized.linear_dynamic_fp16(x if self._scale == 1.0 else x / self._scale, self._matrix)
        else:
            out = _multiply_blocks(x, self._matrix)
        return out

    def for_trial(self, rows: Tensor) -> Callable[[Tensor], Tensor]:
        """Returns a function x -> x W^T with which `RowCounts` tries numbers of rows of x.

        For FBGEMM the function may use only some rows of W. FBGEMM computes all N by one kernel, in blocks of at most
        64 columns.

        Args:
            rows: values [N, K] of W. For oneDNN in bf16 they may differ from the values of this matrix.
        """
        if self.way == "bf16":
            return partial(_multiply_blocks, matrix=_in_blocks(rows))
        few = _TRIED + self.shape[0] % _TRIED
        if self.way != "half" or self.shape[0] <= few:
            return self.multiply
        matrix = torch.ops.quantized.linear_prepack_fp16(rows[:few].float() * self._scale, None)
        return lambda x: torch.ops.quantized.linear_dynamic_fp16(x, matrix)

    def _counted(self, x: Tensor, counts: tuple[int, ...]) -> Tensor:
        """Computes x W^T after padding x with zero rows to the next number of rows in `counts`.

        x may have at most counts[-1] rows. The result has no rows for the padding.
        """
        rows = x.shape[0]
        if rows in counts:
            return self.multiply(x)
        return _padded(self.multiply, x, next(count for count in counts if count > rows))

    def _unrounded(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Computes x W^T [+ bias] from bf16 values, and returns it in fp32.

        The library only returns bf16. So slices of the matrix are converted to fp32 and multiplied in fp32.
        """
        blocks = F.pad(x.float(), (0, 0, 0, -len(x) % _BASE)).split(_BASE)
        wide = [part.float() for part in self.unpack().split(8192)]
        out = torch.cat([torch.cat([F.linear(block, part) for part in wide], dim=-1) for block in blocks])[: len(x)]
        return out if bias is None else out + bias

    def _most_bytes(self) -> int:
        """Returns the largest number of bytes that the matrix can need after `fill`."""
        size = 4 if self.head else self.dtype.itemsize
        return self.shape[0] * self.shape[1] * (size + self.dtype.itemsize * self.embeds)


def is_supported(dtype: torch.dtype) -> bool:
    """True if the CPU libraries of this machine multiply matrices of this dtype in blocked layouts."""
    if dtype not in DTYPES or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _as_half(rows: Tensor) -> tuple[Any, float] | None:
    """Multiplies `rows` by a power of two, and packs the result as an fp16 matrix of FBGEMM.

    Returns (matrix, power of two). Returns None if `rows` is empty or all zero, if fp16 cannot hold all values
    exactly, or if torch has no FBGEMM.
    """
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
    """True if fp16 can hold every product of a value and `scale` exactly."""
    wide = (part.float() * scale for part in values.split(_TESTED))
    return all(torch.equal(part.half().float(), part) for part in wide)
