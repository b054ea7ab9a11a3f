"""Calls of every kernel's wrapper whose launches are compiled ahead of time, by group: see `recorder`."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product as pairs
from types import SimpleNamespace
from typing import Any

import torch

from fastspec.kernels.attention import dispatch
from fastspec.kernels.attention.plan import TILES
from fastspec.kernels.attention.rope import store_heads
from fastspec.kernels.common.kv_scales import FP8
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.embed import embed
from fastspec.kernels.exchange import BLOCK, Room, exchange_added, exchange_gather, exchange_largest
from fastspec.kernels.feed_rows import feed_rows
from fastspec.kernels.gelu import gelu_tanh_mul
from fastspec.kernels.joined import joined_norms
from fastspec.kernels.linear import plan, portable
from fastspec.kernels.linear.argmax import packed_argmax
from fastspec.kernels.linear.dispatch import packed_linear
from fastspec.kernels.linear.layer_tail import layer_tail
from fastspec.kernels.linear.prefill import prefill_linear
from fastspec.kernels.linear.quantised.prompts import dequantise
from fastspec.kernels.norm import add_norm, norm
from fastspec.kernels.recurrent.dispatch import delta_rule
from fastspec.kernels.recurrent.gated_norm import gated_norm
from fastspec.kernels.reference.recurrent import KeptState
from fastspec.kernels.reference.step import Record
from fastspec.kernels.rotate import rotate
from fastspec.kernels.sampling.commit import commit, scratch_of
from fastspec.kernels.sampling.draw import sampled_draw
from fastspec.kernels.sampling.greedy_commit import verify_commit
from fastspec.kernels.sampling.logits import sampled_work
from fastspec.kernels.sampling.logprobs import record_work
from fastspec.kernels.sampling.publish import publish
from fastspec.kernels.sampling.sampled_commit import sampled_commit
from fastspec.shapes import AttentionRule, DeltaRule
from fastspec.state import DecodeState
from tests.helpers.expert_launches import mixtures
from tests.helpers.packed_codes import KINDS, unfilled
from tests.helpers.recorder import Calls, Launch, on_meta, record

META = torch.device("meta")
DTYPES = {2: torch.bfloat16, 4: torch.float32}
I64, F32, BF16 = torch.int64, torch.float32, torch.bfloat16
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
    return dispatch.attend(
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
        work=dispatch.attend_work(META, batch * queries, positions, (heads, KV_HEADS, dim)),
        regroup=regroup,
    )


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
    yield "keys and values alone", _stored


def _stored() -> object:
    """Keys and values of rows without queries, as the context of a head has them."""
    kv, table, at = on_meta((9, 64, KV_HEADS, 128), BF16), on_meta((1, 8), I64), on_meta((1, 8), I64)
    angles, norm, rows = on_meta((512, 64), F32), on_meta((128,), BF16), on_meta((1, 8, 2 * KV_HEADS * 128), BF16)
    written = on_meta((1, 8), torch.bool)
    return store_heads(rows, angles, angles, kv, kv, table, at, written, num_heads=0, norms=(norm, norm, EPS))


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


# (N, K), what is fused: a layer and the head of two Llamas; long and ragged sums; the smallest weights there are
LAYERS = [
    (6144, 4096, "norm"),
    (4096, 4096, "residual"),
    (28672, 4096, "norm+gated"),
    (4096, 14336, "residual"),
    (128256, 4096, "norm+fp32"),
    (128256, 4096, "norm+pick"),
    (3072, 2048, "norm"),
    (16384, 2048, "norm+gated"),
    (2048, 8192, "residual"),
    (10240, 8192, "norm+bias"),
    (5120, 2880, "norm+bias"),
    (9728, 896, "norm+gated"),
    (3584, 18944, "residual"),
    (16, 64, "norm+bias"),
    (1152, 896, "norm+pick"),
]
AT_ONCE = 3  # layers of a group of calls
LAYER_SIZES = [(4096, 14336, 6144), (2048, 8192, 3072), (896, 4864, 1152)]  # hidden, inner and qkv's N
ROWS = range(1, 161)  # every number of them that one program of the ring takes: each change of kernel and of tile


def packed(n: int, k: int, dtype: torch.dtype = BF16, *, gated: bool = False) -> Weight:
    """A packed weight [N, K] without memory."""
    return Weight(on_meta((n // 16, k // 32, 16, 32), dtype), "packed", gated)


def product(n: int, k: int, fused: str, rows: int, pdl: bool, dtype: torch.dtype = BF16) -> object:
    """One product with a packed weight."""
    return multiplied(packed(n, k, dtype, gated="gated" in fused), fused, rows, pdl)


def multiplied(weight: Weight, fused: str, rows: int, pdl: bool) -> object:
    """One product with this weight."""
    words, (n, k), dtype = fused.split("+"), weight.shape, weight.dtype
    x = on_meta((rows, k), dtype)
    norm = (on_meta((k,), dtype), EPS) if "norm" in words else None
    if "pick" in words:
        return packed_argmax(x, weight, n, on_meta((ROWS[-1] + 1,), I64), norm=norm, pdl=pdl)
    return packed_linear(
        x,
        weight,
        on_meta((n,), dtype) if "bias" in words else None,
        norm=norm,
        residual=on_meta((rows, n // 2 if "gated" in words else n), dtype) if "residual" in words else None,
        gated="gated" in words,
        out_dtype=F32 if "fp32" in words else None,
        pdl=pdl,
    )


def tail(hidden: int, inner: int, qkv: int, rows: int) -> object:
    """What lies between two attentions, on sm_90."""
    names = {"o": (hidden, hidden), "gate_up": (2 * inner, hidden), "down": (hidden, inner), "qkv": (qkv, hidden)}
    given: dict[str, Any] = {name: packed(n, k, gated=name == "gate_up") for name, (n, k) in names.items()}
    given |= {f"{name}_bias": None for name in names} | {
        name: on_meta((hidden,)) for name in ("input_norm", "post_norm")
    }
    layer: Any = SimpleNamespace(**given)
    x = on_meta((rows, 1, hidden))
    return layer_tail(x, x, layer, layer, EPS, True)


def recurrent(arch: int) -> Calls:
    """Layers of Qwen3.5's sizes, and one of unequal keys and values, no powers of two; steps, and a prompt."""
    for rule in (DeltaRule(16, 32, 128, 128, 4), DeltaRule(4, 8, 96, 40, 4)):
        for dtype in (BF16, F32):
            for rows, tokens in ((BATCH, 5), (1, 64)):
                yield f"delta {rule.key_dim} {dtype} {tokens}", partial(_delta, rule, dtype, rows, tokens)
            x, gate = on_meta((BATCH, 5, rule.values), dtype), on_meta((BATCH, 5, rule.rows), dtype)
            gamma = on_meta((rule.value_dim,), dtype)
            yield f"gated norm {dtype}", partial(gated_norm, x, gate[..., : rule.values], gamma, EPS)


