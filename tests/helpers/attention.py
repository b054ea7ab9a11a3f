"""Rows of different lengths over a paged cache whose unused slots hold NaN, for tests of attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastspec.kernels import reference
from fastspec.kernels.reference import AttendCall
from fastspec.shapes import KEY_BLOCK, AttentionRule
from tests.helpers.layouts import spread

NAN = float("nan")
TENSORS = ("qkv", "cos", "sin", "keys", "values", "block_table", "positions", "writes")
BY_ROW = ("qkv", "block_table", "positions", "writes")
EPS = 1e-6

# (an argument of `case(device, lengths=[9, 7], queries=3, norm=True)`, what is done to it, what its refusal says)
MISREAD: list[tuple[str, Callable[[Any], Any], str]] = [
    (
        "qkv",
        lambda x: x[..., :224].contiguous(),
        r"qkv is float32 \[2, 3, 224\]; wanted .*\[2, 3, 256\]: that is num_heads=4",
    ),
    ("qkv", lambda x: x.half(), "qkv is float16"),
    ("num_heads", lambda x: 6, "num_heads=6"),
    ("num_heads", lambda x: 3, "num_heads is 3; wanted a multiple of the 2"),
    ("cos", lambda x: x.t().contiguous().t(), r"cos is .*strides.*pass cos.contiguous\(\)"),
    ("cos", lambda x: x[:, :8].contiguous(), r"cos is float32 \[10, 8\]; wanted contiguous float32 \[10, 16\]"),
    ("sin", lambda x: x.t().contiguous().t(), "sin is .*strides"),
    ("sin", lambda x: x[:5], r"sin is float32 \[5, 16\]; wanted contiguous float32 \[10, 16\]"),
    ("sin", lambda x: x.half(), "sin is float16"),
    ("q_norm", spread, "q_norm is .*strides"),
    ("k_norm", lambda x: x[:16], r"k_norm is float32 \[16\]; wanted contiguous float32 \[32\]"),
    ("keys", lambda x: x.transpose(0, 1), "keys is .*strides.*pass whole layers"),
    ("values", lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), "values is .*strides"),
    ("values", lambda x: x.half(), "values is float16"),
    ("block_table", lambda x: x.t().contiguous().t(), "block_table is .*each row contiguous"),
    ("block_table", lambda x: x.int(), "block_table is int32"),
    ("block_table", lambda x: x[:1], "block_table is .*wanted int64"),
    ("positions", lambda x: x.int(), "positions is int32"),
    ("positions", lambda x: x[:, :2], r"positions is int64 \[2, 2\]"),
    ("writes", lambda x: x.int(), "write_mask is int32"),
    ("writes", lambda x: x[:1], r"write_mask is bool \[1, 3\]"),
]


def case(
    device: str,
    *,
    lengths: list[int],
    queries: int,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 32,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    norm: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """What `attend` takes: `queries` new tokens a row that end at `lengths`; slots no earlier pass wrote hold NaN."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    pages_per_row = -(-max(lengths) // page_size) + 1
    num_pages = 1 + len(lengths) * pages_per_row
    table = 1 + torch.randperm(num_pages - 1, generator=generator).view(len(lengths), pages_per_row)
    keys = torch.full((num_pages, page_size, kv_heads, dim), NAN, dtype=dtype)
    values = keys.clone()
    positions = torch.tensor(lengths)[:, None] - queries + torch.arange(queries)
    for row in range(len(lengths)):
        at = torch.arange(max(0, int(positions[row, 0])))
        where = (table[row, at // page_size], at % page_size)
        keys[where] = normal(len(at), kv_heads, dim)
        values[where] = normal(len(at), kv_heads, dim)
    angles = torch.arange(max(lengths) + 1)[:, None] * torch.rand(dim // 2, generator=generator)
    given = {
        "qkv": normal(len(lengths), queries, (heads + 2 * kv_heads) * dim),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "keys": keys,
        "values": values,
        "block_table": table,
        "positions": positions.clamp_min(0),
        "writes": positions >= 0,
    }
    norms = {name: 1 + 0.1 * normal(dim) if norm else None for name in ("q_norm", "k_norm")}
    moved = {name: None if x is None else x.to(device) for name, x in (given | norms).items()}
    return {**moved, "num_heads": heads, "eps": EPS, "num_blocks": -(-max(lengths) // KEY_BLOCK)}


def copied(given: dict[str, Any], dtype: torch.dtype | None = None) -> dict[str, Any]:
    """A copy with a cache of its own; float tensors in another dtype where one is given."""

    def copy(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.to(dtype) if dtype is not None and x.is_floating_point() else x.clone()

    return {name: copy(x) for name, x in given.items()}


def rows_of(given: dict[str, Any], rows: Any, queries: slice = slice(None)) -> dict[str, Any]:
    """Some rows and queries of a case, over the same cache."""
    picked = {name: given[name][rows] for name in BY_ROW}
    fed = {name: picked[name][:, queries] for name in ("qkv", "positions", "writes")}
    return {**given, **picked, **fed}


def stored(given: dict[str, Any]) -> list[Tensor]:
    """Cache content outside of page 0, which nobody reads; NaN is made comparable."""
    return [torch.nan_to_num(given[name][1:].float(), nan=1e30) for name in ("keys", "values")]


def torch_error(given: dict[str, Any], window: int | None, exact: Tensor, eager: bool = False) -> float:
    """What torch's own functions err by in the inputs' dtype: those of `reference`, then SDPA on gathered pages.

    Args:
        eager: attention as transformers' eager one has it, for which weights are rounded to the dtype. So do kernels
            that multiply by tensor cores, and SDPA on a GPU, but not SDPA on a CPU.
    """
    mine = copied(given)
    reference.attend(_call(mine, window))  # fills the cache
    keys, values, page_size, dim = mine["keys"], mine["values"], mine["keys"].shape[1], mine["keys"].shape[3]
    query = mine["qkv"].unflatten(-1, (-1, dim))[:, :, : mine["num_heads"]]
    if mine["q_norm"] is not None:
        query = reference.norm(query, mine["q_norm"], EPS)
    rotation = (mine["cos"][mine["positions"]][:, :, None], mine["sin"][mine["positions"]][:, :, None])
    query = reference.rope(query, *rotation)
    worst = 0.0
    for row in range(len(query)):
        at = torch.arange(int(mine["positions"][row].max()) + 1, device=query.device)
        pages = mine["block_table"][row][at // page_size]
        k, v = (x[pages, at % page_size].transpose(0, 1) for x in (keys, values))
        seen = at <= mine["positions"][row][:, None]
        if window is not None:
            seen &= at > mine["positions"][row][:, None] - window
        attend = _eager if eager else partial(F.scaled_dot_product_attention, enable_gqa=True)
        out = attend(query[row].transpose(0, 1), k, v, attn_mask=seen)
        worst = max(worst, (out.transpose(0, 1).flatten(1).float() - exact[row]).abs().max().item())
    return worst


def _eager(query: Tensor, keys: Tensor, values: Tensor, attn_mask: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(len(query) // len(x), 0) for x in (keys, values))
    scores = (query @ k.transpose(1, 2) * query.shape[2] ** -0.5).masked_fill(~attn_mask, -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ v


def norms_of(given: dict[str, Any]) -> tuple[Tensor, Tensor, float] | None:
    """The norms of heads as ops take them."""
    return None if given["q_norm"] is None else (given["q_norm"], given["k_norm"], given["eps"])


def _call(given: dict[str, Any], window: int | None) -> AttendCall:
    named = {name: given[name] for name in ("num_heads", "num_blocks", "first_block", "sinks") if name in given}
    rule = given.get("rule", AttentionRule())._replace(window=window)
    return AttendCall(*(given[name] for name in TENSORS), rule=rule, norms=norms_of(given), **named)


def twin(given: dict[str, Any], window: int | None = None) -> Tensor:
    """`reference.attend`; writes to the case's cache."""
    return reference.attend(_call(given, window))


def run(attend: Any, given: dict[str, Any], work: Any, window: int | None = None) -> Tensor:
    """`attend` of a kernel; writes to the case's cache."""
    out: Tensor = attend(_call(given, window), work)
    return out
