"""Device code of all packed products: operands from 32-bit words, sums in a fixed order, and the epilogue of a tile.

Weights and activations are loaded as 32-bit words of two 16-bit values each, low half first. A word is one register,
and one operand of an instruction on pairs of values (bf16x2, f16x2).
"""

# ruff: noqa: RUF005  (Triton adds tuples, and knows no starred ones)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fastspec.kernels.common.gluon_compat import thread_barrier
from fastspec.kernels.product.k_steps import by_groups, in_order

# for results that the next kernel reads: they stay in L2 while weights stream through it, and are not written to device
# memory
STAYS = gl.constexpr("evict_last")
LIFTED = gl.constexpr(2.0**64)  # factor of RAISE in `write_tile`
GELU = gl.constexpr((2 / 3.141592653589793) ** 0.5)  # sqrt(2 / pi) of the tanh formula


@gluon.jit
def weight_operand(words, DTYPE: gl.constexpr, layout: gl.constexpr):
    """Casts words of weights [S, R, K/2] to 16-bit values [S, R, K], the left operand. Needs no instruction."""
    low, high = words.to(gl.int16), (words >> 16).to(gl.int16)
    values = gl.reshape(gl.join(low, high), [words.shape[0], words.shape[1], words.shape[2] * 2])
    return gl.convert_layout(values.to(DTYPE, bitcast=True), layout, assert_trivial=True)


@gluon.jit
def row_operand(words, DTYPE: gl.constexpr, layout: gl.constexpr):
    """Casts words of x [S, K/2, BM] to 16-bit values [S, K, BM], the right operand. Needs no instruction."""
    low, high = words.to(gl.int16), (words >> 16).to(gl.int16)
    pairs = gl.permute(gl.join(low, high), (0, 1, 3, 2))
    values = gl.reshape(pairs, [words.shape[0], words.shape[1] * 2, words.shape[2]])
    return gl.convert_layout(values.to(DTYPE, bitcast=True), layout, assert_trivial=True)


@gluon.jit
def times_gamma(words, gamma, DTYPE: gl.constexpr):
    """Multiplies words of x by words of gamma, each of two 16-bit values. Each product is rounded once.

    In bf16 it computes the FMA x * gamma - 0, because sm_80 has no multiplication of bf16 pairs.
    """
    if gl.bfloat16 == DTYPE:
        return gl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }",
            "=r,r,r",
            [words, gamma],
            dtype=gl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return gl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [words, gamma], dtype=gl.int32, is_pure=True, pack=1
        )


@gluon.jit
def unpacked(words, DTYPE: gl.constexpr):
    """Converts words of two 16-bit values to two fp32 tensors: (low halves, high halves)."""
    if gl.bfloat16 == DTYPE:
        low, high = words << 16, words & -65536
        return low.to(gl.float32, bitcast=True), high.to(gl.float32, bitcast=True)
    else:
        return gl.inline_asm_elementwise(
            "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }",
            "=f,=f,r",
            [words],
            dtype=(gl.float32, gl.float32),
            is_pure=True,
            pack=1,
        )


@gluon.jit
def _each_of_four(words):
    even, odd = gl.split(gl.reshape(words, words.shape[:-1] + [2, 2]))
    zeroth, second = gl.split(even)
    first, third = gl.split(odd)
    return zeroth, first, second, third


@gluon.jit
def no_squares(words):
    """Returns fp32 zeros [...] for words [..., 4]. They are the `total` of the first call of `add_squares`."""
    one = _each_of_four(words)[0]
    return gl.full(one.shape, 0.0, gl.float32, layout=one.type.layout)


@gluon.jit
def add_squares(total, words, DTYPE: gl.constexpr):
    """Adds to total [...] the squares of the 8 values in words [..., 4], one after the other.

    This order does not depend on the layout of the tensors, so the bits do not either.
    """
    four = _each_of_four(words)
    for i in gl.static_range(4):
        low, high = unpacked(four[i], DTYPE)
        total = gl.fma(high, high, gl.fma(low, low, total))
    return total


