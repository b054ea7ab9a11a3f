"""Device code that the kernels of recurrent layers share: groups of arguments, and the arithmetic of one token."""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005  (Triton adds tuples, and knows no starred ones)

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastspec.kernels.reference.recurrent import L2_EPS

_EPS = tl.constexpr(L2_EPS)
# number of tokens whose mask `span` loads at a time, in decode passes and in prefill chunks
_OF_STEPS = tl.constexpr(64)
OF_PROMPTS = tl.constexpr(1024)


class Weights(NamedTuple):
    """Weights of a layer with the gated delta rule, as kernel arguments; dispatch.py has their shapes."""

    conv: Any
    decay: Any
    step: Any


class StateSlots(NamedTuple):
    """Recurrent states of a layer, and positions of tokens, as kernel arguments; dispatch.py has their shapes."""

    states: Any
    inputs: Any
    state_rows: Any
    positions: Any
    write_mask: Any


class ScanWeights(NamedTuple):
    """Weights of the recurrence of Mamba-1 or Mamba-2, as kernel arguments.

    Attributes:
        decay: fp32 [heads]; of Mamba-1 [channels, state_dim].
        step, skip: fp32 [heads]; of Mamba-1 [channels].
    """

    decay: Any
    step: Any
    skip: Any


class StepLimits(NamedTuple):
    """Lower and upper limit of the step size (delta of Mamba) after softplus, as kernel arguments."""

    least: Any
    highest: Any


@triton.jit
def span(mask_ptr, num_tokens, SCANNED: tl.constexpr = _OF_STEPS):
    """Returns the index of a row's first unmasked token, and the number of the row's unmasked tokens.

    mask_ptr: bool [num_tokens], False for masked tokens. SCANNED: number of mask elements loaded at a time.
    """
    first = num_tokens
    count = num_tokens * 0
    for start in range(0, num_tokens, SCANNED):
        at = start + tl.arange(0, SCANNED)
        counts = tl.load(mask_ptr + at, mask=at < num_tokens, other=0).to(tl.int32)
        first = tl.minimum(first, tl.min(tl.where(counts != 0, at, num_tokens), axis=0))
        count += tl.sum(counts, axis=0)
    return first, count


@triton.jit
def tokens_of(slots, row, num_tokens, SCANNED: tl.constexpr = _OF_STEPS):
    """Returns a row's first unmasked token, the number of its unmasked tokens, and the position of the first.

    slots: `StateSlots`. If all tokens are masked, the position is 0. SCANNED: see `span`.
    """
    first, count = span(slots.write_mask + row * num_tokens, num_tokens, SCANNED)
    start = tl.load(slots.positions + row * num_tokens + first, mask=count > 0, other=0).to(tl.int32)
    return first, count, start


@triton.jit
def sigmoid(x):
    """Computes 1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """Computes log(1 + exp(x)), without loss of digits for small exp(x). For x > 20 the result is x."""
    power = tl.exp(tl.minimum(x, 20.0))
    whole = 1.0 + power
    lost = whole - 1.0
    small = lost == 0.0
    log = tl.where(small, power, tl.log(whole) * (power / tl.where(small, 1.0, lost)))
    return tl.where(x > 20.0, x, log)


@triton.jit
def _before(inputs_ptr, position, older, channel, CHANNELS: tl.constexpr, PLACES: tl.constexpr):
    """Loads the convolution's inputs [T, C] at positions [T] and channels [C] from the ring buffer.

    Inputs are zero where the mask `older` [T, C] is False or the position is negative. PLACES: length of the ring
    buffer.
    """
    place = (position + PLACES) % PLACES
    older = older & (position >= 0)[:, None]
    return tl.load(inputs_ptr + place[:, None] * CHANNELS + channel[None, :], mask=older, other=0.0)


@triton.jit
def convs_ahead(
    inputs_ptr,
    conv_ptr,
    channel,
    inside,
    token,
    there,
    start,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Loads the weights and the inputs of earlier passes for each tap of the convolution.

    Returns them as the argument `ahead` of `convs`. They do not depend on the product that `convs` reads, so they may
    be loaded before the product is complete. For the arguments see `convs`.
    """
    loaded = ()
    for tap in tl.static_range(WIDTH):
        at = token - (WIDTH - 1 - tap)
        older = there[:, None] & inside[None, :] & (at < 0)[:, None]
        before = _before(inputs_ptr, start + at, older, channel, CHANNELS, PLACES)
        loaded = loaded + ((before, tl.load(conv_ptr + channel * WIDTH + tap, mask=inside, other=0.0)),)
    return loaded


