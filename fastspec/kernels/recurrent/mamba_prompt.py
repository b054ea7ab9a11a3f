"""Mamba-2 for the many tokens of a prefill pass, in chunks of positions, by products on tensor cores.

The formulas are those of Mamba-2 (arXiv 2405.21060, section 6). S is the state before a chunk. Token t has x_t, B_t,
C_t and the time step d_t, and a_t = -rate d_t is the logarithm of its decay. g_t is the sum of a_j over j <= t. For
i <= t:

    out_t = e^g_t S C_t + sum over i <= t of (C_t . B_i) e^(g_t - g_i) d_i x_i + skip x_t
    S'    = e^g_last S + sum over i of e^(g_last - g_i) d_i x_i B_i^T

`_prompt_mamba_kernel` has a CTA for BLOCK elements of one head of one row. It keeps its part of the state in registers,
and processes the chunks of the pass one after the other.

Precision. x, B and C have the dtype of the product, so tensor cores multiply C and B without loss. In each other product
one factor is fp32. With bf16 it is split into parts of 8 bits each, and each part is multiplied. The new state gets three
parts, which are all bits of fp32: errors of a state would stay in it for the rest of the text. The output gets two parts,
whose error is 2^-17 of a factor: it is rounded to bf16 at once.

g_t may be far larger than a difference g_t - g_i. So it is added up in fp64, and kept as two fp32 numbers. A difference
then has the error of one rounding to fp32.

Chunks begin at multiples of CHUNK, as in prompt.py. A missing or masked token has step 0, so it changes nothing. If each
pass begins at the start of a chunk, a token's bits do not depend on how a prompt is cut into passes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.common.launch import launch
from fastspec.kernels.recurrent.parts import OF_PROMPTS, ScanWeights, StateSlots, StepLimits, softplus, span
from fastspec.kernels.reference.recurrent import KeptState
from fastspec.shapes import MambaRule

OUT_PARTS, STATE_PARTS = tl.constexpr(2), tl.constexpr(3)


class MambaPlan(NamedTuple):
    """Launch configuration of `_prompt_mamba_kernel`.

    Attributes:
        chunk: number of positions in a chunk, a divisor of DELTA_CHUNK.
        block: number of elements of a head in a CTA.
        warps, stages: `num_warps` and `num_stages` of the launch.
    """

    chunk: int
    block: int
    warps: int
    stages: int


IN_16_BITS = MambaPlan(chunk=64, block=32, warps=4, stages=2)
WIDE_IN_16_BITS = MambaPlan(chunk=32, block=32, warps=4, stages=2)  # for more than 128 elements of B
IN_FP32 = MambaPlan(chunk=16, block=16, warps=8, stages=1)


@triton.jit
def _split_left(a, b, PARTS: tl.constexpr):
    """Computes the product of a, in fp32, and b, in 16 bits or fp32. Of bf16, PARTS parts of `a` are multiplied."""
    if b.dtype == tl.bfloat16:
        part = a.to(tl.bfloat16)
        out = tl.dot(part, b)
        for _ in tl.static_range(PARTS - 1):
            a = a - part.to(tl.float32)
            part = a.to(tl.bfloat16)
            out = tl.dot(part, b, out)
    elif b.dtype == tl.float16:
        out = tl.dot(a, b.to(tl.float32), input_precision="tf32x3")
    else:
        out = tl.dot(a, b, input_precision="ieee")
    return out


@triton.jit
def _split_right(a, b, PARTS: tl.constexpr):
    """Computes the product of a, in 16 bits or fp32, and b, in fp32. Of bf16, PARTS parts of `b` are multiplied."""
    if a.dtype == tl.bfloat16:
        part = b.to(tl.bfloat16)
        out = tl.dot(a, part)
        for _ in tl.static_range(PARTS - 1):
            b = b - part.to(tl.float32)
            part = b.to(tl.bfloat16)
            out = tl.dot(a, part, out)
    elif a.dtype == tl.float16:
        out = tl.dot(a.to(tl.float32), b, input_precision="tf32x3")
    else:
        out = tl.dot(a, b, input_precision="ieee")
    return out


@triton.jit(do_not_specialize=["num_tokens", "keeps"])
def _prompt_mamba_kernel(
    mixed_ptr,  # [B, Q, CHANNELS]: x, B and C, after the convolution
    product_ptr,  # [B, Q, ROWS]: its last values are the steps of the heads
    weights,  # ScanWeights
    slots,  # StateSlots
    kept,  # KeptState
    limits,  # StepLimits
    out_ptr,
    num_tokens,
    keeps,  # 1: the state after `kept.at` positions is stored in `kept`
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE_DIM: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes the outputs of BLOCK elements of a head, chunk after chunk, and stores the state after the last token.

    The grid is (row, head, block of elements).
    """
    VALUES: tl.constexpr = HEADS * HEAD_DIM
    CHANNELS: tl.constexpr = VALUES + 2 * GROUPS * STATE_DIM
    ROWS: tl.constexpr = VALUES + CHANNELS + HEADS
    SIZE: tl.constexpr = HEAD_DIM * STATE_DIM
    KEYS: tl.constexpr = triton.next_power_of_2(STATE_DIM) if STATE_DIM > 16 else 16
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line, key = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    value = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    has_key, has_value = key < STATE_DIM, value < HEAD_DIM
    first, count = span(slots.write_mask + row * num_tokens, num_tokens, OF_PROMPTS)
    states_ptr = slots.states + (tl.load(slots.state_rows + row) * SLOTS * HEADS + head) * SIZE
    within = key[:, None] + value[None, :] * STATE_DIM  # here a state is [keys, values]
    whole = has_key[:, None] & has_value[None, :]
    start = tl.load(slots.positions + row * num_tokens + first, mask=count > 0, other=0).to(tl.int32)
    known = whole & (start > 0) & (count > 0)
    state = tl.load(states_ptr + (start + SLOTS - 1) % SLOTS * (HEADS * SIZE) + within, mask=known, other=0.0)
    rate = tl.exp(tl.load(weights.decay + head))
    more, skip = tl.load(weights.step + head), tl.load(weights.skip + head)
    keep_at = tl.load(kept.at)
    of_group = VALUES + head // (HEADS // GROUPS) * STATE_DIM + key
    begin = start // CHUNK * CHUNK - start  # chunks lie on a grid of positions
    mixed_ptr += (row * num_tokens + first) * CHANNELS
    product_ptr += (row * num_tokens + first) * ROWS + (ROWS - HEADS) + head
    to = out_ptr + row * num_tokens * VALUES + head * HEAD_DIM + value[None, :]
    seen = line[:, None] >= line[None, :]
    for piece in range(0, tl.cdiv(count - begin, CHUNK)):
        token = begin + piece * CHUNK + line
        there = (token >= 0) & (token < count)
        wanted = there[:, None] & has_key[None, :]
        lines = mixed_ptr + token[:, None] * CHANNELS
        b = tl.load(lines + of_group[None, :], mask=wanted, other=0.0)  # [CHUNK, KEYS]
        c = tl.load(lines + (of_group + GROUPS * STATE_DIM)[None, :], mask=wanted, other=0.0)
        counts = there[:, None] & has_value[None, :]
        x = tl.load(lines + (head * HEAD_DIM + value)[None, :], mask=counts, other=0.0)  # [CHUNK, BLOCK]
        step = softplus(tl.load(product_ptr + token * ROWS, mask=there, other=0.0).to(tl.float32) + more)
        step = tl.where(there, tl.minimum(tl.maximum(step, limits.least), limits.highest), 0.0)
        decay = tl.cumsum((-rate * step).to(tl.float64), axis=0)
        high = decay.to(tl.float32)
        low = (decay - high.to(tl.float64)).to(tl.float32)
        since = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])  # g_t - g_i at [t, i]
        factors = tl.where(seen, tl.exp(tl.where(seen, since, 0.0)) * step[None, :], 0.0)
        scores = tl.dot(c, tl.trans(b), input_precision="ieee") * factors
        out = _split_right(c, state, OUT_PARTS) * tl.exp(high)[:, None]
        out += _split_left(scores, x, OUT_PARTS)
        out += skip * x.to(tl.float32)
        tl.store(to + (first + token)[:, None] * VALUES, out.to(out_ptr.dtype.element_ty), mask=counts)
        last_high = tl.sum(tl.where(line == CHUNK - 1, high, 0.0), axis=0)
        last_low = tl.sum(tl.where(line == CHUNK - 1, low, 0.0), axis=0)
        left = tl.exp((last_high - high) + (last_low - low)) * step
        new = _split_right(tl.trans(b), x.to(tl.float32) * left[:, None], STATE_PARTS)
        state = state * tl.exp(last_high) + new
        ended = start + begin + (piece + 1) * CHUNK
        reached = (keeps != 0) & (ended == keep_at) & (ended <= start + count)
        tl.store(kept.state + head * SIZE + within, state, mask=whole & reached)
    newest = (start + count + SLOTS - 1) % SLOTS * (HEADS * SIZE)
    tl.store(states_ptr + newest + within, state, mask=whole & (count > 0))
    nothing = tl.zeros([CHUNK, BLOCK], out_ptr.dtype.element_ty)  # finite: the next product reads masked tokens
    for begin_at in range(0, num_tokens, CHUNK):
        t = begin_at + line
        masked = ((t < first) | (t >= first + count)) & (t < num_tokens)
        tl.store(to + t[:, None] * VALUES, nothing, mask=masked[:, None] & has_value[None, :])


