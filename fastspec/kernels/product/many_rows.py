"""Packed product for 17 or more rows of x on GPUs without the TMA kernel, with weights and x in shared memory.

Sums have the same terms in the same order as in the few-row kernel, so a row has the same bits. There, each of S warps
takes every S-th K tile. Here, one CTA makes S passes over K, and each pass takes every S-th K tile. A warp has 32
weight rows.

A pass has steps of 64 values of K. The weights of a step are loaded by asynchronous copies, D - 1 steps ahead. The
first copies start before the kernel waits for the previous kernel.
"""

# ruff: noqa: RUF005  (Triton adds tuples, and knows no starred ones)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.gluon_compat import copy_to_shared
from fastspec.kernels.product.epilogue import (
    addends,
    enter_keys,
    loaded_factor,
    row_operand,
    weight_operand,
    write_argmax,
    write_tile,
)
from fastspec.kernels.product.k_steps import WORDS, place_of, steps_of


@gluon.constexpr_function
def _mma_layout(warps):
    """Returns the layout of accumulators [1, R, BM]: the R weight rows are divided among the warps."""
    return gl.NVMMADistributedLayout([2, 0], [1, warps, 1], [1, 16, 8])


@gluon.constexpr_function
def _stage_layout(BM, W, warps):
    """Returns the layout in which x, words [1, BM, W], is loaded from global memory.

    A lane loads two groups of four words of a row. One lane later multiplies all eight of these words.
    """
    rows = [1 << bit for bit in range(BM.bit_length() - 1)]
    runs = [[0, 0, 1 << bit] for bit in range(5, W.bit_length() - 1)]
    lanes = [[0, 0, 4], [0, 0, 8]] + [[0, row, 0] for row in rows[:3]]
    over = [[0, row, 0] for row in rows[3 : 2 + warps.bit_length()]]
    over += [[0, 0, 0]] * (warps.bit_length() - 1 - len(over))
    held = [[0, 0, 1], [0, 0, 2], [0, 0, 16]] + runs + [[0, row, 0] for row in rows[2 + warps.bit_length() :]]
    return gl.DistributedLinearLayout(held, lanes, over, [], [1, BM, W])


@gluon.constexpr_function
def _shared_layout(BM, W):
    """Returns the layout of x, words [1, BM, W], in shared memory.

    Every 16 contiguous bytes are one lane's operands of two mma instructions. Loads have no bank conflicts.
    """
    bits = [[0, 0, 16], [0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8]] + [[0, 0, 32]] * (W == 64)
    # odd rows swap their halves of 32 bytes, so that 2 rows by 4 lanes use different banks
    bits += [[0, 1, 2]] + [[0, 1 << bit, 0] for bit in range(1, BM.bit_length() - 1)]
    return gl.SharedLinearLayout(bits)


@gluon.constexpr_function
def _copy_layout(R, W, warps):
    """Returns the layout of asynchronous copies of weights, words [1, R, W]: a warp copies 512 contiguous bytes."""
    steps = [[0, 0, 4], [0, 0, 8]] + [[0, 1 << bit, 0] for bit in range(4)]
    steps += [[0, 0, 1 << bit] for bit in range(4, W.bit_length() - 1)]
    steps += [[0, 1 << bit, 0] for bit in range(4, R.bit_length() - 1)]
    held = 5 + warps.bit_length() - 1
    each = [[0, 0, 1], [0, 0, 2], *steps[held:]]
    return gl.DistributedLinearLayout(each, steps[:5], steps[5:held], [], [1, R, W])


@gluon.constexpr_function
def _weight_layout(R, W):
    """Returns the layout of weights, words [1, R, W], in shared memory: the same order as in global memory.

    A warp loads 512 contiguous bytes for each fragment of the tensor core.
    """
    bits = [[0, 0, 1 << bit] for bit in range(4)] + [[0, 1 << bit, 0] for bit in range(4)]
    bits += [[0, 0, 1 << bit] for bit in range(4, W.bit_length() - 1)]
    bits += [[0, 1 << bit, 0] for bit in range(4, R.bit_length() - 1)]
    return gl.SharedLinearLayout(bits)


@gluon.jit
def _buffers(GROUP: gl.constexpr, GROUPS: gl.constexpr):
    """Allocates shared memory for the words of x in one step: a buffer for each of GROUPS groups of GROUP rows."""
    buffers = ()
    for _i in gl.static_range(GROUPS):
        buffers = buffers + (gl.allocate_shared_memory(gl.int32, [1, GROUP, WORDS], _shared_layout(GROUP, WORDS)),)
    return buffers


@gluon.constexpr_function
def _turns(depth):
    """Returns the number of buffers for x that are used in turn: the smallest divisor of `depth` above 1.

    depth: number of steps whose weights are in shared memory.
    """
    return min(count for count in range(2, depth + 1) if depth % count == 0)


