"""Product with quantised weights for many rows of x on sm_90. Codes and x are loaded through a TMA pipeline.

The bits are those of few_rows.py: the same terms in the same order, with scales applied at the same points. There, each
of S warps takes every S-th K tile. Here, a CTA makes S passes over K and adds their sums in the same order. If it makes
only some of these passes, it stores their sums, and `split_k.sum_kernel` adds them.

One warp loads K tiles of codes and of x by TMA. The other warps load codes from shared memory, convert them in
registers, once for all rows, and multiply by wgmma. The other operand of wgmma is x in shared memory, regrouped as in
`product.tma_sm90`. For 8-bit codes x is already multiplied by 2^64 (`split_k.permuted_rows`). The converted codes are
subnormal numbers, and the tensor core truncates sums by the exponents of its operands. So both operands must have the
values that they have in few_rows.py.
"""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005  (Triton adds tuples, and knows no starred ones)

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.gluon_compat import load_block
from fastspec.kernels.product.epilogue import (
    STAYS,
    addends,
    enter_keys,
    row_factor,
    splits_scale,
    times_gamma,
    write_argmax,
    write_tile,
)
from fastspec.kernels.product.quantised.conversion import (
    LESS_ONE,
    ONE,
    joined_halves,
    offset_of,
    units_of,
)
from fastspec.kernels.product.reader import groups_of, pieces_of
from fastspec.kernels.product.tma_sm90 import group_operand, group_sums, pieces_layout


class LoadRing(NamedTuple):
    """Ring of K tiles in shared memory, between the loading warp and the multiplying warps.

    Attributes:
        xs: bf16 [STAGES, BM, 64] for each of the two halves of a K tile of x.
        ws: int32 words [STAGES, R / 16, 8 P, 32] of codes, with P pieces in a K tile; see `reader.pieces_of`.
        full, free: barriers [STAGES]. full: a K tile has arrived. free: it has been multiplied.
    """

    xs: Any
    ws: Any
    full: Any
    free: Any


UNIT = gl.constexpr(64)  # values of K in one product