def plan_of(rule: MambaRule, dtype: torch.dtype) -> MambaPlan:
    """Returns the launch configuration for a layer and the dtype of its product."""
    if dtype == torch.float32:
        return IN_FP32
    return IN_16_BITS if rule.state_dim <= 128 else WIDE_IN_16_BITS


def mamba_in_chunks(
    mixed: Tensor,
    product: Tensor,
    weights: ScanWeights,
    slots: StateSlots,
    rule: MambaRule,
    kept: KeptState | None,
    plan: MambaPlan | None = None,
) -> Tensor:
    """Computes the recurrence of Mamba-2 over the new tokens of each row, for a prefill pass. Returns [B, Q, values].

    Args:
        mixed: [B, Q, channels]: x, B and C, after the convolution.
        product: [B, Q, rule.rows]; its last values are the step sizes before softplus.
        weights, slots: see state_space.py. Q is larger than the number of slots for states.
        rule: sizes of the layer.
        kept: see `reference.delta_rule`. None: no state is kept for later prompts.
        plan: launch configuration. None: `plan_of`.
    """
    batch, tokens = slots.positions.shape
    out = product.new_empty(batch, tokens, rule.values)
    plan = plan or plan_of(rule, product.dtype)
    launch(
        _prompt_mamba_kernel,
        (batch, rule.heads, triton.cdiv(rule.head_dim, plan.block)),
        mixed,
        product,
        weights,
        slots,
        KeptState(slots.state_rows, slots.states, slots.inputs) if kept is None else kept,
        StepLimits(rule.least_step, rule.most_step),
        out,
        tokens,
        int(kept is not None),
        HEADS=rule.heads,
        HEAD_DIM=rule.head_dim,
        GROUPS=rule.groups,
        STATE_DIM=rule.state_dim,
        SLOTS=slots.states.shape[1],
        CHUNK=plan.chunk,
        BLOCK=plan.block,
        num_warps=plan.warps,
        num_stages=plan.stages,
        enable_fp_fusion=False,
    )
    return out
