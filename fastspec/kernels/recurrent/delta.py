"""The gated delta rule over the new tokens of each row, with the convolution before it, in one launch.

| argument              | shape, dtype                                       | notes                                 |
|-----------------------|----------------------------------------------------|---------------------------------------|
| product               | [B, Q, rule.rows] bf16, fp16 or fp32               | contiguous                            |
| conv                  | [channels, 1, width], product's dtype              | contiguous                            |
| decay, step           | fp32 [value_heads]                                 | contiguous                            |
| states                | fp32 [rows, slots, value_heads, value_dim, key_dim]| contiguous; written                   |
| inputs                | [rows, slots + width - 1, channels], product's     | contiguous; written                   |
| state_rows            | int64 [B]                                          | contiguous, all different             |
| positions, write_mask | int64 and bool [B, Q]                              | contiguous                            |

A program has some values of one value head of one row. It reads its part of the state once and writes it once for each
new token, or once where a row has more tokens than there are slots. It is compiled once for any number of tokens, so a
token's bits do not depend on how many there are. A sum over a key lies in one warp.

q and k of a head are convolved anew by every program that needs them. One of them writes their inputs: to places that
no program reads in the same launch, for the inputs that are read and those that are written follow one another, and
there are as many places. With more tokens than slots there are not, so a second launch writes them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.checks import check, told
from fastspec.kernels.common.launch import has_pdl, launch
from fastspec.kernels.reference.recurrent import L2_EPS, DeltaParts
from fastspec.shapes import DeltaRule

MAX_KEY_DIM = 256
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TILE = 4096  # elements of a state that a program has
_KEPT = 1024  # channels of a program that keeps inputs
_EPS = tl.constexpr(L2_EPS)
_SCANNED = tl.constexpr(64)  # tokens whose mask is read at once


class Weights(NamedTuple):
    """Weights of a layer, as above."""

    conv: Any
    decay: Any
    step: Any


class Where(NamedTuple):
    """The states of a layer, as above, and where tokens belong in them."""

    states: Any
    inputs: Any
    state_rows: Any
    positions: Any
    write_mask: Any


@triton.jit
def _span(mask_ptr, num_tokens):
    """The first token of a row that counts, and how many do."""
    first = num_tokens
    count = num_tokens * 0
    for start in range(0, num_tokens, _SCANNED):
        at = start + tl.arange(0, _SCANNED)
        counts = tl.load(mask_ptr + at, mask=at < num_tokens, other=0).to(tl.int32)
        first = tl.minimum(first, tl.min(tl.where(counts != 0, at, num_tokens), axis=0))
        count += tl.sum(counts, axis=0)
    return first, count


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _conv(
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

    product_ptr is of that token; from `old` tokens before it on the inputs are in the ring.
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
    return (rounded * _sigmoid(rounded)).to(dtype).to(tl.float32), x


@triton.jit(do_not_specialize=["num_tokens"])
def _delta_kernel(
    product_ptr,
    weights,  # Weights
    where,  # Where
    out_ptr,
    num_tokens,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    DIMS: tl.constexpr,  # of a key and of a value
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Row, value head, and some values of it."""
    if PDL:
        gdc_launch_dependents()
    KEY_DIM: tl.constexpr = DIMS[0]
    VALUE_DIM: tl.constexpr = DIMS[1]
    KEYS: tl.constexpr = triton.next_power_of_2(KEY_DIM)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    ROWS: tl.constexpr = CHANNELS + VALUE_HEADS * VALUE_DIM + 2 * VALUE_HEADS
    SERVED: tl.constexpr = VALUE_HEADS // KEY_HEADS
    PLACES: tl.constexpr = SLOTS + WIDTH - 1
    row, head, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    key_head = head // SERVED
    key, value = tl.arange(0, KEYS), tile * BLOCK + tl.arange(0, BLOCK)
    has_key, has_value = key < KEY_DIM, value < VALUE_DIM
    first, count = _span(where.write_mask + row * num_tokens, num_tokens)
    held = tl.load(where.state_rows + row)
    inputs_ptr = where.inputs + held * (PLACES * CHANNELS)
    product_ptr += row * num_tokens * ROWS
    out_ptr += (row * num_tokens * VALUE_HEADS + head) * VALUE_DIM
    states_ptr = where.states + (held * SLOTS * VALUE_HEADS + head) * (VALUE_DIM * KEY_DIM)
    within = value[:, None] * KEY_DIM + key[None, :]
    whole = has_value[:, None] & has_key[None, :]
    # where no token counts, any position will do: nothing is read or written
    start = tl.load(where.positions + row * num_tokens + first, mask=count > 0, other=0).to(tl.int32)
    slot = (start + SLOTS - 1) % SLOTS
    known = whole & (start > 0) & (count > 0)
    state = tl.load(states_ptr + slot * (VALUE_HEADS * VALUE_DIM * KEY_DIM) + within, mask=known, other=0.0)
    rate = tl.exp(tl.load(weights.decay + head))
    more = tl.load(weights.step + head)
    q_channel = key_head * KEY_DIM + key
    k_channel = KEY_HEADS * KEY_DIM + q_channel
    v_channel = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value
    keeps = num_tokens <= SLOTS
    keeps_qk = has_key & keeps & (head % SERVED == 0) & (tile == 0)
    if PDL:
        gdc_wait()  # for the product: states are of earlier passes
    for t in range(first, first + count):
        position, old = start + t - first, t - first + 1
        at = product_ptr + t * ROWS
        q, q_in = _conv(at, inputs_ptr, weights.conv, q_channel, has_key, old, position, ROWS, CHANNELS, WIDTH, PLACES)
        k, k_in = _conv(at, inputs_ptr, weights.conv, k_channel, has_key, old, position, ROWS, CHANNELS, WIDTH, PLACES)
        v, v_in = _conv(
            at, inputs_ptr, weights.conv, v_channel, has_value, old, position, ROWS, CHANNELS, WIDTH, PLACES
        )
        b = tl.load(at + (ROWS - 2 * VALUE_HEADS) + head)
        a = tl.load(at + (ROWS - VALUE_HEADS) + head).to(tl.float32) + more
        beta = _sigmoid(b.to(tl.float32)).to(b.dtype).to(tl.float32)
        softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
        q = q * (1.0 / tl.sqrt_rn(tl.sum(q * q, axis=0) + _EPS)) * KEY_DIM**-0.5
        k = k * (1.0 / tl.sqrt_rn(tl.sum(k * k, axis=0) + _EPS))
        state = state * tl.exp(-rate * softplus)
        delta = (v - tl.sum(state * k[None, :], axis=1)) * beta
        state = state + delta[:, None] * k[None, :]
        out = tl.sum(state * q[None, :], axis=1).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + t * (VALUE_HEADS * VALUE_DIM) + value, out, mask=has_value)
        if keeps | (t == first + count - 1):
            place = position % SLOTS * (VALUE_HEADS * VALUE_DIM * KEY_DIM)
            tl.store(states_ptr + place + within, state, mask=whole)
        kept = inputs_ptr + position % PLACES * CHANNELS
        tl.store(kept + q_channel, q_in, mask=keeps_qk)
        tl.store(kept + k_channel, k_in, mask=keeps_qk)
        tl.store(kept + v_channel, v_in, mask=has_value & keeps)
    nothing = tl.zeros(value.shape, out_ptr.dtype.element_ty)  # what a mask leaves out is finite
    for t in range(0, num_tokens):
        if (t < first) | (t >= first + count):
            tl.store(out_ptr + t * (VALUE_HEADS * VALUE_DIM) + value, nothing, mask=has_value)


