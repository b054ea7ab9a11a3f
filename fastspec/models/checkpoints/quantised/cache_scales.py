"""Scales of 8-bit K and V that a checkpoint stores, by layer."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

from fastspec.errors import CheckpointError
from fastspec.kernels.common.kv_scales import KVScales
from fastspec.models.checkpoints.tensor_source import TensorSource

_ATTENTION: Final = r"layers\.(\d+)\.(?:self_attn|mixer)\."
# as the tools spell them; kv_scale is both
NAMES: Final = re.compile(_ATTENTION + r"(?:(?:attn\.|[kv]_proj\.|qkv_proj\.)?(k|v|kv)_scale|(k|v)_cache\.scale)$")


class CacheScales(NamedTuple):
    """What K and V of one layer were divided by: one number, or one for each key head. 1 where nothing is stored."""

    k: tuple[float, ...] = (1.0,)
    v: tuple[float, ...] = (1.0,)


def names_of(infos: Collection[str]) -> list[str]:
    """The stored names that are such scales."""
    return [name for name in infos if NAMES.search(name)]


def read(stored: TensorSource) -> dict[int, CacheScales]:
    """The scales of a checkpoint by layer.

    Raises:
        CheckpointError: one that is not a positive number.
    """
    found: dict[int, CacheScales] = {}
    names = names_of(stored.infos())
    if not names:
        return found
    with stored.open():
        for name in names:
            match = NAMES.search(name)
            assert match is not None
            layer, which = int(match[1]), match[2] or match[3]
            values = tuple(stored.read(name).float().flatten().tolist())
            if not all(0 < value < float("inf") for value in values):
                raise CheckpointError(f"{stored.directory}: {name} is {list(values)}, wanted positive numbers")
            found[layer] = found.get(layer, CacheScales())._replace(**dict.fromkeys(which, values))
    return found


def for_layers(found: Mapping[int, CacheScales], layers: Iterable[int]) -> tuple[KVScales, ...]:
    """The scales by which K and V of these layers are stored here: of several heads the largest, which holds all."""
    named = [found.get(layer, CacheScales()) for layer in layers]
    return tuple(KVScales(max(each.k), max(each.v)) for each in named)