def _delta(rule: DeltaRule, dtype: torch.dtype, rows: int, tokens: int) -> object:
    heads, slots = rule.value_heads, DRAFTS + 1
    layer: Any = SimpleNamespace(
        conv=on_meta((rule.channels, 1, rule.width), dtype),
        decay=on_meta((heads,), F32),
        step=on_meta((heads,), F32),
    )
    state = on_meta((heads, rule.value_dim, rule.key_dim), F32)
    of_prompt = KeptState(on_meta((1,), I64), state, on_meta((rule.width, rule.channels), dtype))
    kept = of_prompt if tokens > slots else None
    return delta_rule(
        on_meta((rows, tokens, rule.rows), dtype),
        layer,
        on_meta((rows, slots, heads, rule.value_dim, rule.key_dim), F32),
        on_meta((rows, slots + rule.tail, rule.channels), dtype),
        on_meta((rows,), I64),
        on_meta((rows, tokens), I64),
        on_meta((rows, tokens), torch.bool),
        rule,
        kept,
    )


def products(layers: slice, arch: int) -> Calls:
    """Every product of some of the layers above."""
    for n, k, fused in LAYERS[layers]:
        for rows in ROWS:
            yield f"{n}x{k} {fused} {rows}", partial(product, n, k, fused, rows, arch >= 90)


