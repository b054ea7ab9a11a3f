"""Chunks of a prompt for the gated delta rule: the tokens of each are solved for together, all chunks in parallel.

The formulas are those of Gated DeltaNet (arXiv 2412.06464, section 3.3). With the state S before a chunk, keys k_t,
queries q_t, values v_t, factors beta_t, and g_t the logarithm of the product of all decays of the chunk up to token t,
what token t writes to the state is u_t k_t^T, where

    u_t = beta_t (v_t - e^g_t S k_t - sum over i < t of e^(g_t - g_i) (k_t . k_i) u_i)

With A_ti = beta_t e^(g_t - g_i) (k_t . k_i) below the diagonal, that is

    u   = U - W S^T             U = (I + A)^-1 (beta v), W = (I + A)^-1 (beta e^g k)
    out = e^g q S^T + P u       P_ti = e^(g_t - g_i) (q_t . k_i) for i <= t
    S'  = e^g_last S + sum over i of e^(g_last - g_i) u_i k_i^T

Chunks lie on a grid of positions, from position 0 on, whatever a pass begins with. So a token's bits do not depend on
how a prompt was cut into passes, as long as each begins where a chunk does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastspec.kernels.recurrent.parts import OF_PROMPTS, span


class Prepared(NamedTuple):
    """Results of the first launch, in fp32: what the convolution made of all tokens.

    Attributes:
        q, k: [B, Q, key_heads, key_dim].
        v: [B, Q, values].
        beta: [B, Q, value_heads].
        decay: [B, Q, value_heads], the logarithm.
    """

    q: Any
    k: Any
    v: Any
    beta: Any
    decay: Any


class Chunks(NamedTuple):
    """Results of `solve_kernel`, in fp32, of C = CHUNK positions of a value head each; letters as above.

    Attributes:
        erased: W, [B, chunks, value_heads, C, key_dim].
        written: U, [B, chunks, value_heads, C, value_dim].
        scores: P, [B, chunks, value_heads, C, C].
        decay: g, [B, chunks, value_heads, C].
    """

    erased: Any
    written: Any
    scores: Any
    decay: Any


@triton.jit
def _inverse(a, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular a [CHUNK, CHUNK], CHUNK being 64 at most.

    Its diagonal blocks of 16 are inverted row by row; what joins them is nilpotent: of N = D off the fourth power is 0,
    so (I + N)^-1 = (I - N)(I + N^2).
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
        if BLOCKS > 2:  # else N^2 is 0 already
            twice = tl.dot(joins, joins, input_precision=PRECISION)
            whole = diagonal + tl.dot(twice, diagonal, input_precision=PRECISION)
        whole -= tl.dot(joins, whole, input_precision=PRECISION)
    return whole


@triton.jit(do_not_specialize=["num_tokens"])
def solve_kernel(
    slots,  # StateSlots
    ready,  # Prepared
    chunks,  # Chunks
    num_tokens,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Programs by chunk, value head and row."""
    KEY_DIM: tl.constexpr = DIMS[0]
    VALUE_DIM: tl.constexpr = DIMS[1]
    piece, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first, count = span(slots.write_mask + row * num_tokens, num_tokens, OF_PROMPTS)
    start = tl.load(slots.positions + row * num_tokens + first, mask=count > 0, other=0).to(tl.int32)
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
        k = tl.load(ready.k + of_key, mask=has_key, other=0.0)
        beta = tl.load(ready.beta + at * VALUE_HEADS + head, mask=there, other=0.0)
        decay = tl.cumsum(tl.load(ready.decay + at * VALUE_HEADS + head, mask=there, other=0.0), axis=0)
        before = line[:, None] > line[None, :]
        ratio = tl.exp(tl.where(before, decay[:, None] - decay[None, :], 0.0))
        inner = tl.dot(k, tl.trans(k), input_precision=PRECISION)
        solved = _inverse(tl.where(before, beta[:, None] * ratio * inner, 0.0), CHUNK, PRECISION)
        place = (row * tl.num_programs(0) + piece) * VALUE_HEADS + head
        tl.store(chunks.decay + place * CHUNK + line, decay)
        weighted = tl.dot(solved, (beta * tl.exp(decay))[:, None] * k, input_precision=PRECISION)
        to_key = (place * CHUNK + line)[:, None] * KEY_DIM + key[None, :]
        tl.store(chunks.erased + to_key, weighted, mask=(key < KEY_DIM)[None, :])
        has_value = (value < VALUE_DIM)[None, :]
        of_value = ((at * VALUE_HEADS + head) * VALUE_DIM)[:, None] + value[None, :]
        v = tl.load(ready.v + of_value, mask=there[:, None] & has_value, other=0.0)
        to_value = (place * CHUNK + line)[:, None] * VALUE_DIM + value[None, :]
        tl.store(
            chunks.written + to_value, tl.dot(solved, beta[:, None] * v, input_precision=PRECISION), mask=has_value
        )
        q = tl.load(ready.q + of_key, mask=has_key, other=0.0)
        scores = tl.where(
            line[:, None] >= line[None, :], ratio * tl.dot(q, tl.trans(k), input_precision=PRECISION), 0.0
        )
        tl.store(chunks.scores + (place * CHUNK + line)[:, None] * CHUNK + line[None, :], scores)
