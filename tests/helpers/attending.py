"""A layer's attention from its fused product on: inputs, and the kernel and its twin on copies of one cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastspec.kernels import reference

HEADS, KV_HEADS = 4, 2


def attend_case(
    device: str,
    *,
    lengths: list[int],
    queries: int,
    dim: int = 32,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    norm: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Rows whose newest `queries` tokens, not cached yet, end at `lengths`; slots that nobody wrote hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    pages = -(-max(lengths) // page_size) + 1
    table = (1 + torch.randperm(len(lengths) * pages, generator=generator)).view(len(lengths), pages)
    keys = torch.full((1 + table.numel(), page_size, KV_HEADS, dim), float("nan"))
    values = torch.full_like(keys, float("nan"))
    for row, length in enumerate(lengths):
        at = torch.arange(max(0, length - queries))
        where = (table[row, at // page_size], at % page_size)
        keys[where] = torch.randn(len(at), KV_HEADS, dim, generator=generator)
        values[where] = torch.randn(len(at), KV_HEADS, dim, generator=generator)
    angles = torch.arange(pages * page_size)[:, None] * 100.0 ** -(torch.arange(dim // 2) / dim)
    positions = torch.tensor(lengths)[:, None] - queries + torch.arange(queries)
    weights = [1 + 0.3 * torch.randn(dim, generator=generator) for _ in range(2)] if norm else [None, None]
    qkv = torch.randn(len(lengths), queries, (HEADS + 2 * KV_HEADS) * dim, generator=generator)
    return {
        "qkv": qkv.to(device, dtype),
        "cos": angles.cos().to(device),
        "sin": angles.sin().to(device),
        "keys": keys.to(device, dtype),
        "values": values.to(device, dtype),
        "block_table": table.to(device),
        "positions": positions.clamp_min(0).to(device),
        "writes": (positions >= 0).to(device),
        "num_heads": HEADS,
        "q_norm": None if weights[0] is None else weights[0].to(device, dtype),
        "k_norm": None if weights[1] is None else weights[1].to(device, dtype),
        "eps": 1e-5,
    }


def rows_of(given: dict[str, Any], rows: slice, queries: slice) -> dict[str, Any]:
    """The same caches, fed some of the rows and some of their tokens."""
    fed = {name: given[name][rows, queries] for name in ("qkv", "positions", "writes")}
    return {**given, **fed, "block_table": given["block_table"][rows]}


def copied(given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "keys": given["keys"].clone(), "values": given["values"].clone()}


def widened(given: dict[str, Any]) -> dict[str, Any]:
    """Copies in fp32."""
    return {
        name: value.float().clone() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in given.items()
    }


def blocks_of(given: dict[str, Any]) -> int:
    return -(-(int(given["positions"].max()) + 1) // reference.KEY_BLOCK)


def written(given: dict[str, Any]) -> Tensor:
    """K and V of every position that some row has, in the order of rows: [2, positions, Hkv, D]."""
    page_size = given["keys"].shape[1]
    slots = []
    for row, table in enumerate(given["block_table"]):
        at = torch.arange(int(given["positions"][row].max()) + 1, device=table.device)
        slots.append(table[at // page_size] * page_size + at % page_size)
    where = torch.cat(slots)
    return torch.stack([given[name].flatten(0, 1)[where] for name in ("keys", "values")])
