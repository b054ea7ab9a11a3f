"""`PackedCodes`: a quantised matrix [N, K] in the layout that the kernels for few rows of x read.

    words int32 [N/16, K/C, 16, 16],   C = 64 codes of 8 bits, or 128 of 4 bits

A tile is 16 rows, a chunk is C consecutive columns. Rows are in the order of packing.py: in a gated matrix, 8 rows of
the gate and the matching 8 of up alternate. A row's codes of one chunk are 64 bytes, or 16 words of 32 bits. Lane
4 g + t of a warp loads words 4 t to 4 t + 3 of rows g and g + 8. The 16-bit half h (0 or 1) of word 4 t + c holds two
codes of 8 bits or four codes of 4 bits. Their index in the half is i, from 0 on. Code i belongs to column

    k = 32 i + 8 t + 2 c + h                                 within the chunk, or
    k = 32 i + 16 (c // 2) + 4 t + 2 (c % 2) + h             in int4 with groups of 32, whose sums are separate

`FIELDS` says which bit of a half holds which bit of a code. Masks and shifts alone convert a code to a bf16:

- a bf16 with bits 15..8 zero is the integer in its bits 7..0 times 2^-133,
- a bf16 with the bits of an e4m3 code at 10..4 is its value times 2^-120,
- a bf16 with the bits of an e2m1 code at 8..6 is its value times 2^-126.

| form | format of `Codes`       | stored code                                                 |
|------|-------------------------|-------------------------------------------------------------|
| fp8  | fp8                     | unchanged; NaN (127, 255) counts as +-480                   |
| int8 | int8 without a -128     | sign and magnitude                                          |
| off8 | int8 with a -128        | q + 128; the product subtracts 128 times the sum of x       |
| int4 | int4                    | unchanged; the product subtracts zero points                |
| fp4  | fp4                     | unchanged                                                   |

Each row has a factor in fp32. The scale of a group of columns is this factor times the group's element of `scales`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fastspec.kernels.common.codes import BITS, Codes, CodesKind, e2m1

Form = Literal["fp8", "int8", "off8", "int4", "fp4"]
Field = tuple[int, int, int]  # some bits of a code: first bit in the code, number of bits, first bit in the half
FIELDS: dict[Form, tuple[tuple[Field, ...], ...]] = {
    "fp8": (((7, 1, 15), (0, 7, 4)), ((7, 1, 11), (4, 3, 12), (0, 4, 0))),
    "int8": (((7, 1, 15), (0, 7, 0)), ((7, 1, 7), (0, 7, 8))),
    "off8": (((0, 8, 0),), ((0, 8, 8),)),
    "int4": (((0, 4, 0),), ((0, 4, 4),), ((0, 4, 8),), ((0, 4, 12),)),
    "fp4": (((3, 1, 15), (0, 3, 6)), ((3, 1, 12), (0, 3, 3)), ((3, 1, 14), (0, 3, 9)), ((3, 1, 13), (0, 3, 0))),
}
# Kernels multiply x or the codes by 2^64, except for fp4. Their sums of products are then 2^LIFT times too small, so
# factors of rows are stored 2^LIFT times larger. Scales of fp4 groups are stored 2^FP4_RAISED times larger
LIFT: dict[Form, int] = {"fp8": 56, "int8": 69, "off8": 69, "int4": 69, "fp4": 26}
FP4_RAISED = 100
# by format: numbers of columns that may share a scale
GROUPS = {"fp8": (64, 128), "int8": (64, 128), "int4": (32, 64, 128), "fp4": (16, 32)}
PART = 2**23  # number of codes packed at a time, which need a few times as many bytes of temporary memory


@dataclass(slots=True, eq=False)
class PackedCodes:
    """A quantised matrix [N, K] in the packed layout at the top of this file. `fill` writes it.

    Attributes:
        kind: quantisation format, and the blocks that share a scale; see `Codes`.
        gated: True if rows of gate and up are interleaved, see `Weight`.
        form: layout of a code's bits. `fill` may change it from int8 to off8.
        words: int32 [N/16, K/C, 16, 16], the codes.
        factors: fp32 [N], in the order of the rows of `words`: the factor of each row, times 2^LIFT.
        scales: scales of groups of G columns, each divided by the factor of its row. None if each row has one scale,
            which is its factor.
            int4, fp8, int8: [N/16, K/G, 8], pairs for rows r and r + 8 of a tile: int32 (two fp16) or int64 (two fp32).
            With blocks of 128 rows: [N/16, K/G, 1], one pair for all rows.
            fp4: int32 [N/16, K/128, 16, T, 2], each two bf16. T = 1: groups 0, 1, 2, 3 of a chunk.
            T = 2: groups 0, 2, 4, 6, then groups 1, 3, 5, 7. These numbers are stored times 2^FP4_RAISED.
        zeros: zero points of int4: int32 [N/16, K/G, 8], pairs of bf16. None if every zero point is 8, and in other
            formats.
    """

    kind: CodesKind
    gated: bool
    form: Form
    words: Tensor
    factors: Tensor
    scales: Tensor | None
    zeros: Tensor | None

    @classmethod
    def empty(cls, shape: tuple[int, int], kind: CodesKind, gated: bool, device: torch.device) -> PackedCodes:
        """Allocates a matrix that `fill` writes.

        Args:
            shape: (N, K).
            kind, gated: see `PackedCodes`.
            device: device of the matrix.

        Raises:
            ValueError: `can_pack_codes` returns False.
        """
        if not can_pack_codes(shape, kind):
            raise ValueError(f"{kind} of {shape} has no packed form; keep it as it is, or dequantise it")
        n, k = shape
        words = torch.empty(n // 16, k * BITS[kind.format] // 512, 16, 16, dtype=torch.int32, device=device)
        factors = torch.empty(n, dtype=torch.float32, device=device)
        scales = None
        if kind.format == "fp4":
            scales = torch.empty(n // 16, k // 128, 16, 32 // kind.block[1], 2, dtype=torch.int32, device=device)
        elif group_of(shape, kind):
            dtype = torch.int32 if kind.format == "int4" else torch.int64
            pairs = 1 if kind.block[0] > 1 else 8
            scales = torch.empty(n // 16, k // kind.block[1], pairs, dtype=dtype, device=device)
        return cls(kind, gated, kind.format, words, factors, scales, None)

    @property
    def shape(self) -> tuple[int, int]:
        """Size of the matrix, (N, K)."""
        return self.words.shape[0] * 16, self.words.shape[1] * 512 // BITS[self.kind.format]

    @property
    def group(self) -> int:
        """Number of columns that share a scale; 0 if each row has one scale."""
        return group_of(self.shape, self.kind)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return sum(each.nbytes for each in (self.words, self.factors, self.scales, self.zeros) if each is not None)

    @property
    def layout(self) -> tuple[object, ...]:
        """Form of the codes, dtypes and addresses. Kernels in a CUDA graph were captured for them.

        `fill` changes the layout only if the new values do not fit the present form.
        """
        parts = (self.words, self.factors, self.scales, self.zeros)
        return self.form, *(None if each is None else (each.dtype, each.data_ptr()) for each in parts)

    def fill(self, codes: Codes) -> None:
        """Packs the quantised matrix `codes` into this one. Computes on the device of `codes`.

        Rows of `codes` are in the checkpoint's order: a gated matrix has the gate's rows first.

        Raises:
            ValueError: `codes` have another shape or kind, or fp4 scales that cannot be stored (`_by_small_scales`).
        """
        if codes.shape != self.shape or codes.kind != self.kind:
            raise ValueError(f"codes are {codes.kind} of {codes.shape}; there is room for {self.kind} of {self.shape}")
        if self.kind.format == "int8":
            self.form = "off8" if bool((codes.codes == 128).any()) else "int8"
        self.fill_words(0, codes.codes)
        self.fill_scales(codes.by_rows().scales, codes.zeros)

    def fill_rounded(
        self, runs: Iterable[tuple[int, Tensor]], pack: Callable[[PackedCodes, int, Tensor], Tensor]
    ) -> None:
        """Quantises a matrix of float values, one range of rows after the other, and packs it into this one.

        Args:
            runs: (index of the first tile, rows [n, K] of whole tiles) of each range of rows. Ranges are ascending, and
                have all rows in total. Each range of a gated matrix has gate rows first, then the matching rows of up.
            pack: `rounding.pack_rounded`, or a kernel for it. It writes the `words` of a range, and returns the scales.
                In int8 it writes no -128.
        """
        scales = self._joined([pack(self, tile, rows) for tile, rows in runs])
        self.fill_scales(scales, None)

    def _joined(self, runs: list[Tensor]) -> Tensor:
        """Concatenates scales [n, groups] of ranges of rows to [N, groups], in the checkpoint's order of rows.

        Each range of a gated matrix has gate rows first, then rows of up. The result has all gate rows first.
        """
        if not self.gated:
            return torch.cat(runs)
        return torch.cat([run[: len(run) // 2] for run in runs] + [run[len(run) // 2 :] for run in runs])

    def fill_words(self, tile: int, codes: Tensor) -> None:
        """Packs uint8 codes [n, K] of whole tiles into `words`, from the tile with index `tile` on.

        In a gated matrix, `codes` has gate rows first, then the matching rows of up.
        """
        tiles = _tiles(codes, self.gated)
        step = max(1, PART // (16 * self.shape[1]))
        for first in range(0, len(tiles), step):
            part = tiles[first : first + step].reshape(-1, self.shape[1])
            halves = _halves(part, self.form, self._narrow_lanes)
            self.words[tile + first : tile + first + len(part) // 16].view(torch.int16).copy_(halves)

    @property
    def _narrow_lanes(self) -> bool:
        return self.kind.format == "int4" and self.group == 32

    def fill_scales(self, scales: Tensor, zeros: Tensor | None) -> None:
        """Stores fp32 scales and zero points [N, groups], given in the checkpoint's order of rows.

        Sets `factors`, `scales` and `zeros`. If `zeros` is None, every zero point of int4 is 8.
        """
        form, gated = self.form, self.gated
        lift = 2.0 ** LIFT[form]
        if not self.group:
            self.factors.copy_(_tiles(scales[:, 0], gated).flatten() * lift)
            return
        if form == "fp4":
            small, factors = _by_small_scales(scales)
            self.factors.copy_(_tiles(factors, gated).flatten() * lift)
            raised = _tiles((small * 2.0**FP4_RAISED).bfloat16(), gated)  # [tile, row, group]
            apart = raised.unflatten(2, (-1, 4, 32 // self.kind.block[1])).permute(0, 2, 1, 4, 3)
            assert self.scales is not None
            self.scales.view(torch.bfloat16).copy_(apart)
            return
        exponents = _exponents(scales)
        small = scales * torch.exp2(-exponents)[:, None]
        if form == "int4" and torch.equal(small.half().float(), small):
            self.factors.copy_(_tiles(torch.exp2(exponents), gated).flatten() * lift)
            pairs = _pairs(small.half(), gated).view(torch.int32).squeeze(-1)
        else:
            self.factors.fill_(lift)
            pairs = _pairs(scales, gated).view(torch.int64).squeeze(-1)
            pairs = pairs[:, :, :1] if self.kind.block[0] > 1 else pairs
        assert self.scales is not None
        self.scales = _in_place(self.scales, pairs)
        if zeros is None or not bool((zeros != 8).any()):
            self.zeros = None
        else:
            self.zeros = _in_place(self.zeros, _pairs(zeros.bfloat16(), gated).view(torch.int32).squeeze(-1))

    def copy_from(self, other: PackedCodes) -> None:
        """Copies another matrix of the same shape and kind."""
        self.form = other.form
        self.words.copy_(other.words)
        self.factors.copy_(other.factors)
        self.scales = None if other.scales is None else _in_place(self.scales, other.scales)
        self.zeros = None if other.zeros is None else _in_place(self.zeros, other.zeros)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """Returns the matrix [N, K] in the checkpoint's order of rows, computed in fp32 and rounded once to `dtype`."""
        tiles = self._values(torch.arange(self.shape[0], device=self.words.device), dtype)
        return _rows(tiles.unflatten(0, (-1, 16)), self.gated)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the rows with indices `ids`, int64 [...], as [..., K] in `dtype`. The matrix must not be gated."""
        return self._values(ids.flatten(), dtype).view(*ids.shape, -1)

    def _values(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Dequantises some rows to [n, K] in `dtype`. ids: int64 [n], indices of rows in the order of `words`."""
        tile, row = ids // 16, ids % 16
        values = _decoded(self.words[tile, :, row], self.form, self._narrow_lanes)
        factors = self.factors[ids] * 2.0 ** -LIFT[self.form]
        if not self.group:
            return (values * factors[:, None]).to(dtype)
        if self.zeros is not None:
            values -= _spread(_of_pairs(self.zeros, torch.bfloat16, tile, row), self.group)
        elif self.form == "int4":
            values -= 8
        return (values * _spread(self._scales(tile, row) * factors[:, None], self.group)).to(dtype)

    def _scales(self, tile: Tensor, row: Tensor) -> Tensor:
        """Returns `scales` of n rows, fp32 [n, K/G], not multiplied by `factors`.

        tile, row: int64 [n]. The i-th of these rows is row row[i] (0..15) of tile tile[i].
        """
        assert self.scales is not None
        if self.form == "fp4":
            found = self.scales[tile, :, row].view(torch.bfloat16).transpose(-1, -2)  # [n, K/128, 4, T]
            return found.reshape(len(tile), -1).float() * 2.0**-FP4_RAISED
        return _of_pairs(self.scales, torch.float16 if self.scales.dtype == torch.int32 else torch.float32, tile, row)


