"""The law of whole decodes through the step, by enumeration: stops, caps, temperature and vocabularies included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec.proposers.draft_model import VocabMap
from fastspec.sampling import verify
from fastspec.shapes import FULL
from fastspec.state import AT_LIMIT, STOPPED
from fastspec.step import step
from tests.helpers.step_laws import PROMPT, Context, Laws, law_of_steps
from tests.helpers.tables import ScriptedDraws, all_outcomes, random_table, shape_of, table_modules, table_state

VOCAB = 4
# sums of some thousand float64 products, each a few ulp (2.2e-16) off, of total weight one
TOLERANCE = 1e-12


def step_outcomes(contexts: list[Context], target: Tensor, draft: Tensor | None, **options: object) -> list[Laws]:
    """For each context of one length: the law of (tokens, finish) after one step, every outcome a row."""
    k: int = options["k"]  # type: ignore[assignment]
    drafts, accepted, last = all_outcomes(VOCAB, k)
    context: int = options.get("context", 1000)  # type: ignore[assignment]
    count = max(0, min(k, context + 1 - len(contexts[0])))
    kept = accepted <= count  # a draft that does not count is never accepted
    drafts, accepted, last = drafts[kept], accepted[kept], last[kept]
    outcomes = len(last)
    repeat = len(contexts)
    draws = ScriptedDraws(drafts.repeat(repeat, 1), accepted.repeat(repeat), last.repeat(repeat), count)
    state = table_state(
        torch.tensor(contexts).repeat_interleave(outcomes, 0),
        k=k,
        vocab=VOCAB,
        limit=options["limit"],  # type: ignore[arg-type]
        stop_ids=options["stop_ids"],  # type: ignore[arg-type]
        temperature=options["temperature"],  # type: ignore[arg-type]
    )
    mapped: dict[str, Any] = {name: options[name] for name in ("vocab_map",) if name in options}
    modules = table_modules(target, draft, options.get("shared"), context, **mapped)  # type: ignore[arg-type]
    step(modules, state, shape_of(k, FULL), draws)
    laws: list[Laws] = [{} for _ in contexts]
    for row, weight in enumerate(draws.weight.tolist()):
        if weight:
            tokens = tuple(state.tokens[row, : state.lengths[row]].tolist())
            key = (tokens, int(state.finish[row]))
            law = laws[row // outcomes]
            law[key] = law.get(key, 0.0) + weight
    return laws


def decoded_law(target: Tensor, draft: Tensor | None, **options: object) -> Laws:
    """Law of finished rows, step after step."""
    return law_of_steps(lambda group: step_outcomes(group, target, draft, **options))


def target_law(
    target: Tensor, *, limit: int, stop_ids: list[int], temperature: float, prompt: Context = PROMPT
) -> Laws:
    """The definition: token by token from the target's table."""
    alive: dict[Context, float] = {prompt: 1.0}
    finished: Laws = {}
    while alive:
        context, mass = alive.popitem()
        probs = (target[len(context) - 1, context[-1]] / temperature).softmax(-1).tolist()
        for token, p in enumerate(probs):
            tokens = (*context, token)
            if p == 0:
                continue
            if token in stop_ids:
                finished[tokens, STOPPED] = mass * p
            elif len(tokens) == limit:
                finished[tokens, AT_LIMIT] = mass * p
            else:
                alive[tokens] = mass * p
    return finished


def distance(a: Laws, b: Laws) -> float:
    return max(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys())


def compare(
    seed: int,
    k: int,
    limit: int,
    stop_ids: list[int],
    temperature: float,
    shared: int | None = None,
    **draft_options: int,
) -> float:
    target = random_table(seed, limit + k, VOCAB)
    # a draft cut to the shared ids must have a possible one among them, as every real softmax has
    draft = random_table(seed + 1000, limit + k, VOCAB, zeros=0.0 if shared else 0.3) if k else None
    options = {"limit": limit, "stop_ids": stop_ids, "temperature": temperature}
    return distance(
        decoded_law(target, draft, k=k, shared=shared, **options, **draft_options),
        target_law(target, **options),
    )


