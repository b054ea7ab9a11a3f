"""What the held kernel is made of: x in shared memory, a step's product by warps or warp groups, a norm on the way."""

# ruff: noqa: RUF005  (Triton adds tuples, and knows no starred ones)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from fastspec.kernels.packed_cluster import WORDS, cluster_bases, shared_layout
from fastspec.kernels.packed_parts import (
    add_squares,
    column_layout,
    folded,
    in_order,
    root_scale,
    row_factor,
    row_operand,
    times_gamma,
    weight_operand,
)


@gluon.constexpr_function
def group_layout(S, GROUP, warps):
    """Of sums [S R, GROUP] of warp groups."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, GROUP, 16], cluster_bases(S, 2))


@gluon.constexpr_function
def words_layout(S, R, warps):
    """Of weights [S, R, WORDS]: a lane's 16 bytes are its operands of four products, as of one warp so of a group."""
    held = [[0, 0, 1], [0, 0, 2], [0, 8, 0], [0, 0, 16]]
    held += [[0, 1 << bit, 0] for bit in range(3 + warps.bit_length(), R.bit_length() - 1)]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    over = [[0, 16 << bit, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(held, lanes, over, cluster_bases(S, 3), [S, R, 32])


@gluon.constexpr_function
def _slot_layout(S, own):
    """Of x [S rows, 64] as a warp group reads it, or, if `own`, [rows, 64] as each program of the cluster sees its."""
    return gl.NVMMASharedLayout(128, 16, 2, cga_layout=[[0 if own else s, 0] for [s] in cluster_bases(S, 1)])


@gluon.jit
def _regrouped(words, DTYPE: gl.constexpr):
    """[S, A, 32] words -> [S A, 64] values such that products of 16 neighbours are those of the narrow kernel."""
    runs = gl.permute(gl.reshape(words, [words.shape[0], words.shape[1], 2, 4, 4]), (0, 1, 4, 2, 3))
    flat = gl.reshape(runs, [words.shape[0] * words.shape[1], 32])
    low, high = flat.to(gl.int16), (flat >> 16).to(gl.int16)
    values = gl.reshape(gl.join(low, high), [words.shape[0] * words.shape[1], 64])
    return values.to(DTYPE, bitcast=True)


@gluon.jit
def slots_of(
    C: gl.constexpr,
    GROUP: gl.constexpr,
    GROUPS: gl.constexpr,
    SLOTS: gl.constexpr,
    WGMMA: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Shared memory for SLOTS steps of each group of rows of x."""
    slots = ()
    for _i in gl.static_range(GROUPS):
        if WGMMA:
            slots = slots + (gl.allocate_shared_memory(DTYPE, [SLOTS, C * GROUP, 64], _slot_layout(C, False)),)
        else:
            slots = slots + (
                gl.allocate_shared_memory(gl.int32, [SLOTS, C, GROUP, WORDS], shared_layout(C, GROUP, WORDS)),
            )
    return slots


@gluon.jit
def keep(slots, slot, fetched, WGMMA: gl.constexpr, DTYPE: gl.constexpr):
    """Stores a step's rows of x, times gamma where there is one."""
    for i in gl.static_range(len(slots)):
        rows = fetched[i]
        if len(fetched) > len(slots):
            rows = times_gamma(rows, gl.broadcast(fetched[len(slots)], rows)[0], DTYPE)
        if WGMMA:
            slots[i].index(slot).store(_regrouped(rows, DTYPE))
        else:
            slots[i].index(slot).store(rows)


@gluon.jit
def multiplied(
    accs, weight, slots, slot, nil,
    left: gl.constexpr, right: gl.constexpr, WGMMA: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """accs + weight rows^T of one step."""
    # the compiler copies what 16 bytes bring into the registers of an operand for each product: not what it computes
    weight = weight ^ nil
    if WGMMA:
        mine: gl.constexpr = _slot_layout(weight.shape[0], True)
        values = gl.convert_layout(_regrouped(weight, DTYPE), left)
        rows = slots[0].index(slot)._reinterpret(DTYPE, [accs[0].shape[1], 64], mine)
        acc = warpgroup_mma(values, rows.permute((1, 0)), accs[0], is_async=True)
        return (warpgroup_mma_wait(0, deps=(acc, values))[0],)
    else:
        words: gl.constexpr = gl.DotOperandLayout(1, right.parent, 4)
        values = weight_operand(weight, DTYPE, left)
        new = ()
        for i in gl.static_range(len(accs)):
            rows = row_operand(slots[i].index(slot).permute((0, 2, 1)).load(words), DTYPE, right)
            new = new + (mma_v2(values, rows, accs[i]),)
        return new


@gluon.constexpr_function
def _fold_layout(S, GROUP, warps):
    """Of sums of squares [S GROUP, 8]: a thread holds the 8 of a row."""
    rows = [[1 << bit, 0] for bit in range(GROUP.bit_length() - 1)]
    rows += [[0, 0]] * (5 + warps.bit_length() - 1 - len(rows))
    lanes, over, held = rows[:5], rows[5 : 4 + warps.bit_length()], rows[4 + warps.bit_length() :]
    cluster = [[GROUP * s, 0] for [s] in cluster_bases(S, 1)]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], *held], lanes, over, cluster, [S * GROUP, 8])


@gluon.jit
def runs(words):
    """[S, GROUP, 32] -> [S, GROUP, 8, 4]: the four words that a lane loads at once come last."""
    return gl.reshape(words, [words.shape[0], words.shape[1], 8, 4])


@gluon.jit
def squared(squares, fetched, half: gl.constexpr, DTYPE: gl.constexpr):
    """Adds the squares of a step to those of its half of a slab; `fetched` has gamma behind the groups of rows."""
    groups: gl.constexpr = len(fetched) - 1
    new = ()
    for i in gl.static_range(len(squares)):
        if i // groups == half:
            new = new + (add_squares(squares[i], runs(fetched[i % groups]), DTYPE),)
        else:
            new = new + (squares[i],)
    return new


@gluon.jit
def zero_sums(
    S: gl.constexpr, R: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, mma: gl.constexpr,
    WGMMA: gl.constexpr,
):  # fmt: skip
    """Sums to begin with, for each group of rows of x."""
    accs = ()
    for _i in gl.static_range(GROUPS):
        if WGMMA:
            accs = accs + (gl.zeros([S * R, GROUP], gl.float32, mma),)
        else:
            accs = accs + (gl.zeros([S, R, GROUP], gl.float32, mma),)
    return accs


@gluon.jit
def leave_squares(squares, at, S: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr):
    """Stores this way's sums of squares of each row, folded as in the narrow kernel: [S, GROUPS, GROUP]."""
    lay: gl.constexpr = _fold_layout(S, GROUP, WARPS)
    for i in gl.static_range(GROUPS):
        way = folded(gl.convert_layout(gl.reshape(squares[i], [S * GROUP, 8]), lay))
        if len(squares) > GROUPS:
            way += folded(gl.convert_layout(gl.reshape(squares[GROUPS + i], [S * GROUP, 8]), lay))
        row = gl.arange(0, S * GROUP, layout=way.type.layout)
        gl.store(at + row // GROUP * (GROUPS * GROUP) + i * GROUP + row % GROUP, way)


@gluon.jit
def left_factor(at, like, eps, K: gl.constexpr, S: gl.constexpr, ROWS: gl.constexpr):
    """`row_factor` of rows whose S sums of squares lie ROWS apart."""
    row = gl.arange(0, like.shape[3], layout=column_layout(like.type.layout))
    ways = ()
    for i in gl.static_range(S):
        # past L1: another multiprocessor has written this
        ways = ways + (gl.load(at + i * ROWS + row, cache_modifier=".cg"),)
    return row_factor(root_scale(in_order(ways), K, eps), like)
