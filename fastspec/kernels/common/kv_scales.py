"""8-bit KV cache: the conversion of K and V to e4m3 and back.

    stored = e4m3(x / scale), rounded to nearest even, limited to +-448;   read = stored * scale

Each layer has one scale for K and one for V, which never change. So the stored values of a token depend only on that
token. A row has the same bits whether its tokens came one by one, as drafts, or in a prompt.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

FP8: Final = torch.float8_e4m3fn
LARGEST: Final = 448.0


class KVScales(NamedTuple):
    """Scales of one layer. K and V are divided by them before they are stored, and multiplied by them when read."""

    k: float = 1.0
    v: float = 1.0


def scales_of(keys: Tensor, given: KVScales | None) -> KVScales | None:
    """Returns the scales of an 8-bit cache: `given`, or 1. None for a cache of another dtype.

    Args:
        keys: K pages of the cache.
        given: scales of the checkpoint.

    Raises:
        ValueError: scales are given for a cache that does not have 8 bits.
    """
    if keys.dtype == FP8:
        return given or KVScales()
    if given is not None:
        raise ValueError(f"kv_scales={given} and keys are {keys.dtype}: scales are of caches of {FP8} alone")
    return None


def as_stored(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Rounds x to e4m3 for an 8-bit cache. Returns x unchanged for other caches. Any shape."""
    if dtype != FP8:
        return x
    return (x.float() * (1.0 / scale)).clamp(-LARGEST, LARGEST).to(FP8)
