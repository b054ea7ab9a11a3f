"""Gated delta rule for the many tokens of a prefill pass, in chunks of positions, by four launches.

1. `_prepare_kernel`: computes convolved q, k and v, beta and the logarithm of the decay, in fp32, for all tokens in
   parallel.
2. `solve_kernel`: computes U, W and P (see below) of all chunks in parallel.
3. `_scan_kernel`: a CTA processes the chunks of a row, one after the other. It has BLOCK values of one value head, and
   keeps its part of the state in registers.
4. `_keep_kernel`: stores the inputs of the last tokens for the convolution of later passes.

The formulas are those of Gated DeltaNet (arXiv 2412.06464, section 3.3). S is the state before a chunk, with keys k_t,
queries q_t, values v_t and factors beta_t. g_t is the logarithm of the product of all decays of the chunk up to token
t. Token t adds u_t k_t^T to the state, where

    u_t = beta_t (v_t - e^g_t S k_t - sum over i < t of e^(g_t - g_i) (k_t . k_i) u_i)

With A_ti = beta_t e^(g_t - g_i) (k_t . k_i) below the diagonal, that is

    u   = U - W S^T             U = (I + A)^-1 (beta v), W = (I + A)^-1 (beta e^g k)
    out = e^g q S^T + P u       P_ti = e^(g_t - g_i) (q_t . k_i) for i <= t
    S'  = e^g_last S + sum over i of e^(g_last - g_i) u_i k_i^T

If each element of a key has its own decay (`decay_of`), g_t is a vector. Then e^(g_t - g_i) is a factor of each term of
the sums k_t . k_i and q_t . k_i. `_faded` computes these sums for one i at a time, so that no such factor is above 1.

Chunks begin at multiples of C, so a pass may have only a part of its first and of its last chunk:

    positions   | 0 .. C-1 | C .. 2C-1 | 2C .. 3C-1 | ...
    a pass      | [start ................. end)

If each pass begins at the start of a chunk, a token's bits do not depend on how a prompt is cut into passes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.common.launch import launch
from fastspec.kernels.recurrent.delta import decay_of, sizes_of
from fastspec.kernels.recurrent.parts import (
    OF_PROMPTS,
    StateSlots,
    Weights,
    betas,
    convs,
    decays,
    row_of,
    span,
    tokens_of,
    units,
)
from fastspec.kernels.reference.recurrent import KeptState
from fastspec.shapes import DeltaRule, StateRule


class Prepared(NamedTuple):
    """Results of `_prepare_kernel`, in fp32.

    Attributes:
        q, k: [B, Q, key_heads, key_dim].
        v: [B, Q, values].
        beta: [B, Q, value_heads].
        decay: logarithm of the decay, [B, Q, value_heads]; [B, Q, value_heads, key_dim] if each element of a key has
            its own.
    """

    q: Any
    k: Any
    v: Any
    beta: Any
    decay: Any


class Chunks(NamedTuple):
    """Results of `solve_kernel`, in fp32, for chunks of C = CHUNK positions. The formulas above define the letters.

    Attributes:
        erased: W, [B, chunks, value_heads, C, key_dim].
        written: U, [B, chunks, value_heads, C, value_dim].
        scores: P, [B, chunks, value_heads, C, C].
        decay: g, [B, chunks, value_heads, C]. If each element of a key has its own decay, only g_last, [B, chunks,
            value_heads, key_dim]. `solve_kernel` then multiplies q of `Prepared` by e^g, and k by e^(g_last - g).
    """

    erased: Any
    written: Any
    scores: Any
    decay: Any


@triton.jit
def _inverse(a, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Inverts I + a, for a strictly lower triangular a [CHUNK, CHUNK] with CHUNK of at most 64.

    D are the diagonal blocks of I + a, 16 by 16 each, and `off` are the other blocks. D is inverted row by row. N =
    D^-1 off is nilpotent: N^4 = 0. So (I + a)^-1 = (I + N)^-1 D^-1, with (I + N)^-1 = (I - N)(I + N^2).
    """
    BLOCKS: tl.constexpr = CHUNK // 16
    block, line = tl.arange(0, BLOCKS), tl.arange(0, 16)
    same = (block[:, None] == block[None, :])[:, None, :, None]
    own = tl.sum(tl.where(same, tl.reshape(a, [BLOCKS, 16, BLOCKS, 16]), 0.0), axis=2)
    inverse = tl.where(line[:, None] == line[None, :], 1.0, 0.0)[None, :, :] + tl.zeros_like(own)
    for i in range(1, 16):
        here = (line == i)[None, :, None]
        factors = tl.sum(tl.where(here, own, 0.0), axis=1)
        new = tl.sum(factors[:, :, None] * inverse, axis=1)
        inverse = tl.where(here, inverse - new[:, None, :], inverse)
    diagonal = tl.reshape(tl.where(same, inverse[:, :, None, :], 0.0), [CHUNK, CHUNK])
    whole = diagonal
    if BLOCKS > 1:
        at = tl.arange(0, CHUNK) // 16
        off = tl.where(at[:, None] == at[None, :], 0.0, a)
        joins = tl.dot(diagonal, off, input_precision=PRECISION)
        if BLOCKS > 2:  # otherwise N^2 is 0
            twice = tl.dot(joins, joins, input_precision=PRECISION)
            whole = diagonal + tl.dot(twice, diagonal, input_precision=PRECISION)
        whole -= tl.dot(joins, whole, input_precision=PRECISION)
    return whole


