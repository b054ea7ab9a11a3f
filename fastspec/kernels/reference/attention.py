"""Torch definition of attention over a paged KV cache, with rotary embedding and the append of new K and V.

Batch invariance: keys are visited in blocks of `KEY_BLOCK` absolute positions, in ascending order. A block that is
masked for a row changes no bit of its result. So a row's bits do not depend on the number of visited blocks.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastspec.kernels.common.kv_scales import FP8, KVScales, as_stored, scales_of
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.reference.linear import norm
from fastspec.shapes import KEY_BLOCK, UNTILED, AttentionRule, Tiling


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary embedding in the half-split layout (arXiv 2104.09864).

    Args:
        x: [B, Q, H, D].
        cos, sin: fp32 [B, Q, 1, D/2].

    Returns:
        Shape and dtype of x. Computed in fp32, rounded once.
    """
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Applies rotary embedding as models of transformers do: x cos + [-x2 | x1] sin, with x = [x1 | x2].

    Args:
        q: [B, H, Q, D].
        k: [B, Hkv, Q, D], q's dtype.
        cos, sin: [B or 1, Q, D], q's dtype.

    Returns:
        The rotated q and k. Each product is rounded to q's dtype, and so is the sum.
    """

    def rotated(x: Tensor) -> Tensor:
        first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]

    return rotated(q), rotated(k)


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    positions: Tensor,
    *,
    num_blocks: int,
    rule: AttentionRule,
    sinks: Tensor | None = None,
    tiling: Tiling = UNTILED,
    kv_scales: KVScales | None = None,
) -> Tensor:
    """Computes causal grouped-query attention of B x Q query tokens over a paged KV cache.

    Token (b, i) attends to cached positions j <= positions[b, i]. With a window it attends only to
    j > positions[b, i] - window.

        score_j = scale * (q . k_j);                       with a softcap c: c * tanh(scale * (q . k_j) / c)
        out = sum_j exp(score_j) v_j / sum_j exp(score_j); with a sink, the second sum also has exp(sink)

    Args:
        query: [B, Q, H, D].
        keys: [num_pages, page_size, Hkv, D], H a multiple of Hkv.
        values: shape and dtype of keys.
        block_table: int64 [B, P], the pages of each row.
        positions: int64 [B, Q], position of each query token.
        num_blocks: number of blocks of KEY_BLOCK keys to visit. Every attended position is below
            num_blocks * KEY_BLOCK.
        rule: window, scale and softcap.
        sinks: [H] in fp32 or query's dtype. A sink is the score of one more key of a head, whose value is zero. None:
            there are no sinks.
        tiling: `tiling.queries` query tokens are multiplied with the keys in one matrix product.
        kv_scales: scales of an 8-bit cache. None: both scales are 1.

    Returns:
        [B, Q, H, D] in query's dtype. Softmax and sums are in fp32, online over key blocks (arXiv 2205.14135).
    """
    batch, num_queries, num_heads, dim = query.shape
    kv_heads = keys.shape[2]
    group = num_heads // kv_heads
    tile = num_queries if tiling.queries is None else tiling.queries
    pad = -num_queries % tile
    tiles = (num_queries + pad) // tile
    # [B, Q, H, D] -> [B, tiles, Hkv, group * tile, D]: one fixed shape per matrix product
    scales = scales_of(keys, kv_scales) or KVScales()
    q = F.pad(query.float(), (0, 0, 0, 0, 0, pad)) * (rule.factor(dim) * scales.k)
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
        if rule.window is not None:
            seen = seen & (at > row_pos - rule.window)
        scores = torch.matmul(q, k.transpose(-1, -2)[:, None])
        if rule.softcap is not None:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        scores = scores.masked_fill(~seen, -torch.inf)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        # a row that has seen nothing yet keeps top = -inf: shift by 0 instead, so that exp(-inf) is 0 and not NaN
        shift = new_top.masked_fill(new_top == -torch.inf, 0.0)
        weights = torch.exp(scores - shift)
        scale = torch.exp(top - shift)
        total = total * scale + weights.sum(-1, keepdim=True)
        out = out * scale + torch.matmul(weights, v[:, None])
        top = new_top
    if sinks is not None:  # once, after the last block, so the order does not depend on the number of blocks
        sink = sinks.float().view(kv_heads, group, 1).expand(-1, -1, tile).reshape(kv_heads, group * tile, 1)
        total = total + torch.exp(sink - top)
    out = out / total if scales.v == 1.0 else out / total * scales.v
    out = out.view(batch, tiles, kv_heads, group, tile, dim).permute(0, 1, 4, 2, 3, 5)
    return out.reshape(batch, num_queries + pad, num_heads, dim)[:, :num_queries].to(query.dtype)


def _gather_block(
    keys: Tensor, values: Tensor, block_table: Tensor, at: Tensor, newest: Tensor
) -> tuple[Tensor, Tensor]:
    """Gathers K and V of some positions from a paged cache.

    Positions above `newest` give zeros. Their cache slots may hold NaN that other rows wrote. An attention weight of
    zero does not remove a NaN, because 0 * NaN is NaN.

    Args:
        keys, values, block_table: see `paged_attention`.
        at: int64 [KEY_BLOCK], the positions.
        newest: int64 [B], largest position of each row's query tokens.

    Returns:
        K and V, fp32 [B, Hkv, KEY_BLOCK, D].
    """
    page_size = keys.shape[1]
    pages = block_table[:, (at // page_size).clamp(max=block_table.shape[1] - 1)].clamp(0, keys.shape[0] - 1)
    slots = pages * page_size + at % page_size
    written = (at <= newest[:, None])[:, :, None, None]
    flat = keys.shape[2:]
    k = torch.where(written, _readable(keys).view(-1, *flat)[slots].view(keys.dtype).float(), 0.0)
    v = torch.where(written, _readable(values).view(-1, *flat)[slots].view(values.dtype).float(), 0.0)
    return k.transpose(1, 2), v.transpose(1, 2)


def _readable(cache: Tensor) -> Tensor:
    """Returns a view of a cache tensor that torch can index: bytes for an 8-bit cache, else the tensor itself."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache


