"""Builds an engine: allocates weights and all buffers, on the stream that will use them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Any

import torch

from fastspec.distributed.exchange import Exchange
from fastspec.distributed.ranks import Ranks
from fastspec.engine.engine import Engine
from fastspec.engine.memory import Layout
from fastspec.engine.pass_sizes import PassSizes
from fastspec.engine.settings import Settings
from fastspec.engine.step_shapes import StepShapes
from fastspec.engine.threads import sampling_alone
from fastspec.graphs.results import ResultRing
from fastspec.graphs.runner import EagerRunner, GraphRunner, Runner
from fastspec.kernels.common.kv_scales import FP8
from fastspec.kernels.common.launch import brief
from fastspec.kernels.common.packing import PACKED_ROWS
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.compiled_ops import CompiledOps
from fastspec.kernels.gpu import generation_of
from fastspec.kernels.ops import Ops
from fastspec.kv_cache.cache import PagedKVCache
from fastspec.kv_cache.pages import PageTable
from fastspec.kv_cache.prefix import PrefixCache
from fastspec.kv_cache.prefix_states import PrefixStates
from fastspec.kv_cache.states import StateCache
from fastspec.models.checkpoints.checkpoint import Checkpoint
from fastspec.models.checkpoints.decoder_weights import allocate_weights
from fastspec.models.checkpoints.quantised.tensors import CacheScales, scales_of_layers
from fastspec.models.compiled import CompiledDecoder
from fastspec.models.config import ModelSpec
from fastspec.models.decoder import Decoder
from fastspec.models.heads.checkpoint import HeadCheckpoint
from fastspec.models.heads.weights import HeadWeights
from fastspec.models.hosted.admission import admit, admit_streams
from fastspec.models.hosted.info import HostedInfo
from fastspec.models.hosted.load import load_hosted
from fastspec.models.hosted.model import HostedModel
from fastspec.models.hosted.updates import HostedWeights
from fastspec.models.interface import CausalModel, Pending, is_recurrent, states_of
from fastspec.models.layer_table import DecoderWeights
from fastspec.models.parallel import ParallelDecoder
from fastspec.models.vocab import SharedVocab
from fastspec.proposers.choose import choose
from fastspec.proposers.combined import ContinuesDrafts
from fastspec.proposers.draft_model import DraftModel, ParallelDraft, VocabMap
from fastspec.proposers.heads import build_head
from fastspec.proposers.interface import (
    Proposer,
    feature_buffer,
    features_of,
    kept_in_pages,
    reads_ahead,
    reads_back_of,
    takes_features,
)
from fastspec.proposers.ngram import NGram
from fastspec.proposers.suffix import Suffix
from fastspec.shapes import DELTA_CHUNK, LONG_PROMPT, LONG_PROMPT_CUDA
from fastspec.state import DecodeState
from fastspec.step import PromptEnd, StepModules

# smallest prefill pass with the same bits, in tokens, for quantised weights: smaller ones use the kernel of steps
_SAME_BITS_CODES = 128
_MAX_BUDGET = 2**31 - 1


def build(
    settings: Settings,
    target: Checkpoint,
    draft: Checkpoint | HeadCheckpoint | None,
    *,
    shared_vocab: SharedVocab,
    ranks: Ranks | None = None,
) -> tuple[Engine, list[Pending]]:
    """Makes the engine of a generator. Returns (engine, weights that must be read before the first launch).

    Args:
        settings: settings of the generator.
        target: checkpoint of the target.
        draft: checkpoint of the draft model or head. None: there is neither.
        shared_vocab: token ids that draft and target share.
        ranks: the processes that share the models. None: this process is alone.

    Raises:
        CheckpointError, UnsupportedModel: an error while loading. Everything allocated is freed.
    """
    config, layout, device = settings.config, settings.layout, settings.device
    ops = layout.ops if device.type == "cuda" else sampling_alone(layout.ops)
    ranks = ranks or Ranks.alone()
    only_ours = not config.compile and config.proposer is None and not any(_hosted(each) for each in (target, draft))
    runner = _runner(settings, only_ours=only_ours)
    mark = torch.cuda.nvtx.range if config.nvtx and device.type == "cuda" else nullcontext

    with runner.on_stream():
        exchange = ranks.exchange(device, *layout.exchanged(settings.max_length)) if ranks.asked else None
        work = ops.sampled_work(layout.batch, layout.max_drafts, layout.target.vocab_size, device)
        made = _Models(settings, ops, ranks, exchange, mark, work)
        scoring = made.model(target, layout.target_dtype)
        drafter = made.drafter(draft, scoring, shared_vocab)
        state = _state(settings)
        ring = _ring(settings, ops, state, ranks)
        proposer = config.proposer.on(device, ops) if isinstance(config.proposer, NGram) else config.proposer
        chosen = choose(proposer, drafter, scoring.vocab_size)
        if isinstance(scoring, HostedModel) and features_of(chosen):
            shares = isinstance(draft, HeadCheckpoint) and not draft.spec.own_embed
            admit_streams(scoring, target.name, settings.decode_tiling, shares_embedding=shares)
        modules = _modules(layout, ops, scoring, chosen, ring, mark, work, device)
    pages = PageTable(layout.num_pages(settings.max_length), layout.page_size)
    sizes = _pass_sizes(settings, made, modules)
    salt = target.name, draft.name if draft else None
    prefix, prefix_states = _prefix_cache(settings, pages, sizes.grid_unit, made.models, chosen, salt)
    engine = Engine(
        modules=modules,
        state=state,
        pages=pages,
        runner=runner,
        ring=ring,
        shapes=_step_shapes(settings, state, chosen, static=runner.static),
        sizes=sizes,
        prefix=prefix,
        prefix_states=prefix_states,
        mean_weight=_mean_weight(settings, target),
        share_seconds=ranks.world.share_seconds,
        sharing=(ranks.world.rank, ranks.size),
        texts=proposer if isinstance(proposer, Suffix) else None,
    )
    return engine, made.pending


def _state(settings: Settings) -> DecodeState:
    layout, length = settings.layout, settings.max_length
    return DecodeState.allocate(
        batch=layout.batch,
        max_drafts=layout.max_drafts,
        max_length=length,
        pages_per_row=layout.pages_per_row(length),
        vocab_size=layout.target.vocab_size,
        device=settings.device,
        keep_draft_probs=layout.keep_draft_probs,
        prediction_tokens=layout.prediction_tokens,
    )


def _ring(settings: Settings, ops: Ops, state: DecodeState, ranks: Ranks) -> ResultRing:
    layout, num_top = settings.layout, state.top_ids.shape[2]
    watch = ranks.world if ranks.size > 1 else None
    pinned = ops.name == "triton"
    return ResultRing(layout.batch, layout.max_drafts, num_top, settings.device, pinned=pinned, watch=watch)


def _step_shapes(settings: Settings, state: DecodeState, proposer: Proposer | None, *, static: bool) -> StepShapes:
    layout, row_tokens = settings.layout, state.tokens.shape[1]
    tiling, verification = settings.decode_tiling, settings.verification
    more = verification, reads_back_of(proposer)
    return StepShapes(layout.batch, row_tokens, layout.max_drafts, tiling, static, *more)


def _pass_sizes(settings: Settings, made: _Models, modules: StepModules) -> PassSizes:
    """Returns the sizes of prefill passes.

    One pass may process the last tokens of several prompts if every prompt gets the same bits as alone.

    Args:
        settings: settings of the generator.
        made: the models.
        modules: models and work areas of a decode step.
    """
    chunks = settings.layout.chunks_for(settings.max_length)
    if modules.ops.name == "cpu":  # several sizes are for blocked weights; a shared pass takes as long as its parts
        same_bits, draft_chunks, shared = chunks if len(chunks) > 1 else None, None, False
    else:
        same_bits, draft_chunks = _same_bits_of_both(chunks, made, settings.device)
        shared = _only_in_pages(modules, made.models) and same_bits is not None
    return PassSizes(
        settings.layout.batch,
        settings.exact,
        chunks,
        same_bits,
        draft_chunks,
        batch_tokens=settings.layout.pass_tokens(settings.max_length) if shared else 0,
        budget=settings.config.prefill_budget,
        all_captured=any(each.format == "codes" for each in (*made.matrices, *made.of_draft_model)),
    )


def _runner(settings: Settings, *, only_ours: bool) -> Runner:
    """Makes the runner that launches steps, or captures and replays them as CUDA graphs.

    Args:
        settings: settings of the generator.
        only_ours: True if a step contains no code of other packages. Then fewer warm-up runs are needed before a
            capture.
    """
    if not settings.graphs:
        return EagerRunner(settings.device)
    if only_ours:
        return GraphRunner(settings.device, nvtx=settings.config.nvtx, warm_ups=1, warming=brief)
    return GraphRunner(settings.device, nvtx=settings.config.nvtx)


def _modules(
    layout: Layout,
    ops: Ops,
    target: CausalModel,
    proposer: Proposer | None,
    ring: ResultRing,
    mark: Callable[[str], AbstractContextManager[object]],
    work: Any,
    device: torch.device,
) -> StepModules:
    """Returns the models and work areas of a decode step. Allocates the work areas, except `work`.

    Args:
        layout: sizes and dtypes.
        ops: implementation of the kernels.
        target: the target model.
        proposer: makes the draft tokens. None: decoding is plain.
        ring: buffers to which steps write their results.
        mark: function that returns a context which names a pass in a profiler.
        work: result of `ops.sampled_work`.
        device: device of the work areas.
    """
    rows, drafts, width, vocab = layout.batch, layout.max_drafts, layout.target.hidden_size, layout.target.vocab_size
    return StepModules(
        target,
        proposer,
        ops,
        ring.outbox,
        scratch=ops.commit_scratch(rows, drafts, device),
        mark=mark,
        work=work,
        record_work=ops.record_work(rows, drafts, vocab, device),
        features=feature_buffer(proposer, rows, drafts, width, layout.target_dtype, device),
        prompt_ends=PromptEnd.zeros(
            rows,
            width,
            len(features_of(proposer)),
            layout.target_dtype,
            device,
            LONG_PROMPT_CUDA if device.type == "cuda" else LONG_PROMPT,
        ),
    )


def _only_in_pages(modules: StepModules, models: Sequence[CausalModel]) -> bool:
    """True if a prefill pass writes only to the KV cache pages of its sequence. Then prompts may share a pass."""
    proposer = modules.proposer
    paged = proposer is None or not proposer.max_length or kept_in_pages(proposer)
    return paged and modules.features is None and not takes_features(proposer) and not any(map(is_recurrent, models))


class _Models:
    """Makes target and drafter, each with its cache, on the current stream.

    Args:
        settings: settings of the generator.
        ops: the kernels. With compile=True prefill and decode passes run code of `torch.compile` instead.
        ranks: ranks that share the models.
        exchange: collective operations between them. None: this process is alone.
        mark, work: arguments of `DraftModel`.

    Attributes:
        models: the models in the order in which they are made: the target, then the draft model if there is one.
        pending: weights of the models and of a head that are allocated, but not read yet.
        matrices: weight matrices that prefill passes of the target and of a head read.
        of_draft_model: weight matrices that prefill passes of a draft model read.
    """

    def __init__(
        self,
        settings: Settings,
        ops: Ops,
        ranks: Ranks,
        exchange: Exchange | None,
        mark: Callable[[str], AbstractContextManager[object]],
        work: Any,
    ) -> None:
        layout, length = settings.layout, settings.max_length
        self._settings, self._ops, self._ranks, self._exchange = settings, ops, ranks, exchange
        self._mark, self._work, self._config = mark, work, settings.config
        self._inside = CompiledOps(ops) if self._config.compile else ops
        self._sizes: dict[str, Any] = {
            "max_positions": layout.pages_per_row(length) * layout.page_size,
            "batch": layout.batch,
            "max_queries": layout.max_queries,
        }
        self.models: list[CausalModel] = []
        self.pending: list[Pending] = []
        self.matrices: list[Weight] = []
        self.of_draft_model: list[Weight] = []

    def model(self, checkpoint: Checkpoint, dtype: torch.dtype) -> CausalModel:
        """Makes the model of a checkpoint, and allocates its KV cache.

        Weights are added to `pending`. Those of a hosted model, which runs code of another package, are loaded at once.
        """
        made = self._hosted(checkpoint, dtype) if _hosted(checkpoint) else self._native(checkpoint, dtype)
        self.models.append(made)
        return made

    def drafter(
        self, draft: Checkpoint | HeadCheckpoint | None, scoring: CausalModel, shared_vocab: SharedVocab
    ) -> ContinuesDrafts | None:
        """Makes the proposer that drafts with a draft model or a head. None: there is neither.

        Args:
            draft: checkpoint of the draft model or head. None: there is neither.
            scoring: the target model.
            shared_vocab: token ids that draft and target share.
        """
        if draft is None:
            return None
        layout = self._settings.layout
        if not isinstance(draft, HeadCheckpoint):
            model = self.model(draft, layout.draft_dtype)
            vocab_map = _vocab_map(shared_vocab, self._settings.device)
            size, length = shared_vocab.size, draft.spec.max_length
            more = (model, self._ops, size, length, self._mark, self._work, vocab_map)
            if draft.mask_id is None:
                return DraftModel(*more)
            return ParallelDraft(*more, mask_id=draft.mask_id, max_drafts=layout.max_drafts)
        assert isinstance(scoring, Decoder | HostedModel), "checked with the head"
        made, weights = build_head(
            draft,
            scoring,
            self._cache(draft.spec.decoder, layout.draft_dtype, layout.cache_dtypes[1]),
            dtype=layout.draft_dtype,
            ops=self._inside,
            sizes=self._sizes,
            length=self._settings.max_length,
            progress=self._config.bars,
            mark=self._mark,
            work=self._work,
        )
        self.pending.append(weights)
        self.matrices.extend(_matrices(weights.weights))
        return made

    def _hosted(self, checkpoint: Checkpoint, dtype: torch.dtype) -> HostedModel:
        settings, layout, spec = self._settings, self._settings.layout, checkpoint.spec
        assert isinstance(spec, HostedInfo)
        pages: dict[str, Any] = {"num_pages": layout.num_pages(settings.max_length), "page_size": layout.page_size}
        exchange = None if spec.cut is None else self._exchange
        where: dict[str, Any] = {"dtype": dtype, "device": settings.device}
        model = HostedModel(spec, self._ops, **where, exchange=exchange, **pages, **self._sizes)
        load_hosted(checkpoint, model, **where, release=self._config.release_source, progress=self._config.bars)
        if exchange is not None:
            self._ranks.world.wait_for_all()
        admit(model, checkpoint.name, settings.decode_tiling, self._sizes["max_queries"])
        self.pending.append(HostedWeights(checkpoint, model, **where))
        return model

    def _native(self, checkpoint: Checkpoint, dtype: torch.dtype) -> Decoder:
        spec, drafts = checkpoint.native.for_length(self._settings.max_length), checkpoint.role == "draft"
        allocated = allocate_weights(
            checkpoint,
            dtype=dtype,
            device=self._settings.device,
            progress=self._config.bars,
            release_source=self._config.release_source,
            ops=self._inside,
        )
        self.pending.append(allocated)
        (self.of_draft_model if drafts else self.matrices).extend(_matrices(allocated.weights))
        cache = self._cache(spec, dtype, self._settings.layout.cache_dtypes[drafts], checkpoint.cache_scales)
        own = (spec, allocated.weights, cache, self._inside)
        sliced = checkpoint.sliced
        if sliced is not None and sliced.share.parts > 1 and self._exchange is not None:
            return ParallelDecoder(*own, sliced=sliced, exchange=self._exchange, **self._sizes)
        return (CompiledDecoder if self._config.compile else Decoder)(*own, **self._sizes)

    def _cache(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        of_pages: torch.dtype,
        found: Mapping[int, CacheScales] | None = None,
    ) -> PagedKVCache:
        """Allocates the KV cache and the recurrent states of a model.

        Args:
            spec: spec of the model.
            dtype: dtype of recurrent states.
            of_pages: dtype of the KV cache pages.
            found: layer -> scales of K and V, from the checkpoint. Used only for fp8 pages. None: there are no scales.
        """
        layout, length = self._settings.layout, self._settings.max_length
        sizes = layout.num_pages(length), layout.page_size
        heads = [(kv_heads, dim) for _, kv_heads, dim in spec.attention_shapes]
        rows, where = (layout.batch, layout.max_drafts), dict[str, Any](dtype=dtype, device=self._settings.device)
        kept = layout.kept_states if self._config.prefix_cache else 0
        states = StateCache.allocate(spec.state_rules, *rows, **where, kept=kept) if spec.state_rules else None
        scales = scales_of_layers(found or {}, spec.caching) if of_pages == FP8 else ()
        more = {**where, "dtype": of_pages, "states": states, "scales": scales}
        return PagedKVCache.for_heads(heads, *sizes, **more)


def _vocab_map(shared: SharedVocab, device: torch.device) -> VocabMap | None:
    """Returns the tables that map draft ids to target ids and back. None: both models have the same tokenizer."""
    if shared.target_ids is None or shared.shown is None:
        return None
    return VocabMap.of(shared.target_ids.to(device), shared.size, shared.shown.to(device))


def _prefix_cache(
    settings: Settings,
    pages: PageTable,
    grid_unit: int,
    models: Sequence[CausalModel],
    proposer: Proposer | None,
    salt: tuple[str | None, ...],
) -> tuple[PrefixCache | None, PrefixStates | None]:
    """Makes the prefix cache, and the store of recurrent states after prefixes.

    The cache is None if the user turned it off, or if the proposer stores data of a sequence outside of its KV cache
    pages. The store of states is None if there is no cache, or if no model has recurrent states.

    Args:
        settings: settings of the generator.
        pages: the page table.
        grid_unit: prefill passes begin at multiples of this number of positions.
        models: the target, and the draft model if there is one.
        proposer: makes the draft tokens. None: decoding is plain.
        salt: names of target and draft, see `PrefixCache`.
    """
    if not settings.config.prefix_cache or (takes_features(proposer) and not kept_in_pages(proposer)):
        return None, None
    of_target, of_draft = (*map(states_of, models), None)[:2]
    recurrent = of_target is not None or of_draft is not None
    unit = math.lcm(pages.page_size, grid_unit, DELTA_CHUNK if recurrent else 1)
    ahead = reads_ahead(proposer)
    if not recurrent:
        return PrefixCache(pages, unit, ahead, salt), None
    states = PrefixStates(of_target, of_draft, unit)
    return PrefixCache(pages, unit, ahead, salt, on_drop=states.forget), states


def _hosted(checkpoint: Checkpoint | HeadCheckpoint | None) -> bool:
    return isinstance(checkpoint, Checkpoint) and isinstance(checkpoint.spec, HostedInfo)


def _same_bits_of_both(
    chunks: tuple[int, ...], made: _Models, device: torch.device
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Returns `PassSizes.same_bits` and `PassSizes.draft_chunks` for target and draft model.

    Args:
        chunks: numbers of tokens that a prefill pass may have.
        made: the models.
        device: device of the models.
    """
    of_target = _same_bits(chunks, made.models, made.matrices, device)
    of_draft = _same_bits(chunks, made.models, made.of_draft_model, device)
    if of_target is None or of_draft is None:
        return None, None
    # the smallest passes of a quantised draft have other bits; the target still uses its own smaller passes
    return of_target, of_draft if of_draft[0] > of_target[0] else None


