"""Products with 16-bit or fp32 weights of chosen experts. A CTA reads an expert's weights once for several rows of x.

A pair is a row of x and one of its chosen experts. The index of a pair is row * CHOSEN + i for the row's i-th expert. A
CTA has pairs with one expert: a tile of lists.py, or one pair if there is a single row. codes.py has the kernel for
quantised weights.

Batch invariance. As in `product/portable`, the weights are the left operand, in tiles of at most 32 rows. An element is
one chain of sums over k, for any number of rows and any index of a row. fp32 has one tile for every call.
"""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005  (Triton adds tuples, and knows no starred ones)

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.norm import normed_row, weight_of


class Chosen(NamedTuple):
    """Assignment of pairs (row of x, chosen expert) to CTAs, as kernel arguments.

    Attributes:
        ids: int32 [R * CHOSEN], the expert of each pair.
        order: int32 [R * CHOSEN], indices of pairs sorted by expert. None without `tiles`.
        tiles: int32 [T, 3]: expert, index in `order` of the first pair, number of pairs (0: unused). None: each pair
            has CTAs of its own.
    """

    ids: Any
    order: Any
    tiles: Any


class Norm(NamedTuple):
    """RMSNorm of the sums of expert outputs, as kernel arguments.

    Attributes:
        weight: [K]. None: no norm.
        out: [R, K], receives the normed sums. None without a norm.
        eps: epsilon.
    """

    weight: Any
    out: Any
    eps: Any


class Stack(NamedTuple):
    """Operands of a product with the experts, as kernel arguments.

    Attributes:
        x: [R, K], or [R * CHOSEN, K] with a row for each pair (row, chosen expert).
        weight: [E, N, K].
        bias: [E, N]. None: no bias.
    """

    x: Any
    weight: Any
    bias: Any


@triton.jit
def _pairs_of(chosen, number, ROWS: tl.constexpr):
    """Loads the expert of tile `number`, the indices [ROWS] of its pairs, and a mask [ROWS] of pairs that exist.

    chosen: a `Chosen`. Without tiles, `number` is the index of a pair, the only one of the CTA.
    """
    at = tl.arange(0, ROWS)
    if chosen.tiles is None:
        return tl.load(chosen.ids + number), number + at * 0, at < 1
    else:
        first, count = tl.load(chosen.tiles + number * 3 + 1), tl.load(chosen.tiles + number * 3 + 2)
        pair = tl.load(chosen.order + first + at, mask=at < count, other=0)
        return tl.load(chosen.tiles + number * 3), pair, at < count


