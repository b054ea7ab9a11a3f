"""Device code of tma_sm90.py: choice of the splits of each CTA, steps of the online softmax, and the loading warps."""

# mypy: disable-error-code="assignment, misc"
# ruff: noqa: RUF005  (Triton adds tuples, and knows no starred ones)

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from fastspec.kernels.attention.decode.kv_loads import start_of, widening_of_four
from fastspec.kernels.attention.decode.mma_tiles import shift_of
from fastspec.kernels.common.gluon_compat import REINTERPRETS, load_block, thread_barrier

ROWS = gl.constexpr(64)  # rows of the product of a group of warps
WARPS = gl.constexpr(4)  # warps of a group that multiplies
WIDTH = gl.constexpr(64)  # 16-bit values in 128 bytes: the row size in shared memory that wgmma needs
WIDENING_WARPS = gl.constexpr(4)  # warps that convert tiles from 8 bits to 16: one per scheduler of an SM


class Pipeline(NamedTuple):
    """Ring of tiles of K and V in shared memory. Loading warps fill it, and multiplying warps read it.

    Attributes:
        tiles: [STAGES, KEYS, D], tiles of K and V, alternating; uint8 for an 8-bit cache.
        full: mbarriers [STAGES]. The mbarrier of a stage completes when its tile has arrived.
        free: mbarriers [STAGES]. The mbarrier of a stage completes when its tile has been read.
        stored: an mbarrier that completes when this CTA has stored K and V of its new tokens in the cache.
    """

    tiles: Any
    full: Any
    free: Any
    stored: Any


class Share(NamedTuple):
    """Work of one CTA: a tile of query rows, and the splits of its keys that this CTA processes.

    Attributes:
        batch, kv_head, tile: indices of the batch row, the KV head and the query tile.
        mine: number of splits that this CTA processes.
        cta, ctas: index of this CTA among the CTAs of the query tile, and number of these CTAs.
        last: index of the last split of the query tile.
        only: True if the query tile has only one split.
        begin, stop: bounds of the key positions, begin .. stop - 1, that the query tile reads. `begin` is the start of
            a tile of keys.
        first_new: position of the batch row's first new token.
    """

    batch: Any
    kv_head: Any
    tile: Any
    mine: Any
    cta: Any
    ctas: Any
    last: Any
    only: Any
    begin: Any
    stop: Any
    first_new: Any


@gluon.constexpr_function
def sums_layout(columns):
    """Returns the register layout of wgmma results [ROWS, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, columns, 16])


@gluon.constexpr_function
def piece_of(PAGE_SIZE, KEYS):
    """Returns the number of keys that one TMA copy loads.

    It is the largest power of two, at most KEYS, that divides PAGE_SIZE. KEYS is a power of two.
    """
    piece = KEYS
    while PAGE_SIZE % piece:
        piece //= 2
    return piece


@gluon.constexpr_function
def width_of(D, NARROW):
    """Returns the number of values of a head that one TMA copy loads.

    These are 128 bytes of 16-bit values. If NARROW is True, they are a whole head of D 8-bit values.
    """
    return D if NARROW else 64


@gluon.constexpr_function
def tile_layout(D, NARROW):
    """Returns the shared-memory layout of tiles [KEYS, D] of 16-bit values, or of 8-bit values if NARROW is True."""
    return gl.NVMMASharedLayout(D, 8, 2) if NARROW else gl.NVMMASharedLayout(128, 16, 2)


@gluon.jit
def in_pieces(memory, PIECE: gl.constexpr, NARROW: gl.constexpr = False):
    """Views tiles [COUNT, ROWS, D] in shared memory as pieces [PIECE, W], one for each TMA copy; W is `width_of`.

    tile [ROWS, D]   piece 0: rows 0 .. PIECE-1, first W values     piece 1: the next rows     ...
                     then all rows again, with the next W values
    """
    WIDE: gl.constexpr = width_of(memory.shape[2], NARROW)
    count: gl.constexpr = memory.shape[0] * memory.shape[1] * memory.shape[2] // (PIECE * WIDE)
    layout: gl.constexpr = tile_layout(memory.shape[2], NARROW)
    if REINTERPRETS:
        return memory.reinterpret(memory.dtype, [count, PIECE, WIDE], layout)
    else:
        return memory._reinterpret(memory.dtype, [count, PIECE, WIDE], layout)


@gluon.jit
def clear_tail(tile, count):
    """Sets the rows of a V tile in shared memory to zero, from row `count` on.

    Cache slots after the newest key may hold NaN, and NaN times a weight of 0 is NaN.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, layout)), 1)
    tile.store(gl.where(row < count, tile.load(layout), 0.0))


