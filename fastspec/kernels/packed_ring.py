"""Packed product for 17 rows of x and more on clusters, weights through a ring in shared memory.

What is added up, and in which order, is as in the held kernel, and so are a row's bits. The difference is the way of
the weights: asynchronous copies of D - 1 steps are on their way and belong to no register, so that neither the
registers nor the L1 cache bound how much is in flight, nothing waits for them but the step that multiplies them. A
lane multiplies the bytes that it copied.
"""

# ruff: noqa: RUF005  (Triton adds tuples, and knows no starred ones)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.packed_cluster import WORDS, arrive, await_all, cluster_bases, place_of, stage_layout, steps_of
from fastspec.kernels.packed_held import fetched, finished, laid_down
from fastspec.kernels.packed_held_parts import (
    begun,
    group_layout,
    keep,
    leave_squares,
    runs,
    slots_of,
    squared,
    words_layout,
    zero_sums,
)
from fastspec.kernels.packed_parts import no_squares


@gluon.constexpr_function
def _ring_layout(S, R):
    """Weights [S, R, WORDS] lie as they do in memory: what a warp loads at once is one piece of 512 bytes."""
    bits = [[0, 0, 1 << bit] for bit in range(4)] + [[0, 1 << bit, 0] for bit in range(4)]
    bits += [[0, 0, 16]] + [[0, 1 << bit, 0] for bit in range(4, R.bit_length() - 1)]
    return gl.SharedLinearLayout(bits, cluster_bases(S, 3))


