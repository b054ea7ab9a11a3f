"""Named tuples that group the arguments of attention kernels: tensors, and the sizes that belong to them.

Triton specialises a kernel for integers inside a tuple that are 1 or multiples of 16. If such a property of an integer
changes, Triton compiles the kernel again. So a tuple holds only integers that are constant for one model and its cache.
Integers that differ between passes are separate parameters, named in a kernel's `do_not_specialize`. A field may not be
called `values` or `type`, because Triton's tuples have attributes with these names.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastspec.kernels.common.checks import check, check_cache, rows_dtype
from fastspec.kernels.common.kv_scales import KVScales
from fastspec.kernels.reference.attention import HeadsCall
from fastspec.shapes import AttentionRule

LOG2E = 1.4426950408889634  # log2(e): kernels use exp2 instead of exp, so scores are multiplied by this


class NewTokens(NamedTuple):
    """New tokens of a pass, Q for each of B batch rows, with the weights of the head norms and the rotary table.

    Attributes:
        qkv: [B, Q, (H + 2 Hkv) D] bf16, fp16 or fp32, the fused projections: query heads, key heads, value heads.
        positions: int64 [B, Q], position of each token.
        write_mask: bool [B, Q]. False: K and V of this token are not stored.
        cos, sin: fp32 [num_angles, D / 2], rotary table. Both None: no rotary embedding.
        q_norm, k_norm: [D], weights of the RMSNorms of query and key heads; None: the model has none.
        num_angles: number of positions in `cos` and `sin`.
        eps: epsilon of the head norms.
        k_factor, v_factor: 1 / scale, by which K and V are multiplied before they are stored in 8 bits. None: the cache
            does not have 8 bits.
    """

    qkv: Any
    positions: Any
    write_mask: Any
    cos: Any
    sin: Any
    q_norm: Any
    k_norm: Any
    num_angles: Any
    eps: Any
    k_factor: Any
    v_factor: Any


class PagedCache(NamedTuple):
    """Paged KV cache of one layer, and the block table.

    Attributes:
        k, v: [num_pages, page_size, Hkv, D].
        block_table: int64 [B, table_width], page numbers of each batch row. In a kernel, `cache_of_row` replaces it by
            the page numbers of one batch row.
        table_stride: number of elements from one row of the table to the next.
        table_width: number of columns of the table, the largest number of pages of a batch row.
        num_pages: number of pages in the cache.
    """

    k: Any
    v: Any
    block_table: Any
    table_stride: Any
    table_width: Any
    num_pages: Any


class Scoring(NamedTuple):
    """Numbers that convert products q . k to attention scores. The softmax has base 2: 2^score / sum of 2^score.

        score = factor * (q . k);   with a softcap: score = cap * tanh(factor * (q . k))

    With an 8-bit cache, k is the stored number, and `factor` contains the scale of K.

    Attributes:
        factor: factor of q . k. It contains log2(e), unless there is a softcap.
        cap: the softcap, times log2(e). None: the model has no softcap.
        sinks: [H] in fp32 or the dtype of queries. For each head, the score of one more key, whose value is zero. None:
            the model has no sinks.
        value_scale: the scale of V, by which the result is multiplied. None: 1.
    """

    factor: Any
    cap: Any
    sinks: Any
    value_scale: Any


class WorkArea(NamedTuple):
    """Scratch memory for partial results, if several CTAs attend to the keys of a batch row (split-K decoding).

    Attributes:
        partials: fp32 [B * Hkv, splits, Q * GROUP, D], the attention output over the keys of each split. GROUP is the
            number of query heads per KV head. In the same buffer, after these values, [B * Hkv, splits, Q * GROUP]:
            log2 of the sum of 2^score over the keys of each split.
        counters: int32, numbers of finished CTAs, zero between launches. None: the kernel needs no counters.
    """

    partials: Any
    counters: Any


def check_heads(call: HeadsCall) -> None:
    """Raises ValueError for shapes or dtypes of `call` that the kernels of rope.py do not support."""
    qkv, keys, cos, sin, num_heads = call.qkv, call.keys, call.cos, call.sin, call.num_heads
    check_cache(qkv, keys, call.values, call.block_table, call.positions, num_heads)
    kv_heads, dim = keys.shape[2:]
    width = (num_heads + 2 * kv_heads) * dim
    step = f"that is num_heads={num_heads} and 2 * {kv_heads} key heads of {dim}, in the cache's dtype"
    check("qkv", qkv, (*qkv.shape[:2], width), rows_dtype(qkv, keys), step=step)
    if cos is not None and sin is not None:
        check("cos", cos, (*cos.shape[:1], dim // 2), torch.float32)
        check("sin", sin, cos.shape, torch.float32)
    elif cos is not sin:
        missing, there = ("cos", "sin") if cos is None else ("sin", "cos")
        raise ValueError(f"{missing} is None and {there} is not; wanted both, or None for both: no rotation")
    check("write_mask", call.write_mask, call.positions.shape, torch.bool)
    for name, weight in zip(("q_norm", "k_norm"), (call.norms or ())[:2], strict=False):
        check(name, weight, (dim,))


def new_tokens(call: HeadsCall, scales: KVScales | None = None) -> NewTokens:
    """Builds the kernel argument `tokens` from a call, whose tensors `check_heads` has checked.

    Args:
        call: arguments of an op that norms and rotates heads.
        scales: scales of an 8-bit cache. None: the cache has 16 or 32 bits.
    """
    q_norm, k_norm, eps = call.norms or (None, None, 0.0)
    num_angles = 0 if call.cos is None else call.cos.shape[0]
    factors = (None, None) if scales is None else (1.0 / scales.k, 1.0 / scales.v)
    rotation = call.cos, call.sin, q_norm, k_norm, num_angles, eps
    return NewTokens(call.qkv, call.positions, call.write_mask, *rotation, *factors)


def scoring_of(rule: AttentionRule, sinks: Tensor | None, dim: int, scales: KVScales | None = None) -> Scoring:
    """Builds the kernel argument `scoring`, for heads of size `dim`.

    Args:
        rule: scale and softcap of the scores.
        sinks: attention sinks [H]. None: the model has none.
        dim: head_dim.
        scales: scales of an 8-bit cache. None: the cache has 16 or 32 bits.
    """
    factor, value_scale = rule.factor(dim), None if scales is None else scales.v
    if scales is not None:
        factor *= scales.k
    if rule.softcap is None:
        return Scoring(factor * LOG2E, None, sinks, value_scale)
    return Scoring(factor / rule.softcap, rule.softcap * LOG2E, sinks, value_scale)


def paged_cache(keys: Tensor, values: Tensor, block_table: Tensor) -> PagedCache:
    """Builds the kernel argument `cache` from one layer's KV cache, whose shapes `check_cache` has checked."""
    return PagedCache(keys, values, block_table, block_table.stride(0), block_table.shape[1], keys.shape[0])
