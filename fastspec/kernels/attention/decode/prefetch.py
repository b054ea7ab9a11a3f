"""What `_decode_kernel` has brought into L2 while the product before it runs: see dispatch.py.

A prefetch changes no value: what is asked for by stale positions is of no use, and does no harm.
"""

from __future__ import annotations

import triton
import triton.language as tl

PEEK_KEYS = tl.constexpr(256)  # keys that a CTA asks for at most


@triton.jit
def _prefetch(pointers, wanted):
    """Asks for the 128-byte lines at `pointers` to be brought into L2 where `wanted`."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [pointers, wanted.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def peek(
    cache,  # PagedCache
    position_ptr,
    batch,
    kv_head,
    start,
    num_queries,
    split_keys,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Prefetches the first PEEK_KEYS keys and values of this CTA, by the positions and the table as they are now."""
    newest = tl.load(position_ptr + (batch + 1) * num_queries - 1, cache_modifier=".cg")
    at = start + tl.arange(0, PEEK_KEYS)
    wanted = (at <= newest) & (at < start + split_keys)
    if WINDOW > 0:
        wanted = wanted & (at > newest - num_queries - WINDOW)
    entry = tl.minimum(at // PAGE_SIZE, cache.table_width - 1)
    page = tl.load(cache.block_table + batch * cache.table_stride + entry, mask=wanted, other=0, cache_modifier=".cg")
    page = tl.minimum(tl.maximum(page, 0), cache.num_pages - 1)
    slot = ((page * PAGE_SIZE + at % PAGE_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
    LINE: tl.constexpr = 1024 // cache.k.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes
    for column in tl.static_range(0, HEAD_DIM, LINE):
        _prefetch(cache.k + slot + column, wanted)
        _prefetch(cache.v + slot + column, wanted)


@triton.jit
def warm(tokens, position, valid, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Prefetches what new rows at `position` are normed and rotated by."""
    line = tl.arange(0, BLOCK_D // 32) * 32  # of fp32; of 16 bits half of them
    if tokens.q_norm is not None:
        _prefetch(tokens.q_norm + line, line < HEAD_DIM)
        _prefetch(tokens.k_norm + line, line < HEAD_DIM)
    if tokens.cos is not None:
        HALF: tl.constexpr = HEAD_DIM // 2
        angle = tl.minimum(tl.maximum(position, 0), tokens.num_angles - 1)[:, None] * HALF + line[None, :]
        wanted = valid[:, None] & (line < HALF)[None, :]
        _prefetch(tokens.cos + angle, wanted)
        _prefetch(tokens.sin + angle, wanted)
