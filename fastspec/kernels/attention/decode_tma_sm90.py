"""The decoding kernel of dispatch.py for long caches on sm_90: K and V through a ring in shared memory, read once.

One warp asks the copy engine for tiles of KEYS keys and of their values, as many ahead as the ring holds; four others
multiply as one warp group, whose products have ROWS rows: 16 queries of 4 heads to a key head cost the time of one.

    scores [ROWS, KEYS] = q [ROWS, D] K^T;   out [ROWS, D] += weights [ROWS, KEYS] V

Splits grow with their position: short rows need many programs to be read at once, long ones few partial sums. They
leave their sums to `gather_kernel`, which is launched next, with a program for every row. They are dealt out to as many
programs as there is room for, and from one split to the next the ring does not run dry. Half to three quarters
of a multiprocessor's memory are enough to read at full speed; the rest stays L1, where the products of the layer have
their weights on their way (carveout.py).

Rows of a product do not touch each other, and which program has a split changes no bit of what it leaves: a row's bits
are those of the row alone.

What is fed is stored by the program whose keys it is among; its fetching warp asks for no such tile before.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.attention.kv_loads import split_of, start_of
from fastspec.kernels.attention.mma_tiles import finish, keep
from fastspec.kernels.attention.query_rows import (
    NEVER,
    NEW_ROWS,
    angles,
    append,
    fed_positions,
    head_layout,
    idle,
    reach,
    slots_of,
    turned,
)
from fastspec.kernels.attention.tma_parts import (
    WIDTH,
    fetch,
    in_pieces,
    keys_of,
    masked,
    power,
    rescaled,
    split_number,
    splits_of,
)
from fastspec.kernels.common.gluon_compat import thread_barrier

ROWS = gl.constexpr(64)  # of a product: what a warp group multiplies
WARPS = gl.constexpr(4)  # that multiply


@gluon.constexpr_function
def _sums_layout(columns):
    """Of products [ROWS, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, columns, 16])


