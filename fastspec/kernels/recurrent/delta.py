"""Gated delta rule for the tokens of a decode step, with the convolution before it, in one launch.

    for each token:   S <- e^g S;   S <- S + beta (v - S k) k^T;   out = S q        (Gated DeltaNet, arXiv 2412.06464)

S is the recurrent state of a value head. DECAY says what g is. "head": one number for each head. "channel": one number
for each element of a key, which scales a column of S (Kimi delta attention, arXiv 2510.26692). "bounded": the same as
"channel", with a lower limit of g.

A CTA computes BLOCK values of one value head of one row. A row is a sequence of the batch. The CTA loads its part of
the state once, and stores it after each token. The number of tokens is a runtime argument; its upper limit is a
constexpr (TOKENS). Decode steps of one token per row have a compiled kernel of their own. With few rows, a CTA has a
smaller part of the state.

Batch invariance. A token's bits are the same in all compiled kernels. A sum over the elements of a key stays in one
warp, and a lane has the same elements of the key in every kernel (`_LEAST`).

Every CTA that needs q and k of a head computes their convolution again. One of these CTAs stores the convolution's
inputs in a ring buffer, indexed by position. No CTA reads an index that this launch writes: the positions read and the
positions written are consecutive, and the ring buffer has room for both.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.launch import launch
from fastspec.kernels.recurrent.parts import (
    StateSlots,
    Weights,
    advanced,
    betas,
    convs,
    convs_ahead,
    decays,
    row_of,
    tokens_of,
    units,
)
from fastspec.shapes import DeltaRule

STEP_TILE, WARPS = 2048, 1  # elements of the state in a CTA, and its warps
# with at most FEW_ROWS rows a CTA has only FEW_TILE elements, because then all CTAs still run at once
FEW_ROWS, FEW_TILE = 2, 1024
AHEAD = tl.constexpr(2)  # with more tokens, registers do not suffice to load older inputs before the wait
_LEAST = (
    # least number of elements of keys [TOKENS, KEYS], so that a lane loads 16 bytes of a key, the maximum, in any dtype
    256
)


@triton.jit(do_not_specialize=["num_tokens"])
def _delta_kernel(
    product_ptr,
    weights,  # Weights
    slots,  # StateSlots
    out_ptr,
    floor,
    num_tokens,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DECAY: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,  # a power of two, at least num_tokens
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes BLOCK elements of one head's output for every token of a row. Stores the state after each token.

    The grid is (row, value head, block of the head's values).
    """
    if PDL:
        gdc_launch_dependents()
    KEYS: tl.constexpr = triton.next_power_of_2(KEY_DIM)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    DECAYS: tl.constexpr = VALUE_HEADS if DECAY == "head" else KEY_HEADS * KEY_DIM
    ROWS: tl.constexpr = CHANNELS + VALUE_HEADS * VALUE_DIM + VALUE_HEADS + DECAYS
    SERVED: tl.constexpr = VALUE_HEADS // KEY_HEADS
    PLACES: tl.constexpr = SLOTS + WIDTH - 1
    row, head, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    key_head = head // SERVED
    key, value = tl.arange(0, KEYS), tile * BLOCK + tl.arange(0, BLOCK)
    has_key, has_value = key < KEY_DIM, value < VALUE_DIM
    first, count, start = tokens_of(slots, row, num_tokens)  # a row without tokens reads and writes nothing
    held = tl.load(slots.state_rows + row)
    inputs_ptr = slots.inputs + held * (PLACES * CHANNELS)
    product_ptr += row * num_tokens * ROWS
    out_ptr += (row * num_tokens * VALUE_HEADS + head) * VALUE_DIM
    states_ptr = slots.states + (held * SLOTS * VALUE_HEADS + head) * (VALUE_DIM * KEY_DIM)
    within = value[:, None] * KEY_DIM + key[None, :]  # offsets in the state [BLOCK, KEYS]
    whole = has_value[:, None] & has_key[None, :]
    slot = (start + SLOTS - 1) % SLOTS
    known = whole & (start > 0) & (count > 0)
    state = tl.load(states_ptr + slot * (VALUE_HEADS * VALUE_DIM * KEY_DIM) + within, mask=known, other=0.0)
    rate = tl.exp(tl.load(weights.decay + head))
    q_channel = key_head * KEY_DIM + key
    if DECAY == "head":
        more = tl.load(weights.step + head)
    else:
        more = tl.load(weights.step + q_channel, mask=has_key, other=0.0)
    k_channel = KEY_HEADS * KEY_DIM + q_channel
    v_channel = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value
    token = tl.arange(0, TOKENS)
    mine = token < count
    product_ptr += first * ROWS
    q_ahead, k_ahead, v_ahead = None, None, None
    if TOKENS <= AHEAD:
        q_ahead = convs_ahead(inputs_ptr, weights.conv, q_channel, has_key, token, mine, start, CHANNELS, WIDTH, PLACES)
        k_ahead = convs_ahead(inputs_ptr, weights.conv, k_channel, has_key, token, mine, start, CHANNELS, WIDTH, PLACES)
        v_ahead = convs_ahead(
            inputs_ptr, weights.conv, v_channel, has_value, token, mine, start, CHANNELS, WIDTH, PLACES
        )
    if PDL:
        gdc_wait()  # the previous kernel computes the product; states and older inputs come from earlier passes
    a_ptr = product_ptr + token * ROWS + (ROWS - DECAYS)
    # all tokens at once, so that their loads overlap
    if DECAY != "head":
        counts = mine[:, None] & has_key[None, :]
        a = tl.load(a_ptr[:, None] + q_channel[None, :], mask=counts, other=0.0)  # [TOKENS, KEYS]
    q, q_in = convs(
        product_ptr, inputs_ptr, weights.conv, q_channel, has_key, token, mine, start, ROWS, CHANNELS, WIDTH, PLACES,
        q_ahead,
    )  # fmt: skip
    k, k_in = convs(
        product_ptr, inputs_ptr, weights.conv, k_channel, has_key, token, mine, start, ROWS, CHANNELS, WIDTH, PLACES,
        k_ahead,
    )  # fmt: skip
    v, v_in = convs(
        product_ptr, inputs_ptr, weights.conv, v_channel, has_value, token, mine, start, ROWS, CHANNELS, WIDTH, PLACES,
        v_ahead,
    )  # fmt: skip
    beta = betas(a_ptr - VALUE_HEADS + head, mine)
    if DECAY == "head":
        a = tl.load(a_ptr + head, mask=mine, other=0.0)  # [TOKENS]
        decay = tl.exp(decays(a, rate, more, floor, DECAY))
    q, k = units(q) * KEY_DIM**-0.5, units(k)  # [TOKENS, KEYS]
    kept = inputs_ptr + ((start + token) % PLACES * CHANNELS)[:, None]
    keeps_qk = mine[:, None] & (has_key & (head % SERVED == 0) & (tile == 0))[None, :]
    tl.store(kept + q_channel[None, :], q_in, mask=keeps_qk)
    tl.store(kept + k_channel[None, :], k_in, mask=keeps_qk)
    tl.store(kept + v_channel[None, :], v_in, mask=mine[:, None] & has_value[None, :])
    for t in range(0, count):
        one = token == t
        q_t, k_t, v_t = row_of(q, one), row_of(k, one), row_of(v, one)
        beta_t = tl.sum(tl.where(one, beta, 0.0), axis=0)
        if DECAY == "head":
            decay_t = tl.sum(tl.where(one, decay, 0.0), axis=0)
        else:
            # token by token: registers do not suffice for the decays of all tokens
            decay_t = tl.exp(decays(row_of(a.to(tl.float32), one), rate, more, floor, DECAY))[None, :]
        state, out = advanced(state, q_t, k_t, v_t, decay_t, beta_t)
        out = out.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (first + t) * (VALUE_HEADS * VALUE_DIM) + value, out, mask=has_value)
        place = (start + t) % SLOTS * (VALUE_HEADS * VALUE_DIM * KEY_DIM)
        tl.store(states_ptr + place + within, state, mask=whole)
    nothing = tl.zeros(value.shape, out_ptr.dtype.element_ty)  # finite: the next product reads masked tokens
    for t in range(0, num_tokens):
        if (t < first) | (t >= first + count):
            tl.store(out_ptr + t * (VALUE_HEADS * VALUE_DIM) + value, nothing, mask=has_value)