@gluon.jit
def _copied(to, at, of, zero, step, K: gl.constexpr, STEPS: gl.constexpr, K_TILE: gl.constexpr, S: gl.constexpr):
    """Issues the asynchronous copies of a step's weights from address `at` + `of` to shared memory `to`.

    Writes zeros beyond K, and for steps after the last pass.

    Args:
        of: offsets of the words, for step 0.
        zero: tensor [1, 1, 1] of zero, because a mask must be a tensor.
        step, STEPS, K_TILE, S: see `place_of`.
    """
    place = place_of(step, STEPS, K_TILE, S)
    there = (zero + place < K // 2) & (step < S * STEPS)
    copy_to_shared(to, at + place * 16 + of, mask=there)


@gluon.jit
def _fetched(at, of, valid, step, K: gl.constexpr, STEPS: gl.constexpr, K_TILE: gl.constexpr, S: gl.constexpr):
    """Loads the 32-bit words of x in one step: a tensor [1, GROUP, WORDS] for each group of rows.

    Words beyond K are zero. Rows where the mask `valid` is False are also zero. at, of: address and offsets of the
    words, for step 0. step, STEPS, K_TILE, S: see `place_of`.
    """
    place = place_of(step, STEPS, K_TILE, S)
    there = place < K // 2
    loaded = ()
    for i in gl.static_range(len(valid)):
        loaded = loaded + (gl.load(at + place + of[i], mask=valid[i] & there, other=0),)
    return loaded


@gluon.jit
def _products(accs, weight, shared, nil, left: gl.constexpr, right: gl.constexpr, DTYPE: gl.constexpr):
    """Returns `accs` plus the products of one step's weights with each group of rows of x.

    Multiplies one group at a time, so that its operands fit into the registers. weight, shared: the step's weights and
    the groups of x, in shared memory. nil: 0, but unknown to the compiler.
    """
    w: gl.constexpr = gl.DotOperandLayout(0, left.parent, 4)  # in words, so half as many are contiguous
    x: gl.constexpr = gl.DotOperandLayout(1, right.parent, 4)
    # XOR with zero: the compiler would copy loaded values into an operand's registers for each product, but not
    # computed ones
    values = weight_operand(weight.load(w) ^ nil, DTYPE, left)
    new = ()
    for i in gl.static_range(len(accs)):
        rows = row_operand(shared[i].permute((0, 2, 1)).load(x), DTYPE, right)
        new = new + (mma_v2(values, rows, accs[i]),)
    return new


@gluon.jit
def _passed(
    accs,
    rows,  # rows of x for the first step
    number,  # number of the pass
    turns,
    w_at,
    x_at,
    w_of,
    x_of,
    valid,
    zero,  # see `_copied`
    ring,
    shared,
    nil,
    left: gl.constexpr,
    right: gl.constexpr,
    K: gl.constexpr,
    STEPS: gl.constexpr,
    K_TILE: gl.constexpr,
    S: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Makes one pass over K, which computes one of S partial sums.

    Returns `accs` plus the products of this pass, and the words of x for the first step of the next pass.
    """
    D: gl.constexpr = len(ring)
    for turn in range(turns):
        first = number * STEPS + turn * D
        for i in gl.static_range(D):
            here = shared[i % len(shared)]
            for j in gl.static_range(len(here)):
                here[j].store(rows[j])
            # waits for all warps: then x and all copies of this step have arrived, and the buffers filled next have
            # been read
            async_copy.wait_group(D - 2)
            _copied(ring[(i + D - 1) % D], w_at, w_of, zero, first + (i + D - 1), K, STEPS, K_TILE, S)
            async_copy.commit_group()
            rows = _fetched(x_at, x_of, valid, first + (i + 1), K, STEPS, K_TILE, S)
            accs = _products(accs, ring[i], here, nil, left, right, DTYPE)
    return accs, rows


@gluon.jit
def _stashes(like):
    """Allocates shared memory for the sums of complete passes, with the values of `like` in it at first.

    The registers are needed for the sums of the current pass.
    """
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(2, 1, 8, [2, 1, 0])
    stashes = ()
    for i in gl.static_range(len(like)):
        stashes = stashes + (gl.allocate_shared_memory(gl.float32, like[i].shape, swizzled, like[i]),)
    return stashes


@gluon.jit
def _stashed(stashes, accs):
    for i in gl.static_range(len(accs)):
        stashes[i].store(stashes[i].load(accs[i].type.layout) + accs[i])


@gluon.jit
def _emptied(stashes, zeros):
    for i in gl.static_range(len(zeros)):
        stashes[i].store(zeros[i])


@gluon.jit
def _unstashed(stashes, like):
    totals = ()
    for i in gl.static_range(len(like)):
        totals = totals + (stashes[i].load(like[i].type.layout),)
    return totals


@gluon.jit(do_not_specialize=["M", "limit", "out_stride", "turns"])
def many_rows_kernel(
    inputs,  # Rows of launch.py; x is already multiplied with gamma
    weight_ptr,  # int32 words [N / 16, K / 32, 16, 16]
    epilogue,  # Epilogue of launch.py
    M,
    N,
    limit,
    out_stride,
    turns,  # number of rounds of D steps in a pass; not a constexpr, because the compiler would unroll them
    K: gl.constexpr,
    S: gl.constexpr,
    KT: gl.constexpr,
    PAIRWISE: gl.constexpr,  # number of neighbouring splits that are added first
    R: gl.constexpr,
    GROUP: gl.constexpr,  # rows of x that are multiplied together
    GROUPS: gl.constexpr,
    D: gl.constexpr,  # number of steps whose weights are in shared memory; one of them is in use
    WARPS: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Computes a tile of the result in each CTA: R weight rows times GROUPS * GROUP rows of x, and the epilogue."""
    x_ptr, _gamma_ptr, scale_ptr, _eps = inputs
    mma: gl.constexpr = _mma_layout(WARPS)
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 8)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 8)
    K_TILE: gl.constexpr = KT // 2  # words
    STEPS: gl.constexpr = steps_of(K, S, KT, D)
    copy: gl.constexpr = _copy_layout(R, WORDS, WARPS)
    stage: gl.constexpr = _stage_layout(GROUP, WORDS, WARPS)

    tile = gl.program_id(0)
    first_row = gl.program_id(1) * (GROUP * GROUPS)
    zero = gl.full([1, 1, 1], 0, gl.int32, layout=copy)
    r = gl.expand_dims(gl.expand_dims(gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, copy))), 0), 2)
    k = gl.expand_dims(gl.expand_dims(gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, copy))), 0), 1)
    group = gl.minimum(tile * (R // 16) + r // 16, N // 16 - 1) - tile * (R // 16)
    w_at = weight_ptr + tile.to(gl.int64) * (R * K // 2)
    w_of = group * (8 * K) + (k // 16 * 256 + r % 16 * 16 + k % 16)

    m = gl.expand_dims(gl.expand_dims(gl.arange(0, GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(2, stage))), 0), 2)
    k = gl.expand_dims(gl.expand_dims(gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, stage))), 0), 1)
    x_at = x_ptr + first_row.to(gl.int64) * (K // 2)
    x_of, valid, zeros, ring, shared = (), (), (), (), ()
    for i in gl.static_range(GROUPS):
        x_of = x_of + (m * (K // 2) + (i * (GROUP * K // 2) + k),)
        valid = valid + (m < M - first_row - i * GROUP,)
        zeros = zeros + (gl.zeros([1, R, GROUP], gl.float32, mma),)
    for _i in gl.static_range(D):
        ring = ring + (gl.allocate_shared_memory(gl.int32, [1, R, WORDS], _weight_layout(R, WORDS)),)
    for _i in gl.static_range(_turns(D)):
        shared = shared + (_buffers(GROUP, GROUPS),)

    for i in gl.static_range(D - 1):
        _copied(ring[i], w_at, w_of, zero, i, K, STEPS, K_TILE, S)
        async_copy.commit_group()
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    rows = _fetched(x_at, x_of, valid, 0, K, STEPS, K_TILE, S)
    stashes = _stashes(zeros)
    some = stashes  # sums of the neighbouring splits that are added first
    if PAIRWISE > 1:
        some = _stashes(zeros)
    for group in range(S // PAIRWISE):
        for each in range(PAIRWISE):
            number = group * PAIRWISE + each
            accs, rows = _passed(
                *(zeros, rows, number, turns, w_at, x_at, w_of, x_of, valid, zero, ring, shared, M >> 31),
                *(left, right, K, STEPS, K_TILE, S, DTYPE),
            )
            _stashed(some, accs)
        if PAIRWISE > 1:
            _stashed(stashes, _unstashed(some, zeros))
            _emptied(some, zeros)
    totals = _unstashed(stashes, zeros)
    # otherwise the zeros of steps after the last pass could be written to shared memory that is already in use again
    async_copy.wait_group(0)

    for i in gl.static_range(GROUPS):
        row = first_row + i * GROUP
        total = gl.reshape(totals[i], [R // 16, 2, 8, GROUP])
        loaded = addends(total, tile, row, epilogue.bias_ptr, epilogue.residual_ptr, M, N, GATED)
        if scale_ptr is not None:
            total = total * loaded_factor(scale_ptr, row, M, total)
        if epilogue.keys_ptr is not None:
            enter_keys(total, tile, row, epilogue.keys_ptr, epilogue.ids_ptr, M, N, limit)
        else:
            write_tile(
                *(total, loaded, tile, row, epilogue.out_ptr, M, N, GATED),
                *(epilogue.bias_ptr is not None, epilogue.residual_ptr is not None),
            )
    if epilogue.keys_ptr is not None:
        write_argmax(epilogue.keys_ptr, epilogue.out_ptr, out_stride, M, WARPS)
