"""Portable attention kernel of decode passes, for every GPU, dtype and head_dim. dispatch.py says when it is used.

While the preceding matrix product runs, the kernel prefetches K, V, norm weights and rotary angles into L2. A prefetch
changes no value: if it uses stale positions, it is only useless.

A split is a range of a row's keys. The partial results of a row's splits are combined in ascending order and in two
levels. The CTA that finishes last combines:

    splits   0 .. FAN - 1   FAN .. 2 FAN - 1   ...
    groups   0              1                  ...     -> output
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.attention.prefill import pages_of, sink_of, slots_of, tanh
from fastspec.kernels.attention.rope import NEW_ROWS, append, apply_rope, cache_of_row, columns, new_places

PEEK_KEYS = tl.constexpr(256)  # largest number of keys that a CTA prefetches


@triton.jit
def _prefetch(pointers, wanted):
    """Prefetches the 128-byte cache lines at those pointers into L2 for which `wanted` is True."""
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
    """Prefetches the first PEEK_KEYS keys and values of this CTA's split into L2.

    The split begins at position `start` and has `split_keys` keys. The positions and the block table may be stale,
    because this runs before the kernel waits for the preceding kernel.
    """
    newest = tl.load(position_ptr + (batch + 1) * num_queries - 1, cache_modifier=".cg")
    at = start + tl.arange(0, PEEK_KEYS)
    wanted = (at <= newest) & (at < start + split_keys)
    if WINDOW > 0:
        wanted = wanted & (at > newest - num_queries - WINDOW)
    entry = tl.minimum(at // PAGE_SIZE, cache.table_width - 1)
    page = tl.load(cache.block_table + batch * cache.table_stride + entry, mask=wanted, other=0, cache_modifier=".cg")
    page = tl.minimum(tl.maximum(page, 0), cache.num_pages - 1)
    slot = ((page * PAGE_SIZE + at % PAGE_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
    LINE: tl.constexpr = 1024 // cache.k.dtype.element_ty.primitive_bitwidth  # number of elements in 128 bytes
    for column in tl.static_range(0, HEAD_DIM, LINE):
        _prefetch(cache.k + slot + column, wanted)
        _prefetch(cache.v + slot + column, wanted)


@triton.jit
def warm(tokens, position, valid, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Prefetches the weights of the head norms, and the rotary angles of positions [R], into L2."""
    line = tl.arange(0, BLOCK_D // 32) * 32  # 128 bytes of fp32; for 16-bit weights every line is named twice
    if tokens.q_norm is not None:
        _prefetch(tokens.q_norm + line, line < HEAD_DIM)
        _prefetch(tokens.k_norm + line, line < HEAD_DIM)
    if tokens.cos is not None:
        HALF: tl.constexpr = HEAD_DIM // 2
        angle = tl.minimum(tl.maximum(position, 0), tokens.num_angles - 1)[:, None] * HALF + line[None, :]
        wanted = valid[:, None] & (line < HALF)[None, :]
        _prefetch(tokens.cos + angle, wanted)
        _prefetch(tokens.sin + angle, wanted)


FAN = tl.constexpr(16)  # number of splits in a group


@triton.jit
def averaged(out, top, total):
    """Returns the partial result (mean, weight) of an online softmax: out / total, and top + log2(total).

    mean [R, BLOCK_D] is the weighted average of values. weight [R] is the log-sum-exp of scores in base 2. Without keys
    they are 0 and -inf.

    Args:
        out: sum of values with weights 2^(score - top), [R, BLOCK_D].
        top: largest score [R].
        total: sum of the weights [R].
    """
    return out / tl.where(total == 0.0, 1.0, total)[:, None], top + tl.log2(total)


@triton.jit
def store_partial(mean_ptr, weight_ptr, at, valid, mean, weight, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Stores partial results (mean [R, BLOCK_D], weight [R]) of query rows at indices `at` [R]; see `averaged`."""
    dim, inside = columns(HEAD_DIM, BLOCK_D)
    tl.store(weight_ptr + at, weight, mask=valid)
    tl.store(mean_ptr + at[:, None] * HEAD_DIM + dim[None, :], mean, mask=valid[:, None] & inside[None, :])


@triton.jit
def store_output(
    out_ptr,
    batch,
    kv_head,
    row,
    num_queries,
    mean,
    weight,  # log-sum-exp of the scores of all keys, in base 2
    scoring,  # Scoring
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Stores the attention output of query rows `row` [R] of a KV head.

    It computes the output from the combined result (mean, weight) of all keys: it adds the sinks, and multiplies by the
    scale of V.
    """
    dim, inside = columns(HEAD_DIM, BLOCK_D)
    head = (batch * num_queries + row // GROUP) * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
    mask = (row < num_queries * GROUP)[:, None] & inside[None, :]
    if scoring.sinks is not None:
        sink = sink_of(scoring, kv_head * GROUP + row % GROUP)
        mean = mean * (1.0 / (1.0 + tl.exp2(sink - weight)))[:, None]
    if scoring.value_scale is not None:
        mean = mean * scoring.value_scale
    tl.store(out_ptr + head[:, None] * HEAD_DIM + dim[None, :], mean.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _merged(mean_ptr, weight_ptr, first, last, rows, row, valid, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Combines the stored partial results with indices `first` .. `last` of query rows `row` [R], in ascending order.

    Returns their (mean, weight), see `averaged`. Loads bypass L1, because it may hold old contents of this memory.
    """
    R: tl.constexpr = row.shape[0]
    dim, inside = columns(HEAD_DIM, BLOCK_D)
    top = tl.full([R], -float("inf"), tl.float32)
    total = tl.zeros([R], tl.float32)
    out = tl.zeros([R, BLOCK_D], tl.float32)
    part = tl.arange(0, FAN)
    for begin in tl.range(first // FAN * FAN, last + 1, FAN, disable_licm=True):
        number = begin + part[None, :]  # axis 1: one thread has all its elements
        there = valid[:, None] & (number >= first) & (number <= last)
        at = number * rows + row[:, None]  # [R, FAN]
        mask = there[:, :, None] & inside[None, None, :]
        means = tl.load(
            mean_ptr + (at[:, :, None] * HEAD_DIM + dim[None, None, :]), mask=mask, other=0.0, cache_modifier=".cg"
        )
        weights = tl.load(weight_ptr + at, mask=there, other=-float("inf"), cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(weights, axis=1))
        shift = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(weights - shift[:, None])
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(weights, axis=1)
        out = out * fade[:, None] + tl.sum(means * weights[:, :, None], axis=1)
        top = new_top
    return averaged(out, top, total)


@triton.jit
def combine(
    mean_ptr,
    weight_ptr,
    source,
    begin,
    end,
    target,
    final,
    out_ptr,
    batch,
    kv_head,
    row_start,
    row_stop,
    rows,
    num_queries,
    scoring,  # Scoring
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    R: tl.constexpr,
):
    """Combines the partial results with indices source + begin .. source + end of query rows row_start .. row_stop - 1.

    If `final` is True, it writes the attention output of these rows. Otherwise it stores the combined result as the
    partial result with index `target`. R rows are processed at a time.
    """
    source_mean, source_weight = mean_ptr + source * rows * HEAD_DIM, weight_ptr + source * rows
    for first_row in tl.range(row_start, row_stop, R, disable_licm=True):
        row = first_row + tl.arange(0, R)
        valid = row < row_stop
        mean, weight = _merged(source_mean, source_weight, begin, end, rows, row, valid, HEAD_DIM, BLOCK_D)
        if final:
            store_output(
                out_ptr, batch, kv_head, row, num_queries, mean, weight, scoring, KV_HEADS, GROUP, HEAD_DIM, BLOCK_D
            )
        else:
            store_partial(mean_ptr, weight_ptr, target * rows + row, valid, mean, weight, HEAD_DIM, BLOCK_D)


@triton.jit
def weighed(scores, v, at, position, top, totals, out, scoring, WINDOW: tl.constexpr):
    """Adds a block of keys at positions `at` [BLOCK_N] to the state of an online softmax.

    Returns the new state (top, totals, out).

    Args:
        scores: scores of query rows with these keys [ROWS, BLOCK_N], before softcap and mask.
        v: values of the keys [BLOCK_N, BLOCK_D].
        position: position of each query row [ROWS].
        top: largest score until now [ROWS].
        totals: sums of weights 2^(score - top) over earlier blocks [ROWS, BLOCK_N].
        out: sum of values with these weights [ROWS, BLOCK_D].
        scoring: `Scoring`.
    """
    if scoring.cap is not None:
        scores = scoring.cap * tanh(scores)
    seen = at[None, :] <= position[:, None]
    if WINDOW > 0:
        seen = seen & (at[None, :] > position[:, None] - WINDOW)
    scores = tl.where(seen, scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    # a row without a key so far has top = -inf; with shift 0 its weights are exp2(-inf) = 0, not NaN
    shift = tl.where(new_top == -float("inf"), 0.0, new_top)
    weights = tl.exp2(scores - shift[:, None])
    keep = tl.exp2(top - shift)[:, None]
    return new_top, totals * keep + weights, tl.dot(weights.to(v.dtype), v, out * keep, input_precision="ieee")


@triton.jit
def attend_split(
    q1,
    q2,
    cache,  # PagedCache with one row
    position,
    kv_head,
    begin,
    stop,
    scoring,  # Scoring
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Computes the attention of query rows over the keys at positions begin .. stop - 1, by an online softmax.

    Returns the partial result (mean, weight), see `averaged`. `q1` and `q2` [ROWS, BLOCK_D / 2] are both halves of the
    query heads. `position` [ROWS] is the position of each query row.
    """
    dim, inside = columns(HEAD_DIM, BLOCK_D)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    # summed over keys after the loop, which saves a reduction over threads in the loop
    totals = tl.zeros([ROWS, BLOCK_N], tl.float32)
    out = tl.zeros([ROWS, BLOCK_D], tl.float32)
    HALVES: tl.constexpr = (
        BLOCK_D > 128 and q1.dtype.primitive_bitwidth == 32
    )  # without tensor cores a product keeps whole rows in registers
    if not HALVES:
        q = tl.reshape(tl.permute(tl.join(q1, q2), (0, 2, 1)), ROWS, BLOCK_D)
    for first in tl.range(begin, stop, BLOCK_N, num_stages=STAGES):
        page = pages_of(cache, first, PAGE_SIZE, BLOCK_N)
        place, row_slot = slots_of(page, first, kv_head, KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_N)
        slot = row_slot + dim[None, :]
        at = first + tl.arange(0, BLOCK_N)
        # slots of later positions may hold NaN, so they must not enter a product
        mask = (at < stop)[:, None] & inside[None, :]
        if HALVES:
            column = tl.arange(0, BLOCK_D // 2)
            half_mask = (at < stop)[:, None] & (column < HEAD_DIM // 2)[None, :]
            half = cache.k + place + (row_slot + column[None, :])
            scores = tl.dot(q1, tl.trans(tl.load(half, mask=half_mask, other=0.0).to(q1.dtype)), input_precision="ieee")
            k2 = tl.load(half + HEAD_DIM // 2, mask=half_mask, other=0.0).to(q1.dtype)
            scores = tl.dot(q2, tl.trans(k2), scores, input_precision="ieee") * scoring.factor
        else:
            k = tl.load(cache.k + place + slot, mask=mask, other=0.0).to(q.dtype)  # [BLOCK_N, BLOCK_D]
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scoring.factor  # [ROWS, BLOCK_N]
        v = tl.load(cache.v + place + slot, mask=mask, other=0.0).to(q1.dtype)
        top, totals, out = weighed(scores, v, at, position, top, totals, out, scoring, WINDOW)
    return averaged(out, top, tl.sum(totals, axis=1))


@triton.jit(do_not_specialize=["split_keys", "num_queries", "num_pairs"])
def _decode_kernel(
    tokens,  # NewTokens
    cache,  # PagedCache
    out_ptr,  # [B, Q, H * D]
    work,  # WorkArea; partials of splits, then of groups of FAN splits; counters [B * Hkv * tiles, 1 + groups]
    split_keys,
    num_queries,
    num_pairs,  # B * Hkv
    scoring,  # Scoring
    WINDOW: tl.constexpr,  # 0: no window
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,  # True: positions, write mask and table that were read before the wait are used
    PDL: tl.constexpr,
):
    split = tl.program_id(1)
    rows = num_queries * GROUP  # rows of one KV head
    tiles = tl.cdiv(rows, ROWS)
    tile, pair = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    batch, kv_head = pair // KV_HEADS, pair % KV_HEADS
    start = split * split_keys
    row_cache = cache_of_row(cache, batch)
    if PDL:
        gdc_launch_dependents()
        peek(
            cache, tokens.positions, batch, kv_head, start, num_queries, split_keys,
            WINDOW, KV_HEADS, HEAD_DIM, PAGE_SIZE,
        )  # fmt: skip
        if not EARLY:
            gdc_wait()

    row = tile * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    at = batch * num_queries + row // GROUP
    # -1: a padding row sees no key
    position = tl.load(tokens.positions + at, mask=valid, other=-1, cache_modifier=".cg")
    # first and last split in which this tile has keys; positions after the last split of the launch are clamped to it
    newest = tl.minimum(tl.max(position, axis=0), tl.num_programs(1) * split_keys - 1).to(tl.int32)
    oldest = 0
    if WINDOW > 0:
        oldest = tl.min(tl.where(valid, position, newest), axis=0) - WINDOW + 1
        oldest = tl.minimum(tl.maximum(oldest, 0), newest).to(tl.int32)
    first, last = oldest // split_keys, newest // split_keys
    if (split < first) | (split > last):
        return  # without `gdc_wait`, because other CTAs of the tile call it
    begin, stop = tl.maximum(start, oldest // BLOCK_N * BLOCK_N), tl.minimum(start + split_keys, newest + 1)
    places = new_places(tokens, row_cache, batch, kv_head, 0, start, stop, num_queries, KV_HEADS, HEAD_DIM, PAGE_SIZE)
    if EARLY and PDL:
        warm(tokens, position, valid, HEAD_DIM, BLOCK_D)
        gdc_wait()
    column = tl.arange(0, BLOCK_D // 2)
    mask = valid[:, None] & (column < HEAD_DIM // 2)[None, :]
    head = (at * ((GROUP + 2) * KV_HEADS) + kv_head * GROUP + row % GROUP) * HEAD_DIM
    source = tokens.qkv + head[:, None] + column[None, :]
    q1 = tl.load(source, mask=mask, other=0.0)
    q2 = tl.load(source + HEAD_DIM // 2, mask=mask, other=0.0)
    q1, q2 = apply_rope(q1, q2, position, valid, tokens, tokens.q_norm, HEAD_DIM, BLOCK_D)
    append(tokens, row_cache, kv_head, 0, num_queries, places, KV_HEADS, GROUP, HEAD_DIM, BLOCK_D)
    for first_row in range(NEW_ROWS, num_queries, NEW_ROWS):  # the first rows are handled above, without branches
        places = new_places(
            tokens, row_cache, batch, kv_head, first_row, start, stop, num_queries, KV_HEADS, HEAD_DIM, PAGE_SIZE
        )
        append(tokens, row_cache, kv_head, first_row, num_queries, places, KV_HEADS, GROUP, HEAD_DIM, BLOCK_D)
    tl.debug_barrier()  # the code below reads stores of other threads
    mean, weight = attend_split(
        q1, q2, row_cache, position, kv_head, begin, stop, scoring,
        WINDOW, KV_HEADS, HEAD_DIM, BLOCK_D, PAGE_SIZE, ROWS, BLOCK_N, STAGES,
    )  # fmt: skip

    if first == last:
        store_output(
            out_ptr, batch, kv_head, row, num_queries, mean, weight, scoring, KV_HEADS, GROUP, HEAD_DIM, BLOCK_D
        )
        return
    splits = tl.num_programs(1)
    groups = tl.cdiv(splits, FAN)
    nodes = num_pairs.to(tl.int64) * (splits + groups) * rows
    base = pair * (splits + groups) * rows
    mean_ptr, weight_ptr = work.partials + base * HEAD_DIM, work.partials + (nodes * HEAD_DIM + base)
    count_ptr = work.counters + tl.program_id(0) * (1 + groups)
    store_partial(mean_ptr, weight_ptr, split * rows + row, valid, mean, weight, HEAD_DIM, BLOCK_D)
    group = split // FAN
    begin, end = tl.maximum(first, group * FAN), tl.minimum(last, group * FAN + FAN - 1)
    tl.debug_barrier()  # one thread increments the counter for all
    if tl.atomic_add(count_ptr + 1 + group, 1, sem="acq_rel") != end - begin:
        return
    tl.store(count_ptr + 1 + group, 0)
    tl.debug_barrier()
    only = first // FAN == last // FAN
    AT_ONCE: tl.constexpr = min(ROWS, 512 // BLOCK_D)  # number of rows whose FAN partial results fit into registers
    row_start, row_stop = tile * ROWS, tl.minimum(rows, tile * ROWS + ROWS)
    combine(
        mean_ptr, weight_ptr, 0, begin, end, splits + group, only, out_ptr, batch, kv_head,
        row_start, row_stop, rows, num_queries, scoring, KV_HEADS, GROUP, HEAD_DIM, BLOCK_D, AT_ONCE,
    )  # fmt: skip
    if only:
        return
    tl.debug_barrier()
    if tl.atomic_add(count_ptr, 1, sem="acq_rel") != last // FAN - first // FAN:
        return
    tl.store(count_ptr, 0)
    tl.debug_barrier()
    combine(
        mean_ptr, weight_ptr, splits, first // FAN, last // FAN, 0, True, out_ptr, batch, kv_head,
        row_start, row_stop, rows, num_queries, scoring, KV_HEADS, GROUP, HEAD_DIM, BLOCK_D, AT_ONCE,
    )  # fmt: skip
