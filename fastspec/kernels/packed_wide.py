"""Packed product for 17 rows of x and more: x through shared memory, every warp with 32 rows of the weight.

Sums are made of the same terms in the same order as in the narrow kernel, so a row's bits are the same. There each of
S warps takes every S-th slab of K; here that is one program of a cluster, which also keeps what it reads of x an S-th
(a cluster owns R weight rows, partial tiles meet in `parts` behind its barrier, and each program finishes its share),
or, for weights with enough rows to keep a device busy, one pass of S over K by one program.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.packed_parts import (
    add_squares,
    addends,
    column_layout,
    enter_keys,
    folded,
    in_order,
    no_squares,
    row_numbers,
    row_operand,
    row_scale,
    settle_keys,
    times_gamma,
    weight_numbers,
    weight_operand,
    write_tile,
)

UNROLLED = gl.constexpr(16)  # more slabs than this, and the loop over them is one


@gluon.constexpr_function
def _cluster(programs, rank):
    """How programs of a cluster divide the first axis of a tensor, one step of each power of two."""
    return [[1 << bit] + [0] * (rank - 1) for bit in range(programs.bit_length() - 1)]


@gluon.constexpr_function
def _mma_layout(S, warps):
    return gl.NVMMADistributedLayout([2, 0], [1, warps, 1], [1, 16, 8], _cluster(S, 3))


@gluon.constexpr_function
def _blocked(S, each, lanes, warps, order):
    return gl.BlockedLayout(each, lanes, warps, order, _cluster(S, len(order)))


@gluon.constexpr_function
def _stage_layout(S, BM, W, warps):
    """Of x [S, BM, W] on its way: a lane holds the 2 x 4 words of a row that a lane of the product multiplies."""
    rows = [1 << bit for bit in range(BM.bit_length() - 1)]
    runs = [[0, 0, 1 << bit] for bit in range(5, W.bit_length() - 1)]
    lanes = [[0, 0, 4], [0, 0, 8]] + [[0, row, 0] for row in rows[:3]]
    over = [[0, row, 0] for row in rows[3 : 2 + warps.bit_length()]]
    over += [[0, 0, 0]] * (warps.bit_length() - 1 - len(over))
    held = [[0, 0, 1], [0, 0, 2], [0, 0, 16]] + runs + [[0, row, 0] for row in rows[2 + warps.bit_length() :]]
    return gl.DistributedLinearLayout(held, lanes, over, _cluster(S, 3), [S, BM, W])


@gluon.constexpr_function
def _shared_layout(S, BM, W):
    """Rows of words such that 16 bytes hold the operands of two products, in an order free of bank conflicts."""
    bits = [[0, 0, 16], [0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8]] + [[0, 0, 32]] * (W == 64)
    # odd rows swap their halves of 32 bytes: 2 rows by 4 lanes lie in different banks
    bits += [[0, 1, 2]] + [[0, 1 << bit, 0] for bit in range(1, BM.bit_length() - 1)]
    return gl.SharedLinearLayout(bits, _cluster(S, 3))


@gluon.constexpr_function
def _share_layout(S, R, BM, warps):
    """Of a finished tile [R / 16, 2, 8, BM]: programs divide the first axis, a thread holds both halves of the second."""
    own = R // 16 // S
    rows = [[0, 0, 0, 1 << bit] for bit in range(BM.bit_length() - 1)]
    eight = [[0, 0, 1 << bit, 0] for bit in range(3)]
    spread = [[1 << bit, 0, 0, 0] for bit in range(own.bit_length() - 1)] + rows
    over = spread[5:]
    while len(over) < warps.bit_length() - 1:
        over.append(eight.pop())
    cluster = [[own << bit, 0, 0, 0] for bit in range(S.bit_length() - 1)]
    return gl.DistributedLinearLayout([*eight, [0, 1, 0, 0]], spread[:5], over, cluster, [R // 16, 2, 8, BM])


@gluon.jit
def _cluster_barrier():
    """All that programs of the cluster stored before it is seen after it."""
    gl.inline_asm_elementwise(
        "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; // $0",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _rows(at, of, first: gl.constexpr, valid, k, ragged: gl.constexpr):
    """Words of each group of rows of x, [C, GROUP, W], zero where there is no row, and with a norm of gamma [C, 1, W]."""
    loaded = ()
    for i in gl.static_range(len(valid)):
        mask = valid[i] & k if ragged else valid[i]
        loaded = loaded + (gl.load(at[1] + (of[i + 1] + first), mask=mask, other=0),)
    if len(at) == 3:
        gamma_at = at[2] + (of[len(of) - 1] + first)
        loaded = loaded + (gl.load(gamma_at, mask=k, other=0) if ragged else gl.load(gamma_at),)
    return loaded


@gluon.jit
def _weights(at, of, first: gl.constexpr, k, ragged: gl.constexpr):
    if ragged:
        return gl.load(at[0] + (of[0] + first * 16), mask=k, other=0, eviction_policy="evict_first")
    else:
        return gl.load(at[0] + (of[0] + first * 16), eviction_policy="evict_first")


@gluon.jit
def _moved(at, words: gl.constexpr):
    if len(at) == 3:
        return at[0] + words * 16, at[1] + words, at[2] + words
    else:
        return at[0] + words * 16, at[1] + words


@gluon.jit
def _runs(words):
    """[C, BM, W] -> [C, BM, W / 16, 4, 4]: the four words that a lane loads at once come last."""
    return gl.reshape(words, [words.shape[0], words.shape[1], words.shape[2] // 16, 4, 4])


@gluon.jit
def _passed_on(squares, given, shared, DTYPE: gl.constexpr):
    """Puts one slab of x where the warps read it, times gamma with a norm; returns the sums of squares."""
    if len(squares) > 0:
        new = ()
        for i in gl.static_range(len(shared)):
            gamma = gl.broadcast(given[len(shared)], given[i])[0]
            shared[i].store(times_gamma(given[i], gamma, DTYPE))
            new = new + (add_squares(squares[i], _runs(given[i]), DTYPE),)
        return new
    else:
        for i in gl.static_range(len(shared)):
            shared[i].store(given[i])
        return squares


@gluon.jit
def _products(accs, weight, shared, left: gl.constexpr, right: gl.constexpr, x: gl.constexpr, DTYPE: gl.constexpr):
    """accs + weight rows^T, one group of rows after the other: the operands of one are alive at a time."""
    values = weight_operand(weight, DTYPE, left)
    new = ()
    for i in gl.static_range(len(accs)):
        rows = row_operand(shared[i].permute((0, 2, 1)).load(x), DTYPE, right)
        new = new + (mma_v2(values, rows, accs[i]),)
    return new


@gluon.jit
def _slabs(
    ws,
    xs,
    accs,
    squares,
    at,  # where the slab that comes first begins: in the weights, x and with a norm gamma
    following,  # as `at`, of the next pass
    of,  # offsets from there: of weights, each group of rows of x, gamma
    more,  # whether there is one
    valid,  # rows of x
    w_in,  # what lies within K of the last slab of all, for the weights
    x_in,  # and for x
    even,
    odd,
    left: gl.constexpr,
    right: gl.constexpr,
    x: gl.constexpr,
    COUNT: gl.constexpr,
    LAST: gl.constexpr,  # these slabs are the last of their pass
    PASSES: gl.constexpr,
    RAGGED: gl.constexpr,
    STEP: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """COUNT slabs: each is multiplied, and one further on is fetched."""
    D: gl.constexpr = len(ws)
    XD: gl.constexpr = len(xs)
    for i in gl.static_range(COUNT):
        shared = even if i % 2 == 0 else odd
        squares = _passed_on(squares, xs[0], shared, DTYPE)
        xs = xs[1:]
        if not LAST or i + XD < COUNT:
            xs = xs + (_rows(at, of, (i + XD) * STEP, valid, x_in, RAGGED and LAST and i + XD == COUNT - 1),)
        elif PASSES > 1:
            xs = xs + (_rows(following, of, (i + XD - COUNT) * STEP, valid, x_in, False),)
        accs = _products(accs, ws[0], shared, left, right, x, DTYPE)
        ws = ws[1:]
        if not LAST or i + D < COUNT:
            ws = ws + (_weights(at, of, (i + D) * STEP, w_in, RAGGED and LAST and i + D == COUNT - 1),)
        elif PASSES > 1:
            ws = ws + (_weights(following, of, (i + D - COUNT) * STEP, more, True),)
    return ws, xs, accs, squares


@gluon.jit
def _folded_runs(squares, C: gl.constexpr, WARPS: gl.constexpr):
    RUNS: gl.constexpr = squares.shape[2] * 4
    together: gl.constexpr = _blocked(C, [1, 1, RUNS // 4, 4], [1, 32, 1, 1], [1, WARPS, 1, 1], [2, 3, 1, 0])
    return folded(gl.reshape(gl.convert_layout(squares, together), [C * squares.shape[1], RUNS]))


@gluon.jit
def _whole_squares(squares, C: gl.constexpr, WARPS: gl.constexpr):
    """Sums of squares [C, GROUP, W / 16, 4] of runs -> [C * GROUP], runs added as neighbours, for each group."""
    whole = ()
    for i in gl.static_range(len(squares)):
        whole = whole + (_folded_runs(squares[i], C, WARPS),)
    return whole


@gluon.jit
def _added(first, second):
    sums = ()
    for i in gl.static_range(len(first)):
        sums = sums + (first[i] + second[i],)
    return sums


@gluon.jit
def _handed_over(accs, squares, base, M, S: gl.constexpr):
    """Stores a program's partial tiles [S, R, GROUP] at base[group, s, m, r], its sums of squares at [group, s, m]."""
    R: gl.constexpr = accs[0].shape[1]
    GROUP: gl.constexpr = accs[0].shape[2]
    mma: gl.constexpr = accs[0].type.layout
    s = gl.expand_dims(gl.expand_dims(gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, mma))), 1), 2)
    r = gl.expand_dims(gl.expand_dims(gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, mma))), 0), 2)
    m = gl.expand_dims(gl.expand_dims(gl.arange(0, GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(1, mma))), 0), 1)
    for i in gl.static_range(len(accs)):
        part = base + i * (S * GROUP * (R + 1))
        gl.store(part + (s * (R * GROUP) + m * R + r), accs[i], mask=i * GROUP + m < M)
        if len(squares) > 0:
            at = gl.arange(0, S * GROUP, layout=squares[i].type.layout)
            gl.store(part + (S * GROUP * R + at), squares[i])


