"""`Weight`: a matrix [N, K] of a model, in the layout that the kernels for matrix products read.

Ops get a `Weight` and choose a kernel by its `format`. No other code depends on the layout of its values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fastspec.kernels.common import packing
from fastspec.kernels.common.code_packing import PackedCodes
from fastspec.kernels.common.codes import Codes, CodesKind

if TYPE_CHECKING:
    from fastspec.kernels.cpu.blocked import Blocked

Format = Literal["rows", "packed", "codes", "blocked"]


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """One matrix W [N, K] of a model; y = x W^T.

    Attributes:
        data: the stored values. "rows": [N, K]. "packed": contiguous [N/16, K/32, 16, 32], see packing.py. "codes": the
            words of `codes`. "blocked": empty; `blocked` has the values.
        format: layout of `data`.
        gated: True if the matrix is the gate and up projections of an MLP with interleaved rows: 8 of the gate, then
            the matching 8 of up. Only "packed" and "codes" interleave. In other formats the gate's N/2 rows come first.
        codes: codes and scales of a quantised weight, see code_packing.py. None: the weight is not quantised.
        activations: for a quantised weight, the dtype of its operand x and of the values that `unpack` returns. None
            for other weights.
        whole: (N, K) of the whole matrix, if this weight is one rank's part of it. None: this is the whole matrix.
        tree: True if kernels that support it sum over K as one binary tree over consecutive parts of K. A rank's part
            of K is a subtree, so the bits do not depend on the number of ranks.
        blocked: the matrix in the layout of a CPU library. None: it has another format.

    Raises:
        ValueError: `data` does not have the shape of its format.
    """

    data: Tensor
    format: Format = "rows"
    gated: bool = False
    codes: PackedCodes | None = None
    activations: torch.dtype | None = None
    whole: tuple[int, int] | None = None
    tree: bool = False
    blocked: Blocked | None = None

    def __post_init__(self) -> None:
        shape, packed = tuple(self.data.shape), self.format == "packed"
        if (self.format == "codes") != (self.codes is not None):
            raise ValueError(f"format is {self.format} and codes are {self.codes}; make it by `Weight.empty_codes`")
        if (self.format == "blocked") != (self.blocked is not None):
            raise ValueError(f"format is {self.format} and blocked is {self.blocked}; make it by `Weight.of_blocked`")
        if self.codes is not None or self.blocked is not None:
            return
        if packed and (len(shape) != 4 or shape[2:] != (16, 32) or not self.data.is_contiguous()):
            raise ValueError(f"data has shape {shape}; packed weights are contiguous [N/16, K/32, 16, 32]")
        if not packed and (len(shape) != 2 or self.gated):
            raise ValueError(f"data has shape {shape}, gated={self.gated}; weights as rows are [N, K], gate first")

    @classmethod
    def pack(cls, rows: Tensor, gated: bool = False) -> Weight:
        """Makes a packed weight of a copy of `rows` [N, K]. For `gated` and errors see `packing.pack`."""
        return cls(packing.pack(rows, gated), "packed", gated)

    @classmethod
    def empty(
        cls,
        shape: tuple[int, int],
        form: Format,
        gated: bool,
        dtype: torch.dtype,
        device: torch.device,
        **sums: Any,
    ) -> Weight:
        """Allocates a weight of shape (N, K), which `fill` writes.

        Args:
            shape: (N, K).
            form: layout of the values.
            gated: True to interleave rows of gate and up. Ignored unless the layout is "packed".
            dtype: dtype of the values.
            device: device of the values.
            **sums: the attributes `whole` and `tree` of the weight.
        """
        packed = form == "packed"
        data = torch.empty(packing.packed_shape(shape) if packed else shape, dtype=dtype, device=device)
        return cls(data, form, gated and packed, **sums)

    @classmethod
    def empty_codes(
        cls, shape: tuple[int, int], kind: CodesKind, gated: bool, dtype: torch.dtype, device: torch.device
    ) -> Weight:
        """Allocates a quantised weight of shape (N, K), which `fill_codes` writes.

        Args:
            shape: (N, K).
            kind: format of the codes, and the blocks that share a scale.
            gated: True to interleave rows of gate and up.
            dtype: dtype of the operand x, and of the results of `unpack` and `embed`.
            device: device of the codes.

        Raises:
            ValueError: there is no packed layout for this kind and shape; `Ops.keeps_codes` returns False.
        """
        codes = PackedCodes.empty(shape, kind, gated, device)
        return cls(codes.words, "codes", gated, codes, dtype)

    @classmethod
    def of_blocked(cls, blocked: Blocked) -> Weight:
        """Makes a weight in the layout of torch's CPU libraries, which `fill` writes."""
        return cls(torch.empty(0, dtype=blocked.dtype, device="cpu"), "blocked", blocked=blocked)

    def fill_codes(self, codes: Codes) -> None:
        """Packs a quantised matrix [N, K] into this quantised weight. Gate rows of a gated weight come first.

        Raises:
            ValueError: this weight is not quantised, or `codes` do not fit it; see `PackedCodes.fill`.
        """
        if self.codes is None:
            raise ValueError(f"a weight as {self.format} has no room for codes; make it by `Weight.empty_codes`")
        self.codes.fill(codes)

    def fill_run(self, tile: int, rows: Tensor) -> None:
        """Writes some rows of a packed weight.

        Args:
            tile: index of the first 16-row tile that is written.
            rows: [n, K], n a multiple of 16. Gate rows of a gated weight come first.
        """
        packing.pack_into(self.data[tile : tile + rows.shape[0] // 16], rows, self.gated)

    def fill(self, rows: Tensor) -> None:
        """Copies the matrix `rows` [N, K] into this weight, in its format. Gate rows of a gated weight come first.

        Raises:
            ValueError: this weight is quantised.
        """
        if self.codes is not None:
            raise ValueError("a quantised weight is written by `fill_codes`")
        if self.blocked is not None:
            self.blocked.fill(rows)
        elif self.format == "packed":
            packing.pack_into(self.data, rows, self.gated)
        else:
            self.data.copy_(rows)

    def copy_from(self, other: Weight) -> None:
        """Copies a weight with the same shape and the same kind of codes, if any. The format may be another.

        Raises:
            ValueError: only one of the two is quantised.
        """
        if (self.codes is None) != (other.codes is None):
            raise ValueError(f"a weight in {other.format} cannot be copied to one in {self.format}")
        if self.codes is not None and other.codes is not None:
            self.codes.copy_from(other.codes)
        else:
            self.fill(other.unpack())

    @property
    def shape(self) -> tuple[int, int]:
        """Size of the matrix, (N, K), in every format."""
        if self.codes is not None:
            return self.codes.shape
        if self.blocked is not None:
            return self.blocked.shape
        if self.format == "packed":
            return self.data.shape[0] * 16, self.data.shape[1] * 32
        return self.data.shape[0], self.data.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values that `unpack` returns."""
        return self.data.dtype if self.activations is None else self.activations

    @property
    def device(self) -> torch.device:
        """Device of the values."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of device memory, scales and zero points included."""
        other = self.codes or self.blocked
        return self.data.nbytes if other is None else other.nbytes

    def unpack(self) -> Tensor:
        """Returns the matrix [N, K] in row-major layout, gate rows first.

        For the format "rows" this is `data` itself, for all other formats a copy.
        """
        if self.blocked is not None:
            return self.blocked.unpack()
        if self.codes is not None:
            return self.codes.dequantise(self.dtype)
        return packing.unpack(self.data, self.gated) if self.format == "packed" else self.data

    def embed(self, ids: Tensor) -> Tensor:
        """Returns the rows with indices `ids`, int64 [...] in 0..N-1, as [..., K]. The weight is not gated."""
        if self.blocked is not None:
            return self.blocked.embed(ids)
        if self.codes is not None:
            return self.codes.rows(ids, self.dtype)
        return packing.embed_rows(self.data, ids) if self.format == "packed" else self.data[ids]

    def words(self, *shape: int) -> Tensor:
        """Views `data` of a packed weight as 32-bit words (int32) of two 16-bit values, in `shape` if it is given."""
        words = self.data.view(torch.int32)
        return words.view(shape) if shape else words


def is_packed(weights: Sequence[Weight], dtypes: Sequence[torch.dtype] = packing.DTYPES) -> bool:
    """True if all weights have the format "packed", with values of one of these dtypes."""
    return all(weight.format == "packed" and weight.dtype in dtypes for weight in weights)