@pytest.mark.parametrize("stop_ids", [[], [3], [0, 2]], ids=str)
@pytest.mark.parametrize("new", [1, 2, 3, 4])
@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_decodes_follow_the_targets_law(k: int, new: int, stop_ids: list[int]) -> None:
    assert compare(seed=10 * k + new, k=k, limit=len(PROMPT) + new, stop_ids=stop_ids, temperature=1.0) < TOLERANCE


@pytest.mark.parametrize("temperature", [0.5, 1.75])  # exact in the state's fp32
def test_the_law_at_a_temperature_is_the_targets(temperature: float) -> None:
    assert compare(seed=5, k=2, limit=5, stop_ids=[1], temperature=temperature) < TOLERANCE


@pytest.mark.parametrize("shared", [1, 2, 3])
def test_target_only_ids_stay_reachable(shared: int) -> None:
    assert compare(seed=6, k=2, limit=5, stop_ids=[], temperature=1.0, shared=shared) < TOLERANCE


@pytest.mark.parametrize("target_ids", [[2, 0, 3, 1], [-1, 3, 0], [1, -1, -1, 0, 2, 3]], ids=str)
def test_a_draft_with_another_vocabulary_leaves_the_law(target_ids: list[int]) -> None:
    """The same ids in another order, fewer ids, and more of them."""
    limit, stop_ids, k = 5, [1], 2
    target = random_table(9, limit + k, VOCAB)
    draft = random_table(1009, limit + k, len(target_ids), zeros=0.0)  # of the ids it shares one is always possible
    options = {"limit": limit, "stop_ids": stop_ids, "temperature": 1.0}
    found = VocabMap.of(torch.tensor(target_ids), VOCAB)
    wanted = target_law(target, **options)  # type: ignore[arg-type]
    assert distance(decoded_law(target, draft, k=k, vocab_map=found, **options), wanted) < TOLERANCE


@pytest.mark.parametrize("context", [1, 2, 3, 4, 5])
def test_rows_that_outgrow_the_drafts_context(context: int) -> None:
    """The number of drafts that count shrinks to none as rows grow; the law stays the target's."""
    assert compare(seed=8, k=3, limit=5, stop_ids=[1], temperature=1.0, context=context) < TOLERANCE


def no_coin(p: Tensor, q: Tensor) -> Tensor:
    return (p >= q).to(p.dtype)


def inverted(p: Tensor, q: Tensor) -> Tensor:
    return torch.where(p > 0, (q / p.clamp_min(1e-300)).clamp(max=1.0), 0.0)


@pytest.mark.parametrize(
    ("name", "invalid"),
    [
        ("residual", lambda p, q: p),
        ("accept_probability", inverted),
        ("accept_probability", no_coin),
    ],
    ids=["residual is the target", "ratio inverted", "no coin"],
)
def test_the_enumeration_finds_planted_bugs(
    name: str, invalid: Callable[[Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, name, invalid)
    # far above rounding: the planted bugs move some outcome's probability by percents
    assert compare(seed=3, k=2, limit=5, stop_ids=[3], temperature=1.0) > 1e-3


def test_the_enumeration_catches_a_wrong_draft_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts drawn from one law and judged by another: what forgetting the draft's temperature does."""
    from fastspec.proposers.draft_model import DraftModel

    original = DraftModel.propose

    def forgets(self: DraftModel, state: object, shape: object, draws: object) -> None:
        original(self, state, shape, draws)  # type: ignore[arg-type]
        state.draft_probs.copy_(state.draft_probs.square())  # type: ignore[attr-defined]
        state.draft_probs.div_(state.draft_probs.sum(-1, keepdim=True))  # type: ignore[attr-defined]

    monkeypatch.setattr(DraftModel, "propose", forgets)
    assert compare(seed=3, k=2, limit=5, stop_ids=[3], temperature=1.0) > 1e-3