@triton.jit
def _faded(q, k, decay, CHUNK: tl.constexpr):
    """Computes decayed dot products for a chunk: two tensors [CHUNK, CHUNK], whose elements [t, i] are for t >= i.

    The first has the sums over key elements of q_t k_i e^(g_t - g_i). The second has the sums of k_t k_i e^(g_t - g_i).
    q, k and decay (g) are [CHUNK, KEYS].
    """
    line = tl.arange(0, CHUNK)
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    inner = tl.zeros([CHUNK, CHUNK], tl.float32)
    for i in range(0, CHUNK):
        one = line == i
        k_i, decay_i = row_of(k, one)[None, :], row_of(decay, one)[None, :]
        faded = k_i * tl.exp(tl.where((line >= i)[:, None], decay - decay_i, 0.0))
        scores = tl.where(one[None, :], tl.sum(q * faded, axis=1)[:, None], scores)
        inner = tl.where(one[None, :], tl.sum(k * faded, axis=1)[:, None], inner)
    return scores, inner


@triton.jit(do_not_specialize=["num_tokens"])
def solve_kernel(
    slots,  # StateSlots
    ready,  # Prepared
    chunks,  # Chunks
    num_tokens,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DECAY: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes U, W and P of the formulas above for one chunk and head. The grid is (chunk, value head, row)."""
    piece, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first, count, start = tokens_of(slots, row, num_tokens, OF_PROMPTS)
    begin = (start // CHUNK + piece) * CHUNK - start  # chunks lie on a grid of positions
    if begin < count:
        line = tl.arange(0, CHUNK)
        key = tl.arange(0, triton.next_power_of_2(KEY_DIM))
        value = tl.arange(0, triton.next_power_of_2(VALUE_DIM))
        token = begin + line
        there = (token >= 0) & (token < count)
        at = row * num_tokens + first + token
        of_key = ((at * KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS)) * KEY_DIM)[:, None] + key[None, :]
        has_key = there[:, None] & (key < KEY_DIM)[None, :]
        k = tl.load(ready.k + of_key, mask=has_key, other=0.0)  # [CHUNK, keys]
        beta = tl.load(ready.beta + at * VALUE_HEADS + head, mask=there, other=0.0)
        before = line[:, None] > line[None, :]
        place = (row * tl.num_programs(0) + piece) * VALUE_HEADS + head
        to_key = (place * CHUNK + line)[:, None] * KEY_DIM + key[None, :]
        if DECAY == "head":
            decay = tl.cumsum(tl.load(ready.decay + at * VALUE_HEADS + head, mask=there, other=0.0), axis=0)
            tl.store(chunks.decay + place * CHUNK + line, decay)
            ratio = tl.exp(tl.where(before, decay[:, None] - decay[None, :], 0.0))
            inner = beta[:, None] * ratio * tl.dot(k, tl.trans(k), input_precision=PRECISION)  # [CHUNK, CHUNK]
            keyed = (beta * tl.exp(decay))[:, None] * k
        else:
            q = tl.load(ready.q + of_key, mask=has_key, other=0.0)
            decay = tl.cumsum(tl.load(ready.decay + of_key, mask=has_key, other=0.0), axis=0)  # [CHUNK, keys]
            last = row_of(decay, line == CHUNK - 1)
            tl.store(chunks.decay + place * KEY_DIM + key, last, mask=key < KEY_DIM)
            # no other program reads these; the scan has no registers for decays of all elements
            tl.store(ready.q + of_key, q * tl.exp(decay), mask=has_key)
            tl.store(ready.k + of_key, k * tl.exp(last[None, :] - decay), mask=has_key)
            scores, inner = _faded(q, k, decay, CHUNK)
            inner = beta[:, None] * inner
            keyed = beta[:, None] * tl.exp(decay) * k
        solved = _inverse(tl.where(before, inner, 0.0), CHUNK, PRECISION)
        weighted = tl.dot(solved, keyed, input_precision=PRECISION)
        tl.store(chunks.erased + to_key, weighted, mask=(key < KEY_DIM)[None, :])
        has_value = (value < VALUE_DIM)[None, :]
        of_value = ((at * VALUE_HEADS + head) * VALUE_DIM)[:, None] + value[None, :]
        v = tl.load(ready.v + of_value, mask=there[:, None] & has_value, other=0.0)
        to_value = (place * CHUNK + line)[:, None] * VALUE_DIM + value[None, :]
        tl.store(
            chunks.written + to_value, tl.dot(solved, beta[:, None] * v, input_precision=PRECISION), mask=has_value
        )
        if DECAY == "head":
            q = tl.load(ready.q + of_key, mask=has_key, other=0.0)
            scores = ratio * tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = tl.where(line[:, None] >= line[None, :], scores, 0.0)
        tl.store(chunks.scores + (place * CHUNK + line)[:, None] * CHUNK + line[None, :], scores)


_PREPARED = 16  # tokens in a CTA of `_prepare_kernel`
_KEPT = 1024  # channels in a CTA of `_keep_kernel`


class Plan(NamedTuple):
    """Launch configuration of `solve_kernel` and `_scan_kernel`.

    Attributes:
        chunk: number of positions in a chunk, a divisor of DELTA_CHUNK.
        block: number of a head's values in a CTA of `_scan_kernel`.
        solve_warps, scan_warps: number of warps of each kernel.
        stages: `num_stages` of `_scan_kernel`.
        precision: precision of fp32 products: `input_precision` of Triton's `dot`.
    """

    chunk: int
    block: int
    solve_warps: int
    scan_warps: int
    stages: int
    precision: str


# measured on an H100. bf16x3 products drop bits below 2^-16 of a factor, far below the rounding to 16 bits
IN_16_BITS = Plan(chunk=32, block=16, solve_warps=4, scan_warps=4, stages=2, precision="bf16x3")
IN_FP32 = Plan(chunk=16, block=16, solve_warps=8, scan_warps=8, stages=1, precision="ieee")  # not measured


@triton.jit(do_not_specialize=["num_tokens"])
def _prepare_kernel(
    product_ptr,
    weights,  # Weights
    slots,  # StateSlots
    ready,  # Prepared
    floor,
    num_tokens,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DECAY: tl.constexpr,
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Computes the tensors of `Prepared` for one head and a block of tokens.

    The grid is (block of tokens, row, head), with the key heads before the value heads.
    """
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    DECAYS: tl.constexpr = VALUE_HEADS if DECAY == "head" else KEY_HEADS * KEY_DIM
    ROWS: tl.constexpr = CHANNELS + VALUE_HEADS * VALUE_DIM + VALUE_HEADS + DECAYS
    row, head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    first, count = span(slots.write_mask + row * num_tokens, num_tokens, OF_PROMPTS)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)  # counted from the first token that is not masked
    there = token < count
    if tl.program_id(0) * TOKENS < count:
        start = tl.load(slots.positions + row * num_tokens + first).to(tl.int32)
        inputs_ptr = slots.inputs + tl.load(slots.state_rows + row) * (PLACES * CHANNELS)
        at = product_ptr + (row * num_tokens + first) * ROWS
        to = row * num_tokens + first + token
        if head < KEY_HEADS:  # the branches share no variable name, because in Triton a name has one shape
            key = tl.arange(0, triton.next_power_of_2(KEY_DIM))
            has_key, of_q = key < KEY_DIM, head * KEY_DIM + key
            of_k = of_q + KEY_HEADS * KEY_DIM
            q, _ = convs(
                at, inputs_ptr, weights.conv, of_q, has_key, token, there, start, ROWS, CHANNELS, WIDTH, PLACES
            )
            k, _ = convs(
                at, inputs_ptr, weights.conv, of_k, has_key, token, there, start, ROWS, CHANNELS, WIDTH, PLACES
            )
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
            rate = tl.exp(tl.load(weights.decay + own))
            a_ptr = at + token * ROWS + (ROWS - DECAYS)
            tl.store(ready.beta + to * VALUE_HEADS + own, betas(a_ptr - VALUE_HEADS + own, there), mask=there)
            if DECAY == "head":
                a = tl.load(a_ptr + own, mask=there, other=0.0)
                decay = decays(a, rate, tl.load(weights.step + own), floor, DECAY)
                tl.store(ready.decay + to * VALUE_HEADS + own, decay, mask=there)
            else:
                element = tl.arange(0, triton.next_power_of_2(KEY_DIM))
                of_a, wanted = own * KEY_DIM + element, there[:, None] & (element < KEY_DIM)[None, :]
                step = tl.load(weights.step + of_a, mask=element < KEY_DIM, other=0.0)[None, :]
                a = tl.load(a_ptr[:, None] + of_a[None, :], mask=wanted, other=0.0)
                faded = decays(a, rate, step, floor, DECAY)
                to_decay = ((to * VALUE_HEADS + own) * KEY_DIM)[:, None] + element[None, :]
                tl.store(ready.decay + to_decay, faded, mask=wanted)


