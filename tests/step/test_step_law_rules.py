"""The law of whole decodes through the step under every rule of verification and every proposer, by enumeration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest
import torch
from torch import Tensor

from fastspec.kernels.ops import TORCH_OPS, Ops
from fastspec.proposers.combined import LookupThenModel
from fastspec.proposers.draft_model import DraftModel
from fastspec.proposers.interface import Proposer
from fastspec.proposers.ngram import NGram
from fastspec.proposers.suffix import Suffix
from fastspec.sampling import verify
from fastspec.sampling.distribution import TARGET
from fastspec.sampling.rules import BLOCK, COUPLED, REJECTION
from fastspec.shapes import FULL, StepShape
from fastspec.state import RUNNING, DecodeState
from fastspec.step import StepModules, step
from tests.helpers.races import joint
from tests.helpers.tables import WHOLE, ScriptedDraws, TableModel, all_outcomes, random_table, table_state
from tests.step.test_step_law import Context, Laws, distance, target_law

VOCAB = 3
PROMPT = (1, 2, 1)  # its last token stood before, so lookup finds something at once
TOLERANCE = 1e-12  # as in test_step_law


class BlockDraws(ScriptedDraws):
    """The script's `accepted` is the largest place whose coin falls: coins before it may fall or not."""

    def accept(self, probability: Tensor, positions: Tensor) -> Tensor:
        places = torch.arange(probability.shape[1])
        falls = places == self.accepted[:, None] - 1
        taken = torch.where(falls, probability, 1 - probability)
        matter = (places >= self.accepted[:, None] - 1) & (places < self.count)
        self.weight *= torch.where(matter, taken, 1.0).prod(dim=1)
        return places < self.accepted[:, None]

    def sample(self, probs: Tensor, positions: Tensor, purpose: int) -> Tensor:
        impossible = self.weight == 0  # such an outcome may leave no law to pick from
        token = super().sample(probs, positions, purpose)
        self.weight[impossible] = 0.0
        return token


class CoupledDraws:
    """Scripted picks of draft and target with the same numbers, weighed by their joint law.

    Args:
        drafts: int64 [B, k] the draft's picks.
        picks: int64 [B, k+1] the target's.
        count: how many drafts count.
    """

    def __init__(self, drafts: Tensor, picks: Tensor, count: int) -> None:
        self.drafts, self.picks, self.count = drafts, picks, count
        self.laws: list[Tensor] = []
        self.weight = torch.ones(len(picks), dtype=torch.float64)

    def accept(self, probability: Tensor, positions: Tensor) -> Tensor:
        raise AssertionError("coupled verification tosses no coin")

    def sample(self, probs: Tensor, positions: Tensor, purpose: int) -> Tensor:
        assert purpose == TARGET, "coupled drafts are picked with the target's numbers"
        if probs.dim() == 2:
            self.laws.append(probs)
            return self.drafts[:, len(self.laws) - 1]
        for row in range(len(self.picks)):
            for j in range(self.picks.shape[1]):
                p, y = probs[row, j].tolist(), int(self.picks[row, j])
                drawn = j < len(self.laws)
                q = self.laws[j][row].tolist() if drawn else None
                chance = p[y] / sum(p) if q is None else paired(tuple(q), tuple(p), int(self.drafts[row, j]), y)
                self.weight[row] *= chance
        return self.picks


@cache
def paired(q: tuple[float, ...], p: tuple[float, ...], x: int, y: int) -> float:
    q = (*q, *[0.0] * (len(p) - len(q)))
    return float(joint(tuple(map(Fraction, q)), tuple(map(Fraction, p)))[x][y])


def outcomes_of(mode: str, k: int, count: int, drawn: bool) -> Callable[[int], ScriptedDraws | CoupledDraws]:
    """(repeats) -> draws of every outcome of a step, once for each of so many contexts."""
    if mode == COUPLED:
        drafting = k if drawn else 0
        grid = torch.cartesian_prod(*[torch.arange(VOCAB)] * (drafting + k + 1)).view(-1, drafting + k + 1)
        return lambda repeats: CoupledDraws(
            grid[:, :drafting].repeat(repeats, 1), grid[:, drafting:].repeat(repeats, 1), count
        )
    drafts, accepted, last = all_outcomes(VOCAB, k)
    if not drawn:
        kept = (drafts == 0).all(dim=1)  # nothing is drawn to draft: one script of drafts stands for all
        drafts, accepted, last = drafts[kept], accepted[kept], last[kept]
    kept = accepted <= count
    drafts, accepted, last = drafts[kept], accepted[kept], last[kept]
    kind = BlockDraws if mode == BLOCK else ScriptedDraws
    return lambda repeats: kind(drafts.repeat(repeats, 1), accepted.repeat(repeats), last.repeat(repeats), count)