def tree(n: int, k: int, ranks: int) -> Weight:
    """One rank's part of a weight [N, K] whose K is cut."""
    return replace(packed(n, k // ranks), whole=(n, k), tree=True)


def trees(arch: int) -> Calls:
    """Products whose K ranks share, whole and cut."""
    for n, k in ((4096, 4096), (4096, 14336), (2048, 8192)):
        for ranks in (1, 2, 4):
            for rows in (8, 40):
                call = partial(multiplied, tree(n, k, ranks), "residual", rows, arch >= 90)
                yield f"tree {n}x{k} {ranks} {rows}", call


def tails(sizes: tuple[int, int, int], arch: int) -> Calls:
    """What lies between two attentions on sm_90."""
    for rows in ROWS[plan.small_rows((9, 0)) :] if arch == 90 else ():
        yield f"{sizes[0]}, {sizes[1]} {rows}", partial(tail, *sizes, rows)


def products_in_fp16(arch: int) -> Calls:
    for rows in (8, 64):
        named = "norm+gated+bias+residual"
        yield f"fp16 {rows}", partial(product, 3072, 2048, named, rows, arch >= 90, torch.float16)


def quantised(arch: int) -> Calls:
    """Each kind once, and what else changes the code: many rows, a long K, what is fused."""
    for name in KINDS:
        yield f"{name} 8", partial(_quantised, name, 3072, 2048, "norm+gated", 8, arch >= 90)
    for name, k, fused, rows in (
        *(("fp8", 2048, "bias+fp32", 16), ("fp8", 4096, "residual", 64), ("fp8", 14336, "residual", 8)),
        *(("int4 zeros", 2048, "residual", 32), ("nvfp4", 2048, "pick", 1)),
    ):
        yield f"{name} {k} {rows}", partial(_quantised, name, 3072, k, fused, rows, arch >= 90)


def quantised_wide(arch: int) -> Calls:
    """Many rows, on sm_90: by the TMA ring."""
    for name, n, k, fused, rows in (
        *(
            ("int4", 28672, 4096, "norm+gated", 64),
            ("int4", 4096, 14336, "residual", 32),
            ("fp8", 4096, 4096, "bias", 64),
        ),
        *(
            ("int4 zeros", 6144, 4096, "norm", 32),
            ("int4 64", 3072, 2048, "pick", 32),
            ("fp8 blocks", 6144, 4096, "norm", 64),
        ),
        *(("int8 with -128", 4096, 4096, "fp32", 64), ("int8", 28672, 4096, "gated", 32)),
    ):
        yield f"{name} {n} {k} {rows}", partial(_quantised, name, n, k, fused, rows, True)


def _quantised(name: str, n: int, k: int, fused: str, rows: int, pdl: bool) -> object:
    return multiplied(unfilled(name, n, k, "gated" in fused), fused, rows, pdl)


def quantised_values(arch: int) -> Calls:
    """Rows of an embedding and slices for prompts."""
    scratch = on_meta((64 * 2048,))
    for name in KINDS:
        weight = unfilled(name, 3072, 2048)
        yield f"embed {name}", partial(embed, weight, on_meta((BATCH, 2), I64))
        yield f"dequantise {name}", partial(dequantise, weight, 64, 64, scratch)


WHOLE = 4096  # a K of whole steps; of others the loop is masked
RAGGED = (2880, 4001)  # in pieces of 16 bytes, and in none
ALL_FUSED = "norm+bias+residual"


def portable_product(size: int, k: int, width: int, rows: int, fused: str, pdl: bool) -> object:
    """One product with a weight of rows."""
    dtype, words = DTYPES[size], fused.split("+")
    n = 2 * width if "gated" in words else width
    x, weight = on_meta((rows, k), dtype), on_meta((n, k), dtype)
    norm = (on_meta((k,), dtype), EPS) if "norm" in words else None
    if "pick" in words:
        return portable.tile_argmax(x, weight, n - 1, on_meta((rows + 1,), I64), norm=norm, pdl=pdl)
    bias = on_meta((n,), dtype) if "bias" in words else None
    residual = on_meta((rows, width), dtype) if "residual" in words else None
    return portable.tile_linear(x, weight, bias, norm=norm, residual=residual, gated="gated" in words, pdl=pdl)


def portables(k: int, arch: int) -> Calls:
    """Every tile with everything there is, gated and not, and picking; of whole steps with nothing as well."""
    seen = set()
    for (size, wide), tiles in portable.LAUNCH.items():
        for tile in tiles:
            if k in RAGGED and (size, tile) in seen:
                continue  # how wide a result is changes nothing in the loop
            seen.add((size, tile))
            for fused in (ALL_FUSED, f"{ALL_FUSED}+gated", "norm+pick", *(("", "pick") if k == WHOLE else ())):
                width = 16384 if wide else 4096
                call = partial(portable_product, size, k, width, tile.rows, fused, arch >= 90)
                yield f"{size} bytes {k} {fused} {tile.rows} {wide}", call


def prompts(arch: int) -> Calls:
    """Products of prompts: every tile, whole, gated and masked."""
    for rows in (64, 128, 256, 512, 4096):
        for n, fused in ((4096, ""), (4096, "gated"), (4096, "bias+residual"), (4112, "bias+residual"), (4112, "fp32")):
            yield f"prompt {n} {fused} {rows}", partial(_prompt, rows, n, fused)
        for ranks in (1, 2) if arch == 90 else ():
            x, weight = on_meta((rows, 4096 // ranks)), tree(4096, 4096, ranks)
            yield f"prompt, tree of {ranks} {rows}", partial(prefill_linear, x, weight, out_dtype=F32)


def _prompt(rows: int, n: int, fused: str) -> object:
    words = fused.split("+")
    bias, residual = (on_meta((n,)), on_meta((rows, n))) if "bias" in words else (None, None)
    weight, norm = packed(n, 4096, gated="gated" in words), (on_meta((4096,)), EPS)
    more: dict[str, Any] = {"gated": "gated" in words, "out_dtype": F32 if "fp32" in words else None}
    return prefill_linear(on_meta((rows, 4096)), weight, bias, norm=norm, residual=residual, **more)


VOCABS = (32000, 128256, 256000)
BATCH, DRAFTS = 4, 4
CROWD = 160  # rows: more than a GPU has SMs


def _state(vocab: int, batch: int = BATCH) -> DecodeState:
    return DecodeState.allocate(
        batch=batch, max_drafts=DRAFTS, max_length=500, pages_per_row=8, vocab_size=vocab, device=META
    )


def _outbox(state: DecodeState) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """(entries and counter, details), for the results of steps."""
    batch, places = state.block.shape
    width = 1 + batch * (4 + places)
    details = on_meta((64, batch, places, 1 + 2 * state.top_ids.shape[2]), torch.int32)
    return (on_meta((64, width), I64), on_meta((1,), I64)), details


def _records(state: DecodeState, vocab: int, details: torch.Tensor | None) -> Record:
    return Record(5, record_work(len(state.lengths), DRAFTS, vocab, META), details)


def steps(arch: int) -> Calls:
    """Kernels that build a pass's rows and end a step."""
    state = _state(VOCABS[0])
    scratch = scratch_of(BATCH, DRAFTS, META)
    ring, details = _outbox(state)
    for queries in (1, 2, 32):
        for counts in (state.draft_counts, None):
            yield f"feed {queries}", partial(_feed, queries, counts)
    for dtype in (BF16, F32):
        for table in (Weight(on_meta((32000, 4096), dtype)), packed(32000, 4096, dtype)):
            ids, x, gamma = on_meta((BATCH, 2), I64), on_meta((BATCH, 2, 4096), dtype), on_meta((4096,), dtype)
            yield f"embed {dtype}", partial(embed, table, ids)
            pdl = arch >= 90
            yield f"joined {dtype}", partial(joined_norms, table, ids, x, (gamma, gamma), EPS, x_first=pdl, pdl=pdl)
        for weight, centred in ((dtype, False), (F32, True)):
            x, gamma = on_meta((BATCH, 2, 4096), dtype), on_meta((4096,), weight)
            yield (
                f"norm {dtype}",
                partial(norm, x, gamma, EPS, bias=gamma if centred else None, centred=centred, pdl=arch >= 90),
            )
            yield f"two norms {dtype}", partial(add_norm, x, x, gamma, gamma if centred else None, EPS, pdl=arch >= 90)
        q, k, angles = (
            on_meta((BATCH, 32, 2, 128), dtype),
            on_meta((BATCH, 8, 2, 128), dtype),
            on_meta((1, 2, 128), dtype),
        )
        yield f"rotate {dtype}", partial(rotate, q, k, angles, angles, pdl=arch >= 90)
        yield f"gelu {dtype}", partial(gelu_tanh_mul, on_meta((BATCH, 2, 4096), dtype), pdl=arch >= 90)
    for entry in (ring, None):
        yield "commit", partial(commit, state.accepted, state.block.clone(), state, scratch, entry)
    for vocab in VOCABS:
        for batch, published in pairs((1, BATCH, 64), (True, False)):
            yield f"greedy {vocab} {batch}", partial(_greedy, vocab, batch, False, published)
        for published in (True, False):
            yield f"greedy, recorded {vocab}", partial(_greedy, vocab, BATCH, True, published)
    yield "publish", partial(publish, *ring, state, drafting=True)
    yield "publish details", partial(publish, *ring, state, drafting=True, details=details)


def exchanges(arch: int) -> Calls:
    """Exchanges between two, four and eight ranks of a host."""
    for size in (2, 4, 8):
        pointers, epochs = on_meta((size,), I64), on_meta((1024,), torch.int32)
        room = Room(1, size, 1024 * BLOCK, pointers, pointers, epochs, 64 * BLOCK, pointers, epochs)
        x, residual, bias = on_meta((5, 4096), F32), on_meta((5, 4096)), on_meta((4096,))
        for given in ((bias, residual), (None, residual), (None, None)):
            yield f"exchange {size}", partial(exchange_added, x, *given, room)
        for ways, rows in ((2, 5), (4, 5), (1, 20), (1, 200), (2, 200)):  # as words, in one turn, in two
            parts, given = on_meta((ways, rows, 4096), F32), on_meta((rows, 4096))
            yield f"exchange {size}", partial(exchange_added, parts, bias, given, room, 40 * 4096)
        yield f"exchange {size}", partial(exchange_gather, x, room)
        keys, ids = on_meta((5,), torch.uint64), on_meta((5,), I64)
        yield f"exchange {size}", partial(exchange_largest, keys, 4096, room, ids)


def _feed(queries: int, counts: torch.Tensor | None) -> object:
    state = _state(64)
    drafts = on_meta((BATCH, queries), I64)
    fixed: dict[str, Any] = {"first": -1, "queries": queries, "limit": 2**30, "vocab": 64, "num_drafts": 3}
    return feed_rows(state.tokens, state.lengths, state.finish, drafts, draft_counts=counts, **fixed)


def _greedy(vocab: int, batch: int, recorded: bool, published: bool) -> None:
    state = _state(vocab, batch)
    ring, details = _outbox(state)
    record = _records(state, vocab, details if published else None) if recorded else None
    scratch = scratch_of(batch, DRAFTS, META)
    verify_commit(on_meta((batch, DRAFTS + 1, vocab), F32), state, scratch, ring if published else None, record)


def sampled(vocab: int, arch: int) -> Calls:
    """Kernels of a step that samples: one line or many, every rule, recorded and not."""
    for batch in (1, 64):
        for purpose, keep in ((0, True), (2, False)):
            yield f"draw {vocab} {batch}", partial(_draw, vocab, batch, purpose, keep)
        for rule, deterministic in (("rejection", False), ("block", False), ("block", True), ("coupled", False)):
            named = f"{rule} {vocab} {batch}"
            yield named, partial(_sampled, vocab, batch, rule, deterministic, False, True)
    for rule, published in (("rejection", True), ("block", True), ("coupled", False)):
        yield f"{rule}, recorded {vocab}", partial(_sampled, vocab, BATCH, rule, False, True, published)
    yield f"block, recorded and deterministic {vocab}", partial(_sampled, vocab, BATCH, "block", True, True, True)


def sampled_otherwise(arch: int) -> Calls:
    yield f"rejection, recorded {VOCABS[0]} of many", partial(_sampled, VOCABS[0], 64, "rejection", False, True, True)
    yield f"draw {VOCABS[-1]} of many", partial(_draw, VOCABS[-1], CROWD, 2, False)
    yield "block, kept", partial(_sampled, VOCABS[0], BATCH, "block", False, False, False)


def _draw(vocab: int, batch: int, purpose: int, keep: bool) -> None:
    work = sampled_work(batch, DRAFTS, vocab, META)
    sampled_draw(on_meta((batch, 1, vocab), F32), _state(vocab, batch), 1, work, purpose=purpose, keep_draft_probs=keep)


def _sampled(vocab: int, batch: int, rule: str, deterministic: bool, recorded: bool, published: bool) -> None:
    state = _state(vocab, batch)
    ring, details = _outbox(state)
    record = _records(state, vocab, details if published else None) if recorded else None
    work, scratch = sampled_work(batch, DRAFTS, vocab, META), scratch_of(batch, DRAFTS, META)
    logits, entry = on_meta((batch, DRAFTS + 1, vocab), F32), ring if published else None
    sampled_commit(logits, state, scratch, work, entry, rule=rule, deterministic=deterministic, record=record)


GROUPS: dict[str, Callable[[int], Calls]] = {
    **{f"attention_{8 * size}_bits": partial(attention, size) for size in DTYPES},
    **{f"short_{dim}": partial(attention_short, dim, False) for dim in (64, 128)},
    **{f"short_{dim}_full": partial(attention_short, dim, True) for dim in (64, 128)},
    "attention_long": attention_long,
    "attention_prompt": attention_prompt,
    "attention_cached_in_8_bits": attention_cached_in_8_bits,
    "attention_ruled": attention_ruled,
    "portable_whole": partial(portables, WHOLE),
    "portable_pieces": partial(portables, RAGGED[0]),
    "portable_single": partial(portables, RAGGED[1]),
    "recurrent": recurrent,
    "experts": mixtures,
    "prompts": prompts,
    "steps": steps,
    **{f"sampled_{vocab}": partial(sampled, vocab) for vocab in VOCABS},
    "sampled_otherwise": sampled_otherwise,
    **{
        f"products_{start}": partial(products, slice(start, start + AT_ONCE))
        for start in range(0, len(LAYERS), AT_ONCE)
    },
    **{f"tails_{sizes[0]}": partial(tails, sizes) for sizes in LAYER_SIZES},
    "products_trees": trees,
    "products_fp16": products_in_fp16,
    "exchanges": exchanges,
    "quantised": quantised,
    "quantised_wide": quantised_wide,
    "quantised_values": quantised_values,
}


def all_calls(arch: int) -> Iterator[tuple[str, Callable[[], object]]]:
    for group in GROUPS.values():
        yield from group(arch)


def _told(launch: Launch) -> str:
    constants = {name: str(value) for name, value in sorted(launch.arguments.items()) if name.isupper()}
    return f"{launch.call} {launch.name} {launch.grid} {constants} {sorted(launch.options.items(), key=str)}"


def main() -> None:
    """Prints what the calls launch on each of these architectures, also as a hash; compiles nothing."""
    for arch in map(int, sys.argv[1:]):
        found = record(arch, partial(all_calls, arch))
        told = hashlib.sha256("\n".join(map(_told, found)).encode()).hexdigest()
        print(json.dumps({"kernels": sorted({launch.name for launch in found}), "launches": told}))


if __name__ == "__main__":
    main()
