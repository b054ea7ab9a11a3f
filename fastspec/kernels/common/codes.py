"""`Codes`: a quantised matrix [N, K] as its checkpoint defines it, before it is packed for kernels.

    value[n, k] = (decode(codes[n, k]) - zeros[n, g]) * scales[n // rows, k // columns],   g = k // columns

| format | decode of a code, one byte each                                    | zeros           |
|--------|---------------------------------------------------------------------|-----------------|
| fp8    | the bits of an e4m3 float (`torch.float8_e4m3fn`)                    | none            |
| int8   | the bits of an int8, -128..127                                       | none            |
| int4   | 0..15 as a number                                                    | always, 0..15   |
| fp4    | 0..15 as an e2m1 float: {0, .5, 1, 1.5, 2, 3, 4, 6}, bit 3 the sign  | none            |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

CodeFormat = Literal["fp8", "int8", "int4", "fp4"]
BITS = {"fp8": 8, "int8": 8, "int4": 4, "fp4": 4}
_SLICE = 2048  # rows dequantised at a time
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP Microscaling Formats 1.0, section 5.3.3


class CodesKind(NamedTuple):
    """Format of a quantised matrix, known before its values are read.

    Attributes:
        format: meaning of a code, see the table at the top of this file.
        block: (rows, columns) of a block of elements that share one scale. (1, K): each row has one scale. (1, G): each
            group of G columns of a row has one. (128, 128): each block of 128 x 128 elements has one. Blocks at the
            right and lower edge may be smaller.
    """

    format: CodeFormat
    block: tuple[int, int]

    def scales_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Returns the shape of the scales of a matrix of shape (N, K)."""
        return -(-shape[0] // self.block[0]), -(-shape[1] // self.block[1])

    def of_part(self, rows: Sequence[tuple[int, int]], width: int) -> CodesKind:
        """Returns the kind that `Codes.part` gives the part of a matrix of this kind.

        Its blocks keep their number of rows if all ranges consist of whole blocks. Otherwise they have one row.

        Args:
            rows: (start, stop) of each range of rows.
            width: number of columns of the part. Its first column is a multiple of `width`.
        """
        tall, wide = self.block
        whole = all(start % tall == 0 and stop % tall == 0 for start, stop in rows)
        return CodesKind(self.format, (tall if whole else 1, math.gcd(wide, width)))


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A quantised matrix [N, K].

    Attributes:
        kind: format, and the blocks that share a scale.
        codes: uint8 [N, K], one code each.
        scales: fp32 [ceil(N / block rows), ceil(K / block columns)].
        zeros: zero points of int4, uint8 [N, ceil(K / block columns)]. Blocks of int4 have one row. None for other
            formats.

    Raises:
        ValueError: a shape or dtype is not as above.
    """

    kind: CodesKind
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    def __post_init__(self) -> None:
        wanted = self.kind.scales_shape(self.shape)
        if self.codes.dtype != torch.uint8 or self.codes.dim() != 2:
            raise ValueError(f"codes are {self.codes.dtype} {list(self.codes.shape)}; wanted uint8 [N, K]")
        if self.scales.dtype != torch.float32 or tuple(self.scales.shape) != wanted:
            raise ValueError(
                f"scales are {self.scales.dtype} {list(self.scales.shape)}; {self.kind} of {list(self.shape)} wants "
                f"float32 {list(wanted)}"
            )
        if (self.zeros is not None) != (self.kind.format == "int4"):
            raise ValueError(f"{self.kind.format} {'has' if self.kind.format == 'int4' else 'has no'} zero points")
        if self.zeros is not None and (self.kind.block[0] != 1 or tuple(self.zeros.shape) != wanted):
            raise ValueError(f"zeros are {list(self.zeros.shape)} in blocks {self.kind.block}; wanted {list(wanted)}")

    @property
    def shape(self) -> tuple[int, int]:
        """Size of the matrix, (N, K)."""
        return self.codes.shape[0], self.codes.shape[1]

    def decoded(self) -> Tensor:
        """Decodes the codes to fp32 numbers [N, K], without zero points and scales."""
        if self.kind.format == "fp8":
            return self.codes.view(torch.float8_e4m3fn).float()
        if self.kind.format == "int8":
            return self.codes.view(torch.int8).float()
        if self.kind.format == "int4":
            return self.codes.float()
        return e2m1(self.codes)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """Returns the values [N, K], computed in fp32 and rounded once to `dtype`."""
        values, columns = self.decoded(), self.kind.block[1]
        if self.zeros is not None:
            values -= _spread(self.zeros.float(), columns, 1, values.shape[1])
        scales = _spread(self.scales, self.kind.block[0], 0, values.shape[0])
        values *= _spread(scales, columns, 1, values.shape[1])
        return values.to(dtype)

    def dequantise_into(self, place: Tensor) -> None:
        """Writes the dequantised values to `place` [N, K], in its dtype.

        Converts about _SLICE rows at a time, so it needs fp32 memory only for these.
        """
        rows = self.kind.block[0]
        step = -(-_SLICE // rows) * rows
        for start in range(0, self.shape[0], step):
            here, blocks = slice(start, start + step), slice(start // rows, (start + step) // rows)
            zeros = None if self.zeros is None else self.zeros[here]
            part = Codes(self.kind, self.codes[here], self.scales[blocks], zeros)
            place[here] = part.dequantise(place.dtype)

    def part(self, rows: Sequence[tuple[int, int]], columns: tuple[int, int] | None) -> Codes:
        """Returns a part of the matrix with the same values, for example the part of one rank.

        Args:
            rows: (start, stop) of ranges of rows, which are concatenated.
            columns: (start, stop) of a range of columns. It begins at a multiple of its width. None: all columns.
        """
        start, stop = columns or (0, self.shape[1])
        kind = self.kind.of_part(rows, stop - start)
        whole = self if kind.block[0] == self.kind.block[0] else self.by_rows()
        tall = kind.block[0]
        device = self.codes.device
        here = torch.cat([torch.arange(first, last, device=device) for first, last in rows])
        blocks = torch.cat([torch.arange(first // tall, last // tall, device=device) for first, last in rows])
        groups = torch.arange(start, stop, kind.block[1], device=device) // self.kind.block[1]
        zeros = None if whole.zeros is None else whole.zeros[blocks][:, groups].contiguous()
        codes = whole.codes[here, start:stop].contiguous()
        return Codes(kind, codes, whole.scales[blocks][:, groups].contiguous(), zeros)

    def in_order(self, order: Tensor) -> Codes:
        """Returns the matrix with its rows reordered: row i of the result is row order[i] of this matrix.

        Blocks of the result have one row.
        """
        rows = self.by_rows()
        zeros = None if rows.zeros is None else rows.zeros[order]
        return Codes(rows.kind, rows.codes[order], rows.scales[order], zeros)

    def by_rows(self) -> Codes:
        """Returns the matrix with blocks of one row instead of several. The values do not change."""
        rows, columns = self.kind.block
        if rows == 1:
            return self
        scales = _spread(self.scales, rows, 0, self.shape[0])
        return Codes(CodesKind(self.kind.format, (1, columns)), self.codes, scales, self.zeros)


def e2m1(codes: Tensor) -> Tensor:
    """Decodes fp4 codes 0..15, of any shape, to fp32."""
    table = torch.tensor(E2M1, device=codes.device, dtype=torch.float32)
    return torch.cat((table, -table))[codes.long()]


def _spread(values: Tensor, times: int, dim: int, size: int) -> Tensor:
    """Repeats each value `times` times along axis `dim`, and keeps the first `size` entries of that axis."""
    return values.repeat_interleave(times, dim).narrow(dim, 0, size)


def join(parts: Sequence[Codes]) -> Codes:
    """Concatenates the rows of matrices [N_i, K] to one matrix [sum of N_i, K].

    Blocks of several rows are kept if every part except the last consists of whole blocks. Otherwise they become blocks
    of one row.

    Raises:
        ValueError: the matrices differ in format, in K, or in the columns of a block.
    """
    kind = joined_kind([each.kind for each in parts], [each.shape for each in parts])
    if kind is None:
        raise ValueError(f"cannot join {[(each.kind, list(each.shape)) for each in parts]}: one format, K and group")
    parts = [each if each.kind == kind else each.by_rows() for each in parts]
    zeros = [each.zeros for each in parts if each.zeros is not None]
    return Codes(
        kind,
        torch.cat([each.codes for each in parts]),
        torch.cat([each.scales for each in parts]),
        torch.cat(zeros) if zeros else None,
    )


def joined_kind(kinds: Sequence[CodesKind], shapes: Sequence[tuple[int, int]]) -> CodesKind | None:
    """Returns the kind of the result of `join` for matrices of these kinds and shapes. None if `join` would fail."""
    first = kinds[0]
    if len({(kind.format, kind.block[1], shape[1]) for kind, shape in zip(kinds, shapes, strict=True)}) > 1:
        return None
    same = all(kind == first for kind in kinds)
    whole = all(rows % first.block[0] == 0 for rows, _ in shapes[:-1])
    return first if same and whole else CodesKind(first.format, (1, first.block[1]))
