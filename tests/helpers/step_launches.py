"""Calls whose launches are compiled ahead of time, of recurrent layers and of all between passes: see `recorder`."""

from __future__ import annotations

from functools import partial
from itertools import product as pairs
from types import SimpleNamespace
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from fastspec.kernels.common.code_packing import PackedCodes
from fastspec.kernels.common.codes import CodesKind
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.embed import embed
from fastspec.kernels.exchange import exchange_added, exchange_gather, exchange_largest
from fastspec.kernels.feed_rows import feed_rows
from fastspec.kernels.gelu import gelu_tanh_mul
from fastspec.kernels.joined import joined_norms
from fastspec.kernels.lookup.dispatch import look_up
from fastspec.kernels.norm import add_norm, norm
from fastspec.kernels.product.rank_sums import sum_ranks_permuted
from fastspec.kernels.product.split_k import Parts
from fastspec.kernels.recurrent.dispatch import delta_rule
from fastspec.kernels.recurrent.gated_norm import gated, gated_norm
from fastspec.kernels.recurrent.state_space import mamba, mamba_norm, selective_conv, selective_scan, short_conv
from fastspec.kernels.reference.linear import PartKeys
from fastspec.kernels.reference.lookup import LookUp, Predictions, SharedTexts
from fastspec.kernels.reference.recurrent import KeptState
from fastspec.kernels.reference.step import Record
from fastspec.kernels.room import BLOCK, Room
from fastspec.kernels.rotate import rotate
from fastspec.kernels.round_codes import pack_rounded
from fastspec.kernels.sampling.commit import commit, scratch_of
from fastspec.kernels.sampling.draw import sampled_draw
from fastspec.kernels.sampling.greedy_commit import verify_commit
from fastspec.kernels.sampling.logits import sampled_work
from fastspec.kernels.sampling.logprobs import record_work
from fastspec.kernels.sampling.processed import processed_logits
from fastspec.kernels.sampling.publish import publish
from fastspec.kernels.sampling.sampled_commit import sampled_commit
from fastspec.proposers.texts import TextIndex, rungs_between
from fastspec.shapes import ConvRule, DeltaRule, MambaRule, SelectiveRule
from fastspec.state import DecodeState
from tests.helpers.product_launches import packed
from tests.helpers.recorder import BF16, F32, I64, META, Calls, on_meta

EPS = 1e-5

VOCABS = (32000, 128256, 256000)
BATCH, DRAFTS = 4, 4
OF_GROUPS, OF_ROWS = [CodesKind("int4", (1, size)) for size in (32, 64, 128)], CodesKind("fp8", (1, 4096))
# sums over ranks with the norm behind them: splits before, rows, their width, splits after
WITH_NORM = ((1, 9, 2048, 4), (2, 32, 4096, 4), (4, 160, 4096, 4), (1, 40, 2880, 1), (8, 40, 8192, 8))
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
            yield f"joined {dtype}", partial(joined_norms, table, ids, x, (gamma, gamma), EPS, x_first=arch >= 90)
        for weight, centred in ((dtype, False), (F32, True)):
            x, gamma = on_meta((BATCH, 2, 4096), dtype), on_meta((4096,), weight)
            yield (
                f"norm {dtype}",
                partial(norm, x, gamma, EPS, bias=gamma if centred else None, centred=centred),
            )
            yield f"two norms {dtype}", partial(add_norm, x, x, gamma, gamma if centred else None, EPS)
        q, k, angles = (
            on_meta((BATCH, 32, 2, 128), dtype),
            on_meta((BATCH, 8, 2, 128), dtype),
            on_meta((1, 2, 128), dtype),
        )
        yield f"rotate {dtype}", partial(rotate, q, k, angles, angles)
        yield f"gelu {dtype}", partial(gelu_tanh_mul, on_meta((BATCH, 2, 4096), dtype))
    for kind in (*OF_GROUPS, OF_ROWS, OF_ROWS._replace(format="int8")):
        place = PackedCodes.empty((64, 4096), kind, False, META)
        yield f"round {kind}", partial(pack_rounded, place, 1, on_meta((48, 4096), BF16))
    for entry in (ring, None):
        yield "commit", partial(commit, state.accepted, state.block.clone(), state, scratch, entry)
    for vocab in VOCABS:
        for batch, published in pairs((1, BATCH, 64), (True, False)):
            yield f"greedy {vocab} {batch}", partial(_greedy, vocab, batch, False, published)
        for published in (True, False):
            yield f"greedy, recorded {vocab}", partial(_greedy, vocab, BATCH, True, published)
    for parts in (2, 8):
        yield f"greedy by keys {parts}", partial(_greedy_by_keys, parts)
    for tables, predicted, max_n in ((0, False, 4), (0, True, 16), (2, True, 16), (1, False, 32)):
        yield f"look up {tables} {predicted}", partial(_look_up, tables, predicted, max_n)
    yield "publish", partial(publish, *ring, state, drafting=True)
    yield "publish details", partial(publish, *ring, state, drafting=True, details=details)


