"""Mamba-2 for the many tokens of a prefill pass, in chunks of positions, by two launches.

1. `_inside_mamba_kernel`: computes what the tokens of a chunk add to each other's outputs, for all chunks in parallel.
2. `_across_mamba_kernel`: a CTA processes the chunks of a row, one after the other. It has BLOCK elements of one head,
   and keeps its part of the state in registers. It adds what the state before a chunk gives to the outputs.

The formulas are those of Mamba-2 (arXiv 2405.21060, section 6). S is the state before a chunk. Token t has x_t, B_t,
C_t and the time step d_t, and a_t = -rate d_t is the logarithm of its decay. g_t is the sum of a_j over j <= t. For
i <= t:

    out_t = e^g_t S C_t + sum over i <= t of (C_t . B_i) e^(g_t - g_i) d_i x_i + skip x_t
    S'    = e^g_last S + sum over i of e^(g_last - g_i) d_i x_i B_i^T

Precision. x, B and C have the dtype of the product, so tensor cores multiply B and C without loss. In each other
product one factor is fp32. With bf16 it is split into parts of 8 bits, and each part is multiplied. The new state gets
three parts, which are all bits of fp32: an error of a state would stay in it for the rest of the text. The output gets
two parts, whose error is 2^-17 of a factor: it is rounded to bf16 at once.

g_t may be far larger than a difference g_t - g_i. So it is added up in fp64, and kept as two fp32 numbers. A difference
then has the error of one rounding to fp32.

Chunks begin at multiples of C, as in prompt.py. A missing or masked token has step 0, so it changes nothing. If each
pass begins at the start of a chunk, a token's bits do not depend on how a prompt is cut into passes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.common.launch import launch
from fastspec.kernels.recurrent.parts import OF_PROMPTS, ScanWeights, StateSlots, StepLimits, softplus, span
from fastspec.kernels.reference.recurrent import KeptState
from fastspec.shapes import MambaRule

_OUT_PARTS, _STATE_PARTS = tl.constexpr(2), tl.constexpr(3)  # parts of a factor in fp32, see above
# elements of a head that `_inside_mamba_kernel` multiplies at a time. For 16 or 32 columns Triton 3.6 allots too little
# shared memory to the product on sm_90, as memcheck of compute-sanitizer shows
_VALUES = 64


class Inside(NamedTuple):
    """Results of `_inside_mamba_kernel`, in fp32, for chunks of C = CHUNK positions. The formulas have the letters.

    Attributes:
        out: the outputs without the state's part, [B, Q, values].
        total: e^g, [B, chunks, heads, C].
        left: e^(g_last - g) d, [B, chunks, heads, C].
    """

    out: Any
    total: Any
    left: Any


class MambaPlan(NamedTuple):
    """Launch configuration of a prefill pass.

    Attributes:
        chunk: number of positions in a chunk, a divisor of DELTA_CHUNK.
        block: number of elements of a head in a CTA of `_across_mamba_kernel`.
        inside_warps, across_warps: number of warps of each kernel.
        stages: `num_stages` of `_across_mamba_kernel`.
    """

    chunk: int
    block: int
    inside_warps: int
    across_warps: int
    stages: int


# those that have run on a GPU. Triton 3.6 may allot too little shared memory on sm_90 to kernels with several products
# of few columns, and other plans gave wrong numbers. So a plan is used only where it was seen to work
IN_16_BITS = MambaPlan(chunk=64, block=32, inside_warps=4, across_warps=8, stages=2)
IN_FP32 = MambaPlan(chunk=16, block=16, inside_warps=8, across_warps=8, stages=1)  # not measured
# for more than NARROW elements of B
WIDE_IN_BF16 = MambaPlan(chunk=32, block=32, inside_warps=8, across_warps=8, stages=2)
WIDE_IN_FP16 = MambaPlan(chunk=32, block=32, inside_warps=8, across_warps=8, stages=1)
NARROW = 128


@triton.jit
def _halves(x):
    """Splits x, in fp16, into two parts in bf16 whose sum is x without a rounding: fp16 has 11 bits, bf16 has 8."""
    high = x.to(tl.bfloat16)
    return high, (x.to(tl.float32) - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _parts_left(a, b, PARTS: tl.constexpr):
    """Computes the product of a, in fp32, and b, in bf16 or fp32. For bf16, PARTS parts of `a` are multiplied."""
    if b.dtype == tl.bfloat16:
        part = a.to(tl.bfloat16)
        out = tl.dot(part, b)
        for _ in tl.static_range(PARTS - 1):
            a = a - part.to(tl.float32)
            part = a.to(tl.bfloat16)
            out = tl.dot(part, b, out)
    else:
        out = tl.dot(a, b, input_precision="ieee")
    return out


@triton.jit
def _parts_right(a, b, PARTS: tl.constexpr):
    """Computes the product of a, in bf16 or fp32, and b, in fp32. For bf16, PARTS parts of `b` are multiplied."""
    if a.dtype == tl.bfloat16:
        part = b.to(tl.bfloat16)
        out = tl.dot(a, part)
        for _ in tl.static_range(PARTS - 1):
            b = b - part.to(tl.float32)
            part = b.to(tl.bfloat16)
            out = tl.dot(a, part, out)
    else:
        out = tl.dot(a, b, input_precision="ieee")
    return out


@triton.jit
def _split_left(a, b, PARTS: tl.constexpr):
    """Computes the product of a, in fp32, and b, in the dtype of the product. b in fp16 is multiplied in two parts."""
    if b.dtype == tl.float16:
        high, low = _halves(b)
        out = _parts_left(a, low, PARTS - 1) + _parts_left(a, high, PARTS)
    else:
        out = _parts_left(a, b, PARTS)
    return out


@triton.jit
def _split_right(a, b, PARTS: tl.constexpr):
    """Computes the product of a, in the dtype of the product, and b, in fp32. a in fp16 is multiplied in two parts."""
    if a.dtype == tl.float16:
        high, low = _halves(a)
        out = _parts_right(low, b, PARTS - 1) + _parts_right(high, b, PARTS)
    else:
        out = _parts_right(a, b, PARTS)
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _inside_mamba_kernel(
    mixed_ptr,  # [B, Q, CHANNELS]: x, B and C, after the convolution
    product_ptr,  # [B, Q, ROWS]: its last values are the steps of the heads
    weights,  # ScanWeights
    slots,  # StateSlots
    inside,  # Inside
    limits,  # StepLimits
    num_tokens,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes the tensors of `Inside` for one chunk and head. The grid is (chunk, head, row)."""
    VALUES: tl.constexpr = HEADS * HEAD_DIM
    CHANNELS: tl.constexpr = VALUES + 2 * GROUPS * STATE_DIM
    ROWS: tl.constexpr = VALUES + CHANNELS + HEADS
    piece, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first, count = span(slots.write_mask + row * num_tokens, num_tokens, OF_PROMPTS)
    start = tl.load(slots.positions + row * num_tokens + first, mask=count > 0, other=0).to(tl.int32)
    begin = (start // CHUNK + piece) * CHUNK - start  # chunks lie on a grid of positions
    if begin < count:
        line, key = tl.arange(0, CHUNK), tl.arange(0, KEYS)
        token = begin + line
        there = (token >= 0) & (token < count)
        at = row * num_tokens + first + token
        step = tl.load(product_ptr + at * ROWS + (ROWS - HEADS) + head, mask=there, other=0.0).to(tl.float32)
        step = softplus(step + tl.load(weights.step + head))
        step = tl.where(there, tl.minimum(tl.maximum(step, limits.least), limits.highest), 0.0)
        rate = tl.exp(tl.load(weights.decay + head))
        decay = tl.cumsum((-rate * step).to(tl.float64), axis=0)
        high = decay.to(tl.float32)
        low = (decay - high.to(tl.float64)).to(tl.float32)
        to = ((row * tl.num_programs(0) + piece) * HEADS + head) * CHUNK + line
        tl.store(inside.total + to, tl.exp(high))
        newest = line == CHUNK - 1
        last_high = tl.sum(tl.where(newest, high, 0.0), axis=0)
        last_low = tl.sum(tl.where(newest, low, 0.0), axis=0)
        tl.store(inside.left + to, tl.exp((last_high - high) + (last_low - low)) * step)
        of_group = (at * CHANNELS)[:, None] + (VALUES + head // (HEADS // GROUPS) * STATE_DIM + key)[None, :]
        wanted = there[:, None] & (key < STATE_DIM)[None, :]
        b = tl.load(mixed_ptr + of_group, mask=wanted, other=0.0)
        c = tl.load(mixed_ptr + of_group + GROUPS * STATE_DIM, mask=wanted, other=0.0)
        seen = line[:, None] >= line[None, :]
        since = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])  # g_t - g_i at [t, i]
        scores = tl.dot(c, tl.trans(b), input_precision="ieee")
        scores = tl.where(seen, scores * tl.exp(tl.where(seen, since, 0.0)) * step[None, :], 0.0)
        skip = tl.load(weights.skip + head)
        for block in tl.static_range(0, HEAD_DIM, BLOCK):
            value = block + tl.arange(0, BLOCK)
            counts = there[:, None] & (value < HEAD_DIM)[None, :]
            of_value = (head * HEAD_DIM + value)[None, :]
            x = tl.load(mixed_ptr + (at * CHANNELS)[:, None] + of_value, mask=counts, other=0.0)
            out = _split_left(scores, x, _OUT_PARTS) + skip * x.to(tl.float32)
            tl.store(inside.out + (at * VALUES)[:, None] + of_value, out, mask=counts)