@triton.jit(do_not_specialize=["num_tokens", "num_pieces"])
def _scan_kernel(
    slots,  # StateSlots
    ready,  # Prepared
    chunks,  # Chunks
    kept,  # KeptState, or None
    out_ptr,
    num_tokens,
    num_pieces,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DECAY: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    KEEPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes the outputs of a row, chunk after chunk, and stores the state after its last token.

    The grid is (row, value head, block of the head's values).
    """
    SIZE: tl.constexpr = VALUE_DIM * KEY_DIM
    row, head, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    line, key = tl.arange(0, CHUNK), tl.arange(0, triton.next_power_of_2(KEY_DIM))
    value = tile * BLOCK + tl.arange(0, BLOCK)
    has_key, has_value = key < KEY_DIM, value < VALUE_DIM
    first, count, start = tokens_of(slots, row, num_tokens, OF_PROMPTS)
    states_ptr = slots.states + (tl.load(slots.state_rows + row) * SLOTS * VALUE_HEADS + head) * SIZE
    within = key[:, None] + value[None, :] * KEY_DIM  # here a state is [keys, values]
    whole = has_key[:, None] & has_value[None, :]
    known = whole & (start > 0) & (count > 0)
    slot = (start + SLOTS - 1) % SLOTS
    state = tl.load(states_ptr + slot * (VALUE_HEADS * SIZE) + within, mask=known, other=0.0)
    base = row * num_tokens
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    begin = start // CHUNK * CHUNK - start
    if KEEPS:
        keep_at = tl.load(kept.at)
    for piece in range(0, tl.cdiv(count - begin, CHUNK)):
        token = begin + piece * CHUNK + line
        there = (token >= 0) & (token < count)
        at = base + first + token
        of_key = ((at * KEY_HEADS + key_head) * KEY_DIM)[:, None] + key[None, :]
        place = (row * num_pieces + piece) * VALUE_HEADS + head
        lines = place * CHUNK + line
        if DECAY == "head":
            decay = tl.load(chunks.decay + lines)
            last = tl.load(chunks.decay + place * CHUNK + CHUNK - 1)
            faded = tl.exp(last)
        else:
            faded = tl.exp(tl.load(chunks.decay + place * KEY_DIM + key, mask=has_key, other=0.0))[:, None]
        weighted = tl.load(chunks.erased + lines[:, None] * KEY_DIM + key[None, :], mask=has_key[None, :], other=0.0)
        new = tl.load(chunks.written + lines[:, None] * VALUE_DIM + value[None, :], mask=has_value[None, :], other=0.0)
        new -= tl.dot(weighted, state, input_precision=PRECISION)  # u = U - W S^T, [CHUNK, BLOCK]
        q = tl.load(ready.q + of_key, mask=there[:, None] & has_key[None, :], other=0.0)
        scores = tl.load(chunks.scores + lines[:, None] * CHUNK + line[None, :])
        if DECAY == "head":
            q = q * tl.exp(decay)[:, None]
        out = tl.dot(q, state, input_precision=PRECISION)  # [CHUNK, BLOCK]
        out += tl.dot(scores, new, input_precision=PRECISION)
        of_out = ((at * VALUE_HEADS + head) * VALUE_DIM)[:, None] + value[None, :]
        tl.store(out_ptr + of_out, out.to(out_ptr.dtype.element_ty), mask=there[:, None] & has_value[None, :])
        k = tl.load(ready.k + of_key, mask=there[:, None] & has_key[None, :], other=0.0)
        if DECAY == "head":
            k = k * tl.exp(last - decay)[:, None]
        state = state * faded + tl.dot(tl.trans(k), new, input_precision=PRECISION)
        if KEEPS:
            ended = start + begin + (piece + 1) * CHUNK
            reached = (ended == keep_at) & (ended <= start + count)
            tl.store(kept.state + head * SIZE + within, state, mask=whole & reached)
    newest = (start + count + SLOTS - 1) % SLOTS * (VALUE_HEADS * SIZE)
    tl.store(states_ptr + newest + within, state, mask=whole & (count > 0))
    nothing = tl.zeros([CHUNK, BLOCK], out_ptr.dtype.element_ty)  # finite: the next product reads masked tokens
    for begin_at in range(0, num_tokens, CHUNK):
        t = begin_at + line
        masked = ((t < first) | (t >= first + count)) & (t < num_tokens)
        of_out = (((base + t) * VALUE_HEADS + head) * VALUE_DIM)[:, None] + value[None, :]
        tl.store(out_ptr + of_out, nothing, mask=masked[:, None] & has_value[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _keep_kernel(
    product_ptr,
    slots,  # StateSlots
    kept,  # KeptState, or None
    num_tokens,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PLACES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KEEPS: tl.constexpr,
):
    """Stores the convolution's inputs for a row's last tokens in the ring buffer.

    With KEEPS, also stores the inputs of the last WIDTH tokens before position `kept.at` in `kept.inputs`. The grid is
    (row, token counted from the end, block of channels).
    """
    row, channel = tl.program_id(0).to(tl.int64), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    first, count = span(slots.write_mask + row * num_tokens, num_tokens, OF_PROMPTS)
    t = first + count - 1 - tl.program_id(1)
    if (t >= first) & (count > 0):
        position = tl.load(slots.positions + row * num_tokens + t)
        inside = channel < CHANNELS
        x = tl.load(product_ptr + (row * num_tokens + t) * ROWS + channel, mask=inside)
        place = tl.load(slots.state_rows + row) * PLACES + position % PLACES
        tl.store(slots.inputs + place * CHANNELS + channel, x, mask=inside)
    if KEEPS:
        start = tl.load(slots.positions + row * num_tokens + first, mask=count > 0, other=0)
        keep_at = tl.load(kept.at)
        before = keep_at - 1 - tl.program_id(1)  # a position
        if (before >= start) & (keep_at <= start + count) & (tl.program_id(1) < WIDTH):
            old_channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
            old = tl.load(
                product_ptr + (row * num_tokens + first + before - start) * ROWS + old_channel,
                mask=old_channel < CHANNELS,
            )
            tl.store(kept.inputs + before % WIDTH * CHANNELS + old_channel, old, mask=old_channel < CHANNELS)


def prompt_rule(
    product: Tensor, weights: Weights, slots: StateSlots, out: Tensor, rule: DeltaRule, kept: KeptState | None = None
) -> None:
    """Writes the result of `reference.delta_rule` to `out` [B, Q, rule.values], for a prefill pass.

    A row keeps the states after its last tokens in slots. Q is larger than the number of these slots. dispatch.py has
    the shapes of the tensors. kept: see `reference.delta_rule`. None: no state is kept for later prompts.
    """
    batch, tokens, _ = product.shape
    places, sizes = slots.inputs.shape[1], {**sizes_of(rule), "DECAY": decay_of(rule)}

    def room(*shape: int) -> Tensor:
        return torch.empty(batch, tokens, *shape, dtype=torch.float32, device=product.device)

    of_keys, gate = (rule.key_heads, rule.key_dim), (rule.value_heads,)
    of_decays = (rule.value_heads, rule.key_dim) if rule.by_channel else gate
    ready = Prepared(room(*of_keys), room(*of_keys), room(rule.values), room(*gate), room(*of_decays))
    launch(
        _prepare_kernel,
        (triton.cdiv(tokens, _PREPARED), batch, rule.key_heads + rule.value_heads),
        product,
        weights,
        slots,
        ready,
        rule.floor,
        tokens,
        **sizes,
        WIDTH=rule.width,
        PLACES=places,
        TOKENS=_PREPARED,
        num_warps=4,
        enable_fp_fusion=False,
    )
    plan = IN_FP32 if product.dtype == torch.float32 else IN_16_BITS
    precision = "ieee" if product.device.type == "cpu" else plan.precision  # the interpreter supports only this
    chunk, products = plan.chunk, dict[str, Any](CHUNK=plan.chunk, PRECISION=precision)
    pieces = triton.cdiv(tokens + chunk - 1, chunk)

    def of_chunk(*shape: int) -> Tensor:
        return torch.empty(batch, pieces, rule.value_heads, chunk, *shape, dtype=torch.float32, device=product.device)

    decay = of_chunk()
    if rule.by_channel:
        decay = decay.new_empty(batch, pieces, rule.value_heads, rule.key_dim)
    chunks = Chunks(of_chunk(rule.key_dim), of_chunk(rule.value_dim), of_chunk(chunk), decay)
    launch(
        solve_kernel,
        (pieces, rule.value_heads, batch),
        slots,
        ready,
        chunks,
        tokens,
        **sizes,
        **products,
        num_warps=plan.solve_warps,
    )
    launch(
        _scan_kernel,
        (batch, rule.value_heads, triton.cdiv(rule.value_dim, plan.block)),
        slots,
        ready,
        chunks,
        kept,
        out,
        tokens,
        pieces,
        **sizes,
        SLOTS=slots.states.shape[1],
        **products,
        BLOCK=plan.block,
        KEEPS=kept is not None,
        num_warps=plan.scan_warps,
        num_stages=plan.stages,
    )
    store_inputs(product, slots, kept, rule)


def store_inputs(x: Tensor, slots: StateSlots, kept: KeptState | None, rule: StateRule) -> None:
    """Stores the convolution's inputs for the last tokens of each row in the ring buffer.

    Also stores the inputs at the last positions before `kept.at` in `kept.inputs`, if `kept` is not None.

    Args:
        x: [B, Q, channels or more], tokens at equal strides. The first `channels` values of a token are its inputs.
        slots: ring buffer of inputs, and positions of tokens.
        kept: see `reference.delta_rule`.
        rule: sizes of the layer.
    """
    (batch, tokens), places = slots.positions.shape, slots.inputs.shape[1]
    launch(
        _keep_kernel,
        (batch, places, triton.cdiv(rule.channels, _KEPT)),
        x,
        slots,
        kept,
        tokens,
        ROWS=x.stride(1),
        CHANNELS=rule.channels,
        PLACES=places,
        WIDTH=rule.width,
        BLOCK=_KEPT,
        KEEPS=kept is not None,
        num_warps=4,
    )
