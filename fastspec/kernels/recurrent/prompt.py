"""The gated delta rule over the tokens of a prompt, in three launches.

1. Prepare: the convolved q, k and v, beta and decay of all tokens in parallel, in fp32.
2. Scan: a program goes through the tokens of a row with BLOCK values of one value head. It loads its part of the state
   once, stores it once, and prefetches the next token while it computes one.
3. Keep: the inputs of the last tokens are stored for the convolution of later passes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.common.launch import launch
from fastspec.kernels.recurrent.delta import block_of, sizes_of
from fastspec.kernels.recurrent.parts import TILE, Weights, Where, advanced, convs, gates, span, units
from fastspec.shapes import DeltaRule

_PREPARED = 16  # tokens of one program of `_prepare_kernel`
_KEPT = 1024  # channels of one program of `_keep_kernel`


class Prepared(NamedTuple):
    """Results of `_prepare_kernel`, in fp32.

    Attributes:
        q, k: [B, Q, key_heads, key_dim].
        v: [B, Q, values].
        beta, decay: [B, Q, value_heads].
    """

    q: Any
    k: Any
    v: Any
    beta: Any
    decay: Any


@triton.jit(do_not_specialize=["num_tokens"])
def _prepare_kernel(
    product_ptr,
    weights,  # Weights
    where,  # Where
    ready,  # Prepared
    num_tokens,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    DIMS: tl.constexpr,  # of a key and of a value
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Programs by block of tokens, row, and head: key heads first, then value heads."""
    KEY_DIM: tl.constexpr = DIMS[0]
    VALUE_DIM: tl.constexpr = DIMS[1]
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    ROWS: tl.constexpr = CHANNELS + VALUE_HEADS * VALUE_DIM + 2 * VALUE_HEADS
    row, head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    first, count = span(where.write_mask + row * num_tokens, num_tokens)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)  # counted from the first that is not masked
    there = token < count
    if tl.program_id(0) * TOKENS < count:
        start = tl.load(where.positions + row * num_tokens + first).to(tl.int32)
        inputs_ptr = where.inputs + tl.load(where.state_rows + row) * (PLACES * CHANNELS)
        at = product_ptr + (row * num_tokens + first) * ROWS
        to = row * num_tokens + first + token
        if head < KEY_HEADS:  # the branches share no variable name: Triton wants one shape for a name
            key = tl.arange(0, triton.next_power_of_2(KEY_DIM))
            has_key, of_q = key < KEY_DIM, head * KEY_DIM + key
            of_k = of_q + KEY_HEADS * KEY_DIM
            q, _ = convs(at, inputs_ptr, weights.conv, of_q, has_key, token, there, start, ROWS, CHANNELS, WIDTH, PLACES)
            k, _ = convs(at, inputs_ptr, weights.conv, of_k, has_key, token, there, start, ROWS, CHANNELS, WIDTH, PLACES)
            to_key = ((to * KEY_HEADS + head) * KEY_DIM)[:, None] + key[None, :]
            counts = there[:, None] & has_key[None, :]
            tl.store(ready.q + to_key, units(q) * KEY_DIM**-0.5, mask=counts)
            tl.store(ready.k + to_key, units(k), mask=counts)
        else:
            own = head - KEY_HEADS
            value = tl.arange(0, triton.next_power_of_2(VALUE_DIM))
            has_value, of_v = value < VALUE_DIM, 2 * KEY_HEADS * KEY_DIM + own * VALUE_DIM + value
            v, _newest = convs(
                at, inputs_ptr, weights.conv, of_v, has_value, token, there, start, ROWS, CHANNELS, WIDTH, PLACES
            )
            to_value = ((to * VALUE_HEADS + own) * VALUE_DIM)[:, None] + value[None, :]
            tl.store(ready.v + to_value, v, mask=there[:, None] & has_value[None, :])
            rate, more = tl.exp(tl.load(weights.decay + own)), tl.load(weights.step + own)
            beta, softplus = gates(at + token * ROWS + (ROWS - 2 * VALUE_HEADS) + own, more, there, VALUE_HEADS)
            tl.store(ready.beta + to * VALUE_HEADS + own, beta, mask=there)
            tl.store(ready.decay + to * VALUE_HEADS + own, tl.exp(-rate * softplus), mask=there)


@triton.jit
def _loaded(ready, q_at, v_at, gate_at, has_key, has_value, there):
    """q, k, v, beta and decay of one token; zeros unless `there`."""
    q = tl.load(ready.q + q_at, mask=has_key & there, other=0.0)
    k = tl.load(ready.k + q_at, mask=has_key & there, other=0.0)
    v = tl.load(ready.v + v_at, mask=has_value & there, other=0.0)
    beta = tl.load(ready.beta + gate_at, mask=there, other=0.0)
    return q, k, v, beta, tl.load(ready.decay + gate_at, mask=there, other=0.0)