@gluon.jit
def _copied(
    ring, weights, step,
    D: gl.constexpr, K: gl.constexpr, STEPS: gl.constexpr, SLAB: gl.constexpr, S: gl.constexpr, R: gl.constexpr,
    EVEN: gl.constexpr,
):  # fmt: skip
    """Sends for the weights of a step, counted over this program's tiles: zeros come behind the last and beyond K."""
    weight_ptr, group, within, s, tiles, N = weights
    tile = gl.program_id(0) + step // STEPS * gl.num_programs(0)
    at = place_of(step % STEPS, STEPS, SLAB, S)
    if not EVEN:
        group = gl.minimum(group, N // 16 - 1 - tile * (R // 16))
    here = weight_ptr + tile.to(gl.int64) * (R * K // 2) + at * 16 + (group * (8 * K) + within)
    there = (s * SLAB + at < K // 2) & (step < tiles * STEPS)
    async_copy.async_copy_global_to_shared(ring.index(step % D), here, mask=there)
    async_copy.commit_group()


@gluon.jit
def _arrived(
    ring, weights, step,
    D: gl.constexpr, K: gl.constexpr, STEPS: gl.constexpr, SLAB: gl.constexpr, S: gl.constexpr, R: gl.constexpr,
    EVEN: gl.constexpr, w: gl.constexpr,
):  # fmt: skip
    """The weights of a step, behind the copies of a later one into the place of the one before it."""
    # this waits for all warps: behind it the weights are there, and those before them are read
    async_copy.wait_group(D - 2)
    _copied(ring, weights, step + (D - 1), D, K, STEPS, SLAB, S, R, EVEN)
    return ring.index(step % D).load(w)


@gluon.jit
def _multiplied(
    accs, words, ring, weights, slots, step, slot, nil,
    D: gl.constexpr, K: gl.constexpr, STEPS: gl.constexpr, SLAB: gl.constexpr, S: gl.constexpr, R: gl.constexpr,
    EVEN: gl.constexpr, w: gl.constexpr, left: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """A step's product, and meanwhile the weights of the next one."""
    begun_ones = begun(accs, words, slots, slot, nil, left, DTYPE)
    words = _arrived(ring, weights, step + 1, D, K, STEPS, SLAB, S, R, EVEN, w)
    return (warpgroup_mma_wait(0, deps=begun_ones)[0],), words


@gluon.jit
def _filled(
    accs, words, xs, squares, ring, index, turns, weights, rows, gamma, slots, nil,
    D: gl.constexpr, SLOTS: gl.constexpr, K: gl.constexpr, STEPS: gl.constexpr, SLAB: gl.constexpr, S: gl.constexpr,
    R: gl.constexpr, EVEN: gl.constexpr, w: gl.constexpr, left: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """One tile, and x on the way: its sums, the next weights, x in flight, and sums of squares if there are any."""
    XD: gl.constexpr = len(xs)
    for turn in range(turns):
        first = index * STEPS + turn * XD
        for j in gl.static_range(XD):
            if len(squares) > 0:
                squares = squared(squares, xs[j], j % (SLAB // WORDS), DTYPE)
            keep(slots, (first + j) % SLOTS, xs[j], True, DTYPE)
        fence_async_shared()
        gl.thread_barrier()
        for j in gl.static_range(XD):
            xs = xs[1:] + (fetched(rows, gamma, first + (XD + j), K, STEPS, SLAB, S),)
        for j in gl.static_range(XD):
            accs, words = _multiplied(
                *(accs, words, ring, weights, slots, first + j, (first + j) % SLOTS, nil),
                *(D, K, STEPS, SLAB, S, R, EVEN, w, left, DTYPE),
            )
    return accs, words, xs, squares


@gluon.jit(do_not_specialize=["M", "count", "turns"])
def ring_kernel(
    x_ptr,  # int32 words [M, K / 2]
    weight_ptr,  # int32 words [N / 16, K / 32, 16, 16]
    gamma_ptr,  # int32 words [K / 2] or None
    scale_ptr,  # fp32 [M] or None: factors of the rows of x, where gamma is in them already
    bias_ptr,  # [N] or None
    residual_ptr,  # [M, width] or None
    out_ptr,  # [M, width]
    parts_ptr,  # fp32 [blocks of rows, clusters, 2 R + 1, S, GROUP]: twice a tile's sums, and squares
    M,
    N,
    eps,
    count,  # tiles of weight rows
    turns,  # of XD steps in a tile: a compiler that knew would unroll them
    K: gl.constexpr,
    S: gl.constexpr,
    KT: gl.constexpr,
    R: gl.constexpr,
    GROUP: gl.constexpr,  # rows of x
    D: gl.constexpr,  # steps of weights in shared memory, one of them in use
    XD: gl.constexpr,  # steps of x in flight, which are kept together
    SLOTS: gl.constexpr,  # steps of x in shared memory: twice XD, for other warps still read what came last
    HELD: gl.constexpr,  # SLOTS are all that there are
    WARPS: gl.constexpr,
    EVEN: gl.constexpr,  # N is a multiple of R
    GATED: gl.constexpr,
    PDL: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """One cluster of S programs: every P-th tile of R weight rows by GROUP rows of x."""
    mma: gl.constexpr = group_layout(S, GROUP, WARPS)
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    w: gl.constexpr = words_layout(S, R, WARPS)
    stage: gl.constexpr = stage_layout(S, GROUP, WORDS, WARPS)
    SLAB: gl.constexpr = KT // 2  # words
    STEPS: gl.constexpr = steps_of(K, S, KT, XD)
    SIZE: gl.constexpr = S * GROUP * R
    gl.static_assert(HELD or SLOTS >= 2 * XD)

    first_row = gl.program_id(1) * GROUP
    s = gl.expand_dims(gl.expand_dims(gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, w))), 1), 2)
    r = gl.expand_dims(gl.expand_dims(gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, w))), 0), 2)
    k = gl.expand_dims(gl.expand_dims(gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, w))), 0), 1)
    tiles = (count - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
    within = s * (SLAB * 16) + k // 16 * 256 + r % 16 * 16 + k % 16
    weights = (weight_ptr, r // 16, within, s, tiles, N)
    ring = gl.allocate_shared_memory(gl.int32, [D, S, R, WORDS], _ring_layout(S, R))
    for i in gl.static_range(D - 1):
        _copied(ring, weights, i, D, K, STEPS, SLAB, S, R, EVEN)

    s = gl.expand_dims(gl.expand_dims(gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, stage))), 1), 2)
    m = gl.expand_dims(gl.expand_dims(gl.arange(0, GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(2, stage))), 0), 2)
    k = gl.expand_dims(gl.expand_dims(gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, stage))), 0), 1)
    x_at = x_ptr + first_row.to(gl.int64) * (K // 2)
    x_of = (m * (K // 2) + (s * SLAB + k),)
    rows = (x_at, x_of, (m < M - first_row,), s, STEPS if HELD else tiles * STEPS)
    slots = slots_of(S, GROUP, 1, SLOTS, True, DTYPE)
    block = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
    parts = parts_ptr + block.to(gl.int64) * (2 * SIZE + S * GROUP)
    gamma = ()
    if gamma_ptr is not None:
        gamma = gamma + (gamma_ptr + s * SLAB + k,)
    nil = M >> 31

    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    xs = ()
    for i in gl.static_range(XD):
        xs = xs + (fetched(rows, gamma, i, K, STEPS, SLAB, S),)
    zeros = zero_sums(S, R, GROUP, 1, mma, True)
    squares = ()
    if gamma_ptr is not None:
        for _half in gl.static_range(SLAB // WORDS):
            squares = squares + (no_squares(runs(xs[0][0])),)
    words = _arrived(ring, weights, 0, D, K, STEPS, SLAB, S, R, EVEN, w)
    accs, words, xs, squares = _filled(
        *(zeros, words, xs, squares, ring, 0, turns, weights, rows, gamma, slots, nil),
        *(D, SLOTS, K, STEPS, SLAB, S, R, EVEN, w, left, DTYPE),
    )
    if gamma_ptr is not None:
        leave_squares(squares, parts + 2 * SIZE, S, GROUP, 1, WARPS)
    laid_down(accs, parts, M - first_row, S, R)
    for index in range(1, tiles):
        accs = zeros
        if HELD:
            # a program that arrives waits until all that it stored is seen: later it has been
            for step in range(turns * XD // 2):
                accs, words = _multiplied(
                    *(accs, words, ring, weights, slots, index * STEPS + step, step, nil),
                    *(D, K, STEPS, SLAB, S, R, EVEN, w, left, DTYPE),
                )
            arrive()
            for step in range(turns * XD // 2, turns * XD):
                accs, words = _multiplied(
                    *(accs, words, ring, weights, slots, index * STEPS + step, step, nil),
                    *(D, K, STEPS, SLAB, S, R, EVEN, w, left, DTYPE),
                )
        else:
            arrive()
            accs, words, xs, _ = _filled(
                *(accs, words, xs, (), ring, index, turns, weights, rows, gamma, slots, nil),
                *(D, SLOTS, K, STEPS, SLAB, S, R, EVEN, w, left, DTYPE),
            )
        await_all()
        finished(
            *(index - 1, parts, scale_ptr, bias_ptr, residual_ptr, out_ptr, first_row, M, N, eps),
            *(K, S, R, GROUP, 1, WARPS, gamma_ptr is not None, GATED),
        )
        laid_down(accs, parts + index % 2 * SIZE, M - first_row, S, R)
    arrive()
    await_all()
    finished(
        *(tiles - 1, parts, scale_ptr, bias_ptr, residual_ptr, out_ptr, first_row, M, N, eps),
        *(K, S, R, GROUP, 1, WARPS, gamma_ptr is not None, GATED),
    )
