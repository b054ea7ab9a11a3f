"""The law of whole decodes where some texts cannot go on: as token by token, whatever was drafted and how far."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec.sampling.rules import BLOCK, REJECTION
from fastspec.shapes import GRAMMARS
from tests.helpers.tables import ScriptedDraws, random_table, shape_of, table_state
from tests.step import test_step_law_masks as masks
from tests.step.test_step_law import Context, Laws, distance
from tests.step.test_step_law_masks import (
    LIMIT,
    PROMPT,
    TOLERANCE,
    VOCAB,
    K,
    TableModel,
    drafter,
    grammar_step_of,
    stepped,
)
from tests.step.test_step_law_rules import BlockDraws

DEAD = 1  # beside a text: it could not go on

usual = masks.allowed


def allowed(context: Context) -> set[int]:
    """The grammar of the other tests, but nothing comes behind 2 at the last place."""
    return set() if len(context) == LIMIT - 1 and context[-1] == 2 else usual(context)


def given(context: Context, count: int) -> list[int]:
    """Drafts, which go on behind a dead end."""
    drafts: list[int] = []
    for place in range(count):
        choices = sorted(allowed((*context, *drafts))) or [place]
        drafts.append(choices[(sum(context) + place) % len(choices)])
    return drafts


class Scripted:
    """Where no token can be chosen any will do, and 0 is drawn there; beside a `ScriptedDraws`."""

    def sample(self, probs: Tensor, positions: Tensor, purpose: int) -> Tensor:
        none = probs.isnan().any(-1, keepdim=True)
        first = (torch.arange(probs.shape[-1]) == 0).to(probs.dtype)
        return super().sample(torch.where(none, first, probs), positions, purpose)  # type: ignore[misc, no-any-return]


class OneByOne(Scripted, ScriptedDraws):
    """Of rejection."""


class Together(Scripted, BlockDraws):
    """Of the block rule."""


def law(target: Tensor) -> Laws:
    """The definition: token by token from the target's table."""
    alive: dict[Context, float] = {PROMPT: 1.0}
    ended: Laws = {}
    while alive:
        context, mass = alive.popitem()
        may = sorted(allowed(context))
        if len(context) == LIMIT or not may:
            ended[context, 0 if len(context) == LIMIT else DEAD] = mass
            continue
        probs = target[len(context) - 1, context[-1]][may].softmax(-1).tolist()
        alive |= {(*context, token): mass * p for token, p in zip(may, probs, strict=True)}
    return ended


def decoded(target: Tensor, proposer: Any, rule: str, grammars: str) -> Laws:
    """Law of rows that ended, step after step, with K drafts or none, so that dead ends lie among them."""
    alive: dict[Context, float] = {PROMPT: 1.0}
    ended: Laws = {}
    while alive:
        context = min(alive, key=len)
        mass, count = alive.pop(context), 0 if len(context) % 2 else K
        drafts = given(context, count)
        judged = next((at for at in range(count) if not allowed((*context, *drafts[:at]))), count)
        ids = torch.arange(VOCAB)
        grid = torch.cartesian_prod(*[ids[:1]] * K, torch.arange(judged + 1), ids)
        draws = (Together if rule == BLOCK else OneByOne)(grid[:, :K], grid[:, K], grid[:, K + 1], judged)
        state = table_state(torch.tensor([context] * len(grid)), k=K, vocab=VOCAB, limit=LIMIT, stop_ids=[])
        shape = masks.replace(shape_of(K, masks.FULL), verification=rule, grammars=grammars)
        stepped(
            state,
            masks.StepModules(TableModel(target), proposer),
            shape,
            grammar_step_of(context, drafts, False),
            draws,
        )
        for row, weight in enumerate(draws.weight.tolist()):
            tokens = tuple(state.tokens[row, : state.lengths[row]].tolist())
            if not weight:
                continue
            if state.accepted[row] < 0:
                ended[tokens, DEAD] = ended.get((tokens, DEAD), 0.0) + mass * weight
            elif len(tokens) == LIMIT:
                ended[tokens, 0] = ended.get((tokens, 0), 0.0) + mass * weight
            else:
                alive[tokens] = alive.get(tokens, 0.0) + mass * weight
    return ended


@pytest.mark.parametrize("grammars", GRAMMARS)
@pytest.mark.parametrize("rule", [REJECTION, BLOCK])
def test_drafts_before_a_dead_end_count_and_those_behind_it_do_not(
    rule: str, grammars: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "allowed", allowed)
    for seed in range(3):
        target = random_table(seed, LIMIT + K, VOCAB, zeros=0.0)
        found, expected = decoded(target, drafter("lookup", seed), rule, grammars), law(target)
        assert sum(found.values()) == pytest.approx(1.0)
        assert distance(found, expected) < TOLERANCE
        assert sum(mass for (_, how), mass in expected.items() if how == DEAD) > 0.05, "some texts cannot go on"