def one_step(
    mode: str, modules: StepModules, contexts: list[Context], k: int, count: int, limit: int, stops: list[int]
) -> list[Laws]:
    proposer = modules.proposer
    assert proposer is not None
    draws = outcomes_of(mode, k, count, not proposer.deterministic)(len(contexts))
    outcomes = len(draws.weight) // len(contexts)
    rows = torch.tensor(contexts).repeat_interleave(outcomes, 0)
    state = table_state(rows, k=k, vocab=VOCAB, limit=limit, stop_ids=stops)
    if mode == COUPLED or proposer.deterministic:
        state.draft_probs.fill_(float("nan"))  # nobody may look
    step(modules, state, StepShape(k, FULL, 1, WHOLE, verification=mode), draws)
    laws: list[Laws] = [{} for _ in contexts]
    for row, weight in enumerate(draws.weight.tolist()):
        if weight:
            key = (tuple(state.tokens[row, : state.lengths[row]].tolist()), int(state.finish[row]))
            law = laws[row // outcomes]
            law[key] = law.get(key, 0.0) + weight
    return laws


def decoded(
    mode: str,
    target: Tensor,
    proposer: Proposer,
    counted: Callable[[Context], int],
    *,
    k: int,
    limit: int,
    stop_ids: list[int],
) -> Laws:
    """Law of finished rows, step after step; `counted` says how many drafts of a context count."""
    modules = StepModules(TableModel(target), proposer)
    alive: dict[Context, float] = {PROMPT: 1.0}
    finished: Laws = {}
    while alive:
        length = min(map(len, alive))
        kinds = {counted(context) for context in alive if len(context) == length}
        for count in kinds:
            group = [context for context in alive if len(context) == length and counted(context) == count]
            for context, law in zip(group, one_step(mode, modules, group, k, count, limit, stop_ids), strict=True):
                mass = alive.pop(context)
                for (tokens, finish), weight in law.items():
                    kept = alive if finish == RUNNING else finished
                    key = tokens if finish == RUNNING else (tokens, finish)
                    kept[key] = kept.get(key, 0.0) + mass * weight  # type: ignore[index, arg-type, call-overload]
    return finished


def model(seed: int, positions: int, context: int, shared: int = VOCAB) -> DraftModel:
    table = random_table(seed + 1000, positions, VOCAB, zeros=0.0 if shared < VOCAB else 0.3)
    return DraftModel(TableModel(table), TORCH_OPS, shared, context)


def prompt_law(target: Tensor, limit: int, stop_ids: list[int]) -> Laws:
    return target_law(target, limit=limit, stop_ids=stop_ids, temperature=1.0, prompt=PROMPT)


def compare(
    mode: str,
    k: int,
    *,
    new: int = 3,
    stop_ids: tuple[int, ...] = (2,),
    context: int = 1000,
    shared: int = VOCAB,
    seed: int = 0,
) -> float:
    limit = len(PROMPT) + new
    target = random_table(seed + 7 * k + new, limit + k, VOCAB)
    drafting = model(seed + 3, limit + k, context, shared)
    law = decoded(
        mode,
        target,
        drafting,
        lambda tokens: max(0, min(k, context + 1 - len(tokens))),
        k=k,
        limit=limit,
        stop_ids=list(stop_ids),
    )
    return distance(law, prompt_law(target, limit, list(stop_ids)))


@pytest.mark.parametrize("mode", [BLOCK, COUPLED])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_decodes_follow_the_targets_law(mode: str, k: int) -> None:
    for seed in range(1 if k == 3 else 4):
        assert compare(mode, k, new=2 if k == 3 else 3, seed=seed) < TOLERANCE


@pytest.mark.parametrize("mode", [BLOCK, COUPLED])
@pytest.mark.parametrize("shared", [1, 2])
def test_target_only_ids_stay_reachable(mode: str, shared: int) -> None:
    assert compare(mode, 2, shared=shared) < TOLERANCE


@pytest.mark.parametrize("mode", [BLOCK, COUPLED])
@pytest.mark.parametrize("context", [2, 3, 4, 5])
def test_rows_that_outgrow_the_drafts_context(mode: str, context: int) -> None:
    assert compare(mode, 2, context=context) < TOLERANCE


def found(tokens: Context) -> bool:
    return tokens[-1] in tokens[:-1]


@pytest.mark.parametrize("mode", [REJECTION, BLOCK, COUPLED])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_lookup_follows_the_targets_law(mode: str, k: int) -> None:
    limit = len(PROMPT) + 3
    target = random_table(k, limit + k, VOCAB)
    law = decoded(mode, target, NGram(), lambda tokens: k if found(tokens) else 0, k=k, limit=limit, stop_ids=[2])
    assert distance(law, prompt_law(target, limit, [2])) < TOLERANCE


class OfTexts(Suffix):
    """Suffix with a prediction, a corpus and an earlier answer for every row."""

    def __init__(self, prediction: tuple[int, ...], corpus: tuple[int, ...], answer: tuple[int, ...]) -> None:
        super().__init__(1, 4)
        texts = Suffix(1, 4, prediction_tokens=8, corpus_tokens=8, remember="all", remembered_tokens=8)
        bound = texts.on(torch.device("cpu"), Ops())
        bound.add_corpus("one", corpus)
        bound.remember_answer((), answer, None)
        self.bound, self.prediction = bound, torch.tensor(prediction)

    def look_up(self, state: DecodeState, k: int) -> tuple[Tensor, Tensor]:
        rows = torch.full_like(state.lengths, len(self.prediction))
        known = {"prediction": self.prediction.expand(state.batch, -1), "prediction_lengths": rows}
        known |= {"prompt_lengths": torch.full_like(rows, len(PROMPT)), "owners": torch.zeros_like(rows)}
        return self.bound.look_up(replace(state, **known), k)

    def counted(self, tokens: Context, k: int) -> int:
        state = table_state(torch.tensor([tokens]), k=k, vocab=VOCAB, limit=len(tokens) + k, stop_ids=[])
        return int(self.look_up(state, k)[1])


@pytest.mark.parametrize("mode", [REJECTION, BLOCK, COUPLED])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(
    "given", [((), (), ()), ((1, 0, 1), (), ()), ((), (0, 1, 2, 1), (1, 1, 0)), ((2, 0), (0, 1), (1, 0))]
)
def test_lookup_in_texts_follows_the_targets_law(mode: str, k: int, given: tuple[tuple[int, ...], ...]) -> None:
    limit = len(PROMPT) + (2 if k == 3 else 3)
    target = random_table(k + 20, limit + k, VOCAB)
    lookup = OfTexts(*given)
    law = decoded(mode, target, lookup, lambda tokens: lookup.counted(tokens, k), k=k, limit=limit, stop_ids=[2])
    assert distance(law, prompt_law(target, limit, [2])) < TOLERANCE


def test_the_enumeration_catches_drafts_that_are_always_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = ScriptedDraws.accept
    monkeypatch.setattr(ScriptedDraws, "accept", lambda self, p, positions: accept(self, p.clamp(min=0.9), positions))
    with pytest.raises(AssertionError):
        test_lookup_in_texts_follows_the_targets_law(REJECTION, 2, ((1, 0, 1), (), ()))


class ShortLookup(NGram):
    """Never finds more than one token, so that the model must go on where lookup ends."""

    def guess(self, tokens: Tensor, lengths: Tensor, k: int) -> tuple[Tensor, Tensor]:
        drafts, counts = super().guess(tokens, lengths, k)
        return drafts, counts.clamp(max=1)


@pytest.mark.parametrize("lookup", [NGram, ShortLookup])
@pytest.mark.parametrize("mode", [REJECTION, BLOCK])
@pytest.mark.parametrize("context", [1000, 4])
def test_lookup_before_a_model_follows_the_targets_law(mode: str, lookup: type[NGram], context: int) -> None:
    k, limit = 2, len(PROMPT) + 3
    target = random_table(4, limit + k, VOCAB)
    given = 1 if lookup is ShortLookup else k

    def counted(tokens: Context) -> int:
        return max(max(0, min(k, context + 1 - len(tokens))), given if found(tokens) else 0)

    combined = LookupThenModel(lookup(), model(5, limit + k, context))
    law = decoded(mode, target, combined, counted, k=k, limit=limit, stop_ids=[2])
    assert distance(law, prompt_law(target, limit, [2])) < TOLERANCE


def test_the_enumeration_catches_a_block_with_the_residual_unscaled(monkeypatch: pytest.MonkeyPatch) -> None:
    original = verify._ended
    monkeypatch.setattr(verify, "_ended", lambda p, scaled, *rest: original(p, p, *rest))
    assert compare(BLOCK, 2, seed=5) > 1e-3  # far above rounding


def test_the_enumeration_catches_a_law_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of lookup judged by the law of the model: what forgetting to overwrite it does."""
    from fastspec.proposers import draft_model

    def forgets(state: object, shape: object, token: Tensor, taken: Tensor, j: int) -> None:
        column = state.draft_tokens[:, j]  # type: ignore[attr-defined]
        column.copy_(torch.where(taken, token, column))

    monkeypatch.setattr(draft_model, "overwrite_draft", forgets)
    with pytest.raises(AssertionError):
        test_lookup_before_a_model_follows_the_targets_law(REJECTION, NGram, 1000)


def test_the_enumeration_catches_coupled_drafts_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(p: Tensor, drafts: Tensor, counts: Tensor, positions: Tensor, draws: verify.Draws, purpose: int) -> object:
        picks = draws.sample(p, positions, purpose)
        return counts.clamp(max=drafts.shape[1]), torch.cat((drafts, picks[:, -1:]), dim=1)

    monkeypatch.setattr(verify, "coupled", kept)
    assert compare(COUPLED, 2) > 1e-3
