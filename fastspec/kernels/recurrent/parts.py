"""Shared by the kernels of the gated delta rule: argument groups, and the arithmetic of one token."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastspec.kernels.reference.recurrent import L2_EPS

_EPS = tl.constexpr(L2_EPS)
_SCANNED = tl.constexpr(64)  # tokens whose mask is loaded at once
TILE = 4096  # elements of the state that one program holds


class Weights(NamedTuple):
    """Weights of a layer, as `reference.delta_rule` describes them."""

    conv: Any
    decay: Any
    step: Any


class Where(NamedTuple):
    """The states of a layer and the places of tokens in them, as `reference.delta_rule` describes them."""

    states: Any
    inputs: Any
    state_rows: Any
    positions: Any
    write_mask: Any


@triton.jit
def span(mask_ptr, num_tokens):
    """The first token of a row that the write mask has, and how many it has."""
    first = num_tokens
    count = num_tokens * 0
    for start in range(0, num_tokens, _SCANNED):
        at = start + tl.arange(0, _SCANNED)
        counts = tl.load(mask_ptr + at, mask=at < num_tokens, other=0).to(tl.int32)
        first = tl.minimum(first, tl.min(tl.where(counts != 0, at, num_tokens), axis=0))
        count += tl.sum(counts, axis=0)
    return first, count


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def conv(
    product_ptr,
    inputs_ptr,
    conv_ptr,
    channel,
    inside,
    old,
    position,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
):
    """silu of the convolution of some channels at one token, in fp32, and that token's inputs.

    `product_ptr` points to that token. The inputs of the `old` newest tokens, it included, are in the product; those of
    older positions are in the ring `inputs_ptr`.
    """
    dtype: tl.constexpr = product_ptr.dtype.element_ty
    total = tl.zeros(channel.shape, tl.float32)
    x = tl.zeros(channel.shape, dtype)
    for tap in tl.static_range(WIDTH):
        back = WIDTH - 1 - tap
        place = (position - back + PLACES) % PLACES
        here = tl.load(product_ptr - back * ROWS + channel, mask=inside & (back < old), other=0.0)
        older = inside & (back >= old) & (position >= back)
        before = tl.load(inputs_ptr + place * CHANNELS + channel, mask=older, other=0.0)
        x = tl.where(back < old, here, before)
        total += x.to(tl.float32) * tl.load(conv_ptr + channel * WIDTH + tap, mask=inside, other=0.0).to(tl.float32)
    rounded = total.to(dtype).to(tl.float32)
    return (rounded * sigmoid(rounded)).to(dtype).to(tl.float32), x


@triton.jit
def gates(b_ptr, more, VALUE_HEADS: tl.constexpr):
    """beta = sigmoid(b) and softplus(a + step), of which the decay is made, for one token and head, in fp32."""
    b = tl.load(b_ptr)
    a = tl.load(b_ptr + VALUE_HEADS).to(tl.float32) + more
    beta = sigmoid(b.to(tl.float32)).to(b.dtype).to(tl.float32)
    return beta, tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))


@triton.jit
def unit(x):
    """x / |x|."""
    return x * (1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) + _EPS))


@triton.jit
def advanced(state, q, k, v, decay, beta):
    """The state [values, keys] after one more token, and the output [values] of that token."""
    state = state * decay
    delta = (v - tl.sum(state * k[None, :], axis=1)) * beta
    state = state + delta[:, None] * k[None, :]
    return state, tl.sum(state * q[None, :], axis=1)
