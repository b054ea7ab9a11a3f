"""Head norms, rotary embedding and K/V append on CUDA: device code for all kernels, and a launch for prefill chunks.

    x -> rmsnorm(x) over D, if the model has it;  (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin),  x = [x1 | x2]

| argument     | shape, dtype                             | notes                                     |
|--------------|------------------------------------------|-------------------------------------------|
| qkv          | [B, Q, (H + 2 Hkv) D] bf16, fp16 or fp32 | contiguous                                |
| cos, sin     | [positions, D/2] fp32                    | contiguous; both None: no rotation        |
| keys, values | [num_pages, page_size, Hkv, D], as qkv   | contiguous; may exceed 2^31 elements      |
|              | or e4m3                                  | then `kv_scales` are given                |
| block_table  | [B, P] int64                             | rows may be views of longer rows          |
| positions    | [B, Q] int64                             | >= 0; limited to the last row of cos, sin |
| write_mask   | [B, Q] bool                              | False: K/V are not stored                 |

`append` stores K in decode and prefill passes, in tiles of NEW_ROWS tokens. So the sum of the head norm has the same
order in both. Callers launch with enable_fp_fusion=False, so every product is rounded. The result has the bits of the
torch definition, except for the norm: torch sums in another order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.attention.arguments import PagedCache, check_heads, new_tokens, paged_cache
from fastspec.kernels.attention.plan import padded_dim
from fastspec.kernels.common.kv_scales import scales_of
from fastspec.kernels.common.launch import launch
from fastspec.kernels.reference.attention import HeadsCall

NEW_ROWS = tl.constexpr(8)  # number of new tokens whose K and V are stored at a time
NUM_WARPS = 4


@triton.constexpr_function
def _chunk_rows(block_d: int) -> int:
    """Returns the number of tokens per CTA of `_rotate_kernel`. It is smaller for wide heads, which need registers."""
    return 32 if block_d <= 256 else 8


@triton.jit
def cache_of_row(cache, batch):
    """Returns a `PagedCache` whose `block_table` points to row `batch` of the table."""
    table = cache.block_table + batch * cache.table_stride
    return PagedCache(cache.k, cache.v, table, cache.table_stride, cache.table_width, cache.num_pages)


@triton.jit
def columns(HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Returns two tensors [BLOCK_D]: the element of a head that each column of a block has, and False for padding.

    Each half of the head is padded from HEAD_DIM / 2 to BLOCK_D / 2 columns.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    column = tl.arange(0, BLOCK_D)
    if HEAD_DIM == BLOCK_D:
        return column, column < BLOCK_D
    else:
        within = column % (BLOCK_D // 2)
        return column // (BLOCK_D // 2) * HALF + within, within < HALF


@triton.jit
def _scaled(x, factor, weight):
    """Returns weight * (x * factor) in x's dtype: the last part of an RMSNorm of heads x [R, n].

    Each product is rounded to x's dtype. With an fp32 weight only the result is rounded. factor is [R], weight [n].
    """
    normed = x.to(tl.float32) * factor[:, None]
    if weight.dtype != tl.float32:
        normed = normed.to(x.dtype).to(tl.float32)
    return (weight.to(tl.float32)[None, :] * normed).to(x.dtype)


@triton.jit
def apply_rope(x1, x2, position, valid, tokens, norm_ptr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Applies RMSNorm and rotary embedding to R heads, given as halves x1, x2 [R, BLOCK_D / 2]. Returns both halves.

    Args:
        x1, x2: halves of the heads. Columns from HEAD_DIM / 2 on are padding and hold zeros.
        position: position of each head's token [R].
        valid: [R], False for padding rows.
        tokens: `NewTokens`.
        norm_ptr: weight of the norm, `q_norm` or `k_norm` of `tokens`. None: no norm.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    column = tl.arange(0, BLOCK_D // 2)
    inside = column < HALF
    if tokens.cos is not None:
        angle = tl.minimum(tl.maximum(position, 0), tokens.num_angles - 1)
        at = angle[:, None] * HALF + column[None, :]
        mask = valid[:, None] & inside[None, :]
        cos = tl.load(tokens.cos + at, mask=mask, other=0.0)
        sin = tl.load(tokens.sin + at, mask=mask, other=0.0)
    if norm_ptr is not None:
        wide1, wide2 = x1.to(tl.float32), x2.to(tl.float32)
        squares = tl.sum(wide1 * wide1, axis=1) + tl.sum(wide2 * wide2, axis=1)
        factor = tl.rsqrt(squares / HEAD_DIM + tokens.eps)
        x1 = _scaled(x1, factor, tl.load(norm_ptr + column, mask=inside, other=0.0))
        x2 = _scaled(x2, factor, tl.load(norm_ptr + HALF + column, mask=inside, other=0.0))
    if tokens.cos is None:
        return x1, x2
    else:
        first, second = x1.to(tl.float32), x2.to(tl.float32)
        return (first * cos - second * sin).to(x1.dtype), (second * cos + first * sin).to(x1.dtype)


@triton.jit
def as_stored(x, factor, DTYPE: tl.constexpr):
    """Converts x to DTYPE, the cache's dtype: to e4m3(x * factor). If factor is None, returns x unchanged.

    The e4m3 code is computed from the bits of x * factor, because GPUs convert differently.
    """
    if factor is None:
        return x
    else:
        wide = x.to(tl.float32) * factor
        bits = wide.to(tl.int32, bitcast=True)
        size = tl.minimum(tl.abs(wide), 448.0)
        size_bits = size.to(tl.int32, bitcast=True)
        # rounds to nearest even at bit 20, and changes the bias of the exponent
        normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - 960
        # below 2^-6 e4m3 has steps of 2^-9; fp32 has the same steps from 2^14 on, so adding 2^14 rounds
        small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < 0.015625, small, normal)
        code = tl.where(wide == wide, code, 0x7F) | ((bits >> 24) & 0x80)
        return code.to(tl.uint8).to(DTYPE, bitcast=True)


@triton.jit
def new_places(
    tokens,  # NewTokens
    cache,  # PagedCache with row `batch`
    batch,
    kv_head,
    first_row,
    start,  # first position
    stop,  # end of positions, exclusive
    num_queries,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Computes the cache offsets of K and V for new tokens first_row .. first_row + NEW_ROWS - 1 of batch row `batch`.

    The preceding matrix product writes nothing that is loaded here. Loads bypass L1, because it may hold old contents
    of this memory.

    Returns:
        Four values for each token [NEW_ROWS]: its index in [B, Q]; its position; the offset of its KV head in the
        cache; True if its K and V are to be stored. They are stored if the write mask is True and the position is in
        start .. stop - 1.
    """
    row = first_row + tl.arange(0, NEW_ROWS)
    at = batch * num_queries + row  # int64, because batch is
    is_new = row < num_queries
    position = tl.load(tokens.positions + at, mask=is_new, other=0, cache_modifier=".cg")
    write_mask = tl.load(tokens.write_mask + at, mask=is_new, other=0, cache_modifier=".cg") != 0
    entry = tl.minimum(position // PAGE_SIZE, cache.table_width - 1)
    page = tl.load(cache.block_table + entry, mask=is_new, other=0, cache_modifier=".cg")
    page = tl.minimum(tl.maximum(page, 0), cache.num_pages - 1)
    slot = ((page * PAGE_SIZE + position % PAGE_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
    return at, position, slot, write_mask & (position >= start) & (position < stop)


@triton.jit
def append(
    tokens,  # NewTokens
    cache,  # PagedCache with this row
    kv_head,
    first_row,
    num_queries,
    places,  # result of `new_places`
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Applies head norm and rotary embedding to K of new tokens, and stores their K and V in the cache.

    The tokens are first_row .. first_row + NEW_ROWS - 1 of a batch row. `places` is the result of `new_places` for
    them.
    """
    at, position, slot, stored = places
    is_new = first_row + tl.arange(0, NEW_ROWS) < num_queries
    HALF: tl.constexpr = HEAD_DIM // 2
    column = tl.arange(0, BLOCK_D // 2)
    inside = (column < HALF)[None, :]
    mask = is_new[:, None] & inside
    head = (at * ((GROUP + 2) * KV_HEADS) + GROUP * KV_HEADS + kv_head) * HEAD_DIM
    source = tokens.qkv + head[:, None] + column[None, :]
    k1 = tl.load(source, mask=mask, other=0.0)
    k2 = tl.load(source + HALF, mask=mask, other=0.0)
    v1 = tl.load(source + KV_HEADS * HEAD_DIM, mask=mask, other=0.0)
    v2 = tl.load(source + KV_HEADS * HEAD_DIM + HALF, mask=mask, other=0.0)
    k1, k2 = apply_rope(k1, k2, position, is_new, tokens, tokens.k_norm, HEAD_DIM, BLOCK_D)
    target = slot[:, None] + column[None, :]
    mask = stored[:, None] & inside
    DTYPE: tl.constexpr = cache.k.dtype.element_ty
    tl.store(cache.k + target, as_stored(k1, tokens.k_factor, DTYPE), mask=mask)
    tl.store(cache.k + target + HALF, as_stored(k2, tokens.k_factor, DTYPE), mask=mask)
    tl.store(cache.v + target, as_stored(v1, tokens.v_factor, DTYPE), mask=mask)
    tl.store(cache.v + target + HALF, as_stored(v2, tokens.v_factor, DTYPE), mask=mask)


@triton.jit(do_not_specialize=["num_queries"])
def _rotate_kernel(
    tokens,  # NewTokens
    cache,  # PagedCache
    out_ptr,  # [B, Q, H, D]
    num_queries,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Applies head norms and rotary embedding to queries and K, and stores queries, K and V.

    CTA (tile of tokens, head, batch row) has one head of some tokens. Heads 0 .. H - 1 are query heads, which are
    stored in the output. The other heads are KV heads, whose K and V are stored in the cache.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    ROWS: tl.constexpr = _chunk_rows(BLOCK_D)
    first_row, head, batch = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2).to(tl.int64)
    if head < KV_HEADS * GROUP:
        row = first_row + tl.arange(0, ROWS)
        is_new = row < num_queries
        at = batch * num_queries + row
        HALF: tl.constexpr = HEAD_DIM // 2
        column = tl.arange(0, BLOCK_D // 2)
        mask = is_new[:, None] & (column < HALF)[None, :]
        position = tl.load(tokens.positions + at, mask=is_new, other=0)
        source = tokens.qkv + ((at * ((GROUP + 2) * KV_HEADS) + head) * HEAD_DIM)[:, None] + column[None, :]
        q1 = tl.load(source, mask=mask, other=0.0)
        q2 = tl.load(source + HALF, mask=mask, other=0.0)
        q1, q2 = apply_rope(q1, q2, position, is_new, tokens, tokens.q_norm, HEAD_DIM, BLOCK_D)
        target = out_ptr + ((at * (GROUP * KV_HEADS) + head) * HEAD_DIM)[:, None] + column[None, :]
        tl.store(target, q1, mask=mask)
        tl.store(target + HALF, q2, mask=mask)
    else:
        kv_head, row_cache = head - KV_HEADS * GROUP, cache_of_row(cache, batch)
        for new_row in range(first_row, tl.minimum(first_row + ROWS, num_queries), NEW_ROWS):
            places = new_places(
                tokens, row_cache, batch, kv_head, new_row, 0, 2**31 - 1, num_queries, KV_HEADS, HEAD_DIM, PAGE_SIZE
            )
            append(tokens, row_cache, kv_head, new_row, num_queries, places, KV_HEADS, GROUP, HEAD_DIM, BLOCK_D)


def store_heads(call: HeadsCall) -> Tensor:
    """Applies head norms and rotary embedding to queries and K, and writes K and V to the KV cache, in one launch.

    It implements `Ops.store_heads`. It does not write to page 0 of the cache.

    Returns:
        The queries [B, Q, H, D].

    Raises:
        ValueError: shapes, dtypes or layouts other than in the table above.
    """
    check_heads(call)
    qkv, num_heads = call.qkv, call.num_heads
    batch, num_queries = call.positions.shape
    page_size, kv_heads, dim = call.keys.shape[1:]
    out = torch.empty(batch, num_queries, num_heads, dim, dtype=qkv.dtype, device=qkv.device)
    block_d = padded_dim(dim)
    grid = (triton.cdiv(num_queries, _chunk_rows(block_d)), num_heads + kv_heads, batch)
    launch(
        _rotate_kernel,
        grid,
        new_tokens(call, scales_of(call.keys, call.kv_scales)),
        paged_cache(call.keys, call.values, call.block_table),
        out,
        num_queries,
        KV_HEADS=kv_heads,
        GROUP=num_heads // kv_heads,
        HEAD_DIM=dim,
        BLOCK_D=block_d,
        PAGE_SIZE=page_size,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    return out