def _in_place(old: Tensor | None, new: Tensor) -> Tensor:
    """Copies `new` to `old`, whose address captured kernels know, and returns `old`.

    Returns `new` itself if `old` is None or has another dtype.
    """
    if old is None or old.dtype != new.dtype:
        return new.contiguous()
    return old.copy_(new)


def can_pack_codes(shape: tuple[int, int], kind: CodesKind) -> bool:
    """True if a quantised matrix (N, K) can be packed: it has one scale per row, or groups that the kernels support."""
    (n, k), (rows, columns) = shape, kind.block
    fits = n > 0 and k > 0 and n % 16 == 0 and k % 128 == 0
    if not group_of(shape, kind):
        return fits and rows == 1 and BITS[kind.format] == 8
    blocks = rows == 1 or (rows == 128 and BITS[kind.format] == 8)
    return fits and blocks and columns in GROUPS[kind.format] and k % columns == 0


def group_of(shape: tuple[int, int], kind: CodesKind) -> int:
    """Returns the number of columns that share a scale.

    The result is 0 if each row has one scale, in formats whose kernels support that (those of 8 bits).
    """
    whole = kind.block[1] >= shape[1] and kind.block[0] == 1 and BITS[kind.format] == 8
    return 0 if whole else kind.block[1]


def _tiles(rows: Tensor, gated: bool) -> Tensor:
    """Views or copies rows [N, ...] in the checkpoint's order as tiles [N/16, 16, ...] in the order of `words`."""
    tiles: Tensor = (
        rows.unflatten(0, (2, -1, 8)).transpose(0, 1).flatten(1, 2) if gated else rows.unflatten(0, (-1, 16))
    )
    return tiles