@triton.jit
def _values_product(x_at, weight_at, here, out, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Returns `out` [BLOCK_N, ROWS] plus the products of BLOCK_N weight rows with ROWS rows of x.

    x_at [1, ROWS] and weight_at [BLOCK_N, 1] point to the start of each row. here: mask [ROWS] of rows that exist.
    """
    k = tl.arange(0, BLOCK_K)
    for at in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            x = tl.load(x_at + at + k[:, None], mask=here[None, :], other=0.0)
            weight = tl.load(weight_at + at + k[None, :])
        else:
            inside = at + k < K
            x = tl.load(x_at + at + k[:, None], mask=here[None, :] & inside[:, None], other=0.0)
            weight = tl.load(weight_at + at + k[None, :], mask=inside[None, :], other=0.0)
        out = tl.dot(weight, x, out, input_precision="ieee")
    return out


@triton.jit
def _weights_ahead(weight_at, some, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Loads all weights of a CTA, as a tuple of blocks [BLOCK_N, BLOCK_K]. If `some` is False, returns zeros instead.

    weight_at [BLOCK_N, 1] points to the start of each weight row. This does not read x, so it may run before the
    previous kernel has written x.
    """
    k = tl.arange(0, BLOCK_K)
    blocks = ()
    for at in tl.static_range(0, K, BLOCK_K):
        inside = some & (at + k < K) if at + BLOCK_K > K else some & (k >= 0)
        blocks = blocks + (tl.load(weight_at + at + k[None, :], mask=inside[None, :], other=0.0),)
    return blocks


@triton.jit
def _product_of_loaded(x_at, blocks, here, out, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Computes `_values_product` with the weights `blocks` that `_weights_ahead` has loaded, in the same order over k.

    For the other arguments see `_values_product`.
    """
    k = tl.arange(0, BLOCK_K)
    xs = ()
    for at in tl.static_range(0, K, BLOCK_K):
        inside = here[None, :] & (at + k < K)[:, None] if at + BLOCK_K > K else here[None, :] & (k >= 0)[:, None]
        xs = xs + (tl.load(x_at + at + k[:, None], mask=inside, other=0.0),)
    for i in tl.static_range(len(blocks)):
        out = tl.dot(blocks[i], xs[i], out, input_precision="ieee")
    return out


@triton.jit
def _gated_values_product(x_at, weight_at, here, up_of, gate, up, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Returns `gate` and `up`, plus the products of the gate rows and of the up rows with the rows of x.

    weight_at points to the gate rows. The up rows are `up_of` elements after them. For the other arguments see
    `_values_product`.
    """
    k = tl.arange(0, BLOCK_K)
    for at in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            x = tl.load(x_at + at + k[:, None], mask=here[None, :], other=0.0)
            weight = tl.load(weight_at + at + k[None, :])
            other = tl.load(weight_at + up_of + at + k[None, :])
        else:
            inside = at + k < K
            x = tl.load(x_at + at + k[:, None], mask=here[None, :] & inside[:, None], other=0.0)
            weight = tl.load(weight_at + at + k[None, :], mask=inside[None, :], other=0.0)
            other = tl.load(weight_at + up_of + at + k[None, :], mask=inside[None, :], other=0.0)
        gate = tl.dot(weight, x, gate, input_precision="ieee")
        up = tl.dot(other, x, up, input_precision="ieee")
    return gate, up


@triton.jit
def expert_kernel(
    stack,  # Stack
    chosen,  # Chosen
    out_ptr,  # [R * CHOSEN, WIDTH]
    alpha,
    limit,
    WIDTH: tl.constexpr,  # columns of the result: N, or N / 2 with GATED
    K: tl.constexpr,
    CHOSEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,  # "silu" or "clamped" with GATED, "relu2", or None
    OF_PAIRS: tl.constexpr,  # x has a row for each pair
    AHEAD: tl.constexpr,  # with OF_PAIRS: all weights are loaded before the wait for x
    PDL: tl.constexpr,
):
    """Computes BLOCK_N columns of the result for up to ROWS pairs of one expert.

    A pair is a row of x and one of its chosen experts. The MLP of an expert has two products, each with a launch of
    this kernel. OF_PAIRS is True for the second one, whose x is the result of the first.

    With PDL (programmatic dependent launch) the second product may start before the first one has ended. It loads its
    pairs, and with AHEAD its weights, before it waits for x. This is safe, because the first product writes only x. The
    list of pairs is complete before the first product lets the second one start.
    """
    if PDL:
        if not OF_PAIRS:
            gdc_wait()
        gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert, pair, valid = _pairs_of(chosen, tl.program_id(1), ROWS)
    ROWS_OF: tl.constexpr = 2 * WIDTH if GATED else WIDTH
    some = tl.max(valid.to(tl.int32), axis=0) > 0
    last = expert.to(tl.int64) * ROWS_OF + tl.minimum(n, WIDTH - 1)  # columns after the last one repeat it
    weight_at = stack.weight + last[:, None] * K
    if AHEAD:
        blocks = _weights_ahead(weight_at, some, K, BLOCK_K)
    if PDL and OF_PAIRS:
        gdc_wait()
    if some:
        row = pair if OF_PAIRS else pair // CHOSEN
        x_at = stack.x + tl.where(valid, row, 0).to(tl.int64)[None, :] * K
        out = tl.zeros((BLOCK_N, ROWS), tl.float32)
        up = out
        if GATED:
            out, up = _gated_values_product(x_at, weight_at, valid, WIDTH * K, out, up, K, BLOCK_K)
        elif AHEAD:
            out = _product_of_loaded(x_at, blocks, valid, out, K, BLOCK_K)
        else:
            out = _values_product(x_at, weight_at, valid, out, K, BLOCK_K)
        if stack.bias is not None:
            out += tl.load(stack.bias + last).to(tl.float32)[:, None]
            if GATED:
                up += tl.load(stack.bias + last + WIDTH).to(tl.float32)[:, None]
        if ACTIVATION == "clamped":
            gate = tl.minimum(out, limit)
            out = gate / (1.0 + tl.exp(-alpha * gate)) * (tl.minimum(tl.maximum(up, -limit), limit) + 1.0)
        elif ACTIVATION == "silu":
            out = out / (1.0 + tl.exp(-out)) * up
        elif ACTIVATION == "relu2":
            out = tl.where(out < 0.0, 0.0, out)  # NaN stays
            out = out * out
        at = out_ptr + pair.to(tl.int64)[None, :] * WIDTH + n[:, None]
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=valid[None, :] & (n < WIDTH)[:, None])


@triton.jit
def sum_kernel(
    outputs_ptr,  # [R * CHOSEN, K]
    factors_ptr,  # fp32 [R, CHOSEN]
    shared_ptr,  # [R, K] output of the shared expert, or None
    shared_logits_ptr,  # fp32 [R] or None: the shared output is multiplied by the sigmoid of its logit
    residual_ptr,  # [R, K] or None
    out_ptr,  # [R, K]
    norm,  # Norm
    K: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes [residual +] the sum of a row's expert outputs times their factors [+ shared output], and its norm.

    The outputs are added in the order of the row's ids. With a norm, a CTA computes a whole row. Without a norm, it
    computes BLOCK columns of a row.
    """
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < K
    if norm.weight is not None:
        norm_weight = weight_of(norm.weight, k, inside)
    if PDL:
        gdc_wait()
    kind: tl.constexpr = out_ptr.dtype.element_ty
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(CHOSEN):
        output = tl.load(outputs_ptr + (row * CHOSEN + i) * K + k, mask=inside, other=0.0).to(tl.float32)
        total = tl.fma(output, tl.zeros_like(output) + tl.load(factors_ptr + row * CHOSEN + i), total)
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + row * K + k, mask=inside, other=0.0).to(tl.float32)
        if shared_logits_ptr is not None:
            shared = shared / (1.0 + tl.exp(-tl.load(shared_logits_ptr + row)))
        total += shared
    if residual_ptr is not None:
        total += tl.load(residual_ptr + row * K + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * K + k, total.to(kind), mask=inside)
    if norm.weight is not None:
        normed = normed_row(total.to(kind).to(tl.float32), norm_weight, K, norm.eps, ROUND_FIRST, kind)
        tl.store(norm.out + row * K + k, normed.to(kind), mask=inside)