@dataclass(slots=True)
class HeadsCall:
    """Arguments of `store_heads`: q, k and v of new tokens, and one layer's paged KV cache.

    Attributes:
        qkv: [B, Q, (H + 2 Hkv) * D], query heads first, then keys, then values.
        cos, sin: fp32 [positions, D/2], the rotary table. None: queries and keys are not rotated.
        keys, values: [num_pages, page_size, Hkv, D], the cache. K and V of tokens with `write_mask` are written to it.
            Its dtype is qkv's, or e4m3 (kv_scales.py).
        block_table: int64 [B, P], the pages of each row.
        positions: int64 [B, Q], >= 0, position of each token.
        write_mask: bool [B, Q]. K and V of tokens with False are not stored.
        num_heads: H; 0 if `qkv` has only keys and values.
        norms: (weight [D] for query heads, weight [D] for key heads, epsilon) of RMSNorms of q and k. The weights are
            in qkv's dtype or in fp32, which `norm` rounds differently. None: no norms.
        kv_scales: scales of an 8-bit cache. None: 1.
    """

    qkv: Tensor
    cos: Tensor | None
    sin: Tensor | None
    keys: Tensor
    values: Tensor
    block_table: Tensor
    positions: Tensor
    write_mask: Tensor
    _: KW_ONLY
    num_heads: int
    norms: tuple[Tensor, Tensor, float] | None = None
    kv_scales: KVScales | None = None


@dataclass(slots=True, kw_only=True)
class AttendCall(HeadsCall):
    """Arguments of `attend`: those of `store_heads`, and the rules of attention.

    Attributes:
        num_blocks: number of blocks of KEY_BLOCK keys to visit. Every attended position is below
            num_blocks * KEY_BLOCK.
        first_block: index of a block of KEY_BLOCK keys. New tokens of all running rows are in this block or later ones.
            Results of other rows may be anything.
        rule: window, scale and softcap.
        sinks: [H] in fp32 or qkv's dtype. A sink is the score of one more key of a head, whose value is zero. None:
            there are no sinks.
        product: the layer's output projection, which is multiplied with the result. Kernels may return the result
            regrouped for it (packing.py); `layer_tail` takes both orders. None: the result is not regrouped.
        tiling: see `paged_attention`. Kernels have tiles of their own and do not read it.
    """

    num_blocks: int
    first_block: int = 0
    rule: AttentionRule
    sinks: Tensor | None = None
    product: Weight | None = None
    tiling: Tiling = UNTILED


def store_heads(call: HeadsCall) -> Tensor:
    """Norms and rotates the query and key heads of new tokens, and writes their K and V to the cache.

    Args:
        call: tensors and options; see `HeadsCall`. Its `keys` and `values` are written.

    Returns:
        The normed and rotated queries [B, Q, H, D].
    """
    keys, values, positions = call.keys, call.values, call.positions
    page_size, kv_heads, dim = keys.shape[1:]
    query: Tensor
    query, key, value = call.qkv.unflatten(-1, (-1, dim)).split((call.num_heads, kv_heads, kv_heads), dim=2)
    if call.norms is not None:
        q_norm, k_norm, eps = call.norms
        query, key = norm(query, q_norm, eps), norm(key, k_norm, eps)
    if call.cos is not None and call.sin is not None:
        at = positions.clamp(max=call.cos.shape[0] - 1)
        rotation = call.cos[at][:, :, None], call.sin[at][:, :, None]
        query, key = rope(query, *rotation), rope(key, *rotation)
    slots = _slots(call.block_table, positions, page_size, call.write_mask).flatten()
    scales = scales_of(keys, call.kv_scales) or KVScales()
    for cache, new, scale in ((keys, key, scales.k), (values, value, scales.v)):
        kept = _readable(as_stored(new.flatten(0, 1), cache.dtype, scale))
        _readable(cache).view(-1, kv_heads, dim).index_copy_(0, slots, kept)
    return query


def attend(call: AttendCall, work: Any = None) -> Tensor:
    """Computes a layer's attention from its fused q, k and v: `store_heads`, then `paged_attention`.

    Args:
        call: tensors and options; see `AttendCall`. Its `keys` and `values` are written.
        work: scratch memory from `Ops.workspace`. Torch needs none.

    Returns:
        [B, Q, H * D]. If `call.product` is given, kernels may return [B, Q, H * D / 64, 64], regrouped (packing.py).
    """
    query = store_heads(call)
    out = paged_attention(
        query,
        call.keys,
        call.values,
        call.block_table,
        call.positions,
        num_blocks=call.num_blocks,
        rule=call.rule,
        sinks=call.sinks,
        tiling=call.tiling,
        kv_scales=call.kv_scales,
    )
    return out.flatten(2)


def _slots(block_table: Tensor, positions: Tensor, page_size: int, write_mask: Tensor) -> Tensor:
    """Returns the cache slots (page * page_size + offset) of positions, int64 [B, Q].

    Tokens whose `write_mask` is False get a slot of page 0, the trash page. Only such tokens may have positions beyond
    the block table. These are clamped to its last page, because indices must be in range.
    """
    pages = block_table.gather(1, (positions // page_size).clamp(0, block_table.shape[1] - 1))
    return torch.where(write_mask, pages, 0) * page_size + positions % page_size
