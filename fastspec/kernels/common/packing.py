"""Packed layout of a weight [N, K]: the elements that one warp loads together are contiguous.

| form   | shape                  | element [n, k] of the weight is at                 |
|--------|------------------------|----------------------------------------------------|
| rows   | [N, K]                 | [n, k]                                             |
| packed | [N/16, K/32, 16, 32]   | [n // 16, k // 32, n % 16, k % 32]                 |
| gated  | [N/16, K/32, 16, 32]   | as packed, of a weight whose rows are interleaved: |
|        |                        | 8 of the gate, then the matching 8 of up           |

The operand x of a product with a packed weight is [..., K], or regrouped: [..., K/64, 64]. Regrouping permutes the 32
pairs of neighbouring values in each group of 64 values of K: the pair at index 16 h + 4 c + t moves to index
8 t + 4 h + c. Then the values that one tensor-core instruction reads are contiguous.

A tile of 16 rows is contiguous. In a gated weight, a gate row and its up row are 8 rows apart. So one thread has the
results of both rows in its registers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16)
BLOCK = 64  # number of values of K in a group of regrouping
PACKED_ROWS = 16  # rows of a tile; weights with fewer rows are not packed (small routers, the gate of a shared expert)


def can_pack(weight_shape: Sequence[int], dtype: torch.dtype) -> bool:
    """True if a weight [N, K] can be packed: it has 16-bit values, and N is a multiple of 16, K a multiple of 64."""
    rows, width = weight_shape
    return dtype in DTYPES and rows > 0 and width > 0 and rows % 16 == 0 and width % 64 == 0


def pack(weight: Tensor, gated: bool = False) -> Tensor:
    """Packs a weight [N, K] into a new tensor [N/16, K/32, 16, 32]. Allocates no other memory.

    Args:
        weight: [N, K], bf16 or fp16.
        gated: True if the first N/2 rows are the gate projection and the others the up projection of an MLP.

    Raises:
        ValueError: `can_pack` returns False.
    """
    if weight.dim() != 2 or not can_pack(weight.shape, weight.dtype):
        raise ValueError(
            f"a weight of shape {tuple(weight.shape)} and {weight.dtype} has no packed form; "
            "pack 16-bit weights [N, K] with N % 16 == 0 and K % 64 == 0, and keep the others as they are"
        )
    packed = weight.new_empty(packed_shape(weight.shape))
    pack_into(packed, weight, gated)
    return packed


def packed_shape(weight_shape: Sequence[int]) -> tuple[int, int, int, int]:
    """Returns the shape of the packed form of a weight [N, K]."""
    rows, width = weight_shape
    return rows // 16, width // 32, 16, 32


def pack_into(packed: Tensor, weight: Tensor, gated: bool = False) -> None:
    """Writes the packed form of a weight [N, K] to `packed` [N/16, K/32, 16, 32]. For `gated` see `pack`."""
    rows, width = weight.shape
    _in_rows(packed, gated).copy_(weight.view(_rows_shape(rows, width, gated)))


def unpack(packed: Tensor, gated: bool = False) -> Tensor:
    """Undoes `pack`: converts a packed weight [N/16, K/32, 16, 32] to [N, K]. For `gated` see `pack`."""
    tiles, columns = packed.shape[:2]
    return _in_rows(packed, gated).reshape(tiles * 16, columns * 32)


def _rows_shape(rows: int, width: int, gated: bool) -> tuple[int, ...]:
    return (2, rows // 16, 8, width // 32, 32) if gated else (rows // 16, 16, width // 32, 32)


def _in_rows(packed: Tensor, gated: bool) -> Tensor:
    """Returns a permuted view of a packed weight. Its elements are in the order of the rows [N, K].

    Its shape is that which `_rows_shape` returns. For `gated` see `pack`.
    """
    halves: Tensor = packed.unflatten(2, (2, 8)).permute(2, 0, 3, 1, 4)
    return halves if gated else packed.transpose(1, 2)


def embed_rows(packed: Tensor, ids: Tensor) -> Tensor:
    """Returns the rows with indices `ids`, int64 [...], of a packed weight as [..., K]. The weight is not gated."""
    return packed[ids // 16, :, ids % 16].flatten(-2)


def in_order(regrouped: Tensor) -> Tensor:
    """Undoes regrouping (see the top of this file): converts x [..., K/64, 64] to [..., K] in its original order."""
    pairs: Tensor = regrouped.unflatten(-1, (4, 2, 4, 2))
    return pairs.movedim(-4, -2).flatten(-5)
