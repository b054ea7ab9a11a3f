"""Packed product for 17 rows of x and more by programs that do all of K for their weight rows, each on its own.

Sums are made of the same terms in the same order as in the narrow kernel, so a row's bits are the same: where there S
warps take every S-th slab of K, here a program makes S passes over K, one after the other, and adds up what they give
in the same order. It reads all of x, which is dear next to few weight rows; but nothing has to be handed over between
programs, as the clusters of the held kernel do at the end of every tile. For weights with enough rows to keep a device
busy that way.

Weights are on their way D steps ahead, straight into registers, over the ends of passes too. Rows of x come XD steps
ahead, through shared memory. Where a norm goes before the product it is a kernel of its own: x is normed already.
"""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005  (Triton adds tuples, and knows no starred ones)
# tuples of steps grow and shrink in unrolled loops

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.packed_cluster import WORDS, place_of, stage_layout, steps_of
from fastspec.kernels.packed_held_parts import group_layout, keep, multiplied, slots_of, words_layout
from fastspec.kernels.packed_parts import addends, enter_keys, loaded_factor, settle_keys, write_tile


@gluon.jit
def _weights(weight, of, step, K: gl.constexpr, STEPS: gl.constexpr, SLAB: gl.constexpr, S: gl.constexpr):
    """Words of a step, counted over the passes; nothing is read behind the last, and zeros beyond K."""
    at = place_of(step, STEPS, SLAB, S)
    there = step < S * STEPS
    if STEPS * 64 * S != K:
        there = (at + of[1] < K // 2) & there
    return gl.load(weight + (at * 16 + of[0]), mask=there, other=0, eviction_policy="evict_first")


@gluon.jit
def _fetched(x, of, valid, step, K: gl.constexpr, STEPS: gl.constexpr, SLAB: gl.constexpr, S: gl.constexpr):
    """Words of the rows of x for a step: none behind the last, zeros beyond K."""
    at = place_of(step, STEPS, SLAB, S)
    there = valid & (step < S * STEPS)
    if STEPS * 64 * S != K:
        there = (at + of[1] < K // 2) & there
    return (gl.load(x + (at + of[0]), mask=there, other=0),)


@gluon.jit
def _passed(
    acc, ws, xs, number, turns, weight, w_of, x, x_of, valid, slots, nil,
    left: gl.constexpr, right: gl.constexpr, SLOTS: gl.constexpr, K: gl.constexpr, STEPS: gl.constexpr,
    SLAB: gl.constexpr, S: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """One pass over K: its sums, and what is in flight.

    Steps of x are kept XD at a time: warp groups read them behind a fence and a barrier.
    """
    D: gl.constexpr = len(ws)
    XD: gl.constexpr = len(xs)
    for turn in range(turns):
        for i in gl.static_range(D):
            step = number * STEPS + turn * D + i
            if i % XD == 0:
                for j in gl.static_range(XD):
                    keep(slots, (step + j) % SLOTS, xs[j], True, DTYPE)
                fence_async_shared()
                gl.thread_barrier()
                for j in gl.static_range(XD):
                    xs = xs[1:] + (_fetched(x, x_of, valid, step + (XD + j), K, STEPS, SLAB, S),)
            acc = multiplied((acc,), ws[0], slots, step % SLOTS, nil, left, right, True, DTYPE)[0]
            ws = ws[1:] + (_weights(weight, w_of, step + D, K, STEPS, SLAB, S),)
    return acc, ws, xs


@gluon.jit(do_not_specialize=["M", "limit", "out_stride", "turns"])
def alone_kernel(
    x_ptr,  # int32 words [M, K / 2]
    weight_ptr,  # int32 words [N / 16, K / 32, 16, 16]
    scale_ptr,  # fp32 [M] or None: factors of the rows of x
    bias_ptr,  # [N] or None
    residual_ptr,  # [M, width] or None
    out_ptr,  # [M, width], or int64 tokens with stride out_stride where keys_ptr is given
    keys_ptr,  # int64 [65] or None
    M,
    N,
    limit,
    out_stride,
    turns,  # of D steps in a pass: a compiler that knew would unroll them
    K: gl.constexpr,
    S: gl.constexpr,
    KT: gl.constexpr,
    R: gl.constexpr,
    GROUP: gl.constexpr,  # rows of x
    D: gl.constexpr,  # steps of weights in flight
    XD: gl.constexpr,  # steps of x in flight, which divide D
    SLOTS: gl.constexpr,  # steps of x in shared memory, at least 2 XD
    WARPS: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """R weight rows by GROUP rows of x."""
    mma: gl.constexpr = group_layout(1, GROUP, WARPS)
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 8)
    w: gl.constexpr = words_layout(1, R, WARPS)
    stage: gl.constexpr = stage_layout(1, GROUP, WORDS, WARPS)
    SLAB: gl.constexpr = KT // 2  # words
    STEPS: gl.constexpr = steps_of(K, S, KT, D)
    # complete sums of passes, while registers hold those of the one at hand: eight neighbours lie in four lanes
    held: gl.constexpr = gl.SwizzledSharedLayout(8, 1, GROUP // 8, [1, 0])

    tile = gl.program_id(0)
    first_row = gl.program_id(1) * GROUP
    r = gl.expand_dims(gl.expand_dims(gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, w))), 0), 2)
    k = gl.expand_dims(gl.expand_dims(gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, w))), 0), 1)
    group = gl.minimum(tile * (R // 16) + r // 16, N // 16 - 1) - tile * (R // 16)
    weight = weight_ptr + tile.to(gl.int64) * (R * K // 2)
    w_of = (group * (8 * K) + (k // 16 * 256 + r % 16 * 16 + k % 16), k)
    m = gl.expand_dims(gl.expand_dims(gl.arange(0, GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(2, stage))), 0), 2)
    k = gl.expand_dims(gl.expand_dims(gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, stage))), 0), 1)
    x = x_ptr + first_row.to(gl.int64) * (K // 2)
    x_of = (m * (K // 2) + k, k)
    valid = m < M - first_row
    slots = slots_of(1, GROUP, 1, SLOTS, True, DTYPE)
    sums = gl.allocate_shared_memory(gl.float32, [R, GROUP], held)

    ws = ()
    for i in gl.static_range(D):
        ws = ws + (_weights(weight, w_of, i, K, STEPS, SLAB, S),)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    xs = ()
    for i in gl.static_range(XD):
        xs = xs + (_fetched(x, x_of, valid, i, K, STEPS, SLAB, S),)
    zeros = gl.zeros([R, GROUP], gl.float32, mma)
    for number in range(S):
        acc, ws, xs = _passed(
            *(zeros, ws, xs, number, turns, weight, w_of, x, x_of, valid, slots, M >> 31),
            *(left, right, SLOTS, K, STEPS, SLAB, S, DTYPE),
        )
        if number > 0:
            acc = sums.load(mma) + acc
        sums.store(acc)
    total = gl.reshape(sums.load(mma), [R // 16, 2, 8, GROUP])

    if scale_ptr is not None:
        total = total * loaded_factor(scale_ptr, first_row, M, total)
    if keys_ptr is not None:
        enter_keys(total, tile, first_row, keys_ptr, M, N, limit)
        settle_keys(keys_ptr, out_ptr, out_stride, M, WARPS)
    else:
        loaded = addends(total, tile, first_row, bias_ptr, residual_ptr, M, N, GATED)
        write_tile(
            *(total, loaded, tile, first_row, out_ptr, M, N, GATED),
            *(bias_ptr is not None, residual_ptr is not None),
        )
