"""Where the tensors of mma_tiles.py lie: over registers, lanes and warps, and in shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PARTS = 4  # of a split, KEYS keys each, with a softmax of their own; part of what the bits of a row depend on


@gluon.constexpr_function
def operands(WARPS, S):
    """Layout of scores [S, ROWS, KEYS] and of out [S, ROWS, D]: each of the S parts has a warp, or two."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[S, 1, WARPS // S], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def _bits(first, stop):
    """The powers of two from `first` on that are less than `stop`."""
    return [1 << bit for bit in range(first.bit_length() - 1, stop.bit_length() - 1)]


@gluon.constexpr_function
def _linear(bits, lanes, warps, shape):
    """A layout of these bits of a tensor's places: registers have those of `bits` that warps do not."""
    registers = [each for each in bits if each not in warps]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], shape)


@gluon.constexpr_function
def _parts(S):
    """What warps have of the first of three axes: all of it."""
    return [[s, 0, 0] for s in _bits(1, S)]


@gluon.constexpr_function
def key_layout(WARPS, S, D, RUN):
    """K [S, KEYS, D]: RUN neighbours of a key in a lane, 4 lanes to a key, 8 keys to a load."""
    bits = [*[[0, 0, d] for d in _bits(1, RUN)], [0, 8, 0], [0, 16, 0], *[[0, 0, d] for d in _bits(4 * RUN, D)]]
    lanes = [[0, 0, RUN], [0, 0, 2 * RUN], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return _linear(bits, lanes, [*([[0, 8, 0]] if WARPS == 2 * S else []), *_parts(S)], [S, 32, D])


@gluon.constexpr_function
def value_layout(WARPS, S, D, RUN):
    """V [S, KEYS, D]: RUN neighbours of a key in a lane, 8 lanes to a key, 4 keys to a load.

    Of two warps each has 64 values of 128, or of 64 each half of every lane's.
    """
    near, far = [[0, 0, d] for d in _bits(1, RUN)], [[0, 0, d] for d in _bits(8 * RUN, D)]
    lanes = [[0, 2, 0], [0, 4, 0], [0, 0, RUN], [0, 0, 2 * RUN], [0, 0, 4 * RUN]]
    apart = (far or near[-1:]) if WARPS == 2 * S else []
    return _linear([*near, [0, 1, 0], [0, 8, 0], [0, 16, 0], *far], lanes, [*apart, *_parts(S)], [S, 32, D])


@gluon.constexpr_function
def exchange_memory(S, R, D):
    """Shared memory of sums [S, R, D] as products' lanes have them: what a lane has of one product side by side."""
    pair = [[0, 0, 1], *[[0, r, 0] for r in _bits(8, R)]]
    lanes = [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.SharedLinearLayout([*pair, *lanes, *[[0, 0, d] for d in _bits(8, D)], *[[s, 0, 0] for s in _bits(1, S)]])


@gluon.constexpr_function
def exchange_layout(WARPS, R, D):
    """Sums [PARTS, R, D] in the lanes of products again: all PARTS of one, and neighbours e of a head.

    In this order, warps have: what is left of e, c, the other half of rows, or g, and more of e.
    """
    half = [[0, 8, 0]] if R == 16 else []
    apart = [*([[0, 0, 64]] if D == 128 else []), [0, 0, 8], *half, [0, 0, 1], [0, 0, 32]]
    bits = [[0, 0, 16], [0, 0, 32], [0, 0, 1], *half, [1, 0, 0], [2, 0, 0]]
    lanes = [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return _linear(bits, lanes, apart[: WARPS.bit_length() - 1], [PARTS, R, D])


@gluon.constexpr_function
def _columns(bases, REGROUP):
    """Bases [row, column] of a head's columns as those of `epilogue.regrouped`: of 64, (h, c, t) as (t, h, c)."""
    to = {2: 16, 4: 32, 8: 2, 16: 4, 32: 8} if REGROUP else {}
    return [[row, to.get(column, column)] for row, column in bases]


@gluon.constexpr_function
def merged_layout(WARPS, R, D, REGROUP):
    """The same once PARTS are added up, with the columns of a head; REGROUP: as the next product reads them."""
    half = [[8, 0]] if R == 16 else []
    apart = [[0, 4], *([[0, 64]] if D == 128 else []), *half, [0, 8], [0, 2]]
    # side by side in memory, side by side in a lane
    bits = [[0, 1], [0, 8], [0, 2], *half] if REGROUP else [[0, 1], [0, 2], [0, 8], *half]
    lanes = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    apart = _columns(apart[: WARPS.bit_length() - 1], REGROUP)
    return _linear(_columns(bits, REGROUP), _columns(lanes, REGROUP), apart, [R, D])


@gluon.constexpr_function
def softmax_memory_layout(R, D, REGROUP):
    """Shared memory of averages [R, D] as `merged_layout` lays them out: what a warp has side by side."""
    rest = [[0, 8], *([[0, 64]] if D == 128 else []), *([[8, 0]] if R == 16 else [])]
    bits = [[0, 1], [0, 2], [0, 16], [0, 32], [1, 0], [2, 0], [4, 0], [0, 4], *rest]
    return gl.SharedLinearLayout(_columns(bits, REGROUP))
