"""The law of whole decodes under a grammar's masks, by enumeration: the target's masked law, whatever is drafted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastspec.grammar.row import ALL, GrammarStep
from fastspec.kernels.ops import TORCH_OPS
from fastspec.proposers.draft_model import DraftModel
from fastspec.proposers.ngram import NGram
from fastspec.sampling.distribution import PhiloxDraws
from fastspec.sampling.rules import BLOCK, COUPLED, REJECTION
from fastspec.scheduling.admission import allow
from fastspec.shapes import FULL, GRAMMAR_ONLY, GRAMMARS, GREEDY, MIXED_DRAFTS
from fastspec.state import PAUSED, RUNNING, DecodeState
from fastspec.step import StepModules, step
from tests.helpers.tables import ScriptedDraws, TableModel, random_table, shape_of, table_state
from tests.step.test_step_law import Context, Laws, distance
from tests.step.test_step_law_rules import BlockDraws, CoupledDraws

VOCAB, LIMIT, K = 3, 6, 2
PROMPT = (1, 2)
TOLERANCE = 1e-12  # as in test_step_law


def allowed(context: Context) -> set[int]:
    """A grammar: no id three times running, 0 never behind 2, and only 1 at the fourth place."""
    if len(context) == 3:
        return {1}
    return {token for token in range(VOCAB) if context[-2:] != (token, token) and (token, context[-1]) != (0, 2)}


def given(context: Context, count: int) -> list[int]:
    """Drafts that the grammar allows, of which some are bad ones."""
    drafts: list[int] = []
    for place in range(count):
        choices = sorted(allowed((*context, *drafts)))
        drafts.append(choices[(sum(context) + place) % len(choices)])
    return drafts


def bits(tokens: set[int]) -> int:
    return sum(1 << token for token in tokens)


def grammar_step_of(context: Context, drafts: Sequence[int], free: bool) -> GrammarStep:
    masks = [ALL if free else bits(allowed((*context, *drafts[:place]))) for place in range(len(drafts) + 1)]
    return GrammarStep(list(drafts), np.array(masks, dtype=np.int32)[:, None])


def masked_law(target: Tensor, free: bool = False) -> Laws:
    """The definition: token by token from the target's table."""
    alive: dict[Context, float] = {PROMPT: 1.0}
    finished: Laws = {}
    while alive:
        context, mass = alive.popitem()
        logits = target[len(context) - 1, context[-1]]
        may = set(range(VOCAB)) if free else allowed(context)
        probs = logits[sorted(may)].softmax(-1).tolist()
        for token, p in zip(sorted(may), probs, strict=True):
            tokens = (*context, token)
            if len(tokens) == LIMIT:
                finished[tokens, 0] = finished.get((tokens, 0), 0.0) + mass * p
            else:
                alive[tokens] = alive.get(tokens, 0.0) + mass * p
    return finished


def outcomes(rule: str, grammars: str, k: int, count: int, drawn: bool) -> Any:
    """Draws that script every outcome of a step: of the proposer's drafts, of the coins, and of the last pick."""
    ids = torch.arange(VOCAB)
    drafts = [ids if grammars == MIXED_DRAFTS and drawn else ids[:1]] * k
    if rule == COUPLED:
        grid = torch.cartesian_prod(*drafts, *[ids] * (k + 1))
        return CoupledDraws(grid[:, :k], grid[:, k:], k)
    grid = torch.cartesian_prod(*drafts, torch.arange(count + 1), ids)
    kind = BlockDraws if rule == BLOCK else ScriptedDraws
    return kind(grid[:, :k], grid[:, k], grid[:, k + 1], count)


def stepped(state: DecodeState, modules: StepModules, shape: Any, grammar_step: GrammarStep, draws: Any) -> None:
    state.constrained.fill_(True)
    state.finish.fill_(PAUSED)
    state.draft_limits.fill_(0)  # those of a grammar count all the same
    allow(state, dict.fromkeys(range(state.batch), grammar_step), shape.num_drafts)
    step(modules, state, shape, draws)
    assert set(state.finish.tolist()) <= {PAUSED, 2}, "a row waits for the host after each step"


