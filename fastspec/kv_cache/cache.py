"""K/V storage in pages, and the description of the rows that one pass feeds.

Position `p` of a row lives in page `block_table[row, p // page_size]` at offset `p % page_size`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastspec.kv_cache.states import StateCache


@dataclass(frozen=True, slots=True)
class PagedKVCache:
    """What one model keeps of its rows.

    Attributes:
        keys, values: [layers that attend, num_pages, page_size, num_kv_heads, head_dim] each.
        states: of its recurrent layers; None: it has none.
    """

    keys: Tensor
    values: Tensor
    states: StateCache | None = None

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
        states: StateCache | None = None,
    ) -> PagedKVCache:
        """Allocates zeroed pages, beside the states that are there."""
        shape = (num_layers, num_pages, page_size, num_kv_heads, head_dim)
        keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        return cls(keys, values, states)

    @property
    def page_size(self) -> int:
        """Positions per page."""
        return self.keys.shape[2]
