"""Device code of the Gluon decode kernels: positions of new tokens, head norms, rotary embedding, K/V append.

rope.py has the corresponding code for Triton kernels.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from fastspec.kernels.attention.arguments import PagedCache

NEW_ROWS = gl.constexpr(8)  # number of new tokens whose K and V are stored at a time
PADDED_QUERIES = gl.constexpr(32)  # number of new tokens of a row, including padding
NEVER = gl.constexpr(2**30)  # larger than every position


@gluon.constexpr_function
def head_layout(HALF, WARPS):
    """Returns the register layout of halves of heads [R, HALF], with 8 neighbouring values in a lane.

    Triton compiles rope.py to the same layout. So the sums of the head norms have the same order in both files.
    """
    return gl.BlockedLayout([1, 8], [256 // HALF, HALF // 8], [WARPS, 1], [1, 0])


@gluon.jit
def cache_of_row(cache, batch):
    """Returns a `PagedCache` whose `block_table` points to row `batch` of the table."""
    table = cache.block_table + batch * cache.table_stride
    return PagedCache(cache.k, cache.v, table, cache.table_stride, cache.table_width, cache.num_pages)


@gluon.jit
def new_positions(position_ptr, num_queries, WARPS: gl.constexpr):
    """Loads the positions of a batch row's new tokens, int32 [PADDED_QUERIES], padded with NEVER.

    Each warp has a copy of all positions.
    """
    query = gl.arange(0, PADDED_QUERIES, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    position = gl.load(position_ptr + query, mask=query < num_queries, other=NEVER, cache_modifier=".cg")
    return gl.minimum(position, NEVER).to(gl.int32)


@gluon.jit
def kv_range(
    new,  # result of `new_positions`
    tile,
    low,
    high,
    TILE: gl.constexpr,
    WINDOW: gl.constexpr,
    GROUP: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Returns the range of key positions that a tile of TILE query rows sees.

    Query rows at positions outside low .. high - 1 are ignored. `tile` is the index of the tile.

    Returns:
        The position of the batch row's first new token; the oldest and the newest position that the tile sees. The
        newest position is -1 if all query rows are ignored.
    """
    query = gl.arange(0, PADDED_QUERIES, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    mine = (query >= tile * TILE // GROUP) & (query <= (tile * TILE + TILE - 1) // GROUP)
    mine = mine & (new >= low) & (new < high)
    newest = gl.max(gl.where(mine, new, -1), axis=0)
    oldest = 0
    if WINDOW > 0:
        oldest = gl.min(gl.where(mine, new, NEVER), axis=0) - WINDOW + 1
        oldest = gl.minimum(gl.maximum(oldest, 0), newest)
    return gl.min(new, axis=0), oldest, newest


@gluon.jit
def idle(newest, PDL: gl.constexpr):
    """Waits for the previous kernel, in the first CTA if its query tile has no keys. CTAs without work call it.

    The next kernel waits only for this kernel. So this kernel must not end before the previous kernel, even if it has
    no work. `newest` is a result of `kv_range`: negative if the tile has no keys.
    """
    if PDL and (newest < 0) & (gl.program_id(0) == 0) & (gl.program_id(1) == 0):
        gdc_wait()


@gluon.jit
def _scaled(x, factor, weight):
    """Returns weight * (x * factor) in x's dtype: the last part of an RMSNorm of heads x [R, HALF].

    Each product is rounded to x's dtype. With an fp32 weight only the result is rounded. factor is [R], weight [HALF].
    """
    normed = x.to(gl.float32) * gl.expand_dims(factor, 1)
    kind: gl.constexpr = weight.dtype
    if gl.float32 != kind:
        normed = normed.to(x.dtype).to(gl.float32)
    return (gl.expand_dims(weight, 0).to(gl.float32) * normed).to(x.dtype)


@gluon.jit
def angles(position, valid, tokens, HALF: gl.constexpr, layout: gl.constexpr):
    """Loads the rotary angles (cos, sin), each [R, HALF], for positions `position` [R] where `valid` is True.

    Returns an empty tuple if the model has no rotary embedding.
    """
    if tokens.cos is None:
        return ()
    else:
        column = gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
        angle = gl.minimum(gl.maximum(position, 0), tokens.num_angles - 1)
        at = gl.expand_dims(angle * HALF, 1) + gl.expand_dims(column, 0)
        mask = gl.expand_dims(valid, 1)
        return gl.load(tokens.cos + at, mask=mask, other=0.0), gl.load(tokens.sin + at, mask=mask, other=0.0)


@gluon.jit
def apply_rope(x1, x2, cos_sin, norm_ptr, eps, HALF: gl.constexpr):
    """Applies RMSNorm and rotary embedding to R heads, given as halves x1, x2 [R, HALF]. Returns both halves.

    `cos_sin` is the result of `angles`. `norm_ptr` is the weight of the norm; None: no norm.
    """
    layout: gl.constexpr = x1.type.layout
    if norm_ptr is not None:
        column = gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
        wide1, wide2 = x1.to(gl.float32), x2.to(gl.float32)
        squares = gl.sum(wide1 * wide1, axis=1) + gl.sum(wide2 * wide2, axis=1)
        factor = gl.rsqrt(squares / (2 * HALF) + eps)
        x1 = _scaled(x1, factor, gl.load(norm_ptr + column))
        x2 = _scaled(x2, factor, gl.load(norm_ptr + HALF + column))
    if len(cos_sin) == 0:
        return x1, x2
    else:
        first, second, cos, sin = x1.to(gl.float32), x2.to(gl.float32), cos_sin[0], cos_sin[1]
        return (first * cos - second * sin).to(x1.dtype), (second * cos + first * sin).to(x1.dtype)


@gluon.jit
def slots_of(
    tokens,  # NewTokens
    cache,  # PagedCache with row `batch`
    batch,
    kv_head,
    first_row,
    start,
    stop,
    num_queries,
    KV_HEADS: gl.constexpr,
    D: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    layout: gl.constexpr,
):
    """Computes the cache offsets of K and V for new tokens first_row .. first_row + NEW_ROWS - 1 of batch row `batch`.

    Returns:
        Four values for each token [NEW_ROWS]: its index in [B, Q]; the offset of its KV head in the cache; True if its
        K and V are to be stored; its rotary angles, the result of `angles`. K and V are stored if the write mask is
        True and the position is in start .. stop - 1.
    """
    row = first_row + gl.arange(0, NEW_ROWS, layout=gl.SliceLayout(1, layout))
    valid = row < num_queries
    at = batch * num_queries + row  # int64, because batch is
    position = gl.load(tokens.positions + at, mask=valid, other=0, cache_modifier=".cg")
    write_mask = gl.load(tokens.write_mask + at, mask=valid, other=0, cache_modifier=".cg") != 0
    entry = gl.minimum(position // PAGE_SIZE, cache.table_width - 1)
    page = gl.load(cache.block_table + entry, mask=valid, other=0, cache_modifier=".cg")
    page = gl.minimum(gl.maximum(page, 0), cache.num_pages - 1)
    slot = ((page * PAGE_SIZE + position % PAGE_SIZE) * KV_HEADS + kv_head) * D
    cos_sin = angles(position, valid, tokens, D // 2, layout)
    return at, slot, write_mask & (position >= start) & (position < stop), cos_sin


@gluon.jit
def as_stored(x, factor, CACHED: gl.constexpr):
    """Converts x to CACHED, the cache's dtype: to e4m3(x * factor). If factor is None, returns x unchanged.

    The result has the same bits as that of `as_stored` in rope.py.
    """
    if factor is None:
        return x
    else:
        wide = x.to(gl.float32) * factor
        bits = wide.to(gl.int32, bitcast=True)
        size = gl.minimum(gl.maximum(wide, -wide), 448.0)
        size_bits = size.to(gl.int32, bitcast=True)
        # rounds to nearest even at bit 20, and changes the bias of the exponent
        normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - 960
        # below 2^-6 e4m3 has steps of 2^-9; fp32 has the same steps from 2^14 on, so adding 2^14 rounds
        small = (size + 16384.0).to(gl.int32, bitcast=True) - 0x46800000
        code = gl.where(size < 0.015625, small, normal)
        code = gl.where(wide == wide, code, 0x7F) | ((bits >> 24) & 0x80)
        return code.to(gl.uint8).to(CACHED, bitcast=True)


@gluon.jit
def append(
    tokens, cache, slots, kv_head, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, layout: gl.constexpr
):
    """Applies head norm and rotary embedding to K of new tokens, and stores their K and V in the cache.

    `slots` is the result of `slots_of`.
    """
    HALF: gl.constexpr = D // 2
    at, slot, stored, cos_sin = slots
    column = gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(0, layout)), 0)
    mask = gl.expand_dims(stored, 1)
    head = (at * ((GROUP + 2) * KV_HEADS) + GROUP * KV_HEADS + kv_head) * D
    source = tokens.qkv + gl.expand_dims(head, 1) + column
    k1 = gl.load(source, mask=mask, other=0.0)
    k2 = gl.load(source + HALF, mask=mask, other=0.0)
    v1 = gl.load(source + KV_HEADS * D, mask=mask, other=0.0)
    v2 = gl.load(source + KV_HEADS * D + HALF, mask=mask, other=0.0)
    k1, k2 = apply_rope(k1, k2, cos_sin, tokens.k_norm, tokens.eps, HALF)
    CACHED: gl.constexpr = cache.k.dtype.element_ty
    target = gl.expand_dims(slot, 1) + column
    gl.store(cache.k + target, as_stored(k1, tokens.k_factor, CACHED), mask=mask)
    gl.store(cache.k + target + HALF, as_stored(k2, tokens.k_factor, CACHED), mask=mask)
    gl.store(cache.v + target, as_stored(v1, tokens.v_factor, CACHED), mask=mask)
    gl.store(cache.v + target + HALF, as_stored(v2, tokens.v_factor, CACHED), mask=mask)
