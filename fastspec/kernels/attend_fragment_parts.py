"""Pieces of the kernel of attend_fragments.py: products over keys out of registers, and what they leave."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

KEYS = gl.constexpr(16)  # keys of one warp's product
EIGHT = gl.constexpr(8)  # rows of a group of queries: the columns of a product
FAN = gl.constexpr(16)  # partial sums that one program adds up
FEW = gl.constexpr(4)  # as many of them as short rows have


@gluon.jit
def _along(n: gl.constexpr, axis: gl.constexpr, layout: gl.constexpr):
    """0 .. n-1 along one axis of a 3-D layout."""
    if axis == 0:
        return gl.expand_dims(
            gl.expand_dims(gl.arange(0, n, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout))), 1), 2
        )
    elif axis == 1:
        return gl.expand_dims(
            gl.expand_dims(gl.arange(0, n, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout))), 0), 2
        )
    else:
        return gl.expand_dims(
            gl.expand_dims(gl.arange(0, n, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout))), 0), 1
        )


@gluon.constexpr_function
def operands(WARPS):
    """Layout of scores [S, KEYS, R] and of out [S, D, R]: a warp has every WARPS-th of the S."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def value_layout(S, D):
    """V [S, D, KEYS]: 8 neighbours of a key in a lane, of 8 lanes 64 of them, 4 keys to a load."""
    chunks = [[0, 64, 0]] if D == 128 else []
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 0, 1], [0, 0, 8], *chunks],
        lane_bases=[[0, 0, 2], [0, 0, 4], [0, 8, 0], [0, 16, 0], [0, 32, 0]],
        warp_bases=[[1 << i, 0, 0] for i in range(S.bit_length() - 1)],
        block_bases=[],
        shape=[S, D, 16],
    )