def _rows(tiles: Tensor, gated: bool) -> Tensor:
    """Undoes `_tiles`: returns rows [N, ...] of tiles [N/16, 16, ...]."""
    halves: Tensor = tiles.unflatten(1, (2, 8))
    return halves.transpose(0, 1).flatten(0, 2) if gated else tiles.flatten(0, 1)


def _halves(codes: Tensor, form: Form, narrow: bool) -> Tensor:
    """Packs uint8 codes [16 n, K] into int16 [n, K/C, 16, 32]. C: number of columns of a chunk.

    narrow: True for int4 with groups of 32 columns, whose columns are in another order (see the top of this file).
    """
    count = len(FIELDS[form])
    code = codes.to(torch.int16)
    if form == "int8":
        code = torch.where(code >= 128, 384 - code, code)  # 128, the sign, over 256 - code, the magnitude
    elif form == "off8":
        code = code ^ 128
    axes = (count, 2, 4, 2, 2) if narrow else (count, 4, 4, 2)  # k: i, [c // 2,] t, c, h
    apart = code.unflatten(1, (-1, *axes))
    if narrow:
        apart = apart.transpose(3, 4).flatten(4, 5)
    out = torch.zeros_like(apart[:, :, 0])
    for i, fields in enumerate(FIELDS[form]):
        for first, bits, place in fields:
            out |= ((apart[:, :, i] >> first) & (2**bits - 1)) << place
    halves: Tensor = out.flatten(2).unflatten(0, (-1, 16))
    return halves.transpose(1, 2)