@gluon.jit
def _stored_for_the_engine():
    """What this thread stored is seen by copies that are asked for behind a barrier."""
    gl.inline_asm_elementwise("fence.proxy.async; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _clear_tail(tile, count):
    """Zeros in the rows of a tile from `count` on: what lies behind the newest key may be NaN, and NaN times 0 is."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, layout)), 1)
    tile.store(gl.where(row < count, tile.load(layout), 0.0))


@gluon.jit
def _products(q, keys):
    """Sends for the products [ROWS, KEYS] of queries with a tile of keys."""
    KEYS: gl.constexpr = keys.shape[0]
    nothing = gl.zeros([ROWS, KEYS], gl.float32, _sums_layout(KEYS))
    return warpgroup_mma(q, keys.permute((1, 0)), nothing, is_async=True)


@gluon.jit
def _keep_queries(qs, q1, q2):
    """Puts both halves of heads [ROWS, D / 2] into shared memory [1, ROWS, D], as products take them."""
    D: gl.constexpr = qs.shape[2]
    pieces = in_pieces(qs, ROWS)
    if D == 2 * WIDTH:
        pieces.index(0).store(q1)
        pieces.index(1).store(q2)
    else:
        pieces.index(0).store(gl.reshape(gl.permute(gl.join(q1, q2), (0, 2, 1)), [ROWS, D]))


@gluon.jit
def _nothing(KEYS: gl.constexpr, D: gl.constexpr):
    """(top, total, out) before the first key of a split."""
    row: gl.constexpr = gl.SliceLayout(1, _sums_layout(KEYS))
    out = gl.zeros([ROWS, D], gl.float32, _sums_layout(D))
    return gl.full([ROWS], -float("inf"), gl.float32, row), gl.zeros([ROWS], gl.float32, row), out


@gluon.jit
def _attended(
    qs, ring, full, free, out_ptr, partial_ptr, position, num_queries, num_pairs, splits, scale,
    tile, batch, kv_head, mine, share, shares, last, begin, stop, fresh, newest, only,
    RUNGS: gl.constexpr, FROM: gl.constexpr, WINDOW: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Attends to the program's splits, one by one, and leaves what becomes of each: the output, where it is the `only`
    one of the tile.
    """
    STAGES: gl.constexpr = ring.shape[0]
    KEYS: gl.constexpr = ring.shape[1]
    D: gl.constexpr = ring.shape[2]
    sums: gl.constexpr = gl.SliceLayout(1, _sums_layout(D))
    rows = num_queries * GROUP
    row = tile * ROWS + gl.arange(0, ROWS, layout=sums)
    nodes, base = num_pairs * splits * rows, (batch * KV_HEADS + kv_head) * splits * rows
    mean_ptr, weight_ptr = partial_ptr + base * D, partial_ptr + (nodes.to(gl.int64) * D + base)
    q = qs.index(0)
    step = 0
    mbarrier.wait(full.index(0), 0)
    scores = warpgroup_mma_wait(0, deps=(_products(q, ring.index(0)),))
    thread_barrier()
    mbarrier.arrive(free.index(0), count=1)
    for i in range(mine):
        split = split_number(i, share, shares, last)
        first, end = keys_of(split, begin, stop, RUNGS)
        top, total, out = _nothing(KEYS, D)
        for here in range(first, end, KEYS):
            # the next keys are multiplied while this tile's weights are found; behind the last tile, the same again
            following = gl.where((here + KEYS < end) | (i + 1 < mine), step + 2, step)
            k_place, v_place = following % STAGES, (step + 1) % STAGES
            mbarrier.wait(full.index(k_place), following // STAGES & 1)
            ahead = _products(q, ring.index(k_place))
            if (here + KEYS > fresh + 1) | ((WINDOW > 0) & (here + WINDOW <= newest)):
                scores = masked(scores, here, position, WINDOW)
            top, shift, fade = rescaled(top, scores, scale)
            weights = power(gl.fma(scores, gl.full_like(scores, scale), gl.expand_dims(-shift, 1)))
            total = total * fade + gl.sum(weights, axis=1)
            left = gl.convert_layout(weights.to(ring.dtype), gl.DotOperandLayout(0, _sums_layout(D), 2))
            out = out * gl.expand_dims(gl.convert_layout(fade, sums), 1)
            values = ring.index(v_place)
            mbarrier.wait(full.index(v_place), (step + 1) // STAGES & 1)
            if here + KEYS > stop:
                _clear_tail(values, stop - here)
                fence_async_shared()
                thread_barrier()
            out = warpgroup_mma(left, values, out, is_async=True)
            scores, out, left = warpgroup_mma_wait(0, deps=(ahead, out, left))
            thread_barrier()
            mbarrier.arrive(free.index(k_place), count=1)
            mbarrier.arrive(free.index(v_place), count=1)
            step += 2
        top, total = gl.convert_layout(top, sums), gl.convert_layout(total, sums)
        mean = out * gl.expand_dims(1.0 / gl.where(total == 0.0, 1.0, total), 1)
        if only:
            late = gl.convert_layout(gl.max(position, axis=1), sums) >= FROM
            finish(out_ptr, batch, kv_head, gl.where(late, row, rows), rows, num_queries, mean, KV_HEADS, GROUP)
        else:
            # K and V stream through L2, more of them than it holds; this is to be there when it is gathered
            keep(mean_ptr, weight_ptr, split * rows + row, row < rows, mean, top + gl.log2(total), LASTING=True)


@gluon.jit
def _append_more(
    qkv_ptr, cos_ptr, sin_ptr, k_norm_ptr, key_ptr, value_ptr, table_ptr, position_ptr, write_ptr,
    batch, kv_head, mine, share, shares, last, stop, fresh, num_queries, num_angles, table_width, num_pages, eps,
    RUNGS: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, PAGE_SIZE: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Stores what is fed to the program's splits, but for the first rows that are fed to the first of them."""
    for i in range(mine):
        low, high = keys_of(split_number(i, share, shares, last), 0, stop, RUNGS)
        if high > fresh:
            for first_row in range(gl.where(i == 0, NEW_ROWS, 0), num_queries, NEW_ROWS):
                slots = slots_of(
                    table_ptr, position_ptr, write_ptr, cos_ptr, sin_ptr, batch, kv_head, first_row, low, high,
                    num_queries, num_angles, table_width, num_pages, KV_HEADS, D, PAGE_SIZE, layout,
                )  # fmt: skip
                append(qkv_ptr, k_norm_ptr, key_ptr, value_ptr, slots, kv_head, eps, KV_HEADS, GROUP, D, layout)


@gluon.jit
def _multiply(
    qs, ring, full, free, stored,
    qkv_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, key_ptr, value_ptr, table_ptr, position_ptr, write_ptr,
    out_ptr, partial_ptr, num_queries, num_pairs, splits, table_width, num_pages, num_angles, scale, eps,
    tile, batch, kv_head, mine, share, shares, last, begin, stop, fresh, newest, only,
    RUNGS: gl.constexpr, FROM: gl.constexpr, WINDOW: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    D: gl.constexpr, PAGE_SIZE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """What the warps do that multiply: what is fed to their splits, queries, then the tiles that come."""
    HALF: gl.constexpr = D // 2
    KEYS: gl.constexpr = ring.shape[1]
    rows = num_queries * GROUP
    head_of: gl.constexpr = head_layout(HALF, WARPS)
    row = tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, head_of))
    column = gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(0, head_of)), 0)
    valid = row < rows
    at = batch * num_queries + row // GROUP
    q_position = gl.load(position_ptr + at, mask=valid, other=0, cache_modifier=".cg")
    turn = angles(q_position, valid, cos_ptr, sin_ptr, num_angles, HALF, head_of)
    own = tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, _sums_layout(KEYS)))
    fed = batch * num_queries + own // GROUP
    # a padding row sees nothing
    position = gl.load(position_ptr + fed, mask=own < rows, other=-1, cache_modifier=".cg")
    position = gl.expand_dims(gl.minimum(position, NEVER).to(gl.int32), 1)
    low, high = keys_of(split_number(0, share, shares, last), 0, stop, RUNGS)
    slots = slots_of(
        table_ptr, position_ptr, write_ptr, cos_ptr, sin_ptr, batch, kv_head, 0, low, high, num_queries,
        num_angles, table_width, num_pages, KV_HEADS, D, PAGE_SIZE, head_of,
    )  # fmt: skip
    if PDL:
        gdc_wait()

    first = (at * ((GROUP + 2) * KV_HEADS) + kv_head * GROUP + row % GROUP) * D
    source = qkv_ptr + gl.expand_dims(first, 1) + column
    q1 = gl.load(source, mask=gl.expand_dims(valid, 1), other=0.0)
    q2 = gl.load(source + HALF, mask=gl.expand_dims(valid, 1), other=0.0)
    if high > fresh:
        append(qkv_ptr, k_norm_ptr, key_ptr, value_ptr, slots, kv_head, eps, KV_HEADS, GROUP, D, head_of)
        _append_more(
            qkv_ptr, cos_ptr, sin_ptr, k_norm_ptr, key_ptr, value_ptr, table_ptr, position_ptr, write_ptr,
            batch, kv_head, mine, share, shares, last, stop, fresh, num_queries, num_angles, table_width, num_pages,
            eps, RUNGS, KV_HEADS, GROUP, D, PAGE_SIZE, head_of,
        )  # fmt: skip
        _stored_for_the_engine()
        thread_barrier()
    mbarrier.arrive(stored.index(0), count=1)
    q1, q2 = turned(q1, q2, turn, q_norm_ptr, eps, HALF)
    _keep_queries(qs, q1, q2)
    fence_async_shared()
    thread_barrier()
    _attended(
        qs, ring, full, free, out_ptr, partial_ptr, position, num_queries, num_pairs, splits, scale,
        tile, batch, kv_head, mine, share, shares, last, begin, stop, fresh, newest, only,
        RUNGS, FROM, WINDOW, KV_HEADS, GROUP,
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=["num_queries", "num_pairs", "splits", "table_stride", "table_width", "num_pages", "num_angles"],
)
def shares_kernel(
    key_desc,  # [num_pages * page_size, Hkv * D] by [piece_of(page_size, KEYS), WIDTH]
    value_desc,  # the same of V
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,  # None: no norms
    k_norm_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    position_ptr,
    write_ptr,
    out_ptr,
    partial_ptr,  # as in gather_kernel
    splits,  # that a row has room for
    num_queries,
    num_pairs,  # B * Hkv
    table_stride,
    table_width,
    num_pages,
    num_angles,
    scale,
    eps,
    RUNGS: gl.constexpr,  # (first position, keys, number of the first) of splits of one size
    FROM: gl.constexpr,  # position: rows at earlier ones are left alone
    WINDOW: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    KEYS: gl.constexpr,  # of a tile; part of the bits of a row
    STAGES: gl.constexpr,  # tiles of keys or values in the ring
    PDL: gl.constexpr,
):
    """As `_decode_kernel` of dispatch.py, whose arguments these are: program (t, i) has share i of tile t's splits."""
    DTYPE: gl.constexpr = key_ptr.dtype.element_ty
    tiles = (num_queries * GROUP + ROWS - 1) // ROWS
    tile, pair = gl.program_id(0) % tiles, gl.program_id(0) // tiles
    batch, kv_head = (pair // KV_HEADS).to(gl.int64), pair % KV_HEADS
    table_ptr += batch * table_stride
    if PDL:
        gdc_launch_dependents()
    # up to the wait nothing is read that the product before this kernel writes: see `attend` of dispatch.py
    given = fed_positions(position_ptr + batch * num_queries, num_queries, WARPS)
    limit = start_of(splits, RUNGS)
    fresh, oldest, newest = reach(given, tile, FROM, limit, ROWS, WINDOW, GROUP, WARPS)
    first, last = split_of(oldest, RUNGS), split_of(newest, RUNGS)
    share, shares = gl.program_id(1), gl.num_programs(1)
    begin, stop = oldest // KEYS * KEYS, newest + 1
    mine = gl.where(newest < 0, 0, splits_of(share, shares, last - first + 1))
    if mine == 0:
        idle(newest, PDL)
        return

    lay: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    qs = gl.allocate_shared_memory(DTYPE, [1, ROWS, D], lay)
    ring = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, D], lay)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    stored = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    mbarrier.init(stored.index(0), count=1)
    fence_async_shared()

    # fmt: off
    gl.warp_specialize(
        [
            (_multiply, (
                qs, ring, full, free, stored,
                qkv_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, key_ptr, value_ptr, table_ptr, position_ptr,
                write_ptr, out_ptr, partial_ptr, num_queries, num_pairs, splits, table_width, num_pages, num_angles,
                scale, eps, tile, batch, kv_head, mine, share, shares, last, begin, stop, fresh, newest, first == last,
                RUNGS, FROM, WINDOW, KV_HEADS, GROUP, D, PAGE_SIZE, PDL,
            )),
            (fetch, (
                key_desc, value_desc, ring, full, free, stored, table_ptr, kv_head * D, mine, share, shares, last,
                begin, stop, fresh, table_width, num_pages, RUNGS, PAGE_SIZE,
            )),
        ],
        [1], [40],  # a warp more, and how many registers its threads need
    )
    # fmt: on
