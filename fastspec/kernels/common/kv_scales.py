"""8-bit KV cache: the conversion of K and V to e4m3 and back.

    stored = e4m3(x / scale), rounded to nearest even, limited to +-448
    read   = stored * scale

Each layer has one scale for K and one for V, which never change. So the stored values of a token depend only on that
token. They have the same bits whether the token was decoded, was a draft token, or was part of a prompt.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

FP8: Final = torch.float8_e4m3fn
LARGEST: Final = 448.0


class KVScales(NamedTuple):
    """Scales of one layer. K and V are divided by them before they are stored, and multiplied by them after reads."""

    k: float = 1.0
    v: float = 1.0


def scales_of(keys: Tensor, given: KVScales | None) -> KVScales | None:
    """Returns the scales of an 8-bit KV cache: `given`, or 1 if it is None. Returns None for a cache of another dtype.

    Args:
        keys: keys of the cache, of which only the dtype is read.
        given: scales of the checkpoint. None: the checkpoint has no scales.

    Raises:
        ValueError: scales are given for a cache that does not have 8 bits.
    """
    if keys.dtype == FP8:
        return given or KVScales()
    if given is not None:
        raise ValueError(f"kv_scales={given}, but keys are {keys.dtype}: only caches of {FP8} have scales; pass None")
    return None


def as_stored(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Returns K or V as the KV cache stores it: x / scale, rounded to e4m3, for an 8-bit cache; else x unchanged.

    Args:
        x: K or V, of any shape.
        dtype: dtype of the cache.
        scale: the scale of K or of V, see the top of this file.
    """
    if dtype != FP8:
        return x
    return (x.float() * (1.0 / scale)).clamp(-LARGEST, LARGEST).to(FP8)
