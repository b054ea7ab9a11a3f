"""Packed product for 17 rows of x and more on clusters: weights straight into registers, x through shared memory.

Sums are made of the same terms in the same order as in the narrow kernel, so a row's bits are the same. Each program of
a cluster takes one of the S ways through K, or some in turn, for every P-th tile of R weight rows; partial tiles meet
in `parts`, and while the next tile is multiplied the programs of the cluster finish their shares of the last.

Weights are on their way D steps ahead, over the ends of tiles too. A program's part of x comes XD steps ahead during
the first tile. If it fits it stays in shared memory (HELD), and the tiles behind wait for nothing but weights.
"""

# ruff: noqa: RUF005  (Triton adds tuples, and knows no starred ones)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.packed_cluster import (
    WORDS,
    arrive,
    await_all,
    handed_over,
    mma_layout,
    place_of,
    share_layout,
    stage_layout,
    steps_of,
    taken_over,
)
from fastspec.kernels.packed_held_parts import (
    group_layout,
    keep,
    leave_squares,
    left_factor,
    multiplied,
    runs,
    slots_of,
    squared,
    words_layout,
    zero_sums,
)
from fastspec.kernels.packed_parts import addends, loaded_factor, no_squares, write_tile


@gluon.jit
def _place(step, STEPS: gl.constexpr, SLAB: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """Where in K a step begins that is counted over tiles, and in a tile over passes; for the cluster's first."""
    return step // STEPS % (S // C) * (C * SLAB) + place_of(step % STEPS, STEPS, SLAB, S)


@gluon.jit
def _weights(
    weight_ptr, of, s, tiles, N, step, K: gl.constexpr, STEPS: gl.constexpr, SLAB: gl.constexpr, S: gl.constexpr,
    C: gl.constexpr, R: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """Words of a step of this program, counted over its tiles; nothing is read behind the last, and zeros beyond K."""
    EACH: gl.constexpr = STEPS * (S // C)  # steps of a tile
    group, within = of
    tile = gl.program_id(0) + step // EACH * gl.num_programs(0)
    at = _place(step, STEPS, SLAB, S, C)
    base = weight_ptr + tile.to(gl.int64) * (R * K // 2)
    if not EVEN:
        group = gl.minimum(group, N // 16 - 1 - tile * (R // 16))
    here = base + at * 16 + (group * (8 * K) + within)
    if STEPS * 64 * S != K:
        there = (s * SLAB + at < K // 2) & (step < tiles * EACH)
        return gl.load(here, mask=there, other=0, eviction_policy="evict_first")
    else:
        return gl.load(here, mask=step < tiles * EACH, eviction_policy="evict_first")


@gluon.jit
def _fetched(
    rows, gamma, step, K: gl.constexpr, STEPS: gl.constexpr, SLAB: gl.constexpr, S: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Words of each group of rows of x for a step, and of gamma: none from the last step on, zeros beyond K."""
    x_at, of, valid, s, last = rows
    at = _place(step, STEPS, SLAB, S, C)
    loaded = ()
    for i in gl.static_range(len(valid)):
        loaded = loaded + (_row_words(x_at + at + of[i], valid[i] & (step < last), s, at, K, STEPS, SLAB, S),)
    for i in gl.static_range(len(gamma)):
        loaded = loaded + (_row_words(gamma[i] + at, step < last, s, at, K, STEPS, SLAB, S),)
    return loaded


@gluon.jit
def _row_words(
    here, there, s, at, K: gl.constexpr, STEPS: gl.constexpr, SLAB: gl.constexpr, S: gl.constexpr
):  # fmt: skip
    if STEPS * 64 * S != K:
        return gl.load(here, mask=(s * SLAB + at < K // 2) & there, other=0)
    else:
        return gl.load(here, mask=there)


@gluon.jit
def _filled(
    accs, ws, xs, squares, index, turns, weights, rows, gamma, slots, nil,
    left: gl.constexpr, right: gl.constexpr, SLOTS: gl.constexpr, STEPS: gl.constexpr, K: gl.constexpr,
    SLAB: gl.constexpr, S: gl.constexpr, C: gl.constexpr, R: gl.constexpr, EVEN: gl.constexpr, WGMMA: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """One pass of a tile, and x on the way: its sums, what is in flight, and sums of squares if there are any.

    Steps of x are kept XD at a time: the fence before warp groups read them waits for all that is in flight.
    """
    D: gl.constexpr = len(ws)
    XD: gl.constexpr = len(xs)
    for turn in range(turns):
        for i in gl.static_range(D):
            step = index * STEPS + turn * D + i
            if i % XD == 0:
                for j in gl.static_range(XD):
                    if len(squares) > 0:
                        squares = squared(squares, xs[j], (i + j) % (SLAB // WORDS), DTYPE)
                    keep(slots, (step + j) % SLOTS, xs[j], WGMMA, DTYPE)
                if WGMMA:
                    fence_async_shared()
                    gl.thread_barrier()
                for j in gl.static_range(XD):
                    xs = xs[1:] + (_fetched(rows, gamma, step + (XD + j), K, STEPS, SLAB, S, C),)
            accs = multiplied(accs, ws[0], slots, step % SLOTS, nil, left, right, WGMMA, DTYPE)
            ws = ws[1:] + (_weights(*weights, step + D, K, STEPS, SLAB, S, C, R, EVEN),)
    return accs, ws, xs, squares


@gluon.jit
def _passed(
    accs, ws, index, turns, weights, slots, nil,
    left: gl.constexpr, right: gl.constexpr, STEPS: gl.constexpr, K: gl.constexpr,
    SLAB: gl.constexpr, S: gl.constexpr, C: gl.constexpr, R: gl.constexpr, EVEN: gl.constexpr, WGMMA: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """One tile with x in its place: its sums, and the weights in flight."""
    D: gl.constexpr = len(ws)
    for turn in range(turns):
        for i in gl.static_range(D):
            accs = multiplied(accs, ws[0], slots, turn * D + i, nil, left, right, WGMMA, DTYPE)
            step = index * STEPS + turn * D + (i + D)
            ws = ws[1:] + (_weights(*weights, step, K, STEPS, SLAB, S, C, R, EVEN),)
    return accs, ws


@gluon.jit
def _left_to_all(accs, parts, number, M, S: gl.constexpr, C: gl.constexpr, R: gl.constexpr):
    """Stores this program's sums of a pass for the cluster."""
    apart = ()
    for i in gl.static_range(len(accs)):
        apart = apart + (gl.reshape(accs[i], [C, R, accs[i].shape[len(accs[i].shape) - 1]]),)
    handed_over(apart, parts, number * C, M, S)


@gluon.jit
def _finished(
    index, parts, scale_ptr, bias_ptr, residual_ptr, out_ptr, first_row, M, N, eps,
    K: gl.constexpr, S: gl.constexpr, C: gl.constexpr, R: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
    WARPS: gl.constexpr, NORM: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """This program's share of the tile that the cluster's programs have handed over."""
    SIZE: gl.constexpr = GROUPS * S * GROUP * R
    tile = gl.program_id(0) + index * gl.num_programs(0)
    base = parts + index % 2 * SIZE
    like = gl.full([R // 16, 2, 8, GROUP], 0.0, gl.float32, layout=share_layout(C, R, GROUP, WARPS))
    for i in gl.static_range(GROUPS):
        row = first_row + i * GROUP
        loaded = addends(like, tile, row, bias_ptr, residual_ptr, M, N, GATED)
        if NORM:
            factor = left_factor(parts + (2 * SIZE + i * GROUP), like, eps, K, S, GROUPS * GROUP)
        if scale_ptr is not None:
            factor = loaded_factor(scale_ptr, row, M, like)
        total = taken_over(like, base + i * (S * GROUP * R), M - row, S)
        if NORM or scale_ptr is not None:
            total = total * factor
        write_tile(
            *(total, loaded, tile, row, out_ptr, M, N, GATED),
            *(bias_ptr is not None, residual_ptr is not None),
        )


@gluon.jit(do_not_specialize=["M", "count", "turns"])
def held_kernel(
    x_ptr,  # int32 words [M, K / 2]
    weight_ptr,  # int32 words [N / 16, K / 32, 16, 16]
    gamma_ptr,  # int32 words [K / 2] or None
    scale_ptr,  # fp32 [M] or None: factors of the rows of x, where gamma is in them already
    bias_ptr,  # [N] or None
    residual_ptr,  # [M, width] or None
    out_ptr,  # [M, width]
    parts_ptr,  # fp32 [blocks of rows, clusters, 2 GROUPS R + GROUPS, S, GROUP]: twice a tile's sums, and squares
    M,
    N,
    eps,
    count,  # tiles of weight rows
    turns,  # of D steps in a pass: a compiler that knew would unroll them
    K: gl.constexpr,
    S: gl.constexpr,
    C: gl.constexpr,  # programs of a cluster; where there are fewer than ways, they take those in turns, without a norm
    KT: gl.constexpr,
    R: gl.constexpr,
    GROUP: gl.constexpr,  # rows of x that are multiplied together
    GROUPS: gl.constexpr,
    D: gl.constexpr,  # steps of weights in flight
    XD: gl.constexpr,  # steps of x in flight, which divide D and are kept together: a fence is dear
    SLOTS: gl.constexpr,  # steps of x in shared memory
    HELD: gl.constexpr,  # SLOTS are all that there are
    WARPS: gl.constexpr,
    WGMMA: gl.constexpr,
    EVEN: gl.constexpr,  # N is a multiple of R
    ONE: gl.constexpr,  # no cluster has more than one tile, and no program more than one pass
    GATED: gl.constexpr,
    PDL: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """One cluster of C programs: every P-th tile of R weight rows by GROUPS * GROUP rows of x."""
    mma: gl.constexpr = group_layout(C, GROUP, WARPS) if WGMMA else mma_layout(C, WARPS)
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2 if WGMMA else 8)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 8)
    w: gl.constexpr = words_layout(C, R, WARPS) if WGMMA else gl.DotOperandLayout(0, mma, 4)
    stage: gl.constexpr = stage_layout(C, GROUP, WORDS, WARPS)
    SLAB: gl.constexpr = KT // 2  # words
    STEPS: gl.constexpr = steps_of(K, S, KT, D)
    SIZE: gl.constexpr = GROUPS * S * GROUP * R
    PASSES: gl.constexpr = S // C

    first_row = gl.program_id(1) * (GROUP * GROUPS)
    s = gl.expand_dims(gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(1, gl.SliceLayout(2, w))), 1), 2)
    r = gl.expand_dims(gl.expand_dims(gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, w))), 0), 2)
    k = gl.expand_dims(gl.expand_dims(gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, w))), 0), 1)
    w_of = (r // 16, s * (SLAB * 16) + k // 16 * 256 + r % 16 * 16 + k % 16)
    w_s = s
    tiles = 1 if ONE else (count - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)

    s = gl.expand_dims(gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(1, gl.SliceLayout(2, stage))), 1), 2)
    m = gl.expand_dims(gl.expand_dims(gl.arange(0, GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(2, stage))), 0), 2)
    k = gl.expand_dims(gl.expand_dims(gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, stage))), 0), 1)
    x_at = x_ptr + first_row.to(gl.int64) * (K // 2)
    x_of, valid = (), ()
    for i in gl.static_range(GROUPS):
        x_of = x_of + (m * (K // 2) + (i * (GROUP * K // 2) + s * SLAB + k),)
        valid = valid + (m < M - first_row - i * GROUP,)
    x_steps = STEPS if HELD else tiles * (PASSES * STEPS)
    slots = slots_of(C, GROUP, GROUPS, SLOTS, WGMMA, DTYPE)
    block = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
    parts = parts_ptr + block.to(gl.int64) * (2 * SIZE + S * GROUP * GROUPS)
    weights = (weight_ptr, w_of, w_s, tiles, N)
    rows = (x_at, x_of, valid, s, x_steps)
    gamma = ()
    if gamma_ptr is not None:
        gamma = gamma + (gamma_ptr + s * SLAB + k,)
    nil = M >> 31

    ws = ()
    for i in gl.static_range(D):
        ws = ws + (_weights(*weights, i, K, STEPS, SLAB, S, C, R, EVEN),)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    xs = ()
    for i in gl.static_range(XD):
        xs = xs + (_fetched(rows, gamma, i, K, STEPS, SLAB, S, C),)
    zeros = zero_sums(C, R, GROUP, GROUPS, mma, WGMMA)
    squares = ()
    if gamma_ptr is not None:
        for _half in gl.static_range(SLAB // WORDS):
            for i in gl.static_range(GROUPS):
                squares = squares + (no_squares(runs(xs[0][i])),)
    accs, ws, xs, squares = _filled(
        *(zeros, ws, xs, squares, 0, turns, weights, rows, gamma, slots, nil),
        *(left, right, SLOTS, STEPS, K, SLAB, S, C, R, EVEN, WGMMA, DTYPE),
    )
    if gamma_ptr is not None:
        leave_squares(squares, parts + 2 * SIZE, S, GROUP, GROUPS, WARPS)
    _left_to_all(accs, parts, 0, M - first_row, S, C, R)
    if not ONE:
        for number in range(1, tiles * PASSES):
            index = number // PASSES
            if number % PASSES == 0:
                arrive()
            if HELD:
                accs, ws = _passed(
                    *(zeros, ws, number, turns, weights, slots, nil),
                    *(left, right, STEPS, K, SLAB, S, C, R, EVEN, WGMMA, DTYPE),
                )
            else:
                accs, ws, xs, _ = _filled(
                    *(zeros, ws, xs, (), number, turns, weights, rows, gamma, slots, nil),
                    *(left, right, SLOTS, STEPS, K, SLAB, S, C, R, EVEN, WGMMA, DTYPE),
                )
            if number % PASSES == 0:
                await_all()
                _finished(
                    *(index - 1, parts, scale_ptr, bias_ptr, residual_ptr, out_ptr, first_row, M, N, eps),
                    *(K, S, C, R, GROUP, GROUPS, WARPS, gamma_ptr is not None, GATED),
                )
            _left_to_all(accs, parts + index % 2 * SIZE, number % PASSES, M - first_row, S, C, R)
    arrive()
    await_all()
    _finished(
        *(tiles - 1, parts, scale_ptr, bias_ptr, residual_ptr, out_ptr, first_row, M, N, eps),
        *(K, S, C, R, GROUP, GROUPS, WARPS, gamma_ptr is not None, GATED),
    )
