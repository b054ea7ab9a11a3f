"""KV cache in pages.

Position `p` of a row is in page `block_table[row, p // page_size]` at offset `p % page_size`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastspec.kernels.common.kv_scales import KVScales
from fastspec.kv_cache.states import StateCache


@dataclass(frozen=True, slots=True)
class PagedKVCache:
    """Keys, values and recurrent states of the rows of one model.

    Attributes:
        keys, values: [layers with attention, num_pages, page_size, num_kv_heads, head_dim] each, in the model's dtype
            or in `FP8`.
        states: states of the recurrent layers; None without such layers.
        scales: scales of each layer with attention, for an fp8 cache. Empty: all are 1, or the cache is not fp8.
    """

    keys: Tensor
    values: Tensor
    states: StateCache | None = None
    scales: tuple[KVScales, ...] = ()

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
        scales: tuple[KVScales, ...] = (),
    ) -> PagedKVCache:
        """Allocates zeroed pages. `states` becomes the attribute of that name."""
        shape = (num_layers, num_pages, page_size, num_kv_heads, head_dim)
        keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        return cls(keys, values, states, scales)

    def scales_of(self, layer: int) -> KVScales | None:
        """Returns the scales of one layer. None: it has none."""
        return self.scales[layer] if self.scales else None

    @property
    def page_size(self) -> int:
        """Positions per page."""
        return self.keys.shape[2]