def _decoded(words: Tensor, form: Form, narrow: bool) -> Tensor:
    """Decodes the int32 words [n, K/C, 16] of n rows to fp32 numbers [n, K]. For `narrow` see `_halves`."""
    halves = words.contiguous().view(torch.int16).unflatten(2, (4, 4, 2))
    parts = []
    for fields in FIELDS[form]:
        code = torch.zeros_like(halves)
        for first, bits, place in fields:
            code |= ((halves >> place) & (2**bits - 1)) << first
        parts.append(code)
    codes = torch.stack(parts, 2)  # [n, K/C, i, t, c, h]
    if narrow:
        codes = codes.unflatten(4, (2, 2)).transpose(3, 4)
    return _numbers(codes.flatten(1), form)


def _numbers(codes: Tensor, form: Form) -> Tensor:
    if form == "fp8":
        return codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    if form == "int8":
        return torch.where(codes >= 128, 128 - codes, codes).float()
    if form == "off8":
        return codes.float() - 128
    if form == "int4":
        return codes.float()
    return e2m1(codes)


def _exponents(scales: Tensor) -> Tensor:
    """Returns one exponent for each row of scales [N, groups], fp32 [N].

    A row's scales, divided by 2^exponent, are at most 2^15, so that fp16 can hold them.
    """
    largest = scales.abs().amax(1)
    return torch.frexp(largest).exponent.float() - 15


