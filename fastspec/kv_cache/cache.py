"""K/V storage in pages, and the description of the rows that one pass feeds.

Position `p` of a row lives in page `block_table[row, p // page_size]` at offset `p % page_size`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