@triton.jit(do_not_specialize=["num_tokens"])
def _scan_kernel(
    where,  # Where
    ready,  # Prepared
    out_ptr,
    num_tokens,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs by row, value head, and block of its values."""
    KEY_DIM: tl.constexpr = DIMS[0]
    VALUE_DIM: tl.constexpr = DIMS[1]
    SIZE: tl.constexpr = VALUE_DIM * KEY_DIM
    row, head, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    key = tl.arange(0, triton.next_power_of_2(KEY_DIM))
    value = tile * BLOCK + tl.arange(0, BLOCK)
    has_key, has_value = key < KEY_DIM, value < VALUE_DIM
    first, count = span(where.write_mask + row * num_tokens, num_tokens)
    states_ptr = where.states + (tl.load(where.state_rows + row) * SLOTS * VALUE_HEADS + head) * SIZE
    within = value[:, None] * KEY_DIM + key[None, :]
    whole = has_value[:, None] & has_key[None, :]
    start = tl.load(where.positions + row * num_tokens + first, mask=count > 0, other=0).to(tl.int32)
    known = whole & (start > 0) & (count > 0)
    slot = (start + SLOTS - 1) % SLOTS
    state = tl.load(states_ptr + slot * (VALUE_HEADS * SIZE) + within, mask=known, other=0.0)
    base = row * num_tokens
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    stop = first + count
    q_at, v_at = (base + first) * KEY_HEADS + key_head, (base + first) * VALUE_HEADS + head
    q, k, v, beta, decay = _loaded(
        ready, q_at * KEY_DIM + key, v_at * VALUE_DIM + value, v_at, has_key, has_value, count > 0
    )
    for t in range(first, stop):
        q_at, v_at = (base + t + 1) * KEY_HEADS + key_head, (base + t + 1) * VALUE_HEADS + head
        following = _loaded(
            ready, q_at * KEY_DIM + key, v_at * VALUE_DIM + value, v_at, has_key, has_value, t + 1 < stop
        )
        state, out = advanced(state, q, k, v, decay, beta)
        out_at = ((base + t) * VALUE_HEADS + head) * VALUE_DIM + value
        tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=has_value)
        q, k, v, beta, decay = following
    last = (start + count + SLOTS - 1) % SLOTS * (VALUE_HEADS * SIZE)
    tl.store(states_ptr + last + within, state, mask=whole & (count > 0))
    nothing = tl.zeros(value.shape, out_ptr.dtype.element_ty)  # masked tokens must be finite for what reads them
    for t in range(0, num_tokens):
        if (t < first) | (t >= stop):
            tl.store(out_ptr + ((base + t) * VALUE_HEADS + head) * VALUE_DIM + value, nothing, mask=has_value)


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
    """Stores the inputs of a row's last tokens: programs by row, token counted from the end, and block of channels."""
    row, channel = tl.program_id(0).to(tl.int64), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    first, count = span(where.write_mask + row * num_tokens, num_tokens)
    t = first + count - 1 - tl.program_id(1)
    if (t >= first) & (count > 0):
        position = tl.load(where.positions + row * num_tokens + t)
        inside = channel < CHANNELS
        x = tl.load(product_ptr + (row * num_tokens + t) * ROWS + channel, mask=inside)
        place = tl.load(where.state_rows + row) * PLACES + position % PLACES
        tl.store(where.inputs + place * CHANNELS + channel, x, mask=inside)


def prompt_rule(product: Tensor, weights: Weights, where: Where, out: Tensor, rule: DeltaRule) -> None:
    """Writes the result of `reference.delta_rule` to out [B, Q, rule.values]; Q is above the number of slots."""
    batch, tokens, _ = product.shape
    places, block, sizes = where.inputs.shape[1], block_of(rule, TILE), sizes_of(rule)

    def room(*shape: int) -> Tensor:
        return torch.empty(batch, tokens, *shape, dtype=torch.float32, device=product.device)

    of_keys, gate = (rule.key_heads, rule.key_dim), (rule.value_heads,)
    ready = Prepared(room(*of_keys), room(*of_keys), room(rule.values), room(*gate), room(*gate))
    launch(
        _prepare_kernel,
        (triton.cdiv(tokens, _PREPARED), batch, rule.key_heads + rule.value_heads),
        product,
        weights,
        where,
        ready,
        tokens,
        **sizes,
        WIDTH=rule.width,
        PLACES=places,
        TOKENS=_PREPARED,
        num_warps=4,
        enable_fp_fusion=False,
    )
    launch(
        _scan_kernel,
        (batch, rule.value_heads, triton.cdiv(rule.value_dim, block)),
        where,
        ready,
        out,
        tokens,
        **sizes,
        SLOTS=where.states.shape[1],
        BLOCK=block,
        num_warps=4,
        enable_fp_fusion=False,
    )
    launch(
        _keep_kernel,
        (batch, places, triton.cdiv(rule.channels, _KEPT)),
        product,
        where,
        tokens,
        ROWS=rule.rows,
        CHANNELS=rule.channels,
        PLACES=places,
        BLOCK=_KEPT,
        num_warps=4,
    )