def step_rule(product: Tensor, weights: Weights, slots: StateSlots, out: Tensor, rule: DeltaRule) -> None:
    """Writes the result of `reference.delta_rule` to `out` [B, Q, rule.values], for a decode step of Q tokens a row.

    A row keeps the states after its last tokens in slots. Q is at most the number of these slots. dispatch.py has the
    shapes of the tensors.
    """
    batch, tokens, _ = product.shape
    block = block_of(rule, STEP_TILE if batch > FEW_ROWS else FEW_TILE)
    launch(
        _delta_kernel,
        (batch, rule.value_heads, triton.cdiv(rule.value_dim, block)),
        product,
        weights,
        slots,
        out,
        rule.floor,
        tokens,
        **sizes_of(rule),
        DECAY=decay_of(rule),
        WIDTH=rule.width,
        SLOTS=slots.states.shape[1],
        TOKENS=room_of(rule, tokens, slots.states.shape[1]),
        BLOCK=block,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


def room_of(rule: DeltaRule, tokens: int, slots: int) -> int:
    """Returns TOKENS of `_delta_kernel`: the largest number of tokens of a row that a compiled kernel can process.

    Decode steps of one token have a compiled kernel of their own. All other steps share the one for the longest step.

    Args:
        rule: sizes of the layer.
        tokens: number of tokens of each row in this step.
        slots: number of tokens of each row in the longest step.

    Returns:
        A power of two.
    """
    least = _LEAST // triton.next_power_of_2(rule.key_dim)
    return int(max(1, least, 1 if tokens == 1 else triton.next_power_of_2(slots)))


def block_of(rule: DeltaRule, tile: int) -> int:
    """Returns BLOCK: the number of a head's values that a CTA computes, a power of two.

    tile: number of elements of the state that a CTA should have.
    """
    return int(min(triton.next_power_of_2(rule.value_dim), max(4, tile // triton.next_power_of_2(rule.key_dim))))


def decay_of(rule: DeltaRule) -> str:
    """Returns DECAY of the kernels: "head", "channel" or "bounded"; see the top of this file."""
    if not rule.by_channel:
        return "head"
    return "bounded" if rule.floor else "channel"


def sizes_of(rule: DeltaRule) -> dict[str, Any]:
    """Returns the sizes of the layer as constexpr arguments of the kernels, by name."""
    heads = {"KEY_HEADS": rule.key_heads, "VALUE_HEADS": rule.value_heads}
    return {**heads, "KEY_DIM": rule.key_dim, "VALUE_DIM": rule.value_dim}