@gluon.jit
def products(q, keys):
    """Starts the asynchronous product q K^T, [ROWS, KEYS], of queries with a tile of keys."""
    KEYS: gl.constexpr = keys.shape[0]
    nothing = gl.zeros([ROWS, KEYS], gl.float32, sums_layout(KEYS))
    return warpgroup_mma(q, keys.permute((1, 0)), nothing, is_async=True)


@gluon.jit
def new_ring(
    dtype: gl.constexpr, STAGES: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr, layout: gl.constexpr,
    READERS: gl.constexpr,
):  # fmt: skip
    """Allocates tiles, full and free of an empty `Pipeline` in shared memory, with STAGES tiles [KEYS, D] of `dtype`.

    A stage is free when READERS groups of warps have read its tile.
    """
    tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=READERS)
    return tiles, full, free


@gluon.jit
def splits_of(cta, ctas, splits):
    """Returns the number of splits that one CTA processes, if a query tile has `splits` splits and `ctas` CTAs.

    `cta` is the index of the CTA. `split_number` returns the indices of its splits.
    """
    backwards = splits // ctas % 2 == 1
    return splits // ctas + gl.where(gl.where(backwards, ctas - 1 - cta, cta) < splits % ctas, 1, 0)


@gluon.jit
def split_number(i, share):
    """Returns the index of the i-th split that a CTA processes. `share` is the `Share` of the CTA.

    Splits are dealt to CTAs from the last and largest split down, in alternating direction:

        ctas = 3:   CTA 0: last, last - 5, last - 6, ...    CTA 1: last - 1, last - 4, ...    CTA 2: last - 2, ...

    So all CTAs have about the same number of keys.
    """
    turn = gl.where(i % 2 == 1, share.ctas - 1 - share.cta, share.cta)
    return share.last - (i * share.ctas + turn)


@gluon.jit
def keys_of(split, begin, stop, SPLIT_SIZES: gl.constexpr):
    """Returns the position of a split's first key, and the position after its last key.

    `split` is the index of the split. The keys are limited to positions begin .. stop - 1.
    """
    return gl.maximum(begin, start_of(split, SPLIT_SIZES)), gl.minimum(stop, start_of(split + 1, SPLIT_SIZES))