def _by_small_scales(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Splits scales [N, groups] of fp4: scale = small number [N, groups] * factor [N] of the row. Returns both.

    A small number has at most four significant bits. In checkpoints, scales are e4m3 numbers times one fp32 number, or
    powers of two. The tried factors are the row's largest scale divided by 8, 9, .. 15. A factor fits if every product
    differs from its scale by at most 2^-22 of the scale.

    Raises:
        ValueError: no tried factor fits.
    """
    largest = scales.abs().amax(1, keepdim=True)
    largest = torch.where(largest > 0, largest, 1.0)
    small, factors = torch.zeros_like(scales), torch.ones_like(largest)
    todo = torch.ones_like(largest, dtype=torch.bool)
    for mantissa in range(8, 16):
        factor = largest / mantissa
        found, exponent = torch.frexp(scales / factor)
        rounded = torch.ldexp((found * 16).round() / 16, exponent)
        fits = ((rounded * factor - scales).abs() <= scales.abs() * 2.0**-22).all(1, keepdim=True) & todo
        small, factors = torch.where(fits, rounded, small), torch.where(fits, factor, factors)
        todo &= ~fits
    if bool(todo.any()):
        raise ValueError(
            f"the scales of {int(todo.sum())} rows of fp4 codes are not e4m3 numbers times one fp32 number; dequantise "
            "the matrix"
        )
    return small, factors[:, 0]


def _pairs(values: Tensor, gated: bool) -> Tensor:
    """Rearranges values [N, groups], in the checkpoint's order of rows, to [N/16, groups, 8, 2].

    Element [tile, group, r] is a pair: the values of rows r and r + 8 of the 16-row tile, in the order of `words`.
    """
    pairs: Tensor = _tiles(values, gated).unflatten(1, (2, 8)).permute(0, 3, 2, 1)
    return pairs.clone(memory_format=torch.contiguous_format)


def _of_pairs(words: Tensor, dtype: torch.dtype, tile: Tensor, row: Tensor) -> Tensor:
    """Undoes `_pairs` for n rows: returns their values, fp32 [n, groups].

    Args:
        words: int32 or int64 [N/16, groups, 8 or 1], each a pair of values of `dtype`.
        dtype: dtype of the stored values.
        tile, row: int64 [n]. The i-th of these rows is row row[i] (0..15) of tile tile[i].
    """
    pairs: Tensor = words[tile].view(dtype).unflatten(2, (-1, 2))  # [n, groups, 8 or 1, 2]
    at = torch.arange(len(tile), device=tile.device)
    return pairs[at, :, row % 8 % pairs.shape[2], row // 8].float()


def _spread(values: Tensor, times: int) -> Tensor:
    return values.repeat_interleave(times, 1)