@triton.jit(do_not_specialize=["num_tokens"])
def _keep_kernel(
    product_ptr,
    where,  # Where
    num_tokens,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keeps the inputs of a row's last tokens: row, one of them, and some channels."""
    row, channel = tl.program_id(0).to(tl.int64), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    first, count = _span(where.write_mask + row * num_tokens, num_tokens)
    t = first + count - 1 - tl.program_id(1)
    if (t >= first) & (count > 0):
        position = tl.load(where.positions + row * num_tokens + t)
        inside = channel < CHANNELS
        x = tl.load(product_ptr + (row * num_tokens + t) * ROWS + channel, mask=inside)
        place = tl.load(where.state_rows + row) * PLACES + position % PLACES
        tl.store(where.inputs + place * CHANNELS + channel, x, mask=inside)


def delta_rule(
    product: Tensor,
    layer: DeltaParts,
    states: Tensor,
    inputs: Tensor,
    state_rows: Tensor,
    positions: Tensor,
    write_mask: Tensor,
    rule: DeltaRule,
) -> Tensor:
    """As `reference.delta_rule`, which defines it; tokens that the mask leaves out give zeros.

    Raises:
        ValueError: a tensor is not as above.
    """
    _check(product, layer, states, inputs, state_rows, positions, write_mask, rule)
    batch, tokens, slots = *positions.shape, states.shape[1]
    out = product.new_empty(batch, tokens, rule.values)
    block = min(triton.next_power_of_2(rule.value_dim), max(4, _TILE // triton.next_power_of_2(rule.key_dim)))
    where, pdl = Where(states, inputs, state_rows, positions, write_mask), has_pdl(product.device)
    launch(
        _delta_kernel,
        (batch, rule.value_heads, triton.cdiv(rule.value_dim, block)),
        product,
        Weights(layer.conv, layer.decay, layer.step),
        where,
        out,
        tokens,
        KEY_HEADS=rule.key_heads,
        VALUE_HEADS=rule.value_heads,
        DIMS=(rule.key_dim, rule.value_dim),
        WIDTH=rule.width,
        SLOTS=slots,
        BLOCK=block,
        PDL=pdl,
        num_warps=4,
        enable_fp_fusion=False,
        **({"launch_pdl": True} if pdl else {}),
    )
    if tokens > slots:
        launch(
            _keep_kernel,
            (batch, inputs.shape[1], triton.cdiv(rule.channels, _KEPT)),
            product,
            where,
            tokens,
            ROWS=rule.rows,
            CHANNELS=rule.channels,
            PLACES=inputs.shape[1],
            BLOCK=_KEPT,
            num_warps=4,
        )
    return out


def _check(
    product: Tensor,
    layer: DeltaParts,
    states: Tensor,
    inputs: Tensor,
    state_rows: Tensor,
    positions: Tensor,
    write_mask: Tensor,
    rule: DeltaRule,
) -> None:
    if product.dim() != 3 or product.dtype not in _DTYPES or rule.key_dim > MAX_KEY_DIM:
        raise ValueError(
            f"product is {told(product)} with keys of {rule.key_dim}; wanted bf16, fp16 or fp32 [B, Q, {rule.rows}], "
            f"and keys of up to {MAX_KEY_DIM} elements"
        )
    (batch, tokens, _), dtype = product.shape, product.dtype
    rows, slots = states.shape[:2]
    check("product", product, (batch, tokens, rule.rows))
    check("conv", layer.conv, (rule.channels, 1, rule.width), dtype)
    check("decay", layer.decay, (rule.value_heads,), torch.float32)
    check("step", layer.step, (rule.value_heads,), torch.float32)
    check("states", states, (rows, slots, rule.value_heads, rule.value_dim, rule.key_dim), torch.float32)
    check("inputs", inputs, (rows, slots + rule.tail, rule.channels), dtype)
    check("state_rows", state_rows, (batch,), torch.int64)
    check("positions", positions, (batch, tokens), torch.int64)
    check("write_mask", write_mask, (batch, tokens), torch.bool)