@gluon.jit
def folded(x):
    """Sums x [A, n] over its last axis to [A], as a binary tree of neighbours, in any layout.

    n is a power of two, at most 32.
    """
    for _ in gl.static_range(5):
        if x.shape[1] > 1:
            left, right = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
            x = left + right
    return gl.reshape(x, [x.shape[0]])


@gluon.jit
def apart(x):
    """Splits x [A, n] into a tuple of n tensors [A], in order."""
    if x.shape[1] == 1:
        return (gl.reshape(x, [x.shape[0]]),)
    else:
        left, right = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
        evens, odds = apart(left), apart(right)
        mixed = ()
        for i in gl.static_range(len(evens)):
            mixed = mixed + (evens[i], odds[i])
        return mixed


@gluon.jit
def plus(sums, accs):
    """Adds two tuples of sums, element by element."""
    total = ()
    for i in gl.static_range(len(accs)):
        total = total + (sums[i] + accs[i],)
    return total


@gluon.jit
def added_up(x):
    """Sums x [A, n] over its last axis to [A], from the first element to the last.

    The layout must keep all n elements of a row in one thread.
    """
    return in_order(apart(x))


@gluon.jit
def sum_of_splits(acc, PAIRWISE: gl.constexpr):
    """Adds the partial sums [S, R, BM] of S warps, in the order of `by_groups`.

    Returns a tile [R / 16, 2, 8, BM]: element [a, h, r] of its first three axes is weight row 16 a + 8 h + r.
    """
    S: gl.constexpr = acc.shape[0]
    R: gl.constexpr = acc.shape[1]
    BM: gl.constexpr = acc.shape[2]
    splits = gl.reshape(acc, [S, R // 16, 2, 8, BM])
    if S > 1:
        merged: gl.constexpr = gl.BlockedLayout([S, 1, 2, 1, 1], [1, 1, 1, 8, 4], [1, 1, 1, 1, S], [0, 2, 3, 4, 1])
        splits = gl.convert_layout(splits, merged)
    flat = gl.reshape(gl.permute(splits, (1, 2, 3, 4, 0)), [R * BM, S])
    return gl.reshape(by_groups(apart(flat), PAIRWISE), [R // 16, 2, 8, BM])


@gluon.constexpr_function
def column_layout(tile):
    """Returns the layout of a vector [BM] along the last axis of a tile [A, 2, 8, BM] whose layout is `tile`."""
    return gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, tile)))


@gluon.jit
def root_scale(squares, K: gl.constexpr, eps):
    """Returns 1 / sqrt(mean(x^2) + eps) for each row of x. squares: the row's sum of squares over K."""
    return gl.rsqrt(squares * (1.0 / K) + eps)


@gluon.jit
def splits_scale(squares_ptr, row, there, M, eps, K: gl.constexpr, S: gl.constexpr):
    """Returns `root_scale` for the rows of x with indices `row`.

    squares_ptr: fp32 [S, M], the sum of squares of each row over each of S splits of K. there: mask of the rows that
    exist. None: all exist.
    """
    splits = ()
    for i in gl.static_range(S):
        at = squares_ptr + (i * M + row)
        splits = splits + (gl.load(at) if there is None else gl.load(at, mask=there, other=0.0),)
    return root_scale(in_order(splits), K, eps)


@gluon.jit
def row_factor(scale, like):
    """Reshapes one factor per row of x, [BM], to [1, 1, 1, BM], in the layout of a tile `like` [A, 2, 8, BM]."""
    columns: gl.constexpr = column_layout(like.type.layout)
    if scale.type.layout != columns:
        scale = gl.convert_layout(scale, columns)
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(scale, 0), 0), 0)


@gluon.jit
def loaded_factor(scale_ptr, first_row, M, like):
    """Loads one factor per row of x, from `first_row` on, from scale_ptr, fp32 [M].

    like: tile [A, 2, 8, BM]. Returns [1, 1, 1, BM], as `row_factor`.
    """
    row = first_row + gl.arange(0, like.shape[3], layout=column_layout(like.type.layout))
    return row_factor(gl.load(scale_ptr + row, mask=row < M, other=0.0), like)


@gluon.jit
def row_numbers(total):
    """Returns 0 .. BM - 1 as [1, 1, 1, BM]: the row of x at each index of a tile's last axis."""
    at = gl.arange(0, total.shape[3], layout=column_layout(total.type.layout))
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(at, 0), 0), 0)