@gluon.jit
def _slots(
    table_ptr,
    first,
    s,
    key,
    kv_head,
    table_width,
    num_pages,
    KV_HEADS: gl.constexpr,
    D: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
):
    """(int64 offset, int32 offset) of key `first + s * KEYS + key`; s and key broadcast against each other."""
    at = first + s * KEYS
    if PAGE_SIZE % KEYS != 0:  # else one page holds all keys of a warp
        at = at + key
    # past L1, as all that is read before the kernel's wait: an older content of the same memory may lie there
    page = gl.load(table_ptr + gl.minimum(at // PAGE_SIZE, table_width - 1), cache_modifier=".cg")
    page = gl.minimum(gl.maximum(page, 0), num_pages - 1)
    slot = ((page * PAGE_SIZE + at % PAGE_SIZE) * KV_HEADS + kv_head) * D
    if PAGE_SIZE % KEYS != 0:
        return slot, key * 0
    else:
        return slot, key * (KV_HEADS * D)


@gluon.jit
def places_of(
    key_ptr,
    value_ptr,
    table_ptr,
    first,
    kv_head,
    table_width,
    num_pages,
    KV_HEADS: gl.constexpr,
    D: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    S: gl.constexpr,
):
    """Where K [S, KEYS, D / 2] (first halves) and V [S, D, KEYS] of the keys first.. are, and which keys they are."""
    kl: gl.constexpr = gl.DotOperandLayout(0, operands(gl.num_warps()), 8)
    s = _along(S, 0, kl)
    n = _along(KEYS, 1, kl)
    d = _along(D // 2, 2, kl)
    slot, offset = _slots(table_ptr, first, s, n, kv_head, table_width, num_pages, KV_HEADS, D, PAGE_SIZE)
    k_at, k_key = key_ptr + slot + (offset + d), first + s * KEYS + n
    vl: gl.constexpr = value_layout(S, D)
    s = _along(S, 0, vl)
    n = _along(KEYS, 2, vl)
    d = _along(D, 1, vl)
    slot, offset = _slots(table_ptr, first, s, n, kv_head, table_width, num_pages, KV_HEADS, D, PAGE_SIZE)
    return k_at, k_key, value_ptr + slot + (offset + d), first + s * KEYS + n


@gluon.jit
def keys_at(places, low, high, old, HALF: gl.constexpr):
    """Halves of K at `places`, of which the keys low .. high-1 are loaded and the others as in `old`, or 0.

    The slots of later positions than high-1 hold anything, NaN included: they must not come into a product.
    """
    at, key, _v_at, _v_key = places
    inside = (key >= low) & (key < high)
    if old is None:
        k1 = gl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
        return k1, gl.load(at + HALF, mask=inside, other=0.0, cache_modifier=".cg")
    else:
        return gl.load(at, mask=inside, other=old[0]), gl.load(at + HALF, mask=inside, other=old[1])


@gluon.jit
def values_at(places, low, high, old):
    """V at `places`, as `keys_at`."""
    _k_at, _k_key, at, key = places
    inside = (key >= low) & (key < high)
    if old is None:
        return gl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
    else:
        return gl.load(at, mask=inside, other=old)


@gluon.jit
def _rows_of_values(v, layout: gl.constexpr):
    """V [S, D, KEYS] as left operand, its rows d = (c, g, e) as (c, e, g): no instruction moves it."""
    S: gl.constexpr = v.shape[0]
    D: gl.constexpr = v.shape[1]
    apart = gl.permute(gl.reshape(v, [S, D // 64, 8, 8, KEYS]), (0, 1, 3, 2, 4))
    return gl.convert_layout(gl.reshape(apart, [S, D, KEYS]), layout)


@gluon.jit
def queries_of(qs, G: gl.constexpr, S: gl.constexpr, HALF: gl.constexpr):
    """Group G of the queries in shared memory [rows, HALF], as right operand [S, HALF, 8]."""
    right: gl.constexpr = gl.DotOperandLayout(1, operands(gl.num_warps()), 8)
    part = qs.slice(G * EIGHT, EIGHT).permute((1, 0)).load(gl.SliceLayout(0, right))
    same, _a = gl.broadcast(gl.expand_dims(part, 0), gl.zeros([S, HALF, EIGHT], part.dtype, right))
    return same


@gluon.jit
def scored(keys, q1, q2, first, position, scale, WINDOW: gl.constexpr, S: gl.constexpr):
    """Scores [S, KEYS, R] of the keys first.., times log2(e); -inf where a row does not see a key."""
    mma: gl.constexpr = operands(gl.num_warps())
    scores = mma_v2(keys[0], q1, gl.zeros([S, KEYS, q1.shape[2]], gl.float32, mma))
    scores = mma_v2(keys[1], q2, scores) * scale
    s = _along(S, 0, mma)
    n = _along(KEYS, 1, mma)
    at = first + s * KEYS + n
    # how far back a key lies: of a later one, and of any for a padding row, negative and so beyond every reach
    seen = (position - at).to(gl.uint32) < (WINDOW if WINDOW > 0 else 2**31)
    return gl.where(seen, scores, -float("inf"))


@gluon.jit
def shift_of(top):
    """What to take from logarithms of weights of which `top` is the largest.

    Of nothing top = -inf; taking 0 makes its weights exp2(-inf) = 0, not NaN.
    """
    return gl.where(top == -float("inf"), 0.0, top)


@gluon.jit
def advanced(top, totals, out, scores, v, S: gl.constexpr):
    """The online softmax (top, totals, out) with another block of keys."""
    mma: gl.constexpr = operands(gl.num_warps())
    new_top = gl.maximum(top, gl.max(scores, axis=1))
    shift = shift_of(new_top)
    weights = gl.exp2(scores - gl.expand_dims(shift, 1))
    fade = gl.expand_dims(gl.exp2(top - shift), 1)
    right = gl.convert_layout(weights.to(v.dtype), gl.DotOperandLayout(1, mma, 2))
    out = mma_v2(_rows_of_values(v, gl.DotOperandLayout(0, mma, 2)), right, out * fade)
    return new_top, totals * fade + weights, out


@gluon.jit
def _averaged(out, top, total):
    """(out / total, top + log2(total)): an average of values, and how much it weighs; of nothing, (0, -inf)."""
    average = out / gl.expand_dims(gl.where(total == 0.0, 1.0, total), 1)
    return average, top + gl.log2(total)


@gluon.jit
def together(top, total, out):
    """(averages [R, D], their weights as log2 [R]) of what the S warps have, added up from the first to the last.

    A lane then has the S values of one sum, and 4 neighbours of a head.
    """
    S: gl.constexpr = out.shape[0]
    D: gl.constexpr = out.shape[1]
    R: gl.constexpr = out.shape[2]
    all_top = gl.max(top, axis=0)
    shift = shift_of(all_top)
    weights = gl.exp2(top - gl.expand_dims(shift, 0))
    out = out * gl.expand_dims(weights, 1)
    lanes: gl.constexpr = [1, 1, 32] if D == 128 else [1, 2, 16]
    layout: gl.constexpr = gl.BlockedLayout([S, 1, 4], lanes, [1, gl.num_warps(), 1], [2, 1, 0])
    # rows (c, e, g) of the products are the values (c, g, e) of a head
    heads = gl.permute(gl.reshape(out, [S, D // 64, 8, 8, R]), (0, 4, 1, 3, 2))
    out = gl.sum(gl.convert_layout(gl.reshape(heads, [S, R, D]), layout), axis=0)
    row: gl.constexpr = gl.SliceLayout(1, out.type.layout)
    total = gl.convert_layout(gl.sum(total * weights, axis=0), row)
    return _averaged(out, gl.convert_layout(all_top, row), total)


@gluon.jit
def keep(mean_ptr, weight_ptr, at, valid, mean, weight, LASTING: gl.constexpr = False):
    """Stores what `together` returned of rows, as numbers `at`; LASTING: whatever else streams through L2 meanwhile."""
    policy: gl.constexpr = "evict_last" if LASTING else ""
    D: gl.constexpr = mean.shape[1]
    gl.store(weight_ptr + at, weight, mask=valid, eviction_policy=policy)
    d = gl.arange(0, D, layout=gl.SliceLayout(0, mean.type.layout))
    places = mean_ptr + gl.expand_dims(at, 1) * D + gl.expand_dims(d, 0)
    gl.store(places, mean, mask=gl.expand_dims(valid, 1), eviction_policy=policy)


@gluon.jit
def finish(out_ptr, batch, kv_head, row, stop, num_queries, mean, KV_HEADS: gl.constexpr, GROUP: gl.constexpr):
    """Stores the output of rows that are before `stop`."""
    D: gl.constexpr = mean.shape[1]
    d = gl.arange(0, D, layout=gl.SliceLayout(0, mean.type.layout))
    head = (batch * num_queries + row // GROUP) * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
    mask = gl.expand_dims(row < stop, 1)
    at = gl.expand_dims(head, 1) * D + gl.expand_dims(d, 0)
    gl.store(out_ptr + at, mean.to(out_ptr.dtype.element_ty), mask=mask)
