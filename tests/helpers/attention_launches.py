"""Calls of attention whose launches are compiled ahead of time: see `recorder`."""

from __future__ import annotations

from functools import partial

import torch

from fastspec.kernels.attention import dispatch
from fastspec.kernels.attention.plan import TILES
from fastspec.kernels.attention.rope import store_heads
from fastspec.kernels.common.kv_scales import FP8
from fastspec.kernels.reference import AttendCall, HeadsCall
from fastspec.shapes import AttentionRule
from tests.helpers.recorder import BF16, DTYPES, F32, I64, META, Calls, on_meta

KV_HEADS, GROUP, EPS = 8, 4, 1e-5
# (window, norm, page_size, how much narrower than a power of two)
PLAIN, FULL = (None, False, 64, 0), (4096, True, 80, 1)
NO_TMA = (None, False, 20, 0)  # pages that are no multiple of 8 keys: no copy engine fetches them
DEEP = (17, 20)  # first block and blocks of rows that all lie beyond `LATE_FROM`
# (queries, rows, blocks of 256 keys) of decoding passes: few programs, one for each split, several splits to a program
# one after the other, and two at once
SHORT = (
    *((2, 1, 1), (2, 1, 4), (4, 8, 1), (6, 16, 1), (8, 16, 1)),
    *((4, 24, 1), (6, 24, 1), (8, 24, 1), (2, 1, 16), (2, 4, 16), (4, 24, 16), (6, 24, 16), (8, 24, 16)),
    *((2, 16, 16), (4, 8, 16), (6, 16, 16), (8, 16, 16)),
)


def _attend(
    dtype: torch.dtype,
    dim: int,
    variant: tuple[int | None, bool, int, int],
    shape: tuple[int, int],
    blocks: tuple[int, int],
    regroup: bool = False,
    ruled: bool = False,
    cached: torch.dtype | None = None,
) -> object:
    """One call; shape: queries and rows, blocks: first and all, of 256 keys; ruled: softcap, sinks, no rotation.

    The cache is of dtype `cached`, by default the dtype of all.
    """
    window, norm, page_size, narrow = variant
    (queries, batch), (first, last) = shape, blocks
    dim -= narrow * dim // 4
    heads, positions = KV_HEADS * GROUP, 256 * last
    pages = positions // page_size + 1
    cache = on_meta((pages, page_size, KV_HEADS, dim), cached or dtype)
    gamma = on_meta((dim,), dtype) if norm else None
    angles = None if ruled else on_meta((positions, dim // 2), F32)
    call = AttendCall(
        on_meta((batch, queries, (heads + 2 * KV_HEADS) * dim), dtype),
        angles,
        angles,
        cache,
        cache,
        on_meta((batch, pages), I64),
        on_meta((batch, queries), I64),
        on_meta((batch, queries), torch.bool),
        num_heads=heads,
        norms=(gamma, gamma, EPS) if norm else None,
        num_blocks=last,
        first_block=first,
        rule=AttentionRule(window, 0.1, 30.0) if ruled else AttentionRule(window),
        sinks=on_meta((heads,), dtype) if ruled else None,
    )
    work = dispatch.attend_work(META, batch * queries, positions, (heads, KV_HEADS, dim))
    return dispatch.attend(call, work, regroup)


def attention(of_size: int, arch: int) -> Calls:
    """Decoding passes of every head width, with elements of this many bytes."""
    for size, width in TILES:
        for variant in (PLAIN, FULL) if size == of_size else ():
            named = f"attend {DTYPES[size]} {width}"
            yield named, partial(_attend, DTYPES[size], width, variant, (5, 1), (0, 8))


def attention_cached_in_8_bits(arch: int) -> Calls:
    """Decoding passes and prompts over K and V in e4m3, which older GPUs do not have; sm_89 does, not compiled for."""
    variants = ((64, PLAIN, False), (128, PLAIN, False), (128, FULL, True), (256, PLAIN, False))
    for width, variant, ruled in variants if arch >= 90 else ():
        for queries in (5, 64):
            named = f"8 bits {width} {queries}"
            yield named, partial(_attend, BF16, width, variant, (queries, 1), (0, 8), ruled=ruled, cached=FP8)
    for width in (64, 128) if arch >= 90 else ():
        for variant in (PLAIN, (*FULL[:3], 0)):
            for shape, blocks in (
                ((2, 1), (0, 4)),
                ((4, 24), (0, 16)),
                ((6, 24), (0, 16)),
                ((2, 1), DEEP),
                ((4, 8), DEEP),
            ):
                named = f"8 bits {width} {shape} {blocks}"
                yield named, partial(_attend, BF16, width, variant, shape, blocks, cached=FP8)


def attention_short(dim: int, full: bool, arch: int) -> Calls:
    """Of short caches, for which heads of this width have kernels of their own."""
    variant, regroup = ((*FULL[:3], 0), False) if full else (PLAIN, arch == 90)
    for queries, rows, blocks in SHORT:
        named = f"attend short {dim} {queries} {rows} {blocks}"
        yield named, partial(_attend, BF16, dim, variant, (queries, rows), (0, blocks), regroup)


def attention_long(arch: int) -> Calls:
    for dim in (64, 128):
        for queries, rows in ((2, 1), (4, 1), (2, 8), (4, 8)):
            for variant in (PLAIN, (*FULL[:3], 0), NO_TMA):
                named = f"attend long {dim} {queries} {rows}"
                yield named, partial(_attend, BF16, dim, variant, (queries, rows), DEEP)


def attention_prompt(arch: int) -> Calls:
    for size, width in TILES:
        for variant in (PLAIN, FULL):
            yield f"prompt {DTYPES[size]} {width}", partial(_attend, DTYPES[size], width, variant, (64, 1), (0, 8))
    for width in (64, 128, 256) if arch == 90 else ():
        for variant in (PLAIN, (*FULL[:3], 0)):
            yield f"long prompt {width}", partial(_attend, BF16, width, variant, (2048, 1), (0, 8))
    yield "keys and values alone", _stored


def _stored() -> object:
    """Keys and values of rows without queries, as the context of a head has them."""
    kv, table, at = on_meta((9, 64, KV_HEADS, 128), BF16), on_meta((1, 8), I64), on_meta((1, 8), I64)
    angles, norm, rows = on_meta((512, 64), F32), on_meta((128,), BF16), on_meta((1, 8, 2 * KV_HEADS * 128), BF16)
    written = on_meta((1, 8), torch.bool)
    call = HeadsCall(rows, angles, angles, kv, kv, table, at, written, num_heads=0, norms=(norm, norm, EPS))
    return store_heads(call)


def attention_ruled(arch: int) -> Calls:
    """Every attention kernel with a softcap and sinks, and heads that are not rotated."""
    for dtype, width, queries in ((BF16, 256, 5), (F32, 64, 5), (BF16, 128, 64)):
        yield f"ruled {width} {queries}", partial(_attend, dtype, width, FULL, (queries, 1), (0, 8), ruled=True)
    for dim in (64, 128) if arch >= 90 else ():
        for queries, rows, blocks in ((2, 1, 4), (8, 24, 16)):
            named = f"ruled short {dim} {queries} {rows}"
            yield named, partial(_attend, BF16, dim, PLAIN, (queries, rows), (0, blocks), ruled=True)
        if arch == 90:
            yield f"ruled long {dim}", partial(_attend, BF16, dim, PLAIN, (4, 8), DEEP, ruled=True)