def decoded_law(target: Tensor, proposer: Any, rule: str, grammars: str, sampler: str = FULL, **how: Any) -> Laws:
    """Law of finished rows, step after step, in which each row has from none to K drafts."""
    alive: dict[Context, float] = {PROMPT: 1.0}
    finished: Laws = {}
    drawn = proposer is not None and not proposer.deterministic
    while alive:
        context = min(alive, key=len)
        mass, count = alive.pop(context), sum(context) % (K + 1)
        grammar_step = grammar_step_of(context, given(context, count), how.get("free", False))
        draws = outcomes(rule, grammars, K, count, drawn)
        rows = len(draws.weight)
        state = table_state(torch.tensor([context] * rows), k=K, vocab=VOCAB, limit=LIMIT, stop_ids=[])
        modules = StepModules(TableModel(target), proposer)
        shape = replace(shape_of(K, sampler), verification=rule, grammars=grammars)
        stepped(state, modules, shape, grammar_step, draws)
        for row, weight in enumerate(draws.weight.tolist()):
            tokens = tuple(state.tokens[row, : state.lengths[row]].tolist())
            where = alive if len(tokens) < LIMIT else finished
            key: Any = tokens if where is alive else (tokens, 0)
            if weight:
                where[key] = where.get(key, 0.0) + mass * weight
    return finished


def drafter(name: str, seed: int) -> Any:
    if name == "model":
        return DraftModel(TableModel(random_table(seed + 1000, LIMIT + K, VOCAB)), TORCH_OPS, VOCAB, 1000)
    return NGram()


@pytest.mark.parametrize("grammars", GRAMMARS)
@pytest.mark.parametrize("proposer", ["model", "lookup"])
@pytest.mark.parametrize("rule", [REJECTION, BLOCK, COUPLED])
def test_decodes_follow_the_masked_law(rule: str, proposer: str, grammars: str) -> None:
    target = random_table(3, LIMIT + K, VOCAB, zeros=0.0)
    found = decoded_law(target, drafter(proposer, 3), rule, grammars)
    assert distance(found, masked_law(target)) < TOLERANCE
    assert sum(found.values()) == pytest.approx(1.0)
    assert distance(found, masked_law(target, free=True)) > 0.01, "the grammar forbids something"


def test_a_grammar_of_all_texts_is_none() -> None:
    target = random_table(4, LIMIT + K, VOCAB, zeros=0.0)
    found = decoded_law(target, drafter("model", 4), BLOCK, MIXED_DRAFTS, free=True)
    assert distance(found, masked_law(target, free=True)) < TOLERANCE


@pytest.mark.parametrize("sampler", [GREEDY, FULL])
@pytest.mark.parametrize("grammars", GRAMMARS)
def test_greedy_rows_take_the_best_that_is_allowed(grammars: str, sampler: str) -> None:
    for seed in range(5):
        target = random_table(seed, LIMIT + K, VOCAB, zeros=0.0)
        context = PROMPT
        while len(context) < LIMIT:
            grammar_step = grammar_step_of(context, given(context, (sum(context) + seed) % (K + 1)), False)
            state = table_state(torch.tensor([context]), k=K, vocab=VOCAB, limit=LIMIT, stop_ids=[], temperature=0.0)
            shape = replace(shape_of(K, sampler), grammars=grammars)
            stepped(state, StepModules(TableModel(target), NGram()), shape, grammar_step, PhiloxDraws(state.seeds))
            new = tuple(state.tokens[0, : state.lengths[0]].tolist())
            for place in range(len(context), len(new)):
                logits = target[place - 1, new[place - 1]]
                assert new[place] == max(sorted(allowed(new[:place])), key=lambda token: float(logits[token]))
            context = new


def test_rows_beside_are_as_without_grammars() -> None:
    """A row without a grammar has the bits of a step without masks, and the drafts that its proposer made."""
    target = random_table(7, LIMIT + K, VOCAB, zeros=0.0)
    made = []
    for grammars in (None, MIXED_DRAFTS, GRAMMAR_ONLY):
        state = table_state(torch.tensor([PROMPT] * 2), k=K, vocab=VOCAB, limit=LIMIT, stop_ids=[], temperature=0.0)
        state.draft_limits.fill_(K)
        if grammars:
            state.constrained[1] = True
            allow(state, {1: grammar_step_of(PROMPT, given(PROMPT, 1), False)}, K)
        shape = replace(shape_of(K, GREEDY), grammars=grammars)
        proposer = drafter("model", 7)
        step(StepModules(TableModel(target), proposer), state, shape, PhiloxDraws(state.seeds))
        made.append((state.tokens[0].tolist(), int(state.lengths[0]), int(state.draft_counts[0])))
        assert state.finish[0] == RUNNING
        assert state.finish[1] == (PAUSED if grammars else RUNNING)
    assert made[0] == made[1]
    assert made[2][2] == 0, "nothing was proposed for it"
    assert made[2][0][: made[2][1]] == made[0][0][: made[2][1]]
