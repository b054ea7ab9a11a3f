"""Device code of mma.py and mma_batch.py: layouts, products with operands in registers, and partial results of splits.

A matrix product may run over its inner index in any order, if both operands use the same order. K and q use this order
in each range of 32 values of a head. t = 0..3 is the index of a lane in a group of four, p = 0, 1 the index of a value
in a pair:

    memory          8 t + 2 j + p     lane t loads its 8 values, j = 0..3, in one 16-byte load
    operand         8 j + 2 t + p     a tensor-core instruction takes 16 values: j = 0, 1 first, then j = 2, 3

V may have its columns in any order, which is undone at the end. A lane's 8 neighbouring values go to 8 products (e, c),
at column g of each:

    memory          64 c + 8 g + e (D = 128)    8 g + 4 c + e (D = 64)
    operand, sums   columns in the order (e, c, g)
"""

# mypy: disable-error-code="assignment"
# tuples grow in unrolled loops

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda.libdevice import fast_log2f

from fastspec.kernels.attention.decode.query_rows import NEVER

# --- layouts ---


PARTS = 4  # parts of a split, with KEYS keys and an online softmax each; the bits of a row depend on it


@gluon.constexpr_function
def operands(WARPS, S):
    """Returns the register layout of tensor-core results: scores [S, ROWS, KEYS] and out [S, ROWS, D].

    Each index of the first axis belongs to WARPS / S warps, 1 or 2.
    """
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[S, 1, WARPS // S], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def _bits(first, stop):
    """Lists the powers of two from `first` to `stop` / 2. `first` and `stop` are powers of two."""
    return [1 << bit for bit in range(first.bit_length() - 1, stop.bit_length() - 1)]


@gluon.constexpr_function
def _linear(bits, lanes, warps, shape):
    """Returns a linear layout of a tensor of shape `shape`.

    Args:
        bits: bases of registers. Bases that are also in `warps` are dropped.
        lanes: bases of lanes.
        warps: bases of warps.
        shape: shape of the tensor.
    """
    registers = [each for each in bits if each not in warps]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], shape)


@gluon.constexpr_function
def _parts(S):
    """Returns the bases of a linear layout that distribute the first of three axes, of size S, over warps."""
    return [[s, 0, 0] for s in _bits(1, S)]