@gluon.jit
def _taken_over(like, base, M, S: gl.constexpr, NORM: gl.constexpr):
    """Whole tile [R / 16, 2, 8, GROUP] in the layout of `like`, and with a norm sums of squares [GROUP]."""
    R: gl.constexpr = like.shape[0] * 16
    GROUP: gl.constexpr = like.shape[3]
    row = row_numbers(like)
    at = base + (row * R + weight_numbers(like, 0, 16, 8))
    row_at = base + (S * GROUP * R + gl.arange(0, GROUP, layout=column_layout(like.type.layout)))
    parts, squares = (), ()
    for i in gl.static_range(S):
        # past L1: another multiprocessor has written this
        parts = parts + (gl.load(at + i * (R * GROUP), mask=row < M, other=0.0, cache_modifier=".cg"),)
        if NORM:
            squares = squares + (gl.load(row_at + i * GROUP, cache_modifier=".cg"),)
    if NORM:
        return in_order(parts), in_order(squares)
    else:
        return (in_order(parts),)


@gluon.jit(do_not_specialize=["M", "limit", "out_stride", "loops"])
def wide_kernel(
    x_ptr,  # int32 words [M, K / 2]
    weight_ptr,  # int32 words [N / 16, K / 32, 16, 16]
    gamma_ptr,  # int32 words [K / 2] or None
    bias_ptr,  # [N] or None
    residual_ptr,  # [M, width] or None
    out_ptr,  # [M, width], or int64 tokens with stride out_stride where keys_ptr is given
    keys_ptr,  # int64 [65] or None; C is 1 then
    parts_ptr,  # fp32 [blocks of rows, tiles, GROUPS, S * GROUP * (R + 1)], None where C is 1
    M,
    N,
    eps,
    limit,
    out_stride,
    loops,  # LOOPS: a compiler that knew it would unroll them and run out of registers
    K: gl.constexpr,
    S: gl.constexpr,
    C: gl.constexpr,  # programs of a cluster: S, or 1 for S passes over K
    KT: gl.constexpr,
    R: gl.constexpr,
    GROUP: gl.constexpr,  # rows of x that are multiplied together
    GROUPS: gl.constexpr,
    D: gl.constexpr,  # slabs of weights in flight, even
    XD: gl.constexpr,  # slabs of x in flight
    WARPS: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
    DTYPE: gl.constexpr,
):
    mma: gl.constexpr = _mma_layout(C, WARPS)
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 8)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 8)
    w: gl.constexpr = gl.DotOperandLayout(0, mma, 4)  # of words: half as many contiguous ones
    x: gl.constexpr = gl.DotOperandLayout(1, mma, 4)
    W: gl.constexpr = KT // 2
    T: gl.constexpr = (K + S * KT - 1) // (S * KT)
    RAGGED: gl.constexpr = K % (S * KT) != 0
    STEP: gl.constexpr = S * W
    PASSES: gl.constexpr = S // C
    gl.static_assert(PASSES == 1 or (T % 2 == 0 and not RAGGED))
    stage: gl.constexpr = _stage_layout(C, GROUP, W, WARPS)

    tile = gl.program_id(0)
    first_row = gl.program_id(1) * (GROUP * GROUPS)
    s = gl.expand_dims(gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(1, gl.SliceLayout(2, w))), 1), 2)
    r = gl.expand_dims(gl.expand_dims(gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, w))), 0), 2)
    k = gl.expand_dims(gl.expand_dims(gl.arange(0, W, layout=gl.SliceLayout(0, gl.SliceLayout(1, w))), 0), 1)
    group = gl.minimum(tile * (R // 16) + r // 16, N // 16 - 1) - tile * (R // 16)
    of = (group * (8 * K) + (s * (W * 16) + k // 16 * 256 + r % 16 * 16 + k % 16),)
    w_in = (T - 1) * STEP + s * W + k < K // 2
    any_k = k

    s = gl.expand_dims(gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(1, gl.SliceLayout(2, stage))), 1), 2)
    m = gl.expand_dims(gl.expand_dims(gl.arange(0, GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(2, stage))), 0), 2)
    k = gl.expand_dims(gl.expand_dims(gl.arange(0, W, layout=gl.SliceLayout(0, gl.SliceLayout(1, stage))), 0), 1)
    x_in = (T - 1) * STEP + s * W + k < K // 2
    at = (weight_ptr + tile.to(gl.int64) * (R * K // 2), x_ptr + first_row.to(gl.int64) * (K // 2))
    valid, even, odd = (), (), ()
    for i in gl.static_range(GROUPS):
        of = of + (m * (K // 2) + (i * (GROUP * K // 2) + s * W + k),)
        valid = valid + (m < M - first_row - i * GROUP,)
        even = even + (gl.allocate_shared_memory(gl.int32, [C, GROUP, W], _shared_layout(C, GROUP, W)),)
        odd = odd + (gl.allocate_shared_memory(gl.int32, [C, GROUP, W], _shared_layout(C, GROUP, W)),)
    if gamma_ptr is not None:
        at = at + (gamma_ptr,)
        of = of + (s * W + k,)

    ws = ()
    for i in gl.static_range(D):
        ws = ws + (_weights(at, of, i * STEP, w_in, RAGGED and i == T - 1),)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    xs = ()
    for i in gl.static_range(XD):
        xs = xs + (_rows(at, of, i * STEP, valid, x_in, RAGGED and i == T - 1),)
    zeros, no = (), ()
    for _ in gl.static_range(GROUPS):
        zeros = zeros + (gl.zeros([C, R, GROUP], gl.float32, mma),)
        if gamma_ptr is not None:
            no = no + (no_squares(_runs(xs[0][0])),)

    LOOPS: gl.constexpr = (T - D) // D if T * PASSES > UNROLLED else 0
    REST: gl.constexpr = T - LOOPS * D
    norms = ()
    if PASSES == 1:
        here = at
        if LOOPS > 0:
            for _turn in range(loops):
                ws, xs, zeros, no = _slabs(
                    *(ws, xs, zeros, no, here, here, of, w_in, valid, w_in, x_in, even, odd, left, right, x),
                    *(D, False, 1, RAGGED, STEP, DTYPE),
                )
                here = _moved(here, D * STEP)
        ws, xs, totals, no = _slabs(
            *(ws, xs, zeros, no, here, here, of, w_in, valid, w_in, x_in, even, odd, left, right, x),
            *(REST, True, 1, RAGGED, STEP, DTYPE),
        )
        if gamma_ptr is not None:
            norms = _whole_squares(no, C, WARPS)
    else:
        totals = zeros
        if gamma_ptr is not None:
            norms = _whole_squares(no, C, WARPS)
        for number in range(PASSES):
            accs, squares = zeros, no
            here = at
            following = _moved(at, W)
            more = (any_k >= 0) & (number < PASSES - 1)
            if LOOPS > 0:
                for _turn in range(loops):
                    ws, xs, accs, squares = _slabs(
                        *(ws, xs, accs, squares, here, following, of, more, valid, w_in, x_in, even, odd, left, right, x),
                        *(D, False, PASSES, RAGGED, STEP, DTYPE),
                    )
                    here = _moved(here, D * STEP)
            ws, xs, accs, squares = _slabs(
                *(ws, xs, accs, squares, here, following, of, more, valid, w_in, x_in, even, odd, left, right, x),
                *(REST, True, PASSES, RAGGED, STEP, DTYPE),
            )
            totals = _added(totals, accs)
            if gamma_ptr is not None:
                norms = _added(norms, _whole_squares(squares, C, WARPS))
            at = following

    if C > 1:
        SIZE: gl.constexpr = S * GROUP * (R + 1)
        block = (gl.program_id(1) * gl.num_programs(0) + tile) * GROUPS
        base = parts_ptr + block.to(gl.int64) * SIZE
        like = gl.full([R // 16, 2, 8, GROUP], 0.0, gl.float32, layout=_share_layout(S, R, GROUP, WARPS))
        _handed_over(totals, norms, base, M - first_row, S)
    for i in gl.static_range(GROUPS):
        row = first_row + i * GROUP
        if C == 1:
            like = gl.reshape(totals[i], [R // 16, 2, 8, GROUP])
        loaded = addends(like, tile, row, bias_ptr, residual_ptr, M, N, GATED)
        if C > 1:
            if i == 0:
                _cluster_barrier()
            sums = _taken_over(like, base + i * SIZE, M - row, S, gamma_ptr is not None)
        elif gamma_ptr is not None:
            sums = like, norms[i]
        else:
            sums = (like,)
        total = sums[0]
        if gamma_ptr is not None:
            total = total * row_scale(sums[1], like, K, eps)
        if keys_ptr is not None:
            enter_keys(total, tile, row, keys_ptr, M, N, limit)
        else:
            write_tile(
                *(total, loaded, tile, row, out_ptr, M, N, GATED),
                *(bias_ptr is not None, residual_ptr is not None),
            )
    if keys_ptr is not None:
        settle_keys(keys_ptr, out_ptr, out_stride, M, WARPS)