@gluon.jit
def power(x):
    """Computes 2^x with one instruction. The result is 0 where it would be subnormal in fp32."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def masked(scores, here, position, WINDOW: gl.constexpr):
    """Applies the causal mask: returns the scores [ROWS, KEYS], with -inf for keys that a query row does not see.

    A row sees the key at its own position and earlier keys. If WINDOW is not 0, it sees only the newest WINDOW of them.

    here: position of the first key. position: [ROWS, 1], the position of each query row. It is -1 for padding rows,
    which see no key.
    """
    number = gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, scores.type.layout))
    number = here + gl.expand_dims(number, 0)
    # distance from the row back to the key; it is negative for later keys and for padding rows, so huge as uint32
    seen = (position - number).to(gl.uint32) < (WINDOW if WINDOW > 0 else 2**31)
    return gl.where(seen, scores, -float("inf"))


@gluon.jit
def rescaled(top, scores, scale):
    """Updates the maximum `top` [ROWS] of an online softmax for one more tile of keys, whose scores are scores * scale.

    Returns the new maximum, the number to subtract from scores before exp2, and the factor for the sums until now.
    """
    new_top = gl.maximum(top, gl.max(scores, axis=1) * scale)
    shift = shift_of(new_top)
    return new_top, shift, power(top - shift)


@gluon.jit
def empty_softmax(KEYS: gl.constexpr, D: gl.constexpr):
    """Returns the state (top, total, out) of an online softmax over no keys.

    top [ROWS] is the largest score, total [ROWS] the sum of weights, and out [ROWS, D] the sum of weighted values.
    """
    row: gl.constexpr = gl.SliceLayout(1, sums_layout(KEYS))
    out = gl.zeros([ROWS, D], gl.float32, sums_layout(D))
    return gl.full([ROWS], -float("inf"), gl.float32, row), gl.zeros([ROWS], gl.float32, row), out


@gluon.jit
def weighed(scores, scale, top, total, out, DTYPE: gl.constexpr):
    """Continues an online softmax with the scores [ROWS, KEYS] of one more tile of keys, each times `scale`.

    Args:
        top, total, out: see `empty_softmax`.

    Returns:
        The weights of the keys as left operand of a product, in DTYPE; and the new top, total and out. The weighted
        values of this tile are not in `out` yet.
    """
    D: gl.constexpr = out.shape[1]
    top, shift, fade = rescaled(top, scores, scale)
    weights = power(gl.fma(scores, gl.full_like(scores, scale), gl.expand_dims(-shift, 1)))
    total = total * fade + gl.sum(weights, axis=1)
    left = gl.convert_layout(weights.to(DTYPE), gl.DotOperandLayout(0, sums_layout(D), 2))
    out = out * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, sums_layout(D))), 1)
    return left, top, total, out


@gluon.jit
def slots_at(cache, here, PIECES: gl.constexpr, PIECE: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """Returns a tuple with the cache slot of the first key of each piece of a tile of keys.

    The tile begins at position `here`. One TMA copy loads a piece of PIECE keys. A slot is an index of a token's K or V
    in the cache.
    """
    slots = ()
    for i in gl.static_range(PIECES):
        at = here + i * PIECE
        # bypasses L1, as all loads before the kernel's wait do: L1 may hold old contents of this memory
        page = gl.load(cache.block_table + gl.minimum(at // PAGE_SIZE, cache.table_width - 1), cache_modifier=".cg")
        page = gl.minimum(gl.maximum(page, 0), cache.num_pages - 1).to(gl.int32)
        slots = slots + (page * PAGE_SIZE + at % PAGE_SIZE,)
    return slots


@gluon.jit
def load_tile(
    desc, pieces, pipeline, step, slots, column, PARTS: gl.constexpr, STAGES: gl.constexpr, BYTES: gl.constexpr
):  # fmt: skip
    """Issues the TMA copies of one tile of K or V, as soon as its stage of the pipeline is free.

    Args:
        desc: TMA descriptor of K or of V.
        pieces: pieces of the pipeline's tiles, the result of `in_pieces`.
        pipeline: `Pipeline` with the mbarriers.
        step: index of the tile among all tiles that this CTA loads.
        slots: cache slots of the tile's pieces, the result of `slots_at`.
        column: first column of the KV head in the cache [slots, Hkv * D].
        PARTS: number of pieces side by side in a head.
        BYTES: size of the tile in bytes.
    """
    WIDE: gl.constexpr = pieces.shape[2]
    place = step % STAGES
    if step >= STAGES:
        mbarrier.wait(pipeline.free.index(place), (step // STAGES - 1) & 1)
    count: gl.constexpr = len(slots)
    mbarrier.expect(pipeline.full.index(place), BYTES)
    for i in gl.static_range(count):
        for part in gl.static_range(PARTS):
            to = pieces.index((place * PARTS + part) * count + i)
            load_block(desc, [slots[i], column + part * WIDE], pipeline.full.index(place), to)


@gluon.jit
def load_tiles(
    key_desc, value_desc, pipeline, cache, column, share, SPLIT_SIZES: gl.constexpr, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Runs the loading warp of a CTA for a 16-bit cache. It loads each K tile of the CTA's splits, then the V tile.

    It does not wait for the previous kernel. Before a tile with new tokens (positions from `share.first_new` on) it
    waits for the mbarrier `pipeline.stored`. `column` is the first column of the KV head in the cache.
    """
    STAGES: gl.constexpr = pipeline.tiles.shape[0]
    KEYS: gl.constexpr = pipeline.tiles.shape[1]
    D: gl.constexpr = pipeline.tiles.shape[2]
    PARTS: gl.constexpr = D // width_of(D, False)
    BYTES: gl.constexpr = KEYS * D * 2
    PIECE: gl.constexpr = piece_of(PAGE_SIZE, KEYS)
    PIECES: gl.constexpr = KEYS // PIECE
    pieces = in_pieces(pipeline.tiles, PIECE)
    step = 0
    first, end = keys_of(split_number(0, share), share.begin, share.stop, SPLIT_SIZES)
    slots = slots_at(cache, first, PIECES, PIECE, PAGE_SIZE)
    for i in range(share.mine):
        # the pages of the next tile, even of another split, are loaded before the copies of this tile are issued
        then = split_number(gl.minimum(i + 1, share.mine - 1), share)
        next_first, next_end = keys_of(then, share.begin, share.stop, SPLIT_SIZES)
        for here in range(first, end, KEYS):
            behind = gl.where(here + KEYS < end, here + KEYS, next_first)
            following = slots_at(cache, behind, PIECES, PIECE, PAGE_SIZE)
            if here + KEYS > share.first_new:
                mbarrier.wait(pipeline.stored.index(0), 0)
            load_tile(key_desc, pieces, pipeline, step, slots, column, PARTS, STAGES, BYTES)
            load_tile(value_desc, pieces, pipeline, step + 1, slots, column, PARTS, STAGES, BYTES)
            slots = following
            step += 2
        first, end = next_first, next_end