@gluon.constexpr_function
def key_layout(WARPS, S, D, RUN):
    """Returns the register layout in which K [S, KEYS, D] is loaded.

    A load instruction loads RUN neighbouring values of a key in each lane, and one key by four lanes. So it loads 8
    keys in a warp.
    """
    bits = [*[[0, 0, d] for d in _bits(1, RUN)], [0, 8, 0], [0, 16, 0], *[[0, 0, d] for d in _bits(4 * RUN, D)]]
    lanes = [[0, 0, RUN], [0, 0, 2 * RUN], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return _linear(bits, lanes, [*([[0, 8, 0]] if WARPS == 2 * S else []), *_parts(S)], [S, 32, D])


@gluon.constexpr_function
def value_layout(WARPS, S, D, RUN):
    """Returns the register layout in which V [S, KEYS, D] is loaded.

    A load instruction loads RUN neighbouring values of a key in each lane, and one key by 8 lanes. So it loads 4 keys
    in a warp. If two warps share an index of the first axis, each has half of the D columns. With D = 64 this is half
    of every lane's RUN values.
    """
    near, far = [[0, 0, d] for d in _bits(1, RUN)], [[0, 0, d] for d in _bits(8 * RUN, D)]
    lanes = [[0, 2, 0], [0, 4, 0], [0, 0, RUN], [0, 0, 2 * RUN], [0, 0, 4 * RUN]]
    apart = (far or near[-1:]) if WARPS == 2 * S else []
    return _linear([*near, [0, 1, 0], [0, 8, 0], [0, 16, 0], *far], lanes, [*apart, *_parts(S)], [S, 32, D])


@gluon.constexpr_function
def exchange_memory(S, R, D):
    """Returns the shared-memory layout of results [S, R, D] of products. Warps exchange results through this memory.

    The values that a lane gets from one tensor-core instruction are adjacent.
    """
    pair = [[0, 0, 1], *[[0, r, 0] for r in _bits(8, R)]]
    lanes = [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.SharedLinearLayout([*pair, *lanes, *[[0, 0, d] for d in _bits(8, D)], *[[s, 0, 0] for s in _bits(1, S)]])


@gluon.constexpr_function
def exchange_layout(WARPS, R, D):
    """Returns the register layout of results [PARTS, R, D] that are loaded from memory with layout `exchange_memory`.

    A lane has all PARTS of a result, and neighbouring columns e (see the module's docstring). These axes are
    distributed over warps, in this order: the rest of e, then c, then the other half of the rows (or g).
    """
    half = [[0, 8, 0]] if R == 16 else []
    apart = [*([[0, 0, 64]] if D == 128 else []), [0, 0, 8], *half, [0, 0, 1], [0, 0, 32]]
    bits = [[0, 0, 16], [0, 0, 32], [0, 0, 1], *half, [1, 0, 0], [2, 0, 0]]
    lanes = [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return _linear(bits, lanes, apart[: WARPS.bit_length() - 1], [PARTS, R, D])


@gluon.constexpr_function
def _columns(bases, REGROUP):
    """Returns the bases [row, column] of a layout, with columns reordered as packing.py describes if REGROUP is True.

    The order (h, c, t) of pairs of columns becomes (t, h, c).
    """
    to = {2: 16, 4: 32, 8: 2, 16: 4, 32: 8} if REGROUP else {}
    return [[row, to.get(column, column)] for row, column in bases]


@gluon.constexpr_function
def merged_layout(WARPS, R, D, REGROUP):
    """Returns the register layout of results [R, D] after the parts of a split are combined.

    Columns are in the order of a head. If REGROUP is True, they are in the order that packing.py describes.
    """
    half = [[8, 0]] if R == 16 else []
    apart = [[0, 4], *([[0, 64]] if D == 128 else []), *half, [0, 8], [0, 2]]
    # neighbours in memory are neighbours in a lane
    bits = [[0, 1], [0, 8], [0, 2], *half] if REGROUP else [[0, 1], [0, 2], [0, 8], *half]
    lanes = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    apart = _columns(apart[: WARPS.bit_length() - 1], REGROUP)
    return _linear(_columns(bits, REGROUP), _columns(lanes, REGROUP), apart, [R, D])


@gluon.constexpr_function
def softmax_memory_layout(R, D, REGROUP):
    """Returns the shared-memory layout of results [R, D] whose register layout is `merged_layout`.

    The values that a warp stores are adjacent.
    """
    rest = [[0, 8], *([[0, 64]] if D == 128 else []), *([[8, 0]] if R == 16 else [])]
    bits = [[0, 1], [0, 2], [0, 16], [0, 32], [1, 0], [2, 0], [4, 0], [0, 4], *rest]
    return gl.SharedLinearLayout(_columns(bits, REGROUP))


# --- loads, products and partial sums ---


KEYS = gl.constexpr(32)  # number of keys in a part
ROWS = gl.constexpr(16)  # query rows of a product; in a tile's last product half of them may be padding
LOG2E = gl.constexpr(1.4426950408889634)
EIGHT = gl.constexpr(8)  # query rows in a group; a tile has G groups


@gluon.jit
def _along(n: gl.constexpr, axis: gl.constexpr, layout: gl.constexpr):
    """Returns a 3-D tensor with 0 .. n - 1 along one axis of `layout`, and size 1 along the other axes."""
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


@gluon.jit
def _slots(cache, first, s, key, kv_head, KV_HEADS: gl.constexpr, D: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """Returns two offsets. Their sum is the offset in the cache of the key at position first + s * KEYS + key.

    The first offset is int64. The second is int32, an offset within a page. `s` and `key` broadcast against each other.
    """
    at = first + s * KEYS
    if PAGE_SIZE % KEYS != 0:  # otherwise one page holds all keys of a warp
        at = at + key
    # bypasses L1, as all loads before the kernel's wait do: L1 may hold old contents of this memory
    page = gl.load(cache.block_table + gl.minimum(at // PAGE_SIZE, cache.table_width - 1), cache_modifier=".cg")
    page = gl.minimum(gl.maximum(page, 0), cache.num_pages - 1)
    slot = ((page * PAGE_SIZE + at % PAGE_SIZE) * KV_HEADS + kv_head) * D
    if PAGE_SIZE % KEYS != 0:
        return slot, key * 0
    else:
        return slot, key * (KV_HEADS * D)


@gluon.jit
def places_of(
    cache,  # PagedCache with one row
    first,
    kv_head,
    KV_HEADS: gl.constexpr,
    D: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    S: gl.constexpr,
):
    """Computes the addresses of K and V of S * KEYS keys of a KV head, from position `first` on.

    Returns:
        Four tensors: addresses of the first half of each key in K [S, KEYS, D / 2]; positions of these keys; addresses
        of V [S, KEYS, D]; the same positions in the layout of V.
    """
    kl: gl.constexpr = key_layout(gl.num_warps(), S, D // 2, 8)
    s, n = _along(S, 0, kl), _along(KEYS, 1, kl)
    slot, offset = _slots(cache, first, s, n, kv_head, KV_HEADS, D, PAGE_SIZE)
    k_at, k_key = cache.k + slot + (offset + _along(D // 2, 2, kl)), first + s * KEYS + n
    vl: gl.constexpr = value_layout(gl.num_warps(), S, D, 8)
    s, n = _along(S, 0, vl), _along(KEYS, 1, vl)
    slot, offset = _slots(cache, first, s, n, kv_head, KV_HEADS, D, PAGE_SIZE)
    return k_at, k_key, cache.v + slot + (offset + _along(D, 2, vl)), first + s * KEYS + n


@gluon.jit
def keys_at(places, low, high, old, HALF: gl.constexpr):
    """Loads both halves of the heads in K for the keys at positions low .. high - 1.

    Keys at other positions are not loaded. Cache slots from position `high` on may hold NaN, so they must not enter a
    product.

    Args:
        places: result of `places_of`.
        low, high: bounds of the positions to load.
        old: an earlier result, from which keys at other positions are taken. None: they are 0.
        HALF: D / 2.
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
    """Loads V of the keys at positions low .. high - 1. For the arguments see `keys_at`."""
    _k_at, _k_key, at, key = places
    inside = (key >= low) & (key < high)
    if old is None:
        return gl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
    else:
        return gl.load(at, mask=inside, other=old)


@gluon.jit
def _key_operand(k):
    """Converts one half of the heads in K, [S, KEYS, N], to a right operand [S, N, KEYS] of a product.

    No value moves between lanes. The order (c, t, j, p) of values becomes (c, j, t, p), as the module's docstring
    describes. c is the index of a range of 32 values.
    """
    S: gl.constexpr = k.shape[0]
    N: gl.constexpr = k.shape[2]
    apart = gl.permute(gl.reshape(k, [S, KEYS, N // 32, 4, 4, 2]), (0, 2, 4, 3, 5, 1))
    return gl.convert_layout(gl.reshape(apart, [S, N, KEYS]), gl.DotOperandLayout(1, operands(gl.num_warps(), S), 2))


@gluon.jit
def _in_order(q):
    """Permutes the columns of one half of the query heads, [rows, N], to the order of `_key_operand`."""
    apart = gl.permute(gl.reshape(q, [q.shape[0], q.shape[1] // 32, 4, 4, 2]), (0, 1, 3, 2, 4))
    return gl.reshape(apart, [q.shape[0], q.shape[1]])


@gluon.jit
def value_operand(v):
    """Converts V [S, KEYS, D] to a right operand of a product, with columns in the order (e, c, g).

    No value moves between lanes; each lane only packs pairs of keys. The order of columns in memory is (c, g, e) for
    D = 128, and (g, c, e) for D = 64.
    """
    S: gl.constexpr = v.shape[0]
    D: gl.constexpr = v.shape[2]
    if D == 128:
        apart = gl.permute(gl.reshape(v, [S, KEYS, 2, 8, 8]), (0, 1, 4, 2, 3))
    else:
        apart = gl.permute(gl.reshape(v, [S, KEYS, 8, 2, 4]), (0, 1, 4, 3, 2))
    return gl.convert_layout(gl.reshape(apart, [S, KEYS, D]), gl.DotOperandLayout(1, operands(gl.num_warps(), S), 2))


@gluon.jit
def _in_order_of_heads(out):
    """Permutes the columns of results [R, D] from the order of `value_operand` to the order of a head."""
    R: gl.constexpr = out.shape[0]
    D: gl.constexpr = out.shape[1]
    if D == 128:
        heads = gl.permute(gl.reshape(out, [R, 8, 2, 8]), (0, 2, 3, 1))
    else:
        heads = gl.permute(gl.reshape(out, [R, 4, 2, 8]), (0, 3, 2, 1))
    return gl.reshape(heads, [R, D])


@gluon.constexpr_function
def staged_rows(G):
    """Returns the number of query rows for which a tile of G groups of 8 rows needs shared memory.

    It is a multiple of ROWS, the rows of a product, and a power of two.
    """
    return 16 if G <= 2 else 32


@gluon.constexpr_function
def rows_of(G, P):
    """Returns the number of query rows of product P without padding, in a tile of G groups of 8 rows.

    It is EIGHT in the last product if G is odd, else ROWS.
    """
    return 16 if G > 2 * P + 1 else 8


@gluon.jit
def stage_q(q1, q2):
    """Stores queries in shared memory, from which `scores_of` reads them. q1, q2 [rows, D / 2] are halves of heads."""
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    first = gl.allocate_shared_memory(q1.dtype, q1.shape, shared, _in_order(q1))
    return first, gl.allocate_shared_memory(q2.dtype, q2.shape, shared, _in_order(q2))


@gluon.jit
def _queries_of(staged, P: gl.constexpr, S: gl.constexpr, HALF: gl.constexpr):
    """Loads the ROWS query rows of product P from shared memory, as left operands [S, ROWS, HALF].

    `staged` is the result of `stage_q`. Returns one operand for each half of the head. The values are the same for all
    indices of the first axis.
    """
    left: gl.constexpr = gl.DotOperandLayout(0, operands(gl.num_warps(), S), 2)
    found = ()
    for i in gl.static_range(2):
        part = staged[i].slice(P * ROWS, ROWS).load(gl.SliceLayout(0, left))
        same, _a = gl.broadcast(gl.expand_dims(part, 0), gl.zeros([S, ROWS, HALF], part.dtype, left))
        found += (same,)
    return found


@gluon.jit
def positions_of(position_ptr, first_row, rows, STAGED: gl.constexpr, GROUP: gl.constexpr, S: gl.constexpr):
    """Loads the positions of STAGED query rows from row `first_row` on.

    Returns a tuple with one tensor int32 [1, ROWS, 1] for each product. Rows from `rows` on are padding and have
    position -1.
    """
    mma: gl.constexpr = operands(gl.num_warps(), S)
    found = ()
    for p in gl.static_range(STAGED // ROWS):
        row = first_row + p * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, mma)))
        # -1: a padding row sees no key
        position = gl.load(position_ptr + row // GROUP, mask=row < rows, other=-1, cache_modifier=".cg")
        found += (gl.expand_dims(gl.expand_dims(gl.minimum(position, NEVER).to(gl.int32), 0), 2),)
    return found


@gluon.jit
def scores_of(staged, keys, first, positions, scoring, WINDOW: gl.constexpr, S: gl.constexpr, HALF: gl.constexpr):
    """Computes the attention scores of a tile's query rows with a block of keys.

    Returns a tuple with one tensor [S, ROWS, KEYS] for each product, the result of `_scored`.

    Args:
        staged: queries, the result of `stage_q`.
        keys: both halves of K, the result of `keys_at`.
        first: position of the first key.
        positions: positions of the query rows, the result of `positions_of`.
        scoring: `Scoring`.
    """
    found = ()
    for p in gl.static_range(len(positions)):
        found += (_scored(_queries_of(staged, p, S, HALF), keys, first, positions[p], scoring, WINDOW, S),)
    return found


@gluon.jit
def tanh(x):
    """Computes tanh(x). The result has the same bits as that of `tanh` in prefill.py."""
    squared = x * x
    series = -0.006276390049606562 * squared + 0.021116215735673904
    series = (series * squared - 0.053875137120485306) * squared + 0.13332924246788025
    series = (series * squared - 0.3333333134651184) * squared
    far = 1.0 - 2.0 / (1.0 + gl.exp2(x * 2.8853900817779268))  # 2 log2(e)
    return gl.where(squared < 0.36, x + x * series, far)


@gluon.jit
def sink_of(scoring, head):
    """Loads the attention sinks of the query heads `head`, times log2(e) like all scores. `scoring` is `Scoring`."""
    return gl.load(scoring.sinks + head).to(gl.float32) * LOG2E


@gluon.jit
def share_of_keys(weight, head, scoring):
    """Returns the total softmax probability of all keys. The attention sink of query head `head` has the rest.

    `weight` is the log-sum-exp of the keys' scores, in base 2.
    """
    return 1.0 / (1.0 + gl.exp2(sink_of(scoring, head) - weight))


@gluon.jit
def _scored(queries, keys, first, position, scoring, WINDOW: gl.constexpr, S: gl.constexpr):
    """Returns the scores [S, ROWS, KEYS], times log2(e), of query rows with S * KEYS keys from position `first` on.

    A score is -inf if the row does not see the key. `queries` and `keys` are tuples with both halves of heads.
    `position` is the position of each query row, [1, ROWS, 1].
    """
    mma: gl.constexpr = operands(gl.num_warps(), S)
    scores = mma_v2(queries[0], _key_operand(keys[0]), gl.zeros([S, ROWS, KEYS], gl.float32, mma))
    scores = mma_v2(queries[1], _key_operand(keys[1]), scores) * scoring.factor
    if scoring.cap is not None:
        scores = scoring.cap * tanh(scores)
    # newest visible key, as an index of the warp's keys; negative for a padding row
    newest = position - first - _along(S, 0, mma) * KEYS
    key = _along(KEYS, 2, mma)
    seen = key <= newest
    if WINDOW > 0:
        seen = seen & (key > newest - WINDOW)
    return gl.where(seen, scores, -float("inf"))


@gluon.jit
def shift_of(top):
    """Returns the number that a softmax subtracts from its scores before exp2: their maximum `top`, or 0 if it is -inf.

    A row without keys has top = -inf. With 0 its weights are exp2(-inf) = 0. With top they would be NaN.
    """
    return gl.where(top == -float("inf"), 0.0, top)


@gluon.jit
def begun(scores, v, S: gl.constexpr):
    """Computes the softmax over one block of keys, without normalisation, for query rows with scores [S, ROWS, KEYS].

    Returns:
        The largest score [S, ROWS], the weights 2^(score - largest) [S, ROWS, KEYS], and the sum of the values `v` with
        these weights [S, ROWS, D].
    """
    mma: gl.constexpr = operands(gl.num_warps(), S)
    top = gl.max(scores, axis=2)
    weights = gl.exp2(scores - gl.expand_dims(shift_of(top), 2))
    left = gl.convert_layout(weights.to(v.dtype), gl.DotOperandLayout(0, mma, 2))
    return top, weights, mma_v2(left, value_operand(v), gl.zeros([S, ROWS, v.shape[2]], gl.float32, mma))


@gluon.jit
def averaged(out, top, total):
    """Returns the partial result (mean, weight) of a softmax: out / total, and top + log2(total).

    mean [R, D] is the weighted average of values. weight [R] is the log-sum-exp of scores in base 2. Without keys they
    are 0 and -inf.

    Args:
        out: sum of values with weights 2^(score - top), [R, D].
        top: largest score [R].
        total: sum of the weights [R].
    """
    share = 1.0 / gl.where(total == 0.0, 1.0, total)
    return out * gl.expand_dims(share, 1), top + fast_log2f(total)


@gluon.jit
def _summed(totals):
    """Sums softmax weights [S, ROWS, KEYS] over keys. The order of the sum is the same for any number of warps.

    Returns the sums [S, ROWS].
    """
    pairs = gl.sum(gl.reshape(totals, [totals.shape[0], ROWS, 2, 2, 8]), axis=2)
    return gl.sum(gl.sum(pairs, axis=3), axis=2)


@gluon.jit
def _upper(x):
    """Returns rows 0 .. EIGHT - 1 of x [S, ROWS] or [S, ROWS, N]; the other rows are padding."""
    S: gl.constexpr = x.shape[0]
    if len(x.shape) == 2:
        halves = gl.permute(gl.reshape(x, [S, 2, EIGHT]), (0, 2, 1))
    else:
        halves = gl.permute(gl.reshape(x, [S, 2, EIGHT, x.shape[2]]), (0, 2, 3, 1))
    upper, _lower = gl.split(halves)
    return upper


@gluon.jit
def _regrouped(out):
    """Permutes the columns of results [R, D] from the order of a head to the order that packing.py describes."""
    R: gl.constexpr = out.shape[0]
    D: gl.constexpr = out.shape[1]
    return gl.reshape(gl.permute(gl.reshape(out, [R, D // 64, 2, 4, 4, 2]), (0, 1, 4, 2, 3, 5)), [R, D])


@gluon.jit
def merge_parts(top, totals, out, S: gl.constexpr, R: gl.constexpr, REGROUP: gl.constexpr = False):
    """Combines the S parts of each split in order.

    Returns a tuple with the partial result (mean [R, D], weight [R]) of each split, see `averaged`. Each lane has 4
    neighbouring values of a head in mean.

    Args:
        top, totals, out: results of `begun` for one or more splits, S parts each.
        S: number of parts of a split.
        R: number of query rows without padding, the result of `rows_of`.
        REGROUP: True to order the columns as packing.py describes, for the TMA pipeline of the next matrix product.
    """
    ALL: gl.constexpr = out.shape[0]
    D: gl.constexpr = out.shape[2]
    total = gl.convert_layout(_summed(totals), top.type.layout)
    if R == EIGHT:
        out, top, total = _upper(out), _upper(top), _upper(total)
    place = gl.allocate_shared_memory(gl.float32, [ALL, R, D], exchange_memory(ALL, R, D), out)
    few: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0, 1])
    tops = gl.allocate_shared_memory(gl.float32, [ALL, R], few, top)
    sums = gl.allocate_shared_memory(gl.float32, [ALL, R], few, total)
    found = ()
    for first in gl.static_range(0, ALL, S):
        found += (_merge_split(tops.slice(first, S), sums.slice(first, S), place.slice(first, S), REGROUP),)
    return found


@gluon.jit
def _merge_split(tops, sums, place, REGROUP: gl.constexpr):
    """Combines the parts of one split, and returns its partial result (mean [R, D], weight [R]).

    Args:
        tops: largest score of each part, [S, R] in shared memory.
        sums: sum of the weights of each part, [S, R] in shared memory.
        place: weighted sum of the values of each part, [S, R, D] in shared memory.
        REGROUP: see `merge_parts`.
    """
    R: gl.constexpr = place.shape[1]
    D: gl.constexpr = place.shape[2]
    layout: gl.constexpr = exchange_layout(gl.num_warps(), R, D)
    top, total = tops.load(gl.SliceLayout(2, layout)), sums.load(gl.SliceLayout(2, layout))
    all_top = gl.max(top, axis=0)
    weights = gl.exp2(top - gl.expand_dims(shift_of(all_top), 0))
    out = gl.sum(place.load(layout) * gl.expand_dims(weights, 2), axis=0)
    out = _in_order_of_heads(out)
    if REGROUP:
        out = _regrouped(out)
    layout_merged: gl.constexpr = merged_layout(gl.num_warps(), R, D, REGROUP)
    out = gl.convert_layout(out, layout_merged)
    row: gl.constexpr = gl.SliceLayout(1, layout_merged)
    total = gl.convert_layout(gl.sum(total * weights, axis=0), row)
    return averaged(out, gl.convert_layout(all_top, row), total)


@gluon.jit
def store_partial(mean_ptr, weight_ptr, at, valid, mean, weight, LASTING: gl.constexpr = False):
    """Stores partial results (mean [R, D], weight [R]) of query rows at indices `at` [R], where `valid` is True.

    If LASTING is True, L2 evicts them last.
    """
    policy: gl.constexpr = "evict_last" if LASTING else ""
    D: gl.constexpr = mean.shape[1]
    gl.store(weight_ptr + at, weight, mask=valid, eviction_policy=policy)
    d = gl.arange(0, D, layout=gl.SliceLayout(0, mean.type.layout))
    places = mean_ptr + gl.expand_dims(at, 1) * D + gl.expand_dims(d, 0)
    gl.store(places, mean, mask=gl.expand_dims(valid, 1), eviction_policy=policy)


@gluon.jit
def store_output(
    out_ptr, batch, kv_head, row, stop, num_queries, mean, weight, scoring, KV_HEADS: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """Stores the attention output of the query rows `row` [R] that are less than `stop`.

    It computes the output from the combined result (mean, weight) of all keys: it adds the sink, and multiplies by the
    scale of V. A query row is a pair of token and query head of one KV head.
    """
    if scoring.sinks is not None:
        mean = mean * gl.expand_dims(share_of_keys(weight, kv_head * GROUP + row % GROUP, scoring), 1)
    if scoring.value_scale is not None:
        mean = mean * scoring.value_scale
    D: gl.constexpr = mean.shape[1]
    d = gl.arange(0, D, layout=gl.SliceLayout(0, mean.type.layout))
    head = (batch * num_queries + row // GROUP) * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
    mask = gl.expand_dims(row < stop, 1)
    at = gl.expand_dims(head, 1) * D + gl.expand_dims(d, 0)
    gl.store(out_ptr + at, mean.to(out_ptr.dtype.element_ty), mask=mask)
