"""KV cache in pages.

Position `p` of the sequence in batch slot `row` is in page `block_table[row, p // page_size]`, at offset
`p % page_size`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fastspec.kernels.common.kv_scales import KVScales
from fastspec.kv_cache.states import StateCache

_ALIGNED = 64  # bytes, as torch aligns its own memory


@dataclass(frozen=True, slots=True)
class PagedKVCache:
    """KV cache pages and recurrent states of one model, for all sequences.

    Attributes:
        keys, values: [layers with attention, num_pages, page_size, num_kv_heads, head_dim] each, in the model's dtype
            or in `FP8`.
        states: states of the recurrent layers; None without such layers.
        scales: scales of K and V of each layer with attention, for an fp8 cache. Empty: all scales are 1, or the cache
            is not fp8.
        others: caches of the layers whose heads have other shapes than those in `keys` and `values`.
        places: (cache, index) for each layer with attention. cache: 0 for this object, n for others[n - 1]. index:
            index of the layer in that cache. Empty: all layers are in this object.
    """

    keys: Tensor
    values: Tensor
    states: StateCache | None = None
    scales: tuple[KVScales, ...] = ()
    others: tuple[PagedKVCache, ...] = ()
    places: tuple[tuple[int, int], ...] = ()

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
        """Allocates zeroed pages for layers whose heads have one shape.

        `states` and `scales` become the attributes of these names.
        """
        shape = (num_layers, num_pages, page_size, num_kv_heads, head_dim)
        keys, values = (_zeros(shape, dtype, device) for _ in range(2))
        return cls(keys, values, states, scales)

    @classmethod
    def for_heads(
        cls,
        heads: Sequence[tuple[int, int]],
        num_pages: int,
        page_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        states: StateCache | None = None,
        scales: tuple[KVScales, ...] = (),
    ) -> PagedKVCache:
        """Allocates zeroed pages for layers whose heads may differ.

        Args:
            heads: (num_kv_heads, head_dim) of each layer.
            num_pages, page_size, dtype, device, states, scales: see `allocate`.
        """
        shapes = list(dict.fromkeys(heads)) or [(0, 0)]
        first, *others = (
            cls.allocate(heads.count(shape), num_pages, page_size, *shape, dtype=dtype, device=device)
            for shape in shapes
        )
        places = tuple((shapes.index(shape), heads[:layer].count(shape)) for layer, shape in enumerate(heads))
        return replace(first, states=states, scales=scales, others=tuple(others), places=places if others else ())

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns (keys, values) of a layer's pages, each [num_pages, page_size, num_kv_heads, head_dim]."""
        number, at = self.places[index] if self.places else (0, index)
        cache = self.others[number - 1] if number else self
        return cache.keys[at], cache.values[at]

    def scales_of(self, layer: int) -> KVScales | None:
        """Returns the scales of one layer's keys and values. None: all are 1, or the cache is not fp8."""
        return self.scales[layer] if self.scales else None

    @property
    def page_size(self) -> int:
        """Number of positions per page."""
        return self.keys.shape[2]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocates zeros. On a CPU the system zeroes memory only at its first use, so unused pages take no time."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    whole = np.zeros(size + _ALIGNED, np.uint8)
    start = -whole.ctypes.data % _ALIGNED
    return torch.from_numpy(whole[start : start + size]).view(dtype).view(shape)