@triton.jit
def convs(
    product_ptr,
    inputs_ptr,
    conv_ptr,
    channel,
    inside,
    token,
    there,
    start,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
    ahead=None,
):
    """Computes silu of the convolution over tokens, for tokens [T] of a row and channels [C].

    product_ptr points to the values of the row's first unmasked token, at position `start`. token [T]: indices of
    tokens, counted from this token. inputs_ptr: ring buffer with the inputs at positions before `start`. there [T]:
    mask of tokens that are read. inside [C]: mask of channels. ROWS: number of values of a token in the product. WIDTH:
    number of taps. PLACES: length of the ring buffer. ahead: result of `convs_ahead`. None: loads its values here.

    Returns:
        The result [T, C] in fp32, rounded to the product's dtype; and the tokens' own inputs [T, C] in that dtype.
    """
    dtype: tl.constexpr = product_ptr.dtype.element_ty
    total = tl.zeros([token.shape[0], channel.shape[0]], tl.float32)
    x = tl.zeros([token.shape[0], channel.shape[0]], dtype)
    wanted = there[:, None] & inside[None, :]
    for tap in tl.static_range(WIDTH):
        at = token - (WIDTH - 1 - tap)
        new, position = (at >= 0)[:, None], start + at
        here = tl.load(product_ptr + at[:, None] * ROWS + channel[None, :], mask=wanted & new, other=0.0)
        if ahead is None:
            before = _before(inputs_ptr, position, wanted & ~new, channel, CHANNELS, PLACES)
            taps = tl.load(conv_ptr + channel * WIDTH + tap, mask=inside, other=0.0)
        else:
            before, taps = ahead[tap]
        x = tl.where(new, here, before)
        total += x.to(tl.float32) * taps.to(tl.float32)[None, :]
    rounded = total.to(dtype).to(tl.float32)
    return (rounded * sigmoid(rounded)).to(dtype).to(tl.float32), x


@triton.jit
def betas(b_ptr, there):
    """Loads b of some tokens and one head. Returns beta = sigmoid(b) in fp32, rounded to the dtype of b.

    there: mask of the tokens.
    """
    b = tl.load(b_ptr, mask=there, other=0.0)
    return sigmoid(b.to(tl.float32)).to(b.dtype).to(tl.float32)


@triton.jit
def decays(a, rate, more, floor, DECAY: tl.constexpr):
    """Computes g, the logarithm of the factor by which a token multiplies the state, in fp32 and in the shape of a.

    a: the layer's product for the token. rate: exp of the layer's weight `decay`. more: the layer's weight `step`,
    which is added to a. floor: lower limit of g if DECAY is "bounded".
    """
    a = a.to(tl.float32) + more
    if DECAY == "bounded":
        log = floor * sigmoid(rate * a)
    else:
        log = -rate * tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    return log


@triton.jit
def units(x):
    """Normalises each row of x [T, D] to length 1: x / sqrt(sum(x^2) + L2_EPS)."""
    return x * (1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) + _EPS))[:, None]


@triton.jit
def row_of(x, one):
    """Returns the one row [D] of x [T, D] at which the mask `one` [T] is True."""
    return tl.sum(tl.where(one[:, None], x, 0.0), axis=0)


@triton.jit
def advanced(state, q, k, v, decay, beta):
    """Applies one token of the gated delta rule to the state [values, keys]. Returns (new state, output [values]).

    q, k [keys] and v [values]: query, key and value of the token. decay: factor of the state, e^g; one number or
    [1, keys]. beta: factor of the update.
    """
    state = state * decay
    delta = (v - tl.sum(state * k[None, :], axis=1)) * beta
    state = state + delta[:, None] * k[None, :]
    return state, tl.sum(state * q[None, :], axis=1)
