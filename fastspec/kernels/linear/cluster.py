"""What the packed products of many rows share: steps through K, layouts of their operands, clusters that add up."""

# ruff: noqa: RUF005  (Triton adds tuples, and knows no starred ones)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fastspec.kernels.linear.epilogue import by_groups, row_numbers, weight_numbers

WORDS = gl.constexpr(32)  # of a row in a step: 64 values, half a slab of 128


@gluon.constexpr_function
def cluster_bases(programs, rank):
    """How programs of a cluster divide the first axis of a tensor, one step of each power of two."""
    return [[1 << bit] + [0] * (rank - 1) for bit in range(programs.bit_length() - 1)]


@gluon.constexpr_function
def mma_layout(S, warps):
    """Of sums [S, R, BM]: warps divide the rows of the weight."""
    return gl.NVMMADistributedLayout([2, 0], [1, warps, 1], [1, 16, 8], cluster_bases(S, 3))


@gluon.constexpr_function
def stage_layout(S, BM, W, warps):
    """Of x [S, BM, W] on its way: a lane holds the 2 x 4 words of a row that a lane of the product multiplies."""
    rows = [1 << bit for bit in range(BM.bit_length() - 1)]
    runs = [[0, 0, 1 << bit] for bit in range(5, W.bit_length() - 1)]
    lanes = [[0, 0, 4], [0, 0, 8]] + [[0, row, 0] for row in rows[:3]]
    over = [[0, row, 0] for row in rows[3 : 2 + warps.bit_length()]]
    over += [[0, 0, 0]] * (warps.bit_length() - 1 - len(over))
    held = [[0, 0, 1], [0, 0, 2], [0, 0, 16]] + runs + [[0, row, 0] for row in rows[2 + warps.bit_length() :]]
    return gl.DistributedLinearLayout(held, lanes, over, cluster_bases(S, 3), [S, BM, W])


@gluon.constexpr_function
def shared_layout(S, BM, W):
    """Rows of words such that 16 bytes hold the operands of two products, in an order free of bank conflicts."""
    bits = [[0, 0, 16], [0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8]] + [[0, 0, 32]] * (W == 64)
    # odd rows swap their halves of 32 bytes: 2 rows by 4 lanes lie in different banks
    bits += [[0, 1, 2]] + [[0, 1 << bit, 0] for bit in range(1, BM.bit_length() - 1)]
    return gl.SharedLinearLayout(bits, cluster_bases(S, 3))


@gluon.constexpr_function
def share_layout(S, R, BM, warps):
    """Of a whole tile [R / 16, 2, 8, BM]: programs divide the first axis, a thread holds both halves of the second."""
    own = R // 16 // S
    rows = [[0, 0, 0, 1 << bit] for bit in range(BM.bit_length() - 1)]
    eight = [[0, 0, 1 << bit, 0] for bit in range(3)]
    spread = [[1 << bit, 0, 0, 0] for bit in range(own.bit_length() - 1)] + rows
    while len(spread) < 5 + warps.bit_length() - 1:
        spread.append(eight.pop() if eight else [0, 0, 0, 0])  # more threads than numbers: some do the same
    cluster = [[own << bit, 0, 0, 0] for bit in range(S.bit_length() - 1)]
    return gl.DistributedLinearLayout([*eight, [0, 1, 0, 0]], spread[:5], spread[5:], cluster, [R // 16, 2, 8, BM])


@gluon.jit
def arrive():
    """What this thread stored is seen by programs of the cluster behind their `await_all`."""
    gl.inline_asm_elementwise(
        "barrier.cluster.arrive.release.aligned; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def await_all():
    """Until all threads of the cluster have arrived."""
    gl.inline_asm_elementwise(
        "barrier.cluster.wait.acquire.aligned; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def steps_of(K, S, KT, depth):
    """Steps of a pass over K, a multiple of `depth`: those that are too many multiply zeros."""
    steps = -(-K // (S * KT)) * (KT // 64)
    return -(-steps // depth) * depth


@gluon.jit
def place_of(step, STEPS: gl.constexpr, SLAB: gl.constexpr, S: gl.constexpr):
    """Where in K the step begins, in words: passes have STEPS steps, and each starts one slab further on."""
    HALVES: gl.constexpr = SLAB // WORDS
    within = step % STEPS
    return step // STEPS * SLAB + within // HALVES * (S * SLAB) + within % HALVES * WORDS


@gluon.jit
def handed_over(accs, base, M):
    """Stores each program's partial tiles [1, R, GROUP] of [S, R, GROUP] at base[group, s, m, r]."""
    S: gl.constexpr = accs[0].shape[0]
    R: gl.constexpr = accs[0].shape[1]
    GROUP: gl.constexpr = accs[0].shape[2]
    mma: gl.constexpr = accs[0].type.layout
    s = gl.expand_dims(gl.expand_dims(gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, mma))), 1), 2)
    r = gl.expand_dims(gl.expand_dims(gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, mma))), 0), 2)
    m = gl.expand_dims(gl.expand_dims(gl.arange(0, GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(1, mma))), 0), 1)
    for i in gl.static_range(len(accs)):
        gl.store(base + (i * S + s) * (GROUP * R) + m * R + r, accs[i], mask=i * GROUP + m < M)


@gluon.jit
def taken_over(like, base, M, S: gl.constexpr, TOGETHER: gl.constexpr):
    """The S partial tiles at `base` added up, TOGETHER at a time: [R / 16, 2, 8, GROUP] in the layout of `like`."""
    R: gl.constexpr = like.shape[0] * 16
    GROUP: gl.constexpr = like.shape[3]
    row = row_numbers(like)
    at = base + row * R + weight_numbers(like, 0, 16, 8)
    parts = ()
    for i in gl.static_range(S):
        # past L1: another multiprocessor has written this
        parts = parts + (gl.load(at + i * (GROUP * R), mask=row < M, other=0.0, cache_modifier=".cg"),)
    return by_groups(parts, TOGETHER)