@triton.jit(do_not_specialize=["num_tokens", "num_pieces", "keeps"])
def _across_mamba_kernel(
    mixed_ptr,  # [B, Q, CHANNELS]: x, B and C, after the convolution
    slots,  # StateSlots
    inside,  # Inside
    kept,  # KeptState
    out_ptr,
    num_tokens,
    num_pieces,
    keeps,  # 1: the state after `kept.at` positions is stored in `kept`
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes the outputs of BLOCK elements of a head, chunk after chunk, and stores the state after the last token.

    The grid is (row, head, block of elements).
    """
    VALUES: tl.constexpr = HEADS * HEAD_DIM
    CHANNELS: tl.constexpr = VALUES + 2 * GROUPS * STATE_DIM
    SIZE: tl.constexpr = HEAD_DIM * STATE_DIM
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
    keep_at = tl.load(kept.at)
    of_group = VALUES + head // (HEADS // GROUPS) * STATE_DIM + key
    of_value = head * HEAD_DIM + value
    begin = start // CHUNK * CHUNK - start
    mixed_ptr += (row * num_tokens + first) * CHANNELS
    base = (row * num_tokens + first) * VALUES
    for piece in range(0, tl.cdiv(count - begin, CHUNK)):
        token = begin + piece * CHUNK + line
        there = (token >= 0) & (token < count)
        wanted, counts = there[:, None] & has_key[None, :], there[:, None] & has_value[None, :]
        lines = mixed_ptr + token[:, None] * CHANNELS
        c = tl.load(lines + (of_group + GROUPS * STATE_DIM)[None, :], mask=wanted, other=0.0)  # [CHUNK, KEYS]
        b = tl.load(lines + of_group[None, :], mask=wanted, other=0.0)
        x = tl.load(lines + of_value[None, :], mask=counts, other=0.0)  # [CHUNK, BLOCK]
        place = ((row * num_pieces + piece) * HEADS + head) * CHUNK
        total = tl.load(inside.total + place + line)
        out = _split_right(c, state, _OUT_PARTS) * total[:, None]
        of_out = base + token[:, None] * VALUES + of_value[None, :]
        out += tl.load(inside.out + of_out, mask=counts, other=0.0)
        tl.store(out_ptr + of_out, out.to(out_ptr.dtype.element_ty), mask=counts)
        left = x.to(tl.float32) * tl.load(inside.left + place + line)[:, None]
        new = _split_right(tl.trans(b), left, _STATE_PARTS)
        state = state * tl.load(inside.total + place + CHUNK - 1) + new
        ended = start + begin + (piece + 1) * CHUNK
        if (keeps != 0) & (ended == keep_at) & (ended <= start + count):
            tl.store(kept.state + head * SIZE + within, state, mask=whole)
    newest = (start + count + SLOTS - 1) % SLOTS * (HEADS * SIZE)
    tl.store(states_ptr + newest + within, state, mask=whole & (count > 0))
    nothing = tl.zeros([CHUNK, BLOCK], out_ptr.dtype.element_ty)  # finite: the next product reads masked tokens
    for begin_at in range(0, num_tokens, CHUNK):
        t = begin_at + line
        masked = ((t < first) | (t >= first + count)) & (t < num_tokens)
        of_masked = (row * num_tokens + t)[:, None] * VALUES + of_value[None, :]
        tl.store(out_ptr + of_masked, nothing, mask=masked[:, None] & has_value[None, :])


def plan_of(rule: MambaRule, dtype: torch.dtype) -> MambaPlan | None:
    """Returns the launch configuration for a layer and the dtype of its product. None: prompts have no chunks."""
    if rule.state_dim > NARROW:
        return {torch.bfloat16: WIDE_IN_BF16, torch.float16: WIDE_IN_FP16}.get(dtype)
    return IN_FP32 if dtype == torch.float32 else IN_16_BITS


def mamba_in_chunks(
    mixed: Tensor,
    product: Tensor,
    weights: ScanWeights,
    slots: StateSlots,
    rule: MambaRule,
    kept: KeptState | None,
    plan: MambaPlan,
) -> Tensor:
    """Computes the recurrence of Mamba-2 over the new tokens of each row, for a prefill pass. Returns [B, Q, values].

    Args:
        mixed: [B, Q, channels]: x, B and C, after the convolution.
        product: [B, Q, rule.rows]; its last values are the step sizes before softplus.
        weights, slots: see state_space.py. Q is larger than the number of slots for states.
        rule: sizes of the layer.
        kept: see `reference.delta_rule`. None: no state is kept for later prompts.
        plan: launch configuration, a result of `plan_of`.
    """
    batch, tokens = slots.positions.shape
    pieces = triton.cdiv(tokens + plan.chunk - 1, plan.chunk)
    out, wide = product.new_empty(batch, tokens, rule.values), slots.states.new_empty
    of_chunks = batch, pieces, rule.heads, plan.chunk
    inside = Inside(wide(batch, tokens, rule.values), wide(of_chunks), wide(of_chunks))
    sizes = {
        "HEADS": rule.heads,
        "HEAD_DIM": rule.head_dim,
        "GROUPS": rule.groups,
        "STATE_DIM": rule.state_dim,
        "KEYS": max(16, triton.next_power_of_2(rule.state_dim)),  # tensor cores multiply 16 at a time
        "CHUNK": plan.chunk,
    }
    launch(
        _inside_mamba_kernel,
        (pieces, rule.heads, batch),
        mixed,
        product,
        weights,
        slots,
        inside,
        StepLimits(rule.least_step, rule.most_step),
        tokens,
        **sizes,
        BLOCK=_VALUES,
        num_warps=plan.inside_warps,
        enable_fp_fusion=False,
    )
    launch(
        _across_mamba_kernel,
        (batch, rule.heads, triton.cdiv(rule.head_dim, plan.block)),
        mixed,
        slots,
        inside,
        KeptState(slots.state_rows, slots.states, slots.inputs) if kept is None else kept,
        out,
        tokens,
        pieces,
        int(kept is not None),
        **sizes,
        SLOTS=slots.states.shape[1],
        BLOCK=plan.block,
        num_warps=plan.across_warps,
        num_stages=plan.stages,
        enable_fp_fusion=False,
    )
    return out