@gluon.jit
def weight_numbers(total, first, group, half):
    """Returns first + a * group + h * half + r as [A, 2, 8, 1]: the index of the weight row at [a, h, r] of a tile."""
    planes: gl.constexpr = gl.SliceLayout(0, total.type.layout)
    groups: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, total.type.layout))
    a = gl.arange(0, total.shape[0], layout=gl.SliceLayout(1, groups))
    h = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, planes)))
    r = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(0, planes)))
    a = gl.expand_dims(gl.expand_dims(gl.expand_dims(a, 1), 2), 3)
    h = gl.expand_dims(gl.expand_dims(gl.expand_dims(h, 1), 2), 0)
    r = gl.expand_dims(gl.expand_dims(gl.expand_dims(r, 1), 0), 0)
    return first + a * group + h * half + r


@gluon.jit
def _halves(tile):
    """Splits a tile [A, 2, 8, BM] into [:, 0] and [:, 1]. A thread has both, so no data moves between threads."""
    return gl.split(gl.permute(tile, (0, 2, 3, 1)))


@gluon.jit
def regrouped(word):
    """Returns the index that word number `word` of a row of x has after regrouping.

    Of every 32 words, word 16 h + 4 c + t moves to 8 t + 4 h + c. So the 8 words (16 values of K) that one instruction
    of the tensor core multiplies become neighbours.
    """
    return word // 32 * 32 + word % 4 * 8 + word // 16 % 2 * 4 + word // 4 % 4


@gluon.jit
def _width(N, GATED: gl.constexpr):
    if GATED:
        return N // 2
    else:
        return N


@gluon.constexpr_function
def _owned(tile, OWN):
    """Returns the number of weight rows of a tile whose results are stored: OWN, or all rows if OWN is 0."""
    return OWN or tile.shape[0] * 16


