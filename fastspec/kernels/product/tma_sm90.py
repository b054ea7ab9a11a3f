"""Packed product for 9 or more rows of x on sm_90. Weights and x are loaded through a TMA pipeline.

Sums have the same terms in the same order as in the few-row kernel, so a row has the same bits. There, each of S warps
takes every S-th K tile. Here, a CTA makes S passes over K, and adds their sums in the same order. With too few weight
rows to fill the GPU, a CTA makes only one pass, or those that are added pairwise. It stores these partial sums, and
`split_k.add_up` adds them. With many weight rows and many rows of x, CTAs are persistent: they compute several tiles,
and load the next one while a tile's sums are stored.

One warp loads weights and rows of x by TMA, 64 values of K per step, STAGES steps ahead. Other warps multiply. Only the
weights pass through registers: a lane's 16 bytes are its operands of four products. x is regrouped, so that the values
of these four products are contiguous, as wgmma reads them from shared memory. Attention, `split_k` or this kernel store
it so. With a norm, one more warp computes 1 / sqrt(mean(x^2) + eps) of the rows.
"""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005  (Triton adds tuples, and knows no starred ones)

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

from fastspec.kernels.common.gluon_compat import load_block
from fastspec.kernels.product.epilogue import (
    STAYS,
    addends,
    column_layout,
    enter_keys,
    plus,
    row_factor,
    splits_scale,
    write_argmax,
    write_tile,
)
from fastspec.kernels.product.k_steps import WORDS, place_of, steps_of
from fastspec.kernels.product.plan import boxes

_boxes = gluon.constexpr_function(boxes)  # `boxes` as a function of device code


@gluon.constexpr_function
def group_sums(GROUP, warps):
    """Returns the layout of a wgmma accumulator: fp32 sums of R weight rows times GROUP rows of x, [R, GROUP]."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, GROUP, 16])


@gluon.constexpr_function
def pieces_layout(R, warps, pieces=2):
    """Returns the layout in which a step's weights, words [R / 16, 8 pieces, 32], are loaded from shared memory.

    Each 16 bytes of a lane are its operands of four products. warps: number of multiplying warps.
    """
    held = [[0, 0, 1], [0, 0, 2], [0, 4, 0], *([[0, 8, 0]] if pieces == 2 else [])]
    held += [[1 << bit, 0, 0] for bit in range(warps.bit_length() - 1, R.bit_length() - 5)]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0]]
    over = [[1 << bit, 0, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(held, lanes, over, [], [R // 16, 8 * pieces, 32])


@gluon.jit
def group_operand(words, DTYPE: gl.constexpr):
    """Casts words of weights [R, 32] to 16-bit values [R, 64], in the order along K that regrouped x has.

    Each wgmma over 16 neighbours then multiplies the same 16 values of K as one mma of the few-row kernel.
    """
    runs = gl.permute(gl.reshape(words, [words.shape[0], 2, 4, 4]), (0, 3, 1, 2))
    flat = gl.reshape(runs, [words.shape[0], 32])
    low, high = flat.to(gl.int16), (flat >> 16).to(gl.int16)
    return gl.reshape(gl.join(low, high), [words.shape[0], 64]).to(DTYPE, bitcast=True)


@gluon.constexpr_function
def _steps_in_all(STEPS, S, pairwise, apart):
    return STEPS * (pairwise if apart else S)


@gluon.constexpr_function
def _box_first(OWN, index):
    """Returns the first weight row, divided by 16, that TMA box `index` of a tile loads. OWN: weight rows of a tile."""
    return sum(_boxes(OWN)[:index]) // 16


@gluon.constexpr_function
def _box_size(OWN, index):
    return _boxes(OWN)[index] // 16


@gluon.jit
def _ask_for_weights(
    weight_descs, ws, full, step, tile, place, split,
    STEPS: gl.constexpr, K_TILE: gl.constexpr, S: gl.constexpr, BYTES: gl.constexpr, OWN: gl.constexpr,
):  # fmt: skip
    """Tells the barrier of a step's slot to expect BYTES bytes, and issues the TMA copies of the step's weights.

    step: index of the step among all steps of the CTA. place: index of the step within its tile. full: barriers, one
    for each slot of the ring buffer.
    """
    slot = step % ws.shape[0]
    at = (split * K_TILE + place_of(place, STEPS, K_TILE, S)) // 2
    mbarrier.expect(full.index(slot), BYTES)
    for i in gl.static_range(len(weight_descs)):
        rows = ws.index(slot)
        if 16 * ws.shape[1] > OWN:
            rows = rows.slice(_box_first(OWN, i), _box_size(OWN, i))
        block = [tile * (OWN // 16) + _box_first(OWN, i), at, 0]
        load_block(weight_descs[i], block, full.index(slot), rows)


@gluon.jit
def _ask_for_rows(
    x_descs, xs, full, step, place, split, first_row, STEPS: gl.constexpr, K_TILE: gl.constexpr, S: gl.constexpr
):  # fmt: skip
    """Issues the TMA copies of a step's rows of x. For `place` see `_ask_for_weights`."""
    slot = step % xs[0].shape[0]
    at = 2 * (split * K_TILE + place_of(place, STEPS, K_TILE, S))
    for i in gl.static_range(len(xs)):
        load_block(x_descs[i], [first_row, at], full.index(slot), xs[i].index(slot))
        first_row += xs[i].shape[1]


