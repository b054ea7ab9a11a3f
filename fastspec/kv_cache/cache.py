"""K/V storage in pages, and the description of the rows that one pass feeds.

Position `p` of a row lives in page `block_table[row, p // page_size]` at offset `p % page_size`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastspec.kernels.reference import Tiling


@dataclass(frozen=True, slots=True)
class PassRows:
    """What one forward pass feeds. B rows of Q consecutive tokens each.

    Attributes:
        ids: int64 [B, Q], tokens within the model's vocabulary.
        positions: int64 [B, Q], absolute positions, >= 0 also for rows that do not count.
        writes: bool [B, Q], whose K/V is kept: not that of padding, of finished rows, of what stands before a prompt.
        block_table: int64 [B, P], pages of each row.
        num_blocks: host bound on the attended positions, in blocks of `reference.KEY_BLOCK`.
        tiling: shapes of the matrix products; fixing them fixes a row's bits whatever runs beside it.
        first_block: rows that count are at positions in this block of KEY_BLOCK or in later ones.
    """

    ids: Tensor
    positions: Tensor
    writes: Tensor
    block_table: Tensor
    num_blocks: int
    tiling: Tiling
    first_block: int = 0


@dataclass(frozen=True, slots=True)
class PagedKVCache:
    """K and V of one model: [num_layers, num_pages, page_size, num_kv_heads, head_dim] each."""

    keys: Tensor
    values: Tensor

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PagedKVCache:
        """Allocates zeroed pages."""
        shape = (num_layers, num_pages, page_size, num_kv_heads, head_dim)
        return cls(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))

    @property
    def page_size(self) -> int:
        """Positions per page."""
        return self.keys.shape[2]