def exchanges(arch: int) -> Calls:
    """Exchanges between two, four and eight ranks of a host."""
    for size in (2, 4, 8):
        room = Room(1, size, 2048 * BLOCK, on_meta((size,), I64), on_meta((2048,), torch.int32))
        x, residual, bias = on_meta((5, 4096), F32), on_meta((5, 4096)), on_meta((4096,))
        for given in ((bias, residual), (None, residual), (None, None)):
            yield f"exchange {size}", partial(exchange_added, x, *given, room)
        for ways, rows in ((2, 5), (4, 5), (1, 200), (2, 200)):  # one-shot, two-shot
            parts, given = on_meta((ways, rows, 4096), F32), on_meta((rows, 4096))
            yield f"exchange {size}", partial(exchange_added, parts, bias, given, room, 256 * BLOCK)
        for ways, rows, k, split in WITH_NORM[: 5 if size == 2 else 1]:
            sums, norm = Parts(on_meta((ways, rows, k), F32), 0), (on_meta((k,)), 1e-5)
            rest = None if ways == 1 else on_meta((k,)), on_meta((rows, k)), norm, (split, 64), gl.bfloat16
            yield f"exchange {size}", partial(sum_ranks_permuted, sums, *rest, arch >= 90, room)
        if size == 2:
            codes = Parts(on_meta((8, 40, 4096), F32), 2, on_meta((4096,), F32))  # of a quantised target
            rest = None, on_meta((40, 4096)), (on_meta((4096,)), 1e-5), (8, 128), gl.bfloat16, arch >= 90, room, True
            yield f"exchange {size}", partial(sum_ranks_permuted, codes, *rest)
        yield f"exchange {size}", partial(exchange_gather, x, room)
        keys, ids = on_meta((5,), torch.uint64), on_meta((5,), I64)
        yield f"exchange {size}", partial(exchange_largest, keys, 4096, room, ids)


def _look_up(tables: int, predicted: bool, max_n: int) -> None:
    state = _state(64)
    prediction = Predictions(on_meta((BATCH, 4096), I64), state.prediction_lengths, state.prompt_lengths)
    texts = tuple(
        SharedTexts(TextIndex(1000, rungs_between(2, max_n), META).table, state.owners) for _ in range(tables)
    )
    given = (state.tokens, state.lengths, 2, max_n)
    call = LookUp(*given, prediction if predicted else None, texts, per_match=2 if predicted or tables else None)
    look_up(call, DRAFTS)


def _feed(queries: int, counts: torch.Tensor | None) -> object:
    state = _state(64)
    drafts = on_meta((BATCH, queries), I64)
    fixed: dict[str, Any] = {"first": -1, "queries": queries, "limit": 2**30, "vocab": 64, "num_drafts": 3}
    id_map = on_meta((64,), I64) if counts is not None else None
    return feed_rows(state.tokens, state.lengths, state.finish, drafts, draft_counts=counts, id_map=id_map, **fixed)


def _greedy(vocab: int, batch: int, recorded: bool, published: bool) -> None:
    state = _state(vocab, batch)
    ring, details = _outbox(state)
    record = _records(state, vocab, details if published else None) if recorded else None
    scratch = scratch_of(batch, DRAFTS, META)
    verify_commit(on_meta((batch, DRAFTS + 1, vocab), F32), state, scratch, ring if published else None, record)