@gluon.jit
def _turns(N, OWN: gl.constexpr, STAY: gl.constexpr):
    """Returns the number of weight tiles that this CTA computes: 1, unless CTAs are persistent (STAY)."""
    if STAY:
        return ((N + OWN - 1) // OWN - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
    else:
        return 1


@gluon.jit
def _fetch(
    x_descs, weight_descs, xs, ws, full, free, first_row, split, N,
    PDL: gl.constexpr, EACH: gl.constexpr, STEPS: gl.constexpr, K_TILE: gl.constexpr, S: gl.constexpr,
    BYTES: gl.constexpr, OWN: gl.constexpr, APART: gl.constexpr, STAY: gl.constexpr,
):  # fmt: skip
    """Runs the loading warp. It loads the first weights before the previous kernel ends, and x afterwards.

    full, free: barriers of the ring buffer's slots. EACH: number of steps of a tile.

    If this kernel stores partial sums (APART), the next kernel may not start early, because it only adds these. Most of
    its CTAs would wait on the first free SMs.
    """
    STAGES: gl.constexpr = ws.shape[0]
    AHEAD: gl.constexpr = min(EACH, STAGES)
    tile = gl.program_id(0)
    for step in range(AHEAD):
        _ask_for_weights(weight_descs, ws, full, step, tile, step, split, STEPS, K_TILE, S, BYTES, OWN)
    if PDL:
        if not APART:
            gdc_launch_dependents()
        gdc_wait()
    for step in range(AHEAD):
        _ask_for_rows(x_descs, xs, full, step, step, split, first_row, STEPS, K_TILE, S)
    for step in range(AHEAD, EACH * _turns(N, OWN, STAY)):
        place = step
        if STAY:
            tile = gl.program_id(0) + step // EACH * gl.num_programs(0)
            place = step % EACH
        mbarrier.wait(free.index(step % STAGES), (step // STAGES - 1) & 1)
        _ask_for_weights(weight_descs, ws, full, step, tile, place, split, STEPS, K_TILE, S, BYTES, OWN)
        _ask_for_rows(x_descs, xs, full, step, place, split, first_row, STEPS, K_TILE, S)
    if PDL and APART:
        gdc_launch_dependents()


@gluon.jit
def _weights_of(step, ws, full, WARPS: gl.constexpr):
    """Waits until a step's weights are in shared memory, and loads their words [R, 32] into registers.

    In shared memory, as in a packed weight, words 0..15 of 16 rows precede words 16..31 of these rows.
    """
    groups: gl.constexpr = ws.shape[1]
    slot = step % ws.shape[0]
    mbarrier.wait(full.index(slot), step // ws.shape[0] & 1)
    words = gl.reshape(ws.index(slot).load(pieces_layout(groups * 16, WARPS)), [groups, 2, 8, 2, 16])
    return gl.reshape(gl.permute(words, (0, 2, 3, 1, 4)), [groups * 16, WORDS])


@gluon.jit
def _passed(
    step, words, xs, ws, full, free, nil, last, STEPS: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Makes one pass of STEPS steps over K, which computes one of S partial sums.

    step, words: first step of the pass, and its weights. nil: 0, but unknown to the compiler.

    Returns the step after the pass, its weights, and the pass's sums [R, GROUP] for each group of rows of x. A step's
    weights are loaded while the previous step is multiplied. After step `last`, the weights of `last` are loaded again
    and not used.
    """
    accs = ()
    for i in gl.static_range(len(xs)):
        accs = accs + (_zero_sums(ws.shape[1] * 16, xs[i].shape[1], WARPS),)
    for _ in range(STEPS):
        slot = step % ws.shape[0]
        new = ()
        # XOR with zero: the compiler would copy loaded values into an operand's registers for each product, but not
        # computed ones. It is here and not at the load, because products in flight still read those registers then
        words ^= nil
        for i in gl.static_range(len(xs)):
            values = gl.convert_layout(
                group_operand(words, xs[i].dtype), gl.DotOperandLayout(0, accs[i].type.layout, 2)
            )
            new = new + (warpgroup_mma(values, xs[i].index(slot).permute((1, 0)), accs[i], is_async=True),)
        step += 1
        following = _weights_of(gl.minimum(step, last), ws, full, WARPS)
        accs = warpgroup_mma_wait(0, deps=new + (words,))[: len(xs)]
        mbarrier.arrive(free.index(slot), count=1)
        words = following
    return step, words, accs


@gluon.jit
def _pairwise_sums(
    step, words, xs, ws, full, free, nil, last, STEPS: gl.constexpr, PAIRWISE: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Makes PAIRWISE passes over K and adds their sums in order. For the arguments and results see `_passed`."""
    step, words, totals = _passed(step, words, xs, ws, full, free, nil, last, STEPS, WARPS)
    for _ in gl.static_range(1, PAIRWISE):
        step, words, accs = _passed(step, words, xs, ws, full, free, nil, last, STEPS, WARPS)
        totals = plus(totals, accs)
    return step, words, totals


@gluon.jit
def _zero_sums(R: gl.constexpr, GROUP: gl.constexpr, WARPS: gl.constexpr):
    return gl.zeros([R, GROUP], gl.float32, group_sums(GROUP, WARPS))


@gluon.jit
def _leave(accs, parts, split, first_row, M, N, OWN: gl.constexpr):
    """Stores this CTA's sums `accs` over PAIRWISE splits of K as partial sums number `split` of `parts`.

    parts: fp32 [S / PAIRWISE, M, N]. OWN: number of weight rows of the CTA.
    """
    for i in gl.static_range(len(accs)):
        n = gl.arange(0, accs[i].shape[0], layout=gl.SliceLayout(1, accs[i].type.layout))
        first = gl.program_id(0) * OWN
        there = gl.expand_dims(n < gl.minimum(OWN, N - first), 1)
        n = gl.expand_dims(first + n, 1)
        m = gl.expand_dims(gl.arange(0, accs[i].shape[1], layout=gl.SliceLayout(0, accs[i].type.layout)), 0)
        base = parts + (split * M + first_row).to(gl.int64) * N
        gl.store(base + (m * N + n), accs[i], mask=(m < M - first_row) & there, eviction_policy=STAYS)
        first_row += accs[i].shape[1]


@gluon.constexpr_function
def _factors_room(rows):
    """Returns the number of row factors for which shared memory is allocated: a power of two, at least 32."""
    return max(32, 1 << (rows - 1).bit_length())


@gluon.jit
def _work_out_factors(
    factors, known, squares_ptr, first_row, M, eps,
    K: gl.constexpr, S: gl.constexpr, ROWS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Runs the warp that computes each row's factor of the norm, 1 / sqrt(mean(x^2) + eps).

    The warp stores the factors in shared memory, `factors`, and then arrives at the barrier `known`. squares_ptr: fp32
    [S, M], sums of squares of the rows of x. None: no norm, so the warp does nothing.
    """
    if squares_ptr is not None:
        if PDL:
            gdc_wait()
        for first in gl.static_range(0, ROWS, 32):
            row = first_row + first + gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
            factors.slice(first, 32).store(splits_scale(squares_ptr, row, row < M, M, eps, K, S))
        mbarrier.arrive(known.index(0), count=1)


@gluon.jit
def _end(
    totals, tile, first_row, factors, bias_ptr, residual_ptr, out_ptr, keys_ptr, ids_ptr, M, N, limit,
    GATED: gl.constexpr, REGROUP: gl.constexpr, OWN: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Runs the epilogue of a tile whose sums over K are complete. `totals` has sums for each group of rows of x.

    factors: shared memory with the norm's factor of each row. None: no norm.
    """
    FIRST: gl.constexpr = (0, totals[0].shape[1])
    for i in gl.static_range(len(totals)):
        total = gl.reshape(totals[i], [totals[i].shape[0] // 16, 2, 8, totals[i].shape[1]])
        if factors is not None:
            mine = factors.slice(FIRST[i], total.shape[3]).load(column_layout(total.type.layout))
            total = total * row_factor(mine, total)
        if keys_ptr is not None:
            enter_keys(total, tile, first_row, keys_ptr, ids_ptr, M, N, limit, OWN)
        else:
            loaded = addends(total, tile, first_row, bias_ptr, residual_ptr, M, N, GATED, OWN)
            write_tile(
                *(total, loaded, tile, first_row, out_ptr, M, N, GATED),
                *(bias_ptr is not None, residual_ptr is not None, REGROUP, OWN, WARPS),
            )
        first_row += totals[i].shape[1]


@gluon.jit
def _multiply(
    xs, ws, full, free, factors, known, first_row, split, epilogue, M, N, limit,
    EACH: gl.constexpr, STEPS: gl.constexpr, PAIRWISE: gl.constexpr,
    WARPS: gl.constexpr, GATED: gl.constexpr, REGROUP: gl.constexpr, OWN: gl.constexpr, STAY: gl.constexpr,
):  # fmt: skip
    """Runs the multiplying warps. For each tile of this CTA they sum over K, and store partial sums or the result.

    full, free: barriers of the ring buffer's slots. factors, known: see `_work_out_factors`. EACH: steps of a tile.
    """
    nil = M >> 31
    step = 0
    turns = _turns(N, OWN, STAY)
    last = EACH * turns - 1
    for turn in range(turns):
        words = _weights_of(step, ws, full, WARPS)  # loaded again, because the epilogue needs these registers
        step, words, totals = _pairwise_sums(step, words, xs, ws, full, free, nil, last, STEPS, PAIRWISE, WARPS)
        if epilogue.parts_ptr is not None:
            _leave(totals, epilogue.parts_ptr, split // PAIRWISE, first_row, M, N, OWN)
        else:
            for _ in range(PAIRWISE, EACH // STEPS, PAIRWISE):
                step, words, accs = _pairwise_sums(step, words, xs, ws, full, free, nil, last, STEPS, PAIRWISE, WARPS)
                totals = plus(totals, accs)
            if factors is not None:
                mbarrier.wait(known.index(0), 0)
            zero = nil & turn  # so that addresses are computed here and need no registers before
            width = (N + zero) // 16 * 16  # equal to N; tells the compiler that it is a multiple of 16
            _end(
                *(totals, gl.program_id(0) + turn * gl.num_programs(0), first_row + zero),
                *(
                    factors,
                    epilogue.bias_ptr,
                    epilogue.residual_ptr,
                    epilogue.out_ptr,
                    epilogue.keys_ptr,
                    epilogue.ids_ptr,
                    M + zero,
                    width,
                    limit + zero,
                ),
                *(GATED, REGROUP, OWN, WARPS),
            )


@gluon.jit(do_not_specialize=["M", "limit", "out_stride"])
def tma_kernel(
    x_desc,  # [M, K] in blocks of [GROUP, 64], regrouped
    rest_desc,  # the same in blocks of [REST, 64], or None
    weight_desc,  # int32 words [N / 16, K / 4, 32] in blocks of [first of `boxes(OWN)` / 16, 16, 32]
    second_desc,  # the same for the second of `boxes(OWN)`, or None
    third_desc,  # the same for the third of `boxes(OWN)`, or None
    squares_ptr,  # fp32 [S, M] or None: sums of squares of the rows of x, for the norm
    epilogue,  # Epilogue of launch.py
    M,
    N,
    eps,
    limit,
    out_stride,
    K: gl.constexpr,
    S: gl.constexpr,
    KT: gl.constexpr,
    PAIRWISE: gl.constexpr,  # number of neighbouring splits that a CTA adds first
    R: gl.constexpr,  # weight rows in shared memory: a power of two, because wgmma multiplies 64
    OWN: gl.constexpr,  # weight rows of the CTA's tile; sums of the other R - OWN rows are not stored
    GROUP: gl.constexpr,  # rows of x in the first product
    REST: gl.constexpr,  # rows of x in a second product; 0: no second one
    STAGES: gl.constexpr,  # steps of K in shared memory
    WARPS: gl.constexpr,  # number of multiplying warps
    GATED: gl.constexpr,
    REGROUP: gl.constexpr,  # True: out is regrouped as x is
    STAY: gl.constexpr,  # True: CTAs are persistent and take every num_programs-th tile
    PDL: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Computes tiles of the result: products of OWN weight rows with GROUP + REST rows of x.

    A CTA sums over all of K and runs the epilogue, or it stores partial sums over PAIRWISE splits.
    """
    K_TILE: gl.constexpr = KT // 2  # in words
    STEPS: gl.constexpr = steps_of(K, S, KT, 1)
    BYTES: gl.constexpr = (OWN + GROUP + REST) * 128
    first_row = gl.program_id(1) * (GROUP + REST)
    split = gl.program_id(2) * PAIRWISE
    EACH: gl.constexpr = _steps_in_all(STEPS, S, PAIRWISE, epilogue.parts_ptr is not None)

    ws = gl.allocate_shared_memory(gl.int32, [STAGES, R // 16, 16, 32], gl.NVMMASharedLayout(128, 32, 3))
    rows: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    xs = (gl.allocate_shared_memory(DTYPE, [STAGES, GROUP, 64], rows),)
    x_descs, weight_descs = (x_desc,), (weight_desc,)
    if second_desc is not None:
        weight_descs = weight_descs + (second_desc,)
    if third_desc is not None:
        weight_descs = weight_descs + (third_desc,)
    if REST > 0:
        xs = xs + (gl.allocate_shared_memory(DTYPE, [STAGES, REST, 64], rows),)
        x_descs = x_descs + (rest_desc,)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    ROWS: gl.constexpr = GROUP + REST
    factors, known = None, None
    if squares_ptr is not None:
        factors = gl.allocate_shared_memory(gl.float32, [_factors_room(ROWS)], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        known = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(known.index(0), count=1)
    fence_async_shared()

    # fmt: off
    gl.warp_specialize(
        [
            (_multiply, (
                xs, ws, full, free, factors, known, first_row, split, epilogue, M, N, limit,
                EACH, STEPS, PAIRWISE, WARPS, GATED, REGROUP, OWN, STAY,
            )),
            (_fetch, (
                x_descs, weight_descs, xs, ws, full, free, first_row, split, N, PDL, EACH, STEPS, K_TILE, S, BYTES, OWN,
                epilogue.parts_ptr is not None, STAY,
            )),
            (_work_out_factors, (factors, known, squares_ptr, first_row, M, eps, K, S, ROWS, PDL)),
        ],
        [1, 1], [32, 32],  # extra warps, and registers of each of their threads
    )
    # fmt: on
    if epilogue.keys_ptr is not None:
        write_argmax(epilogue.keys_ptr, epilogue.out_ptr, out_stride, M, WARPS)
