"""K/V storage in pages, and the description of the rows that one pass feeds.

Slots: position `p` of a row lives in page `block_table[row, p // page_size]` at offset `p % page_size`;
its flat slot is `page * page_size + offset`. Rows that must not write (padding, finished, the missing row
of a one-token prompt) carry a slot of the trash page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastspec.kernels.reference import Tiling
from fastspec.kv_cache.pages import TRASH_PAGE


@dataclass(frozen=True, slots=True)
class PassRows:
    """What one forward pass feeds. B rows of Q consecutive tokens each.

    Attributes:
        tokens: int64 [B, Q], ids within the model's vocabulary.
        positions: int64 [B, Q], absolute positions, >= 0 also for rows that do not count.
        slots: int64 [B, Q], flat cache slots the K/V of these tokens are written to.
        block_table: int64 [B, P], pages of each row.
        num_blocks: host bound on the attended positions, in blocks of `reference.KEY_BLOCK`.
        tiling: shapes of the matrix products; fixing them fixes a row's bits whatever runs beside it.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    block_table: Tensor
    num_blocks: int
    tiling: Tiling


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

    def write(self, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Stores K and V [B, Q, Hkv, D] of one layer at `slots` [B, Q]."""
        heads, dim = self.keys.shape[3:]
        flat = slots.reshape(-1)
        self.keys[layer].view(-1, heads, dim).index_copy_(0, flat, key.reshape(-1, heads, dim))
        self.values[layer].view(-1, heads, dim).index_copy_(0, flat, value.reshape(-1, heads, dim))


def slots_of(block_table: Tensor, positions: Tensor, page_size: int, writes: Tensor) -> Tensor:
    """Flat slots [B, Q] of `positions` [B, Q]; rows where `writes` [B, Q] is False get the trash page.

    Positions beyond the block table are clamped to its last page: they are only ever given for rows whose
    `writes` is False, and an index derived from data must stay in range all the same.
    """
    page_index = (positions // page_size).clamp(0, block_table.shape[1] - 1)
    pages = block_table.gather(1, page_index)
    pages = torch.where(writes, pages, TRASH_PAGE)
    return pages * page_size + positions % page_size
