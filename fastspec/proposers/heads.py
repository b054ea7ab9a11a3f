"""Proposers with EAGLE-3 and P-EAGLE heads. `build_head` makes the proposer of every kind of learned head."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from fastspec.kernels.ops import Ops
from fastspec.kv_cache.cache import PagedKVCache
from fastspec.models.assistant import Assistant, order_of
from fastspec.models.decoder import Decoder
from fastspec.models.heads.assistant_spec import AssistantSpec
from fastspec.models.heads.checkpoint import HeadCheckpoint
from fastspec.models.heads.dflash2_spec import DFlash2Spec
from fastspec.models.heads.dflash_spec import DFlashSpec
from fastspec.models.heads.dspark_spec import DSparkSpec
from fastspec.models.heads.eagle3_spec import Eagle3Spec, PEagleSpec
from fastspec.models.heads.mtp_spec import MtpSpec
from fastspec.models.heads.passes import DFlash, DFlash2, DSpark, Eagle3, Lender, Mtp, PEagle, mask_embedding
from fastspec.models.heads.weights import PendingHead, allocate_head
from fastspec.proposers.chain import AssistantDrafts, ChainDrafts
from fastspec.proposers.combined import ContinuesDrafts
from fastspec.proposers.dflash import DFlash2Drafts, DFlashDrafts, DSparkDrafts
from fastspec.proposers.mtp import MtpDrafts, MtpLayersDrafts
from fastspec.sampling.verify import Draws
from fastspec.shapes import NO_LIMIT, ForwardBatch, StepShape
from fastspec.state import DecodeState


class Eagle3Drafts(ChainDrafts):
    """Drafts with an EAGLE-3 head; see `ChainDrafts`."""

    article = "an"


class PEagleDrafts(ChainDrafts):
    """Drafts with a P-EAGLE head, which makes all draft tokens of a step in one pass over mask tokens.

    It reads the target's hidden states in the same way as an EAGLE-3 head, see `ChainDrafts`. The head never reads
    draft tokens of the same step. So the distribution of a draft token depends only on the text. With penalties it also
    depends on the draft tokens before it.

    Args:
        model: the head.
        ops, vocab_map, mark, work, sample: see `ChainDrafts`.
    """

    def __init__(self, model: PEagle, ops: Ops, *options: Any, sample: tuple[int, ...] = ()) -> None:
        super().__init__(model, ops, *options, sample=sample)
        self._head = model

    @override
    def take_features(self, state: DecodeState, shape: StepShape, features: Tensor, rows: ForwardBatch) -> Tensor:
        g = self.model.condense(features, rows.tiling)
        self.model.absorb(g, rows)
        return g

    def propose(
        self,
        state: DecodeState,
        shape: StepShape,
        draws: Draws,
        lookup: tuple[Tensor, Tensor] | None = None,
        *,
        features: Tensor,
    ) -> None:
        """Makes k draft tokens for each running sequence of at least two tokens; see `Proposer.propose`.

        Args:
            state, shape, draws: see `Proposer.propose`.
            lookup: see `DraftModel.propose`.
            features: [B, hidden], the head's input g (see `ChainHead.condense`) at each sequence's newest position.
        """
        known = self._begin(state, shape.num_drafts)
        with self._mark("block"):
            x = self._head.block(features[:, None], self._block(state, shape, known))
        self._draw_block(state, shape, draws, x, lookup)

    def _block(self, state: DecodeState, shape: StepShape, known: Tensor) -> ForwardBatch:
        """Returns the input of the head's pass: positions lengths - 2 .. lengths + k - 3 of each sequence.

        Its ids are the tokens after these positions: the sequence's last token, then mask tokens.

        Args:
            state, shape: see `propose`.
            known: bool [B], True for running sequences that draft.
        """
        k = shape.num_drafts
        state.draft_tokens[:, :k] = self._head.head.mask_id
        ids, positions, _ = self.ops.feed_rows(
            state.tokens,
            state.lengths,
            state.finish,
            state.draft_tokens,
            first=-1,
            queries=k,
            limit=NO_LIMIT,
            vocab=self._target.vocab_size,
        )
        mask = known[:, None].expand_as(positions).contiguous()
        return shape.forward_batch(ids, (positions - 1).clamp_min(0), mask, state.block_table)


def build_head(
    checkpoint: HeadCheckpoint,
    target: Lender,
    cache: PagedKVCache,
    *,
    dtype: torch.dtype,
    ops: Ops,
    sizes: dict[str, Any],
    length: int,
    progress: bool,
    mark: Callable[[str], AbstractContextManager[object]],
    work: Any,
) -> tuple[ContinuesDrafts, PendingHead]:
    """Makes the proposer of a head. Returns (proposer, weights of the head, which must be read before use).

    Args:
        checkpoint: the head, already checked against its target.
        target: the target. Its matrices are used for those that the head lacks, for example the embedding.
        cache: KV cache of the head's layers.
        dtype: dtype of the head's weights.
        ops: implementation of the kernels.
        sizes: the keyword arguments max_positions, batch and max_queries of `Decoder`.
        length: largest number of tokens of a sequence.
        progress: True to show a progress bar.
        mark, work: see `DraftModel`.
    """
    spec, device = checkpoint.spec.for_length(length), cache.keys.device
    pending = allocate_head(checkpoint, target.weights, dtype=dtype, device=device, ops=ops, progress=progress)
    vocab_map = None if checkpoint.vocab_map is None else checkpoint.vocab_map.to(device)
    made, more = (pending.weights, cache, ops), (ops, vocab_map, mark, work)
    if isinstance(spec, AssistantSpec):
        assert isinstance(target, Decoder), "checked when it was resolved"
        order = order_of(checkpoint.directory, spec)
        order = None if order is None else order.to(device)
        assistant = Assistant(spec, pending.weights, target, ops, order=order, **sizes)
        return AssistantDrafts(assistant, *more), pending
    if isinstance(spec, DFlashSpec):
        mask = None if spec.mask_file is None else mask_embedding(spec.mask_file, spec.hidden_size, dtype, device)
        sizes = {**sizes, "mask": mask}
        if isinstance(spec, DSparkSpec):
            return DSparkDrafts(DSpark(spec, *made, **sizes).borrowing(target), *more), pending
        if isinstance(spec, DFlash2Spec):
            return DFlash2Drafts(DFlash2(spec, *made, **sizes).borrowing(target), *more), pending
        return DFlashDrafts(DFlash(spec, *made, **sizes).borrowing(target), *more), pending
    if isinstance(spec, MtpSpec):
        sizes = {**sizes, "max_queries": sizes["max_queries"] + spec.computed_again}
        layers = Mtp(spec, *made, **sizes).borrowing(target)
        if spec.num_layers > 1:
            return MtpLayersDrafts(layers, *more), pending
        return MtpDrafts(layers, *more, sample=checkpoint.sample), pending
    if isinstance(spec, PEagleSpec):
        parallel = PEagle(spec, *made, **sizes).borrowing(target)
        return PEagleDrafts(parallel, *more, sample=checkpoint.sample), pending
    if not isinstance(spec, Eagle3Spec):
        raise AssertionError(f"{spec.found} was resolved without a proposer")
    return Eagle3Drafts(Eagle3(spec, *made, **sizes).borrowing(target), *more, sample=checkpoint.sample), pending