@gluon.jit
def _columns(like, tile_id, GATED: gl.constexpr, OWN: gl.constexpr):
    """Returns the output column of each weight row of tile `tile_id`, as [A, 2, 8, 1].

    With GATED, a gate row and its up row have the same column.
    """
    if GATED:
        return weight_numbers(like, tile_id * (_owned(like, OWN) // 2), 8, 0)
    else:
        return weight_numbers(like, tile_id * _owned(like, OWN), 16, 8)


@gluon.jit
def _columns_end(like, tile_id, width, GATED: gl.constexpr, OWN: gl.constexpr):
    """Returns the limit of the output columns that a tile stores: only columns below it. It is at most `width`."""
    if _owned(like, OWN) < like.shape[0] * 16:
        width = gl.minimum(width, (tile_id + 1) * _width(_owned(like, OWN), GATED))
    return width


@gluon.jit
def _offsets(like, tile_id, first_row, M, N, GATED: gl.constexpr, OWN: gl.constexpr):
    """Returns the offsets of a tile's values from output row `first_row`, and a mask of the values that are stored.

    Both are [A, 2, 8, BM], or [A, 8, BM] if GATED. like: a tensor [A, 2, 8, BM] in the tile's layout. OWN: see
    `_owned`.
    """
    row = row_numbers(like)
    column = _columns(like, tile_id, GATED, OWN)
    width = _width(N, GATED)
    valid = (row < M - first_row) & (column < _columns_end(like, tile_id, width, GATED, OWN))
    at = row * width + column
    if GATED:
        return _halves(at)[0], _halves(valid)[0]
    else:
        return at, valid


@gluon.jit
def addends(
    like, tile_id, first_row, bias_ptr, residual_ptr, M, N, GATED: gl.constexpr, OWN: gl.constexpr = 0
):  # fmt: skip
    """Loads the elements of the bias and of the residual that belong to a tile. Leaves out a pointer that is None.

    Returns them as a tuple, the argument `loaded` of `write_tile`. like: a tensor [A, 2, 8, BM] in the tile's layout.
    OWN: see `_owned`.
    """
    loaded = ()
    if bias_ptr is not None:
        column = _columns(like, tile_id, GATED, OWN)
        place = column
        if GATED:
            place = weight_numbers(like, tile_id * (_owned(like, OWN) // 2), 8, N // 2)
        loaded = loaded + (gl.load(bias_ptr + place, mask=column < _width(N, GATED), other=0.0),)
    if residual_ptr is not None:
        at, valid = _offsets(like, tile_id, first_row, M, N, GATED, OWN)
        base = residual_ptr + first_row.to(gl.int64) * _width(N, GATED)
        loaded = loaded + (gl.load(base + at, mask=valid, other=0.0),)
    return loaded


@gluon.constexpr_function
def _rows_layout(runs, each, BM, warps):
    """Returns a layout of output values [runs, each, BM] in which one thread has all `each` values of a run.

    A run is `each` neighbouring values of an output row. Neighbouring lanes have neighbouring runs. warps: number of
    warps.
    """
    held = [[0, 1 << bit, 0] for bit in range(each.bit_length() - 1)]
    spread = [[1 << bit, 0, 0] for bit in range(runs.bit_length() - 1)]
    spread += [[0, 0, 1 << bit] for bit in range(BM.bit_length() - 1)]
    threads = 4 + warps.bit_length()
    spread += [[0, 0, 0]] * (threads - len(spread))  # more threads than numbers: some threads have the same numbers
    return gl.DistributedLinearLayout(held + spread[threads:], spread[:5], spread[5:threads], [], [runs, each, BM])


@gluon.jit
def _store_rows(
    values, tile_id, first_row, out_ptr, M, N, GATED: gl.constexpr, REGROUP: gl.constexpr, OWN: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Stores 16-bit values [A, 2, 8, BM], or [A, 8, BM] if GATED, as contiguous pieces of output rows.

    A lane stores 16 bytes, or one 32-bit word if REGROUP. wgmma leaves single values of several rows in a thread's
    registers. So the values are first converted to the layout of these stores. For the arguments see `write_tile`.
    """
    BM: gl.constexpr = values.shape[len(values.shape) - 1]
    EACH: gl.constexpr = 2 if REGROUP else 8
    RUNS: gl.constexpr = values.shape[0] * (8 if GATED else 16) // EACH
    lay: gl.constexpr = _rows_layout(RUNS, EACH, BM, WARPS)
    values = gl.convert_layout(gl.reshape(values, [RUNS, EACH, BM]), lay)
    planes: gl.constexpr = gl.SliceLayout(2, lay)
    run = gl.expand_dims(gl.expand_dims(gl.arange(0, RUNS, layout=gl.SliceLayout(1, planes)), 1), 2)
    place = gl.expand_dims(gl.expand_dims(gl.arange(0, EACH, layout=gl.SliceLayout(0, planes)), 0), 2)
    rows: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, lay))
    row = gl.expand_dims(gl.expand_dims(gl.arange(0, BM, layout=rows), 0), 0)
    own, width = _width(OWN, GATED), _width(N, GATED)
    run += tile_id * (own // EACH)
    there = (row < M - first_row) & (run < (tile_id + 1) * (own // EACH)) & (run < width // EACH)
    if REGROUP:
        run = regrouped(run)
    base = out_ptr + first_row.to(gl.int64) * width
    gl.store(base + (row * width + run * EACH + place), values, mask=there, eviction_policy=STAYS)


@gluon.jit
def write_tile(
    total, loaded, tile_id, first_row, out_ptr, M, N, GATED: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
    REGROUP: gl.constexpr = False, OWN: gl.constexpr = 0, WARPS: gl.constexpr = 0, RAISE: gl.constexpr = False,
):  # fmt: skip
    """Runs the epilogue of a tile: adds the bias, applies act(gate) * up, adds the residual, rounds once and stores.

    total: fp32 sums [A, 2, 8, BM] over K. loaded: result of `addends`. GATED: 0 for no gate, 1 for silu(gate) * up, 2
    for gelu(gate) * up (tanh formula, arXiv 1606.08415). REGROUP: stores words in the order of `regrouped`; needs
    WARPS. OWN: number of weight rows whose results are stored, a multiple of 16; 0: all. WARPS: number of warps, if
    wgmma computed the tile. 0: mma computed it, and values are stored from their layout. RAISE: multiplies the result
    by 2^64, exactly, for a next product with 8-bit codes.
    """
    at, valid = _offsets(total, tile_id, first_row, M, N, GATED, OWN)
    if BIAS:
        total += loaded[0].to(gl.float32)
    if GATED:
        gate, up = _halves(total)
        if GATED == 2:
            inner = GELU * (gate + 0.044715 * gate * gate * gate)
            total = gate / (1.0 + gl.exp(-2.0 * inner)) * up
        else:
            total = gate / (1.0 + gl.exp(-gate)) * up
    if RESIDUAL:
        total += loaded[len(loaded) - 1].to(gl.float32)
    kind: gl.constexpr = out_ptr.dtype.element_ty
    if RAISE:
        total = total.to(kind).to(gl.float32) * LIFTED
    base = out_ptr + first_row.to(gl.int64) * _width(N, GATED)
    if gl.float32 == kind:  # logits are too many to stay in L2
        gl.store(base + at, total, mask=valid)
    elif WARPS > 0:
        _store_rows(total.to(kind), tile_id, first_row, out_ptr, M, N, GATED, REGROUP, OWN, WARPS)
    else:
        gl.store(base + at, total.to(kind), mask=valid, eviction_policy=STAYS)


@gluon.jit
def enter_keys(total, tile_id, first_row, keys_ptr, ids_ptr, M, N, limit, OWN: gl.constexpr = 0):
    """Updates each row's key, for the argmax, with the row's largest logit in a tile of logits [A, 2, 8, BM].

    keys_ptr: int64 [M], updated by an atomic maximum. ids_ptr: int64 [N], ids of the logits; None: their places.
    limit: only ids below it count. OWN: see `_owned`.

    A key holds a logit and its id. Keys are ordered by logit, then by lower id. The upper 32 bits order floats as
    integers; NaN is the largest, and 0 equals -0. The lower 31 bits are 2^31 - 1 - id. Every key is above zero, so zero
    means that there is no key yet.
    """
    A: gl.constexpr = total.shape[0]
    token = _columns(total, tile_id, False, OWN)
    bits = gl.where(total == 0.0, 0.0, total).to(gl.int32, bitcast=True)
    order = (bits ^ ((bits >> 31) | -0x80000000)).to(gl.int64) & 0xFFFFFFFF
    order = gl.where(total == total, order, 0xFFFFFFFF)
    end = _columns_end(total, tile_id, N, False, OWN)
    if ids_ptr is None:
        counted = token < gl.minimum(limit, end)
    else:
        inside = token < end
        token = gl.load(ids_ptr + token, mask=inside, other=0)
        counted = inside & (token < limit)
    key = gl.where(counted, (order << 31) | (0x7FFFFFFF - token), 0)
    best = gl.max(gl.reshape(key, [A * 16, total.shape[3]]), axis=0)
    row = first_row + gl.arange(0, total.shape[3], layout=best.type.layout)
    gl.atomic_max(keys_ptr + row, best, mask=row < M, sem="relaxed")


@gluon.jit
def write_argmax(keys_ptr, out_ptr, out_stride, M, warps: gl.constexpr):
    """Writes the id in each row's key to out_ptr, and sets the keys to zero for the next launch.

    Only the last CTA that calls it does this. keys_ptr: int64 [M + 1]; the last element counts CTAs. out_ptr: int64 for
    ids, or uint64 for the keys themselves. out_stride: elements between two ids.
    """
    kind: gl.constexpr = out_ptr.dtype.element_ty
    # every warp must have entered its maxima before one thread counts this CTA as done
    thread_barrier()
    done = gl.atomic_add(keys_ptr + M, 1, sem="acq_rel")
    if done == gl.num_programs(0) * gl.num_programs(1) - 1:
        for first in range(0, M, 64):
            row = first + gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [warps], [0]))
            none = gl.full_like(row, 0).to(gl.int64)
            key = gl.atomic_xchg(keys_ptr + row, none, mask=row < M, sem="relaxed")
            if gl.int64 == kind:
                key = 0x7FFFFFFF - (key & 0x7FFFFFFF)
            gl.store(out_ptr + row * out_stride, key.to(kind), mask=row < M)
        gl.atomic_xchg(keys_ptr + M, 0, sem="relaxed")
