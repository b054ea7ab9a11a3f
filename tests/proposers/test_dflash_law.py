"""The law of decodes with a block of drafts, by enumeration: each place's law depends on the context alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec.kernels.ops import TORCH_OPS
from fastspec.proposers.combined import LookupThenModel
from fastspec.proposers.dflash import DFlash2Drafts, DFlashDrafts, DSparkDrafts
from fastspec.proposers.ngram import NGram
from fastspec.sampling.rules import BLOCK, COUPLED, REJECTION
from fastspec.shapes import ForwardBatch, Tiling
from tests.helpers.tables import random_table
from tests.step.test_step_law import distance
from tests.step.test_step_law_rules import PROMPT, TOLERANCE, VOCAB, decoded, prompt_law

MASK = 2


class TableHead:
    """A head whose law at each place is a table of (place, last token).

    Args:
        table: float64 [positions, V, V'].
        anchored: as `DFlashSpec.sample_from_anchor`.
    """

    def __init__(self, table: Tensor, anchored: bool) -> None:
        self.table = table
        self.vocab_size = table.shape[-1]
        target = SimpleNamespace(layers=0, vocab_size=VOCAB)
        self.head: Any = SimpleNamespace(mask_id=MASK, rows=lambda k: k + (not anchored), readings=((),), target=target)

    def block(self, rows: ForwardBatch) -> Tensor:
        assert (rows.ids[:, 1:] == MASK).all()
        last = rows.ids[:, :1].expand_as(rows.ids)
        return torch.stack([rows.positions.clamp(max=len(self.table) - 1), last], dim=-1)

    def logits(self, hidden: Tensor, tiling: Tiling) -> Tensor:
        return self.table[hidden[..., 0], hidden[..., 1]]


def law(
    rule: str,
    k: int,
    *,
    ids: list[int] | None = None,
    anchored: bool = False,
    lookup: bool = False,
    kind: type[DFlashDrafts] = DFlashDrafts,
) -> float:
    """How far the law of whole decodes is from the target's."""
    limit, known = len(PROMPT) + (2 if k == 3 else 3), None if ids is None else torch.tensor(ids)
    target = random_table(k, limit + k, VOCAB)
    table = random_table(k + 50, limit + k + 1, VOCAB, zeros=0.0)[..., : len(ids or range(VOCAB))]
    head: Any = TableHead(table, anchored)
    proposer: Any = kind(head, TORCH_OPS, known)
    proposer = LookupThenModel(NGram(), proposer) if lookup else proposer
    found = decoded(rule, target, proposer, lambda _: k, k=k, limit=limit, stop_ids=[2])
    return distance(found, prompt_law(target, limit, [2]))


@pytest.mark.parametrize("rule", [REJECTION, BLOCK, COUPLED])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_decodes_follow_the_targets_law(k: int, rule: str) -> None:
    assert law(rule, k) < TOLERANCE


@pytest.mark.parametrize("rule", [REJECTION, BLOCK, COUPLED])
def test_with_a_vocabulary_of_its_own(rule: str) -> None:
    assert law(rule, 2, ids=[2, 0]) < TOLERANCE


def test_from_the_anchor_and_behind_lookup() -> None:
    assert law(REJECTION, 2, anchored=True) < TOLERANCE
    assert law(BLOCK, 2, lookup=True, ids=[2, 1]) < TOLERANCE


class MarkovTable(TableHead):
    """A head of a DSpark kind: a second table is added, of the token before."""

    def after(self, ids: Tensor, tiling: Tiling) -> Tensor:
        return random_table(9, 1, VOCAB, zeros=0.0)[0, :, : self.vocab_size][ids]


def law_of_a_chain(
    rule: str, k: int, *, kind: type[DSparkDrafts], ids: list[int] | None, lookup: bool = False
) -> float:
    limit, known = len(PROMPT) + (2 if k == 3 else 3), None if ids is None else torch.tensor(ids)
    target = random_table(k, limit + k, VOCAB)
    head: Any = MarkovTable(
        random_table(k + 50, limit + k + 1, VOCAB, zeros=0.0)[..., : len(ids or range(VOCAB))], True
    )
    proposer: Any = kind(head, TORCH_OPS, known)
    proposer = LookupThenModel(NGram(), proposer) if lookup else proposer
    found = decoded(rule, target, proposer, lambda _: k, k=k, limit=limit, stop_ids=[2])
    return distance(found, prompt_law(target, limit, [2]))


@pytest.mark.parametrize("rule", [REJECTION, BLOCK, COUPLED])
@pytest.mark.parametrize(("k", "ids"), [(3, None), (2, [2, 0])])
def test_drafts_of_a_markov_chain_follow_the_targets_law(k: int, ids: list[int] | None, rule: str) -> None:
    assert law_of_a_chain(rule, k, kind=DSparkDrafts, ids=ids) < TOLERANCE


def test_a_markov_chain_goes_on_from_what_lookup_found() -> None:
    assert law_of_a_chain(BLOCK, 2, kind=DSparkDrafts, ids=None, lookup=True) < TOLERANCE


class SelectingTable(TableHead):
    """A head of a DFlash2 kind: two of the ids are scored again, by a table of (token before, id)."""

    candidates = 2

    def projected(self, x: Tensor, tiling: Tiling) -> Tensor:
        return x

    def scored(self, projected: Tensor, before: Tensor, candidates: Tensor) -> Tensor:
        return random_table(9, 1, VOCAB, zeros=0.0)[0][before, candidates][:, None]


@pytest.mark.parametrize("rule", [REJECTION, COUPLED])
def test_drafts_among_candidates_follow_the_targets_law(rule: str) -> None:
    limit = len(PROMPT) + 3
    target, laws = random_table(2, limit + 2, VOCAB), random_table(52, limit + 3, VOCAB, zeros=0.0)
    head = SelectingTable(laws, False)
    drafts: Any = DFlash2Drafts(head, TORCH_OPS)  # type: ignore[arg-type]
    found = decoded(rule, target, drafts, lambda _: 2, k=2, limit=limit, stop_ids=[2])
    assert distance(found, prompt_law(target, limit, [2])) < TOLERANCE


class JudgedWithoutTheChain(DSparkDrafts):
    """Drafts are drawn from the chain, and judged by the laws of a block without it."""

    def _sample(self, state: Any, shape: Any, draws: Any, logits: Tensor, j: int) -> None:
        super()._sample(state, shape, draws, logits, j)
        before = state.tokens.gather(1, state.lengths[:, None] - 1) if j == 0 else state.draft_tokens[:, j - 1 : j]
        state.draft_probs[:, j] = (logits - self._head.after(before, shape.tiling))[:, 0].softmax(-1)


def test_the_enumeration_catches_a_chain_that_is_judged_as_a_block() -> None:
    assert law_of_a_chain(REJECTION, 2, kind=JudgedWithoutTheChain, ids=None) > 1e-3


class OfThePlaceBefore(DFlashDrafts):
    def _sample(self, state: Any, shape: Any, draws: Any, logits: Tensor, j: int) -> None:
        super()._sample(state, shape, draws, logits, j)
        if j:
            state.draft_probs[:, j] = state.draft_probs[:, j - 1]


class Unmapped(DFlashDrafts):
    def _sample(self, state: Any, shape: Any, draws: Any, logits: Tensor, j: int) -> None:
        super()._sample(state, shape, draws, logits, j)
        state.draft_probs[:, j] = state.draft_probs[:, j].flip(-1)


@pytest.mark.parametrize(("kind", "ids"), [(OfThePlaceBefore, None), (Unmapped, [2, 0])])
def test_the_enumeration_catches_laws_that_drafts_were_not_drawn_from(
    kind: type[DFlashDrafts], ids: list[int] | None
) -> None:
    assert law(REJECTION, 2, ids=ids, kind=kind) > 1e-3  # far above rounding