def _greedy_by_keys(parts: int) -> None:
    state = _state(64)
    keys = PartKeys(on_meta((BATCH, DRAFTS + 1, parts), I64), 64 // parts)
    verify_commit(keys, state, scratch_of(BATCH, DRAFTS, META), _outbox(state)[0])


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
    yield f"processed {vocab}", partial(_processed, vocab)
    yield f"block, recorded and deterministic {vocab}", partial(_sampled, vocab, BATCH, "block", True, True, True)


def sampled_otherwise(arch: int) -> Calls:
    yield f"rejection, recorded {VOCABS[0]} of many", partial(_sampled, VOCABS[0], 64, "rejection", False, True, True)
    yield f"draw {VOCABS[-1]} of many", partial(_draw, VOCABS[-1], CROWD, 2, False)
    yield "block, kept", partial(_sampled, VOCABS[0], BATCH, "block", False, False, False)


def _draw(vocab: int, batch: int, purpose: int, keep: bool) -> None:
    work = sampled_work(batch, DRAFTS, vocab, META)
    sampled_draw(
        on_meta((batch, 1, vocab), F32),
        _state(vocab, batch),
        1,
        work,
        purpose=purpose,
        keep_draft_probs=keep,
        draws=None,
    )


def _processed(vocab: int) -> object:
    work, logits = sampled_work(BATCH, DRAFTS, vocab, META), on_meta((BATCH, DRAFTS + 1, vocab), F32)
    return processed_logits(logits, _state(vocab), work)


def _sampled(vocab: int, batch: int, rule: str, deterministic: bool, recorded: bool, published: bool) -> None:
    state = _state(vocab, batch)
    ring, details = _outbox(state)
    record = _records(state, vocab, details if published else None) if recorded else None
    work, scratch = sampled_work(batch, DRAFTS, vocab, META), scratch_of(batch, DRAFTS, META)
    logits, entry = on_meta((batch, DRAFTS + 1, vocab), F32), ring if published else None
    sampled_commit(
        logits, state, scratch, work, entry, rule=rule, deterministic=deterministic, record=record, draws=None
    )


def recurrent(arch: int) -> Calls:
    """Layers of Qwen3.5's sizes, of Kimi-Linear's, and of keys and values that are no powers of two; also prompts."""
    unequal, of_channels = DeltaRule(4, 8, 96, 40, 4), DeltaRule(32, 32, 128, 128, 4, by_channel=True, gate="sigmoid")
    for rule in (DeltaRule(16, 32, 128, 128, 4), unequal, of_channels, of_channels._replace(floor=-5.0)):
        for dtype in (BF16, F32):
            if rule.floor and dtype is F32:
                continue
            plain = ((1, 1),) if rule.key_dim == 128 else ()
            for rows, tokens in (*plain, (BATCH, 5), (1, 64)):
                name = f"delta {rule.key_dim} {rule.by_channel} {rule.floor} {dtype} {tokens}"
                yield name, partial(_delta, rule, dtype, rows, tokens)
            x, gate = on_meta((BATCH, 5, rule.values), dtype), on_meta((BATCH, 5, rule.rows), dtype)
            gamma = on_meta((rule.value_dim,), dtype)
            yield f"gated norm {dtype}", partial(gated_norm, x, gate[..., : rule.values], gamma, EPS, rule.gate)
            yield f"gate {dtype}", partial(gated, x, gate[..., : rule.values])
    yield from _states()


def _states() -> Calls:
    """Layers of the sizes of Nemotron 3 Nano, LFM2 and Jamba, and of no powers of two; steps, and a prompt.

    And a prompt of Falcon-H1's size, whose B and C are wide.
    """
    yield "falcon", partial(_state_of, MambaRule(24, 64, 1, 256, 4), BF16, 1, 64)
    of_jamba = SelectiveRule(8192, 16, 4, 256)
    for rule in (
        of_jamba,
        MambaRule(64, 64, 8, 128, 4),
        MambaRule(4, 40, 1, 24, 4, norm="norm_first"),
        ConvRule(2048, 3),
    ):
        for dtype in (BF16, F32):
            for rows, tokens in ((BATCH, 5), (1, 64)):
                yield (
                    f"{type(rule).__name__} {rule.rows} {dtype} {tokens}",
                    partial(_state_of, rule, dtype, rows, tokens),
                )
            if isinstance(rule, MambaRule):
                x, gate = on_meta((BATCH, 5, rule.values), dtype), on_meta((BATCH, 5, rule.rows), dtype)
                weight = on_meta((rule.values,), dtype) if rule.groups > 1 else None
                yield f"norm {dtype}", partial(mamba_norm, x, gate[..., : rule.values], weight, EPS, rule)


def _state_of(rule: MambaRule | ConvRule | SelectiveRule, dtype: torch.dtype, rows: int, tokens: int) -> object:
    slots, heads = DRAFTS + 1, rule.heads if isinstance(rule, MambaRule) else 0
    selective = isinstance(rule, SelectiveRule)
    of_heads = (rule.channels,) if selective else (heads,)
    layer: Any = SimpleNamespace(
        conv=on_meta((rule.channels, 1, rule.width), dtype),
        conv_bias=on_meta((rule.channels,), dtype) if heads or selective else None,
        decay=on_meta(rule.state_shape if selective else (heads,), F32),
        step=on_meta(of_heads, F32),
        skip=on_meta(of_heads, F32),
    )
    room = on_meta((1,), I64), on_meta(rule.state_shape, F32), on_meta((rule.width, rule.channels), dtype)
    where = (
        on_meta((rows, slots, *rule.state_shape), F32),
        on_meta((rows, slots + rule.tail, rule.channels), dtype),
        on_meta((rows,), I64),
        on_meta((rows, tokens), I64),
        on_meta((rows, tokens), torch.bool),
    )
    kept, product = KeptState(*room) if tokens > slots else None, on_meta((rows, tokens, rule.rows), dtype)
    if isinstance(rule, MambaRule):
        return mamba(product, layer, *where, rule, kept)
    if isinstance(rule, SelectiveRule):
        selective_conv(product, layer, *where, rule, kept)
        mixed = on_meta((rows, tokens, rule.channels + 2 * rule.state_dim), dtype)
        steps = on_meta((rows, tokens, rule.channels), dtype)
        return selective_scan(mixed, steps, layer, where[0], *where[2:], rule, kept)
    return short_conv(product, layer, *where, rule, kept)


def _delta(rule: DeltaRule, dtype: torch.dtype, rows: int, tokens: int) -> object:
    heads, slots = rule.value_heads, DRAFTS + 1
    layer: Any = SimpleNamespace(
        conv=on_meta((rule.channels, 1, rule.width), dtype),
        decay=on_meta((heads,), F32),
        step=on_meta((rule.decays,), F32),
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
