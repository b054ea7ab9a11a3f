"""Kernels of Mamba-1, Mamba-2 and the gated short convolution; `reference.state_space` defines them.

| argument              | shape, dtype                                          | notes                              |
|-----------------------|-------------------------------------------------------|------------------------------------|
| product               | [B, Q, rule.rows] bf16, fp16 or fp32                  | contiguous                         |
| conv, conv_bias       | [channels, 1, width] and [channels], product's dtype  | contiguous                         |
| decay                 | fp32 [heads]; of Mamba-1 [channels, state_dim]        | contiguous                         |
| step, skip            | fp32 [heads]; of Mamba-1 [channels]                   | contiguous                         |
| states                | fp32 [rows, slots, *rule.state_shape]                 | contiguous; written                |
| inputs                | [rows, slots + width - 1, channels], product's        | contiguous; written                |
| state_rows            | int64 [B]                                             | contiguous, all different          |
| positions, write_mask | int64 and bool [B, Q]                                 | contiguous                         |

1. `_conv_kernel` computes the convolution, with the gates or the activation around it. In a decode step it also stores
   the convolution's inputs.
2. `_mamba_kernel`: a CTA has BLOCK elements of one head of one row; all channels of Mamba-1 are one head. It keeps its
   part of the state in registers, and processes the tokens of the pass one after the other. It loads a token while it
   computes the token before.
3. The kernels of mamba_prompt.py take the place of 2 in prefill passes of Mamba-2, where `plan_of` has a plan.
4. `_keep_kernel` of prompt.py stores the convolution's inputs for the last tokens of a prefill pass.

Batch invariance. Decode steps and prefill passes run 1, and 2 in Mamba-1. The tile of a CTA depends on the numbers of
tokens and rows, but the sums of an element have one order in all tiles. So a token has the same bits in all passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.checks import check, told
from fastspec.kernels.common.launch import launch
from fastspec.kernels.recurrent.mamba_prompt import mamba_in_chunks, plan_of
from fastspec.kernels.recurrent.parts import OF_PROMPTS, ScanWeights, StateSlots, StepLimits, softplus, tokens_of
from fastspec.kernels.recurrent.prompt import store_inputs
from fastspec.kernels.reference.recurrent import KeptState
from fastspec.kernels.reference.state_space import StateParts
from fastspec.shapes import ConvRule, MambaRule, SelectiveRule

SpaceRule: TypeAlias = ConvRule | MambaRule | SelectiveRule
MAX_STATE_DIM, MAX_GROUP = 256, 2**15
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TOKENS, _CHANNELS = 16, 64  # largest number of tokens, and channels, in a CTA of `_conv_kernel`
# elements of the state in a CTA of `_mamba_kernel`: the first number that gives _ENOUGH CTAs, or the last. A row of the
# state is added up in one order with all of them
_TILES = (2048, 1024, 512)
_ENOUGH = 1024
_NORM_WARPS = 4


class ConvWeights(NamedTuple):
    """Weights of a convolution, as kernel arguments.

    Attributes:
        conv: [channels, 1, width].
        bias: [channels]. None: no bias.
    """

    conv: Any
    bias: Any


@triton.jit
def _given(line_ptr, channel, mask, CHANNELS: tl.constexpr, GATED: tl.constexpr):
    """Loads the inputs of the convolution for some tokens and channels.

    line_ptr points to the first value of each token that the convolution reads. With GATED the inputs are b * x,
    rounded to the dtype of x. Masked inputs are zero.
    """
    x = tl.load(line_ptr + channel, mask=mask, other=0.0)
    if GATED:
        gated = tl.load(line_ptr + 2 * CHANNELS + channel, mask=mask, other=0.0)
        x = (x.to(tl.float32) * gated.to(tl.float32)).to(x.dtype)
    return x


@triton.jit(do_not_specialize=["num_tokens", "stores"])
def _conv_kernel(
    product_ptr,
    weights,  # ConvWeights
    slots,  # StateSlots
    out_ptr,
    given_ptr,  # [B, Q, CHANNELS], receives the inputs if GATED and they are not stored in the ring buffer
    num_tokens,
    stores,  # 1: the inputs are stored in the ring buffer
    FIRST: tl.constexpr,  # index of the first value of a token that the convolution reads
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,  # values of a token in the product
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,  # length of the ring buffer
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes the convolution, with its gates or its activation, for TOKENS tokens and BLOCK channels of a row.

    The grid is (row, block of tokens, block of channels).
    """
    if PDL:
        gdc_launch_dependents()
    row, channel = tl.program_id(0).to(tl.int64), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside, number = channel < CHANNELS, tl.arange(0, TOKENS)
    first, count, start = tokens_of(slots, row, num_tokens, OF_PROMPTS)
    token = tl.program_id(1) * TOKENS + number  # counted from the first token that is not masked
    there = token < count
    inputs_ptr = slots.inputs + tl.load(slots.state_rows + row) * (PLACES * CHANNELS)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    lines = product_ptr + (row * num_tokens + first) * ROWS + FIRST
    wanted = there[:, None] & inside[None, :]
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    newest = tl.zeros([TOKENS, BLOCK], dtype)
    if PDL:
        gdc_wait()
    for tap in tl.static_range(WIDTH):
        at = token - (WIDTH - 1 - tap)
        new, position = (at >= 0)[:, None], start + at
        here = _given(lines + at[:, None] * ROWS, channel[None, :], wanted & new, CHANNELS, GATED)
        older = wanted & ~new & (position >= 0)[:, None]
        place = (position + PLACES) % PLACES
        before = tl.load(inputs_ptr + place[:, None] * CHANNELS + channel[None, :], mask=older, other=0.0)
        newest = tl.where(new, here, before)
        taps = tl.load(weights.conv + channel * WIDTH + tap, mask=inside, other=0.0)
        total += newest.to(tl.float32) * taps.to(tl.float32)[None, :]
    if BIASED:
        total += tl.load(weights.bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    out = total.to(dtype).to(tl.float32)
    if GATED:
        gate = tl.load(lines + token[:, None] * ROWS + CHANNELS + channel[None, :], mask=wanted, other=0.0)
        out = out * gate.to(tl.float32)
    else:
        out = out * (1.0 / (1.0 + tl.exp(-out)))
    to = out_ptr + row * num_tokens * CHANNELS + channel[None, :]
    tl.store(to + (first + token)[:, None] * CHANNELS, out.to(dtype), mask=wanted)
    kept = inputs_ptr + ((start + token) % PLACES * CHANNELS)[:, None] + channel[None, :]
    tl.store(kept, newest, mask=wanted & (stores != 0))
    if GATED:
        to_given = given_ptr + (row * num_tokens + first + token)[:, None] * CHANNELS + channel[None, :]
        tl.store(to_given, newest, mask=wanted & (stores == 0))
    every = tl.program_id(1) * TOKENS + number
    masked = ((every < first) | (every >= first + count)) & (every < num_tokens)
    # finite, because the next kernel reads masked tokens
    tl.store(to + every[:, None] * CHANNELS, tl.zeros([TOKENS, BLOCK], dtype), mask=masked[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_tokens", "every", "keeps"])
def _mamba_kernel(
    mixed_ptr,  # [B, Q, CHANNELS]: x, B and C, after the convolution
    product_ptr,  # [B, Q, ROWS]: its last values are the steps of the heads
    weights,  # ScanWeights
    slots,  # StateSlots
    kept,  # KeptState
    limits,  # StepLimits
    out_ptr,
    num_tokens,
    every,  # 1: the state after each token is stored; 0: that after the last one
    keeps,  # 1: the state after `kept.at` positions is stored in `kept`
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE_DIM: tl.constexpr,
    SELECTIVE: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes the recurrence of one head, for all tokens of a row and BLOCK rows of the head's state.

    The grid is (row, head, block of rows of the state). SELECTIVE (Mamba-1): every row of the state has steps and
    decays of its own. product_ptr then has only the steps.
    """
    if PDL:
        gdc_launch_dependents()
    VALUES: tl.constexpr = HEADS * HEAD_DIM
    CHANNELS: tl.constexpr = VALUES + 2 * GROUPS * STATE_DIM
    ROWS: tl.constexpr = VALUES if SELECTIVE else VALUES + CHANNELS + HEADS
    SIZE: tl.constexpr = HEAD_DIM * STATE_DIM
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    value, key = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, triton.next_power_of_2(STATE_DIM))
    has_value, has_key = value < HEAD_DIM, key < STATE_DIM
    first, count, start = tokens_of(slots, row, num_tokens, OF_PROMPTS)
    states_ptr = slots.states + (tl.load(slots.state_rows + row) * SLOTS * HEADS + head) * SIZE
    within = value[:, None] * STATE_DIM + key[None, :]
    whole = has_value[:, None] & has_key[None, :]
    known = whole & (start > 0) & (count > 0)
    state = tl.load(states_ptr + (start + SLOTS - 1) % SLOTS * (HEADS * SIZE) + within, mask=known, other=0.0)
    if SELECTIVE:
        rate = tl.exp(tl.load(weights.decay + within, mask=whole, other=0.0))
        step_at, has_step = value, has_value
    else:
        rate = tl.exp(tl.load(weights.decay + head))
        step_at, has_step = head, head >= 0
    more = tl.load(weights.step + step_at, mask=has_step, other=0.0)
    skip = tl.load(weights.skip + step_at, mask=has_step, other=0.0)
    keep_at = tl.load(kept.at)
    of_group = VALUES + head // (HEADS // GROUPS) * STATE_DIM + key
    if PDL:
        gdc_wait()
    mixed_ptr += (row * num_tokens + first) * CHANNELS
    step_ptr = product_ptr + (row * num_tokens + first) * ROWS + step_at
    if not SELECTIVE:
        step_ptr += ROWS - HEADS
    x_at, c_at = head * HEAD_DIM + value, of_group + GROUPS * STATE_DIM
    x_next = tl.load(mixed_ptr + x_at, mask=has_value & (count > 0), other=0.0)
    b_next = tl.load(mixed_ptr + of_group, mask=has_key & (count > 0), other=0.0)
    c_next = tl.load(mixed_ptr + c_at, mask=has_key & (count > 0), other=0.0)
    step_next = tl.load(step_ptr, mask=has_step & (count > 0), other=0.0)
    for t in range(0, count):
        x, b, c = x_next.to(tl.float32), b_next.to(tl.float32), c_next.to(tl.float32)
        step = softplus(step_next.to(tl.float32) + more)
        # the next token is loaded while this one is computed
        after, follows = t + 1, t + 1 < count
        x_next = tl.load(mixed_ptr + after * CHANNELS + x_at, mask=has_value & follows, other=0.0)
        b_next = tl.load(mixed_ptr + after * CHANNELS + of_group, mask=has_key & follows, other=0.0)
        c_next = tl.load(mixed_ptr + after * CHANNELS + c_at, mask=has_key & follows, other=0.0)
        step_next = tl.load(step_ptr + after * ROWS, mask=has_step & follows, other=0.0)
        step = tl.minimum(tl.maximum(step, limits.least), limits.highest)
        faded = tl.exp(-rate * step[:, None]) if SELECTIVE else tl.exp(-rate * step)
        state = state * faded + (step * x)[:, None] * b[None, :]
        out = tl.sum(state * c[None, :], axis=1) + skip * x
        to = out_ptr + (row * num_tokens + first + t) * VALUES + head * HEAD_DIM + value
        tl.store(to, out.to(out_ptr.dtype.element_ty), mask=has_value)
        stored = (every != 0) | (t == count - 1)
        tl.store(states_ptr + (start + t) % SLOTS * (HEADS * SIZE) + within, state, mask=whole & stored)
        reached = (keeps != 0) & (start + t + 1 == keep_at)
        tl.store(kept.state + head * SIZE + within, state, mask=whole & reached)
    nothing = tl.zeros([BLOCK], out_ptr.dtype.element_ty)  # finite: the next product reads masked tokens
    for t in range(0, num_tokens):
        masked = (t < first) | (t >= first + count)
        to = out_ptr + (row * num_tokens + t) * VALUES + head * HEAD_DIM + value
        tl.store(to, nothing, mask=has_value & masked)


@triton.jit
def _norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    gate_stride,
    eps,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes the gate and the norm of `mamba_norm` for one group of heads of one token.

    The grid is (token, group).
    """
    if PDL:
        gdc_launch_dependents()
    token, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside, own = at < SIZE, tl.program_id(1) * SIZE + at
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + token * (GROUPS * SIZE) + own, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + own, mask=inside, other=0.0).to(tl.float32)
    opened = gate * (1.0 / (1.0 + tl.exp(-gate)))
    if NORMED:
        if GATE_FIRST:
            x = x * opened
        x = x * (1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) / SIZE + eps))
        x = x * tl.load(weight_ptr + own, mask=inside, other=0.0).to(tl.float32)
        if not GATE_FIRST:
            x = x * opened
    else:
        x = x * opened
    tl.store(out_ptr + token * (GROUPS * SIZE) + own, x.to(out_ptr.dtype.element_ty), mask=inside)


def short_conv(
    product: Tensor,
    layer: StateParts,
    states: Tensor,
    inputs: Tensor,
    state_rows: Tensor,
    positions: Tensor,
    write_mask: Tensor,
    rule: ConvRule | SelectiveRule,
    kept: KeptState | None = None,
) -> Tensor:
    """Computes the convolution of a rule over the new tokens of each row.

    With a ConvRule it is `Ops.short_conv`, with a SelectiveRule `Ops.selective_conv`. The output of masked tokens is
    zero. For the arguments see the table above, and the functions in `reference.state_space`.

    Raises:
        ValueError: a shape, dtype or layout other than in the table above.
    """
    slots = StateSlots(states, inputs, state_rows, positions, write_mask)
    _check(product, layer, slots, rule, kept)
    return _convolved(product, layer, slots, rule, kept)


selective_conv = short_conv


def mamba(
    product: Tensor,
    layer: StateParts,
    states: Tensor,
    inputs: Tensor,
    state_rows: Tensor,
    positions: Tensor,
    write_mask: Tensor,
    rule: MambaRule,
    kept: KeptState | None = None,
) -> Tensor:
    """Applies Mamba-2 to the new tokens of each row, as `Ops.mamba`.

    The output of masked tokens is zero. For the arguments see the table above, and `reference.state_space.mamba`.

    Raises:
        ValueError: a shape, dtype or layout other than in the table above.
    """
    slots = StateSlots(states, inputs, state_rows, positions, write_mask)
    _check(product, layer, slots, rule, kept)
    shapes = dict.fromkeys(ScanWeights._fields, (rule.heads,))
    mixed = _convolved(product, layer, slots, rule, kept)
    weights, plan = scan_weights(layer, shapes), plan_of(rule, product.dtype)
    if plan is None or product.shape[1] <= states.shape[1]:
        return scanned(mixed, product, weights, slots, rule, kept)
    return mamba_in_chunks(mixed, product, weights, slots, rule, kept, plan)


def selective_scan(
    mixed: Tensor,
    steps: Tensor,
    layer: StateParts,
    states: Tensor,
    state_rows: Tensor,
    positions: Tensor,
    write_mask: Tensor,
    rule: SelectiveRule,
    kept: KeptState | None = None,
) -> Tensor:
    """Computes the recurrence of Mamba-1 after `selective_conv` of the same pass, as `Ops.selective_scan`.

    Args:
        mixed: [B, Q, channels + 2 * state_dim] bf16, fp16 or fp32, contiguous: x, B and C.
        steps: [B, Q, channels], mixed's dtype, contiguous: step sizes before softplus.
        layer, states, state_rows, positions, write_mask, rule, kept: see the table above.

    Raises:
        ValueError: a shape, dtype or layout other than these.
    """
    batch, tokens = positions.shape
    if mixed.dtype not in _DTYPES or rule.state_dim > MAX_STATE_DIM:
        raise ValueError(f"mixed is {told(mixed)} for {rule}; wanted bf16, fp16 or fp32, and state_dim up to 256")
    check("mixed", mixed, (batch, tokens, rule.channels + 2 * rule.state_dim))
    check("steps", steps, (batch, tokens, rule.channels), mixed.dtype)
    check("states", states, (*states.shape[:2], *rule.state_shape), torch.float32)
    of_channels = (rule.channels,)
    weights = scan_weights(layer, {"decay": rule.state_shape, "step": of_channels, "skip": of_channels})
    # `mixed` is not read as inputs; it has their dtype, so that decode and prefill passes run the same machine code
    slots = StateSlots(states, mixed, state_rows, positions, write_mask)
    return scanned(mixed, steps, weights, slots, rule, kept)


def scanned(
    mixed: Tensor,
    product: Tensor,
    weights: ScanWeights,
    slots: StateSlots,
    rule: MambaRule | SelectiveRule,
    kept: KeptState | None,
) -> Tensor:
    """Computes the recurrence of Mamba-1 or Mamba-2 over the new tokens of each row. Returns [B, Q, rule.values].

    mixed: [B, Q, ..], x, B and C after the convolution. product: step sizes before softplus. With Mamba-1 it has only
    these; with Mamba-2 they are the last values of a token. All channels of Mamba-1 are one head.
    """
    batch, tokens = slots.positions.shape
    if isinstance(rule, SelectiveRule):
        (heads, dim, groups), limits = (1, rule.channels, 1), StepLimits(0.0, math.inf)
    else:
        heads, dim, groups = rule.heads, rule.head_dim, rule.groups
        limits = StepLimits(rule.least_step, rule.most_step)
    out = product.new_empty(batch, tokens, rule.values)
    block = _state_rows(batch * heads, dim, rule.state_dim)
    launch(
        _mamba_kernel,
        (batch, heads, triton.cdiv(dim, block)),
        mixed,
        product,
        weights,
        slots,
        KeptState(slots.state_rows, slots.states, slots.inputs) if kept is None else kept,
        limits,
        out,
        tokens,
        int(tokens <= slots.states.shape[1]),
        int(kept is not None),
        HEADS=heads,
        HEAD_DIM=dim,
        GROUPS=groups,
        STATE_DIM=rule.state_dim,
        SELECTIVE=isinstance(rule, SelectiveRule),
        SLOTS=slots.states.shape[1],
        BLOCK=block,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out


def _state_rows(heads: int, dim: int, state_dim: int) -> int:
    """Returns the number of rows of a head's state in a CTA, for `heads` heads of all tokens' rows."""
    keys: int = triton.next_power_of_2(state_dim)
    whole: int = triton.next_power_of_2(dim)
    blocks = [min(whole, max(4, tile // keys)) for tile in _TILES]
    return next((block for block in blocks if heads * triton.cdiv(dim, block) >= _ENOUGH), blocks[-1])


def mamba_norm(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, rule: MambaRule | SelectiveRule) -> Tensor:
    """Applies the gate, and an RMSNorm over each group of heads, to the output of Mamba, as `Ops.mamba_norm`.

    Args:
        x: [B, Q, rule.values] bf16, fp16 or fp32, contiguous.
        gate: shape and dtype of x; its last axis contiguous, tokens at equal strides.
        weight: [rule.values], x's dtype, contiguous. None: no norm.
        eps: epsilon of the norm.
        rule: sizes of the layer, and the order of norm and gate.

    Raises:
        ValueError: a shape, dtype or layout other than these.
    """
    groups, norm = (1, None) if isinstance(rule, SelectiveRule) else (rule.groups, rule.norm)
    size = rule.values // groups
    if x.dim() != 3 or not x.is_contiguous() or x.shape[-1] != rule.values or size > MAX_GROUP:
        raise ValueError(f"x is {told(x)}; wanted contiguous [B, Q, {rule.values}], and groups of up to {MAX_GROUP}")
    stride = gate.stride(1) if gate.dim() == 3 else 0
    even = gate.shape[0] == 1 or gate.stride(0) == gate.shape[1] * stride
    if gate.shape != x.shape or gate.dtype != x.dtype or gate.stride(2) != 1 or not even:
        raise ValueError(f"gate is {told(gate)}; wanted it as x, {told(x)}, with tokens at equal strides")
    if weight is not None:
        check("weight", weight, (rule.values,), x.dtype)
    out = torch.empty_like(x)
    launch(
        _norm_kernel,
        (x.shape[0] * x.shape[1], groups),
        x,
        gate,
        weight,
        out,
        stride,
        eps,
        GROUPS=groups,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        NORMED=weight is not None,
        GATE_FIRST=norm == "gate_first",
        num_warps=_NORM_WARPS,
        enable_fp_fusion=False,
    )
    return out


def _convolved(
    product: Tensor, layer: StateParts, slots: StateSlots, rule: SpaceRule, kept: KeptState | None
) -> Tensor:
    """Computes the layer's convolution, with gates or activation, and stores its inputs. Returns [B, Q, channels]."""
    (batch, tokens), places = slots.positions.shape, slots.inputs.shape[1]
    gated, step = isinstance(rule, ConvRule), tokens <= slots.states.shape[1]
    first = rule.values if isinstance(rule, MambaRule) else 0
    out = product.new_empty(batch, tokens, rule.channels)
    given = torch.empty_like(out) if gated and not step else out
    each = min(_TOKENS, triton.next_power_of_2(tokens))
    launch(
        _conv_kernel,
        (batch, triton.cdiv(tokens, each), triton.cdiv(rule.channels, _CHANNELS)),
        product,
        ConvWeights(layer.conv, layer.conv_bias),
        slots,
        out,
        given,
        tokens,
        int(step),
        FIRST=first,
        CHANNELS=rule.channels,
        ROWS=rule.rows,
        WIDTH=rule.width,
        PLACES=places,
        GATED=gated,
        BIASED=layer.conv_bias is not None,
        TOKENS=each,
        BLOCK=_CHANNELS,
        num_warps=1,
        enable_fp_fusion=False,
    )
    if not step:
        store_inputs(given if gated else product[..., first:], slots, kept, rule)
    return out


def scan_weights(layer: StateParts, shapes: Mapping[str, tuple[int, ...]]) -> ScanWeights:
    """Checks that the layer's weights of the recurrence are fp32 and have `shapes` (by name), and returns them."""
    found = {name: getattr(layer, name) for name in ScanWeights._fields}
    for name, weight in found.items():
        if weight is None:
            raise ValueError(f"{name} is None; wanted fp32 {list(shapes[name])}")
        check(name, weight, shapes[name], torch.float32)
    return ScanWeights(**found)


def _check(product: Tensor, layer: StateParts, slots: StateSlots, rule: SpaceRule, kept: KeptState | None) -> None:
    fits = isinstance(rule, ConvRule) or rule.state_dim <= MAX_STATE_DIM
    if product.dim() != 3 or product.dtype not in _DTYPES or not fits:
        raise ValueError(
            f"product is {told(product)} for {rule}; wanted bf16, fp16 or fp32 [B, Q, {rule.rows}], and state_dim up "
            f"to {MAX_STATE_DIM}"
        )
    (batch, tokens, _), dtype, (rows, count) = product.shape, product.dtype, slots.states.shape[:2]
    check("product", product, (batch, tokens, rule.rows))
    check("conv", layer.conv, (rule.channels, 1, rule.width), dtype)
    if layer.conv_bias is not None:
        check("conv_bias", layer.conv_bias, (rule.channels,), dtype)
    check("states", slots.states, (rows, count, *rule.state_shape), torch.float32)
    check("inputs", slots.inputs, (rows, count + rule.tail, rule.channels), dtype)
    check("state_rows", slots.state_rows, (batch,), torch.int64)
    check("positions", slots.positions, (batch, tokens), torch.int64)
    check("write_mask", slots.write_mask, (batch, tokens), torch.bool)
    if kept is None:
        return
    if batch != 1 or tokens <= count:
        raise ValueError(
            f"a state is kept of a pass over a prompt, one row of more than {count} tokens; product is {told(product)}"
        )
    check("kept.at", kept.at, (1,), torch.int64)
    check("kept.state", kept.state, rule.state_shape, torch.float32)
    check("kept.inputs", kept.inputs, (rule.width, rule.channels), dtype)