def _same_bits(
    chunks: tuple[int, ...], models: Iterable[CausalModel], matrices: Iterable[Weight], device: torch.device
) -> tuple[int, ...] | None:
    """Returns the sizes of prefill passes with which the KV cache gets the same bits. None: no such sizes are known.

    A size is a number of tokens. The kernel for packed weights sums in the same order for any number of tokens. In
    cuBLAS and other libraries the order may depend on the number of tokens. The order of sums over several GPUs may
    depend on it, too.

    Args:
        chunks: numbers of tokens that a prefill pass may have.
        models: target and draft model.
        matrices: weight matrices that the passes read.
        device: device of the models.
    """
    formats = {matrix.format for matrix in matrices}
    if not all(type(model) is Decoder for model in models) or "rows" in formats:
        return None
    least = generation_of(device).same_bits_from
    least = max(least, _SAME_BITS_CODES) if "codes" in formats else least
    return tuple(size for size in chunks if size >= least) or None


def _matrices(weights: DecoderWeights | HeadWeights) -> Iterator[Weight]:
    """Yields the weight matrices that prefill passes read: matrices of the layers, and additional ones of a head.

    Matrices whose kernel uses the same tiles for any number of tokens are left out.
    """
    decoder = weights.decoder if isinstance(weights, HeadWeights) else weights
    others = weights.others.values() if isinstance(weights, HeadWeights) else ()
    parts = [part for layer in decoder.layers for part in (layer, layer.state, layer.experts) if part is not None]
    held = [getattr(part, each.name) for part in parts for each in fields(part)]
    # leave out matrices whose kernel uses tiles for any number of tokens: those with few rows, and routers that are
    # joined with a shared expert's gate
    by_tiles = {id(layer.experts.router) for layer in decoder.layers if layer.experts and layer.experts.joined}
    for each in (*held, *others):
        if isinstance(each, Weight) and each.shape[0] >= PACKED_ROWS and id(each) not in by_tiles:
            yield each


def _mean_weight(settings: Settings, target: Checkpoint) -> float | None:
    """Returns the mean number of elements of the target's matrices, from which the number of CPU threads is chosen.

    None: torch's number of threads is not changed.
    """
    if settings.device.type != "cpu" or settings.config.compile or target.ranks > 1:
        return None
    dtype = settings.layout.target_dtype
    return target.spec.weight_bytes(dtype) / dtype.itemsize / (4 * target.spec.num_layers + 1)