@gluon.constexpr_function
def _slice_layout(D):
    """Returns the register layout of half a tile of K or V while it is converted from 8 to 16 bits.

    A thread converts 16 numbers of each of two keys. Eight threads access shared memory together. Four of them access
    one key, the other four another key. So neither the loads nor the stores of 16-bit values have bank conflicts.
    """
    lanes, warps = (
        ([[5, 0], [2, 0], [4, 0]], [[0, 64], [8, 0]])
        if D == 128
        else (
            [[1, 0], [2, 0], [4, 0]],
            [[8, 0], [16, 0]],
        )
    )
    bases = [[0, 1], [0, 2], [0, 4], [0, 8]]
    last = [16 if D == 128 else 32, 0]
    return gl.DistributedLinearLayout([*bases, last], [[0, 16], [0, 32], *lanes], warps, [], [4096 // D, D])


@gluon.jit
def _widened(four, DTYPE: gl.constexpr):
    """Converts e4m3 numbers [N, D], stored as uint8, to DTYPE."""
    INTO: gl.constexpr = widening_of_four(DTYPE)
    if gl.bfloat16 == DTYPE:
        return gl.inline_asm_elementwise(INTO, "=r,=r,r", [four], dtype=gl.bfloat16, is_pure=True, pack=4)
    else:
        return gl.inline_asm_elementwise(INTO, "=r,=r,r", [four], dtype=gl.float16, is_pure=True, pack=4)


@gluon.jit
def _widen(narrow, wide, step):
    """Converts one tile of K or V from 8 to 16 bits, from Pipeline `narrow` to Pipeline `wide`.

    `step` is the index of the tile among all tiles that this CTA loads. The function waits until the tile has arrived,
    and until its stage of `wide` is free. It then marks its stage of `narrow` as free, and its stage of `wide` as full.
    """
    STAGES: gl.constexpr = narrow.tiles.shape[0]
    WIDE: gl.constexpr = wide.tiles.shape[0]
    KEYS: gl.constexpr = wide.tiles.shape[1]
    D: gl.constexpr = wide.tiles.shape[2]
    ROWS: gl.constexpr = KEYS // 2
    layout: gl.constexpr = _slice_layout(D)
    source, target = step % STAGES, step % WIDE
    mbarrier.wait(narrow.full.index(source), step // STAGES & 1)
    here = narrow.tiles.index(source).slice(0, ROWS).load(layout)
    if step >= WIDE:
        mbarrier.wait(wide.free.index(target), (step // WIDE - 1) & 1)
    # the second half is loaded before the first is stored, because the compiler does not move loads over stores
    there = narrow.tiles.index(source).slice(ROWS, ROWS).load(layout)
    wide.tiles.index(target).slice(0, ROWS).store(_widened(here, wide.tiles.dtype))
    wide.tiles.index(target).slice(ROWS, ROWS).store(_widened(there, wide.tiles.dtype))
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(narrow.free.index(source), count=1)
    mbarrier.arrive(wide.full.index(target), count=1)


@gluon.jit
def _next_tile(i, here, end, share, KEYS: gl.constexpr, SPLIT_SIZES: gl.constexpr):
    """Finds the next tile of keys that a CTA loads after the tile at position `here`.

    Args:
        i: index of the current tile's split among the splits of the CTA.
        here: first position of the current tile.
        end: position after the last key of this split.
        share: `Share` of the CTA.

    Returns:
        The values of i, here and end for the next tile. i is `share.mine` if there is none.
    """
    then = split_number(gl.minimum(i + 1, share.mine - 1), share)
    first, last = keys_of(then, share.begin, share.stop, SPLIT_SIZES)
    inside = here + KEYS < end
    return gl.where(inside, i, i + 1), gl.where(inside, here + KEYS, first), gl.where(inside, end, last)


@gluon.jit
def _load_next(
    key_desc, value_desc, pieces, narrow, cache, column, share, issued, i, here, end, slots,
    KEYS: gl.constexpr, BYTES: gl.constexpr, SPLIT_SIZES: gl.constexpr, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Issues the TMA copies of the CTA's next K tile and V tile, if a tile is left.

    Args:
        issued: number of tiles whose copies were already issued.
        i, here, end: results of `_next_tile` for the tile to load.
        slots: result of `slots_at` for the tile to load.

    Returns:
        (issued, i, here, end, slots) for the tile after this one.
    """
    STAGES: gl.constexpr = narrow.tiles.shape[0]
    PIECE: gl.constexpr = piece_of(PAGE_SIZE, KEYS)
    if i < share.mine:
        if here + KEYS > share.first_new:
            mbarrier.wait(narrow.stored.index(0), 0)
        load_tile(key_desc, pieces, narrow, issued, slots, column, 1, STAGES, BYTES)
        load_tile(value_desc, pieces, narrow, issued + 1, slots, column, 1, STAGES, BYTES)
        issued += 2
        i, here, end = _next_tile(i, here, end, share, KEYS, SPLIT_SIZES)
        slots = slots_at(cache, here, KEYS // PIECE, PIECE, PAGE_SIZE)
    return issued, i, here, end, slots


@gluon.jit
def load_and_widen(
    key_desc, value_desc, narrow, wide, cache, column, share, SPLIT_SIZES: gl.constexpr, PAGE_SIZE: gl.constexpr
):  # fmt: skip
    """Runs the loading warps of a CTA for an 8-bit cache. They also convert the tiles to 16 bits.

    They issue TMA copies as far ahead as the ring `narrow` has room: a K tile, then the V tile of the same keys.

    Args:
        narrow: Pipeline of uint8 tiles, which TMA fills.
        wide: Pipeline of 16-bit tiles, which the multiplying warps read.
        column: first column of the KV head in the cache.
    """
    STAGES: gl.constexpr = narrow.tiles.shape[0]
    KEYS: gl.constexpr = wide.tiles.shape[1]
    D: gl.constexpr = wide.tiles.shape[2]
    PIECE: gl.constexpr = piece_of(PAGE_SIZE, KEYS)
    PIECES: gl.constexpr = KEYS // PIECE
    BYTES: gl.constexpr = KEYS * D
    pieces = in_pieces(narrow.tiles, PIECE, True)
    first, end = keys_of(split_number(0, share), share.begin, share.stop, SPLIT_SIZES)
    i, here, last = 0, first, end  # the next tile to load, and the end of its split
    slots = slots_at(cache, here, PIECES, PIECE, PAGE_SIZE)
    issued, step = 0, 0
    for _ahead in range(STAGES // 2 - 1):
        issued, i, here, last, slots = _load_next(
            key_desc, value_desc, pieces, narrow, cache, column, share, issued, i, here, last, slots,
            KEYS, BYTES, SPLIT_SIZES, PAGE_SIZE,
        )  # fmt: skip
    for split in range(share.mine):
        begin, stop = keys_of(split_number(split, share), share.begin, share.stop, SPLIT_SIZES)
        for _key in range(begin, stop, KEYS):
            # the stages of the previous two tiles are free now
            issued, i, here, last, slots = _load_next(
                key_desc, value_desc, pieces, narrow, cache, column, share, issued, i, here, last, slots,
                KEYS, BYTES, SPLIT_SIZES, PAGE_SIZE,
            )  # fmt: skip
            _widen(narrow, wide, step)
            _widen(narrow, wide, step + 1)
            step += 2
