"""Torch definition of every op of a forward pass: what runs where Triton does not, and what kernels are tested by.

Row invariance. A row's bits must not depend on how many rows run beside it. Libraries choose a matrix
product's algorithm by its shape, so `linear` and `paged_attention` always give them the same shape: rows go
in zero-padded blocks of a fixed number, keys in blocks of `KEY_BLOCK` absolute positions, reduced in order.
A block that is masked for a row is an exact no-op for it, so the number of blocks visited does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

KEY_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Tiling:
    """Shapes that matrix products are cut into.

    Attributes:
        rows: rows of every product with weights; None takes all rows at once.
        queries: query tokens of every product with keys; None takes all at once.
    """

    rows: int | None
    queries: int | None


UNTILED = Tiling(rows=None, queries=None)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; statistics in fp32 (arXiv 1910.07467)."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, tiling: Tiling = UNTILED) -> Tensor:
    """x [..., K] @ weight [N, K].T + bias, in products of `tiling.rows` rows."""
    if tiling.rows is None:
        return F.linear(x, weight, bias)
    product = torch.cat([F.linear(rows, weight, bias) for rows in _row_blocks(x, tiling.rows)])
    return product[: x.shape[:-1].numel()].view(*x.shape[:-1], -1)


def head(x: Tensor, weight: Tensor, tiling: Tiling = UNTILED) -> Tensor:
    """Logits [..., V] in fp32 from the accumulator: never rounded to the weights' dtype on the way."""
    blocks = [x.reshape(-1, x.shape[-1])] if tiling.rows is None else _row_blocks(x, tiling.rows)
    logits = torch.cat([_product_fp32(rows, weight) for rows in blocks])
    return logits[: x.shape[:-1].numel()].view(*x.shape[:-1], -1)


def _row_blocks(x: Tensor, row_block: int) -> list[Tensor]:
    """Rows of x [..., K] as zero-padded blocks [row_block, K]."""
    flat = x.reshape(-1, x.shape[-1])
    return list(F.pad(flat, (0, 0, 0, -flat.shape[0] % row_block)).split(row_block))


def _product_fp32(rows: Tensor, weight: Tensor) -> Tensor:
    if weight.dtype == torch.float32:
        return F.linear(rows, weight)
    if weight.is_cuda:
        return torch.mm(rows, weight.t(), out_dtype=torch.float32)
    # the CPU has no mixed-output product: widen the weights by slices, so that no fp32 copy of all of them exists
    return torch.cat([F.linear(rows.float(), part.float()) for part in weight.split(8192)], dim=-1)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout (arXiv 2104.09864): x [B, Q, H, D], cos and sin fp32 [B, Q, 1, D/2]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of a fused [..., 2 I] product, gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    positions: Tensor,
    *,
    num_blocks: int,
    window: int | None,
    tiling: Tiling = UNTILED,
) -> Tensor:
    """Causal attention of B x Q query rows over paged keys, with grouped heads and an optional window.

    Row (b, i) sees the cached positions j <= positions[b, i], and with a window only j > positions[b, i] - window.

    Args:
        query: [B, Q, H, D].
        keys: [num_pages, page_size, Hkv, D], H a multiple of Hkv.
        values: as keys.
        block_table: int64 [B, P].
        positions: int64 [B, Q].
        num_blocks: KEY_BLOCK-sized blocks to visit; every attended position lies below num_blocks * KEY_BLOCK.
        window: newest positions seen, the row's own included; None sees all.
        tiling: query tokens per matrix product.

    Returns:
        [B, Q, H, D] in query's dtype; softmax and sums in fp32 (online over key blocks, arXiv 2205.14135).
    """
    batch, num_queries, num_heads, dim = query.shape
    kv_heads = keys.shape[2]
    group = num_heads // kv_heads
    tile = num_queries if tiling.queries is None else tiling.queries
    pad = -num_queries % tile
    tiles = (num_queries + pad) // tile
    # [B, Q, H, D] -> [B, tiles, Hkv, group * tile, D]: one fixed shape per matrix product
    q = F.pad(query.float(), (0, 0, 0, 0, 0, pad)) * dim**-0.5
    q = q.view(batch, tiles, tile, kv_heads, group, dim).permute(0, 1, 3, 4, 2, 5)
    q = q.reshape(batch, tiles, kv_heads, group * tile, dim)
    row_pos = F.pad(positions, (0, pad)).view(batch, tiles, 1, 1, tile)
    row_pos = row_pos.expand(-1, -1, -1, group, -1).reshape(batch, tiles, 1, -1, 1)
    newest = positions.amax(dim=1)

    top = q.new_full((*q.shape[:-1], 1), -torch.inf)
    total = torch.zeros_like(top)
    out = torch.zeros_like(q)
    for block in range(num_blocks):
        at = torch.arange(block * KEY_BLOCK, (block + 1) * KEY_BLOCK, device=query.device)
        k, v = _gather_block(keys, values, block_table, at, newest)
        seen = at <= row_pos
        if window is not None:
            seen = seen & (at > row_pos - window)
        scores = torch.matmul(q, k.transpose(-1, -2)[:, None]).masked_fill(~seen, -torch.inf)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        # a row that has seen nothing yet keeps top = -inf: shift by 0 instead, so that exp(-inf) is 0 and not NaN
        shift = new_top.masked_fill(new_top == -torch.inf, 0.0)
        weights = torch.exp(scores - shift)
        scale = torch.exp(top - shift)
        total = total * scale + weights.sum(-1, keepdim=True)
        out = out * scale + torch.matmul(weights, v[:, None])
        top = new_top
    out = out / total
    out = out.view(batch, tiles, kv_heads, group, tile, dim).permute(0, 1, 4, 2, 3, 5)
    return out.reshape(batch, num_queries + pad, num_heads, dim)[:, :num_queries].to(query.dtype)


def _gather_block(
    keys: Tensor, values: Tensor, block_table: Tensor, at: Tensor, newest: Tensor
) -> tuple[Tensor, Tensor]:
    """K and V [B, Hkv, KEY_BLOCK, D] in fp32 of positions `at`; zero above each row's `newest`.

    Slots above `newest` hold stale or foreign values, possibly NaN, and 0 * NaN is NaN: a zero weight alone
    would not keep them out.
    """
    page_size = keys.shape[1]
    pages = block_table[:, (at // page_size).clamp(max=block_table.shape[1] - 1)].clamp(0, keys.shape[0] - 1)
    slots = pages * page_size + at % page_size
    written = (at <= newest[:, None])[:, :, None, None]
    flat = keys.shape[2:]
    k = torch.where(written, keys.view(-1, *flat)[slots], 0.0)
    v = torch.where(written, values.view(-1, *flat)[slots], 0.0)
    return k.float().transpose(1, 2), v.float().transpose(1, 2)