@gluon.jit
def _issue_copies(
    x_desc, weight_desc, xs, ws, full, step, tile, first_row, split,
    T: gl.constexpr, S: gl.constexpr, CODES: gl.constexpr, ROWS: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Issues the TMA copies of one step's K tile: of its codes if CODES, of its rows of x if ROWS.

    step: index of the K tile among the K tiles of this CTA. tile: index of the weight tile. T: number of K tiles of a
    split. split: first split of this CTA. For `xs`, `ws` and `full` see `LoadRing`.
    """
    slot = step % ws.shape[0]
    k_tile = step % T * S + split + step // T
    if CODES:
        mbarrier.expect(full.index(slot), BYTES)
        load_block(weight_desc, [tile * ws.shape[1], k_tile * ws.shape[2], 0], full.index(slot), ws.index(slot))
    if ROWS:
        for u in gl.static_range(2):
            load_block(x_desc, [first_row, k_tile * 128 + u * 64], full.index(slot), xs[u].index(slot))


@gluon.jit
def _fetch(
    x_desc, weight_desc, xs, ws, full, free, tile, first_row, split,
    T: gl.constexpr, S: gl.constexpr, SPLITS: gl.constexpr, BYTES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Runs the loading warp. It loads the first codes before the previous kernel ends, and x afterwards.

    For the arguments see `LoadRing` and `_issue_copies`.
    """
    STAGES: gl.constexpr = ws.shape[0]
    AHEAD: gl.constexpr = min(STAGES, T * SPLITS)
    for step in range(AHEAD):
        _issue_copies(x_desc, weight_desc, xs, ws, full, step, tile, first_row, split, T, S, True, False, BYTES)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for step in range(AHEAD):
        _issue_copies(x_desc, weight_desc, xs, ws, full, step, tile, first_row, split, T, S, False, True, BYTES)
    for step in range(AHEAD, T * SPLITS):
        mbarrier.wait(free.index(step % STAGES), (step // STAGES - 1) & 1)
        _issue_copies(x_desc, weight_desc, xs, ws, full, step, tile, first_row, split, T, S, True, True, BYTES)


@gluon.jit
def _codes_of(step, ws, full, WARPS: gl.constexpr):
    """Waits until a step's K tile is in shared memory, and loads the words of its codes into registers.

    Returns a tensor [1, R, 16] for each piece, see `reader.pieces_of`.
    """
    G: gl.constexpr = ws.shape[1]
    slot = step % ws.shape[0]
    mbarrier.wait(full.index(slot), step // ws.shape[0] & 1)
    words = ws.index(slot).load(pieces_layout(G * 16, WARPS, ws.shape[2] // 8))
    if ws.shape[2] == 8:
        return (gl.reshape(words, [1, G * 16, 16]),)
    else:
        first, second = gl.split(gl.permute(gl.reshape(words, [G, 2, 16, 16]), (0, 2, 3, 1)))
        return gl.reshape(first, [1, G * 16, 16]), gl.reshape(second, [1, G * 16, 16])


@gluon.jit
def _left_operand(pairs, like: gl.constexpr):
    """Converts bf16 pairs [1, R, 32] of a unit, in the order of K, to the left operand of wgmma, bf16 [R, 64]."""
    values = group_operand(gl.reshape(pairs, [pairs.shape[1], 32]), gl.bfloat16)
    return gl.convert_layout(values, gl.DotOperandLayout(0, like, 2))


@gluon.jit
def _operands(pieces, zeros, like: gl.constexpr, FORM: gl.constexpr):
    """Converts the codes of a K tile to left operands of wgmma: bf16 [R, 64] for each half of the K tile.

    pieces: result of `_codes_of`. zeros: see `units_of`. like: layout of the accumulator.
    """
    found = ()
    for p in gl.static_range(len(pieces)):
        pairs = units_of(pieces[p], pieces[p], zeros, FORM, UNIT)
        for u in gl.static_range(len(pairs)):
            found = found + (_left_operand(pairs[u], like),)
    return found


@gluon.jit
def _ones(piece, like: gl.constexpr):
    """Returns a left operand [R, 64] of the constant that stands for 1 in converted codes.

    Its product with x is the sum of x. piece: words [1, R, 16] of codes, for the shape and layout.
    """
    one = gl.full_like(piece, ONE)
    return _left_operand(joined_halves(one, one), like)


@gluon.jit
def _pair_of(row, step, g: gl.constexpr, tile, split, N, K: gl.constexpr, S: gl.constexpr, T: gl.constexpr,
             GROUP: gl.constexpr, PAIRS: gl.constexpr, R: gl.constexpr):  # fmt: skip
    """Returns the indices of scales or zero points in a tensor [N / 16, K / GROUP, PAIRS, 2].

    They belong to weight rows `row` of the tile, and to group g of K in the K tile of `step`.
    """
    tiles = gl.minimum(tile * (R // 16) + row // 16, N // 16 - 1)
    k_tile = gl.minimum(step % T * S + split + step // T, K // 128 - 1)  # after the last K tile x is zero
    group = tiles * (K // GROUP) + k_tile * (128 // GROUP) + g
    return (group * PAIRS + row % PAIRS) * 2 + row // 8 % 2


@gluon.jit
def _scales_of(ptr, step, tile, split, like: gl.constexpr, N, K: gl.constexpr, S: gl.constexpr, T: gl.constexpr,
               GROUP: gl.constexpr, PAIRS: gl.constexpr, R: gl.constexpr):  # fmt: skip
    """Loads the scales, fp32 [R, 1], of each group of the K tile of `step`, for sums in layout `like`.

    Returns an empty tuple if `ptr` is None.
    """
    found = ()
    if ptr is not None:
        row = gl.arange(0, R, layout=gl.SliceLayout(1, like))
        for g in gl.static_range(128 // GROUP):
            at = _pair_of(row, step, g, tile, split, N, K, S, T, GROUP, PAIRS, R)
            found = found + (gl.expand_dims(gl.load(ptr + at).to(gl.float32), 1),)
    return found


@gluon.jit
def _zeros_of(ptr, step, tile, split, like: gl.constexpr, N, K: gl.constexpr, S: gl.constexpr, T: gl.constexpr,
              GROUP: gl.constexpr, PAIRS: gl.constexpr, R: gl.constexpr):  # fmt: skip
    """Loads the zero points of each group of the K tile of `step`, as `zeros` of `units_of`.

    like: layout of the codes. Returns an empty tuple if `ptr` is None.
    """
    found = ()
    if ptr is not None:
        row = gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, like)))
        for g in gl.static_range(128 // GROUP):
            at = _pair_of(row, step, g, tile, split, N, K, S, T, GROUP, PAIRS, R)
            bits = gl.load(ptr + at).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
            less = times_gamma(bits | (bits << 16), gl.full_like(bits, LESS_ONE), gl.bfloat16)
            found = found + (gl.expand_dims(gl.expand_dims(less, 0), 2),)
    return found


@gluon.jit
def _less_offset(part, total, FORM: gl.constexpr):
    """Returns `part` minus the offset of codes times `total`, the sums of x; see `less_offset` of reader.py."""
    return gl.fma(gl.full_like(total, -1.0 * offset_of(FORM)), total, part)


@gluon.jit
def _pass(
    step, loaded, ring, weight, ones, tile, split, N, last,
    K: gl.constexpr, S: gl.constexpr, T: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr, PAIRS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Makes one pass over K, which computes one split of the sum.

    Returns the step after the pass, the K tile loaded for this step, and the pass's sums [R, BM].

    The next K tile is loaded into registers while this one is multiplied. After step `last`, its K tile is loaded again
    and not used. loaded: codes, scales and zero points of the K tile of `step`.
    """
    pieces, scales, zeros = loaded
    xs, ws, full, free = ring
    R: gl.constexpr = ws.shape[1] * 16
    BM: gl.constexpr = xs[0].shape[1]
    like: gl.constexpr = group_sums(BM, WARPS)
    codes: gl.constexpr = pieces[0].type.layout
    OFFSET: gl.constexpr = offset_of(FORM) > 0
    GROUPS: gl.constexpr = groups_of(128, FORM, GROUP)
    EACH: gl.constexpr = 2 // max(GROUPS, 1)  # units in a group
    acc = gl.zeros([R, BM], gl.float32, like)
    own = gl.zeros([R, BM], gl.float32, like)
    for _ in range(T):
        slot = step % ws.shape[0]
        units = _operands(pieces, zeros, like, FORM)
        following = gl.minimum(step + 1, last)
        if GROUPS == 0:
            for u in gl.static_range(2):
                x = xs[u].index(slot).permute((1, 0))
                acc = warpgroup_mma(units[u], x, acc, is_async=True)
                if OFFSET:
                    own = warpgroup_mma(ones, x, own, is_async=True)
            pieces = _codes_of(following, ws, full, WARPS)
            if OFFSET:
                acc, own, _a, _b = warpgroup_mma_wait(0, deps=(acc, own, units[0], units[1]))
            else:
                acc, _a, _b = warpgroup_mma_wait(0, deps=(acc, units[0], units[1]))
        else:
            parts = ()
            for g in gl.static_range(GROUPS):
                part = gl.zeros([R, BM], gl.float32, like)
                for u in gl.static_range(g * EACH, g * EACH + EACH):
                    x = xs[u].index(slot).permute((1, 0))
                    part = warpgroup_mma(units[u], x, part, is_async=True)
                parts = parts + (part,)
            pieces = _codes_of(following, ws, full, WARPS)
            more = _scales_of(weight.scales, following, tile, split, like, N, K, S, T, GROUP, PAIRS, R)
            more_zeros = _zeros_of(weight.zeros, following, tile, split, codes, N, K, S, T, GROUP, PAIRS, R)
            done = warpgroup_mma_wait(0, deps=parts + units)
            for g in gl.static_range(GROUPS):
                scale, part = gl.broadcast(scales[g], done[g])
                acc = gl.fma(scale, part, acc)
            scales, zeros = more, more_zeros
        mbarrier.arrive(free.index(slot), count=1)
        step += 1
    if GROUPS == 0 and OFFSET:
        acc = _less_offset(acc, own, FORM)
    return step, (pieces, scales, zeros), acc


@gluon.jit
def _multiply(
    weight, squares_ptr, epilogue, ring, tile, first_row, split, M, N, eps, limit,
    K: gl.constexpr, S: gl.constexpr, T: gl.constexpr, SPLITS: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr,
    PAIRS: gl.constexpr, WARPS: gl.constexpr, GATED: gl.constexpr, REGROUP: gl.constexpr, RAISE: gl.constexpr,
):  # fmt: skip
    """Runs the multiplying warps, which compute the sums over SPLITS splits of K.

    If these are all S splits, they are added, and the epilogue follows. Else the sums over each split are stored as
    partial sums.
    """
    R: gl.constexpr = ring.ws.shape[1] * 16
    BM: gl.constexpr = ring.xs[0].shape[1]
    like: gl.constexpr = group_sums(BM, WARPS)
    last = T * SPLITS - 1
    scales = _scales_of(weight.scales, 0, tile, split, like, N, K, S, T, GROUP, PAIRS, R)
    pieces = _codes_of(0, ring.ws, ring.full, WARPS)
    codes: gl.constexpr = pieces[0].type.layout
    zeros = _zeros_of(weight.zeros, 0, tile, split, codes, N, K, S, T, GROUP, PAIRS, R)
    ones = ()
    if offset_of(FORM) > 0:
        ones = _ones(pieces[0], like)
    sums = gl.zeros([R, BM], gl.float32, like)
    n = gl.arange(0, R, layout=gl.SliceLayout(1, like))
    m = gl.expand_dims(gl.arange(0, BM, layout=gl.SliceLayout(0, like)), 0)
    there = gl.expand_dims(n < N - tile * R, 1) & (m < M - first_row)
    step, loaded = 0, (pieces, scales, zeros)
    for i in range(SPLITS):
        step, loaded, acc = _pass(
            step, loaded, ring, weight, ones, tile, split, N, last, K, S, T, FORM, GROUP, PAIRS, WARPS
        )  # fmt: skip
        if epilogue.parts_ptr is not None:  # each split separately, because the kernel that adds them needs their order
            base = epilogue.parts_ptr + ((split + i) * M + first_row).to(gl.int64) * N
            gl.store(base + (m * N + gl.expand_dims(tile * R + n, 1)), acc, mask=there, eviction_policy=STAYS)
        else:
            sums += acc
    if epilogue.parts_ptr is None:
        factor = gl.load(weight.factors + tile * R + n, mask=n < N - tile * R, other=0.0)
        factor, total = gl.broadcast(gl.expand_dims(factor, 1), sums)
        total = gl.reshape(total * factor, [R // 16, 2, 8, BM])
        if squares_ptr is not None:
            # each thread computes the factor of one row; if each computed those of its columns, there would be S times
            # as many loads
            row = first_row + gl.arange(0, BM, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
            scale = splits_scale(squares_ptr, row, row < M, M, eps, K, S)
            total = total * row_factor(scale, total)
        if epilogue.keys_ptr is not None:
            enter_keys(total, tile, first_row, epilogue.keys_ptr, epilogue.ids_ptr, M, N, limit)
        else:
            added = addends(total, tile, first_row, epilogue.bias_ptr, epilogue.residual_ptr, M, N, GATED)
            write_tile(
                *(total, added, tile, first_row, epilogue.out_ptr, M, N, GATED),
                *(epilogue.bias_ptr is not None, epilogue.residual_ptr is not None, REGROUP, R, WARPS, RAISE),
            )


@gluon.jit(do_not_specialize=["M", "limit", "out_stride"])
def codes_tma_kernel(
    x_desc,  # bf16 [M, K] in blocks of [BM, 64], regrouped; raised for 8-bit codes
    weight_desc,  # int32 words [N / 16, K / 128 * 8 P, 32] in blocks of [R / 16, 8 P, 32], with P pieces per K tile
    weight,  # WeightParts of reader.py; scales and zero points have their own dtypes
    squares_ptr,  # fp32 [S, M] or None: sums of squares of the rows of x, for a norm whose weight is already in x
    epilogue,  # Epilogue of launch.py; parts [S, M, N]
    M,
    N,
    eps,
    limit,
    out_stride,
    K: gl.constexpr,
    S: gl.constexpr,
    SPLITS: gl.constexpr,  # number of passes over K of one CTA
    FORM: gl.constexpr,
    GROUP: gl.constexpr,  # values of K that share a scale; 0: all
    PAIRS: gl.constexpr,  # pairs of scales in a tile: 8, or 1 for all rows
    R: gl.constexpr,
    BM: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    GATED: gl.constexpr,
    REGROUP: gl.constexpr,  # True: out is regrouped as x is
    RAISE: gl.constexpr,  # True: out is multiplied by 2^64, for a next product with 8-bit codes
    PDL: gl.constexpr,
):
    """Computes a tile of the result in each CTA: R weight rows times BM rows of x, over SPLITS splits of K."""
    T: gl.constexpr = (K + S * 128 - 1) // (S * 128)
    P: gl.constexpr = pieces_of(128, FORM)
    BYTES: gl.constexpr = R * 64 * P + BM * 256
    tile, first_row, split = gl.program_id(0), gl.program_id(1) * BM, gl.program_id(2) * SPLITS
    ws = gl.allocate_shared_memory(gl.int32, [STAGES, R // 16, 8 * P, 32], gl.NVMMASharedLayout(128, 32, 3))
    rows: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    xs = ()
    for _u in gl.static_range(2):
        xs = xs + (gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, 64], rows),)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    fence_async_shared()
    # fmt: off
    gl.warp_specialize(
        [
            (_multiply, (
                weight, squares_ptr, epilogue, LoadRing(xs, ws, full, free), tile, first_row, split, M, N, eps, limit,
                K, S, T, SPLITS, FORM, GROUP, PAIRS, WARPS, GATED, REGROUP, RAISE,
            )),
            (_fetch, (x_desc, weight_desc, xs, ws, full, free, tile, first_row, split, T, S, SPLITS, BYTES, PDL)),
        ],
        [1], [32],  # number of extra warps, and registers of each of their threads
    )
    # fmt: on
    if epilogue.keys_ptr is not None:
        write_argmax(epilogue.keys_ptr, epilogue.out_ptr, out_stride, M, WARPS)
