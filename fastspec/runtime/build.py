"""Builds an engine: loads weights and allocates every buffer, on the stream that will use them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import torch

from fastspec.graphs.results import ResultRing
from fastspec.graphs.runner import WARM_UPS, EagerRunner, GraphRunner, Runner
from fastspec.inputs.values import flag
from fastspec.kernels.common.kv_scales import FP8
from fastspec.kernels.common.packing import PACKED_ROWS
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.compiled_ops import compiled
from fastspec.kv_cache.cache import PagedKVCache
from fastspec.kv_cache.kept_states import KeptStates
from fastspec.kv_cache.pages import PageTable
from fastspec.kv_cache.prefix import PrefixCache
from fastspec.kv_cache.states import StateCache
from fastspec.models.compiled import CompiledDecoder
from fastspec.models.config import ModelSpec
from fastspec.models.decoder import Decoder
from fastspec.models.heads.checkpoint import HeadCheckpoint
from fastspec.models.heads.weights import HeadWeights
from fastspec.models.hosted.admission import admit
from fastspec.models.hosted.info import HostedInfo
from fastspec.models.hosted.load import load_hosted
from fastspec.models.hosted.model import HostedModel
from fastspec.models.interface import CausalModel, Pending, is_recurrent, states_of
from fastspec.models.parallel import ParallelDecoder
from fastspec.models.weights.load import DecoderWeights, allocate_weights
from fastspec.models.weights.quantised.cache_scales import CacheScales, for_layers
from fastspec.models.weights.sources import Checkpoint
from fastspec.parallel.ranks import Ranks
from fastspec.proposers.choose import choose
from fastspec.proposers.combined import TakesGiven
from fastspec.proposers.draft_model import DraftModel
from fastspec.proposers.heads import build_head
from fastspec.proposers.interface import (
    Proposer,
    feature_buffer,
    features_of,
    kept_in_pages,
    reads_ahead,
    takes_features,
)
from fastspec.runtime.engine import Engine, grid_unit_of
from fastspec.runtime.settings import Settings, check_range
from fastspec.runtime.threads import sampling_alone
from fastspec.shapes import DELTA_CHUNK
from fastspec.state import DecodeState
from fastspec.step import PromptEnd, StepModules

PREFILL_BUDGET = 256  # prompt tokens: on a GPU reading the weights still takes most of the time of such a pass
_PREFILL_BATCH_TOKENS = 256  # tokens of a pass over several short prompts: with fewer it waits for the weights
# tokens of a pass, by compute capability: from here on one kernel multiplies packed weights, in one order of sums
_SAME_BITS_FROM = {(9, 0): 64}
_SAME_BITS_ELSEWHERE = 256  # on GPUs where smaller passes were not compared
_SAME_BITS_CODES = 128  # of quantised weights: smaller passes take the steps' kernel
_MAX_BUDGET = 2**31 - 1


def build(
    settings: Settings,
    target: Checkpoint,
    draft: Checkpoint | HeadCheckpoint | None,
    *,
    proposer: Proposer | None,
    shared_vocab: int,
    release_source: bool,
    nvtx: bool,
    progress: bool,
    prefix_cache: bool = True,
    prefill_budget: int | None = PREFILL_BUDGET,
    ranks: Ranks | None = None,
) -> tuple[Engine, list[Pending]]:
    """Everything a scheduler runs on, and its weights, to be filled before anything is run.

    Args:
        settings: checked arguments of the generator.
        target, draft: where the weights come from.
        proposer: the caller's own, or a lookup before the draft.
        shared_vocab: ids below this mean the same to draft and target.
        release_source, progress: as in `allocate_weights`.
        nvtx: name steps and their phases to a profiler.
        ranks: that share the models; None: this process is alone.
        prefix_cache, prefill_budget: of the generator.

    Raises:
        ValueError: a budget out of range, or a flag that is no bool.
        CheckpointError, UnsupportedModel: from loading; nothing is kept.
    """
    flag("release_source", release_source)
    flag("nvtx", nvtx)
    if prefill_budget is not None:
        prefill_budget = check_range("prefill_budget", prefill_budget, 1, _MAX_BUDGET)
    layout, device, length = settings.layout, settings.device, settings.max_length
    ops = layout.ops if device.type == "cuda" else sampling_alone(layout.ops)
    ranks = ranks or Ranks.alone()
    ours = not settings.compiled and proposer is None and not any(_hosted(each) for each in (target, draft))
    warm_ups = 1 if ours else WARM_UPS
    runner: Runner = GraphRunner(device, nvtx=nvtx, warm_ups=warm_ups) if settings.graphs else EagerRunner(device)
    mark = torch.cuda.nvtx.range if nvtx and device.type == "cuda" else nullcontext

    inside, kind = (compiled(ops), CompiledDecoder) if settings.compiled else (ops, Decoder)

    pending: list[Pending] = []
    matrices: list[Weight] = []
    of_draft_model: list[Weight] = []

    sizes: dict[str, Any] = {
        "max_positions": layout.pages_per_row(length) * layout.page_size,
        "batch": layout.batch,
        "max_queries": layout.max_queries,
    }

    def model_of(checkpoint: Checkpoint, dtype: torch.dtype) -> CausalModel:
        if not isinstance(checkpoint.spec, HostedInfo):
            return decoder(checkpoint, dtype)
        pages = {"num_pages": layout.num_pages(length), "page_size": layout.page_size}
        between = None if checkpoint.spec.cut is None else exchange
        model = HostedModel(checkpoint.spec, ops, dtype=dtype, device=device, exchange=between, **pages, **sizes)
        load_hosted(checkpoint, model, dtype=dtype, device=device, release=release_source, progress=progress)
        if between is not None:
            ranks.world.wait_for_all()
        admit(model, checkpoint.name, settings.decode_tiling, sizes["max_queries"])
        return model

    def decoder(checkpoint: Checkpoint, dtype: torch.dtype) -> Decoder:
        spec = checkpoint.native.for_length(length)
        allocated = allocate_weights(
            checkpoint,
            dtype=dtype,
            device=device,
            progress=progress,
            release_source=release_source,
            ops=inside,
        )
        pending.append(allocated)
        own = of_draft_model if checkpoint.role == "draft" else matrices
        own.extend(_matrices(allocated.weights))
        of_target, of_draft = layout.cache_dtypes
        kept = of_draft if checkpoint.role == "draft" else of_target
        cache = cache_of(spec, dtype, kept, checkpoint.cache_scales)
        share = None if checkpoint.sliced is None else checkpoint.sliced.share
        if checkpoint.sliced is not None and share is not None and share.parts > 1 and exchange is not None:
            part: dict[str, Any] = {"sliced": checkpoint.sliced, "exchange": exchange, **sizes}
            return ParallelDecoder(spec, allocated.weights, cache, inside, **part)
        return kind(spec, allocated.weights, cache, inside, **sizes)

    def cache_of(
        spec: ModelSpec, dtype: torch.dtype, of_pages: torch.dtype, found: Mapping[int, CacheScales] | None = None
    ) -> PagedKVCache:
        """A cache with pages of dtype `of_pages` and the checkpoint's scales; states have the model's dtype."""
        sizes = len(spec.attending), layout.num_pages(length), layout.page_size, spec.num_kv_heads, spec.head_dim
        rows, where = (layout.batch, layout.max_drafts), dict[str, Any](dtype=dtype, device=device)
        kept = layout.kept_states if prefix_cache else 0
        states = StateCache.allocate(spec.deltas, *rows, **where, kept=kept) if spec.deltas else None
        scales = for_layers(found or {}, spec.attending) if of_pages == FP8 else ()
        return PagedKVCache.allocate(*sizes, **{**where, "dtype": of_pages}, states=states, scales=scales)

    def head_proposer(head: HeadCheckpoint, scoring: CausalModel) -> TakesGiven:
        assert isinstance(scoring, Decoder), "checked with the head"
        made, weights = build_head(
            head,
            scoring,
            cache_of(head.spec.decoder, layout.draft_dtype, layout.cache_dtypes[1]),
            dtype=layout.draft_dtype,
            ops=inside,
            sizes=sizes,
            length=length,
            progress=progress,
            mark=mark,
            work=work,
        )
        pending.append(weights)
        matrices.extend(_matrices(weights.weights))
        return made

    with runner.on():
        exchange = ranks.exchange(device, *layout.exchanged(length)) if ranks.asked else None
        model: TakesGiven | None = None
        work = ops.sampled_work(layout.batch, layout.max_drafts, layout.target.vocab_size, device)
        scoring = model_of(target, layout.target_dtype)
        models = [scoring]
        if isinstance(draft, HeadCheckpoint):
            model = head_proposer(draft, scoring)
        elif draft:
            drafting = model_of(draft, layout.draft_dtype)
            models.append(drafting)
            model = DraftModel(drafting, ops, shared_vocab, draft.spec.max_length, mark, work)
        state = DecodeState.allocate(
            batch=layout.batch,
            max_drafts=layout.max_drafts,
            max_length=length,
            pages_per_row=layout.pages_per_row(length),
            vocab_size=layout.target.vocab_size,
            device=device,
            keep_draft_probs=layout.keep_draft_probs,
        )
        places = layout.batch, layout.max_drafts, layout.target.hidden_size
        chosen = choose(proposer, model, scoring.vocab_size)
        features = feature_buffer(chosen, *places, layout.target_dtype, device)
        read = len(features_of(chosen))
        ends = PromptEnd.zeros(layout.batch, layout.target.hidden_size, read, layout.target_dtype, device)
        ring = ResultRing(layout.batch, layout.max_drafts, state.top_ids.shape[2], device, pinned=ops.name == "triton")
        if ranks.size > 1:
            ring.watch = ranks.world
    pages, chunks = PageTable(layout.num_pages(length), layout.page_size), layout.chunks_for(length)
    same_bits = _same_bits(chunks, models, matrices, device)
    in_draft = _same_bits(chunks, models, of_draft_model, device)
    same_bits = None if in_draft is None else same_bits
    # a quantised draft's smallest passes have other bits; the target's do not wait for larger ones
    narrow = same_bits is not None and in_draft is not None and in_draft[0] > same_bits[0]
    # what a pass over a prompt makes lies in the pages of its row and nowhere else
    paged = chosen is None or not chosen.max_length or kept_in_pages(chosen)
    apart = paged and features is None and not takes_features(chosen) and not any(map(is_recurrent, models))
    prefix = kept = None
    if prefix_cache and (not takes_features(chosen) or kept_in_pages(chosen)):
        of_target, of_draft = (*map(states_of, models), None)[:2]
        recurrent = of_target is not None or of_draft is not None
        grid_unit = grid_unit_of(chunks, same_bits, settings.decode_tiling.rows is not None)
        unit = math.lcm(layout.page_size, grid_unit, DELTA_CHUNK if recurrent else 1)
        salt = target.name, draft.name if draft else None
        prefix = PrefixCache(pages, unit, reads_ahead(chosen), salt)
        if recurrent:
            kept = KeptStates(of_target, of_draft, unit)
            prefix.on_drop = kept.forget
    engine = Engine(
        parts=StepModules(
            scoring,
            chosen,
            ops,
            ring.outbox,
            ops.commit_scratch(layout.batch, layout.max_drafts, device),
            mark,
            work,
            ops.record_work(layout.batch, layout.max_drafts, layout.target.vocab_size, device),
            features,
            ends,
        ),
        state=state,
        pages=pages,
        max_drafts=layout.max_drafts,
        decode_tiling=settings.decode_tiling,
        chunks=chunks,
        runner=runner,
        ring=ring,
        verification=settings.verification,
        same_bits=same_bits,
        draft_chunks=in_draft if narrow else None,
        prefix=prefix,
        kept=kept,
        prefill_batch_tokens=_PREFILL_BATCH_TOKENS if apart and same_bits == chunks else 0,
        prefill_budget=prefill_budget,
        mean_weight=_mean_weight(settings, target),
        share_seconds=ranks.world.share_seconds,
    )
    return engine, pending


def _hosted(checkpoint: Checkpoint | HeadCheckpoint | None) -> bool:
    return isinstance(checkpoint, Checkpoint) and isinstance(checkpoint.spec, HostedInfo)


def _same_bits(
    chunks: tuple[int, ...], models: Iterable[CausalModel], matrices: Iterable[Weight], device: torch.device
) -> tuple[int, ...] | None:
    """Sizes of passes over prompts that leave the same bits in the caches of these models; None: no two are known to.

    One kernel sums products with packed weights in the same order for any number of rows. A library's order may depend
    on the number of rows, and so may that of sums over several GPUs.
    """
    formats = {matrix.format for matrix in matrices}
    if not all(type(model) is Decoder for model in models) or "rows" in formats:
        return None
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    least = _SAME_BITS_FROM.get(capability, _SAME_BITS_ELSEWHERE)
    least = max(least, _SAME_BITS_CODES) if "codes" in formats else least
    return tuple(size for size in chunks if size >= least) or None


def _matrices(weights: DecoderWeights | HeadWeights) -> Iterator[Weight]:
    """The matrices that passes over prompts multiply with: those of the layers, and what a head has besides."""
    decoder = weights.decoder if isinstance(weights, HeadWeights) else weights
    others = weights.others.values() if isinstance(weights, HeadWeights) else ()
    parts = [part for layer in decoder.layers for part in (layer, layer.delta, layer.experts) if part is not None]
    held = [getattr(part, each.name) for part in parts for each in fields(part)]
    # of fewer rows a product is by tiles, whatever the number of tokens
    yield from (each for each in (*held, *others) if isinstance(each, Weight) and each.shape[0] >= PACKED_ROWS)


def _mean_weight(settings: Settings, target: Checkpoint) -> float | None:
    """Elements of one of the target's matrices, in the mean; None where threads of the CPU are not ours to choose."""
    if settings.device.type != "cpu" or settings.compiled or target.ranks > 1:
        return None
    dtype = settings.layout.target_dtype
    return target.spec.weight_bytes(dtype) / dtype.itemsize / (4 * target.spec.num_layers + 1)
