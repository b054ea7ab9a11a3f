"""The law of whole decodes through the step with penalties, biases and filters, by enumeration on four ids.

The definition knows nothing of drafts: token by token, in plain Python, from the target's table and the text so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fastspec.sampling import processors
from fastspec.sampling.rules import BLOCK, REJECTION
from fastspec.shapes import FULL, StepShape
from fastspec.state import AT_LIMIT, STOPPED, DecodeState
from fastspec.step import step
from tests.helpers.step_laws import PROMPT, Context, Laws, law_of_steps
from tests.helpers.tables import WHOLE, ScriptedDraws, all_outcomes, random_table, table_modules, table_state
from tests.step.test_step_law_rules import BlockDraws

VOCAB = 4
# sums of some thousand float64 products, each a few ulp (2.2e-16) off, of total weight one
TOLERANCE = 1e-12


@dataclass(frozen=True)
class Asked:
    """Options of a row; every number is exact in fp32."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: tuple[float, ...] = (0.0,) * VOCAB
    min_new: int = 0
    temperature: float = 1.0
    top_k: int = 0
    draft_limit: int = 99
    limit: int = 5
    stop_ids: tuple[int, ...] = ()


def asked_of(state: DecodeState, asked: Asked, contexts: list[Context]) -> None:
    """Admits rows that hold `contexts`, all of which began with PROMPT."""
    state.repetition.fill_(asked.repetition)
    state.presence.fill_(asked.presence)
    state.frequency.fill_(asked.frequency)
    state.bias.copy_(torch.tensor(asked.bias))
    state.min_lengths.fill_(len(PROMPT) + asked.min_new)
    state.top_k.fill_(asked.top_k)
    state.draft_limits.fill_(asked.draft_limit)
    for row, context in enumerate(contexts):
        state.in_prompt[row, list(PROMPT)] = True
        for token in context[len(PROMPT) :]:
            state.output_counts[row, token] += 1


def outcomes(contexts: list[Context], target: Tensor, draft: Tensor, k: int, asked: Asked, mode: str) -> list[Laws]:
    """For each context of one length: the law of (tokens, finish) after one step, every outcome a row."""
    drafts, accepted, last = all_outcomes(VOCAB, k)
    count = min(k, asked.draft_limit)
    kept = accepted <= count
    drafts, accepted, last = drafts[kept], accepted[kept], last[kept]
    each = len(last)
    rows = [context for context in contexts for _ in range(each)]
    repeat = len(contexts)
    kind = BlockDraws if mode == BLOCK else ScriptedDraws
    draws = kind(drafts.repeat(repeat, 1), accepted.repeat(repeat), last.repeat(repeat), count)
    state = table_state(
        torch.tensor(rows),
        k=k,
        vocab=VOCAB,
        limit=asked.limit,
        stop_ids=list(asked.stop_ids),
        temperature=asked.temperature,
    )
    asked_of(state, asked, rows)
    step(table_modules(target, draft), state, StepShape(k, FULL, 1, WHOLE, verification=mode), draws)
    laws: list[Laws] = [{} for _ in contexts]
    for row, weight in enumerate(draws.weight.tolist()):
        if weight:
            tokens = tuple(state.tokens[row, : state.lengths[row]].tolist())
            key = (tokens, int(state.finish[row]))
            laws[row // each][key] = laws[row // each].get(key, 0.0) + weight
            new = torch.bincount(torch.tensor(tokens[len(PROMPT) :]), minlength=VOCAB)
            assert state.output_counts[row].tolist() == new.tolist(), "counts are those of the emitted tokens"
    return laws


def decoded_law(target: Tensor, draft: Tensor, k: int, asked: Asked, mode: str) -> Laws:
    """Law of finished rows, step after step."""
    return law_of_steps(lambda group: outcomes(group, target, draft, k, asked, mode))


def next_law(logits: list[float], context: Context, asked: Asked) -> list[float]:
    """The definition at one place."""
    output = context[len(PROMPT) :]
    for token in range(VOCAB):
        value = logits[token] + asked.bias[token]
        if token in context:
            value = value * asked.repetition if value < 0 else value / asked.repetition
        value -= asked.frequency * output.count(token) + asked.presence * (token in output)
        if token in asked.stop_ids and len(output) < asked.min_new:
            value = -math.inf
        logits[token] = value
    scaled = [value / (asked.temperature or 1.0) for value in logits]
    if asked.top_k:
        kth = sorted(scaled, reverse=True)[asked.top_k - 1]
        scaled = [value if value >= kth else -math.inf for value in scaled]
    if asked.temperature == 0:
        best = max(range(VOCAB), key=lambda token: (logits[token], -token))
        return [float(token == best) for token in range(VOCAB)]
    weights = [math.exp(value - max(scaled)) for value in scaled]
    return [weight / sum(weights) for weight in weights]


def target_law(target: Tensor, asked: Asked) -> Laws:
    """Token by token."""
    alive: dict[Context, float] = {PROMPT: 1.0}
    finished: Laws = {}
    while alive:
        context, mass = alive.popitem()
        for token, p in enumerate(next_law(target[len(context) - 1, context[-1]].tolist(), context, asked)):
            tokens = (*context, token)
            if p == 0:
                continue
            if token in asked.stop_ids:
                finished[tokens, STOPPED] = mass * p
            elif len(tokens) == asked.limit:
                finished[tokens, AT_LIMIT] = mass * p
            else:
                alive[tokens] = mass * p
    return finished


def compare(k: int, asked: Asked, mode: str = REJECTION, seed: int = 0) -> float:
    # logits of both signs, for the repetition penalty treats them differently
    target = random_table(seed, asked.limit + k, VOCAB) + 1.5
    draft = random_table(seed + 1000, asked.limit + k, VOCAB, zeros=0.0) + 1.5
    ours, wanted = decoded_law(target, draft, k, asked, mode), target_law(target, asked)
    assert abs(sum(wanted.values()) - 1) < TOLERANCE
    return max(abs(ours.get(key, 0.0) - wanted.get(key, 0.0)) for key in ours.keys() | wanted.keys())


ASKED = {
    "repetition": Asked(repetition=1.5),
    "presence": Asked(presence=0.75),
    "frequency": Asked(frequency=0.5, limit=6),
    "negative": Asked(presence=-0.5, frequency=-0.25),
    "bias": Asked(bias=(1.0, -2.0, 0.0, 0.5)),
    "banned": Asked(bias=(-math.inf, 0.0, 0.0, 0.5)),
    "least length": Asked(min_new=2, stop_ids=(0, 3)),
    "top-k": Asked(top_k=2, frequency=1.0, temperature=0.5),
    "greedy": Asked(temperature=0.0, repetition=2.0, presence=0.5),
    "opted out": Asked(draft_limit=0, repetition=1.5),
    "one draft": Asked(draft_limit=1, frequency=0.5),
    "all": Asked(1.25, 0.5, 0.25, (0.5, 0.0, -1.0, 0.0), 1, 0.75, 3, 2, 5, (3,)),
}


@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ASKED)
def test_decodes_follow_the_processed_law(name: str, k: int) -> None:
    assert compare(k, ASKED[name], seed=k) < TOLERANCE


@pytest.mark.parametrize("name", ["repetition", "frequency", "all"])
def test_also_when_blocks_are_judged_together(name: str) -> None:
    assert compare(2, ASKED[name], BLOCK) < TOLERANCE


def forgets_drafts(logits: Tensor, rows: processors.ProcessorRows, lengths: Tensor, drafts: Tensor) -> Tensor:
    return process(logits, rows, lengths, torch.full_like(drafts, -1))


def counts_everything(counts: Tensor, block: Tensor, emitted: Tensor) -> None:
    count(counts, block, torch.full_like(emitted, 1))


process, count = processors.process, processors.count


@pytest.mark.parametrize("invalid", [forgets_drafts], ids=["drafts before a place are forgotten"])
def test_the_enumeration_finds_planted_bugs(invalid: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "process", invalid)
    # far above rounding: the planted bug moves some outcome's probability by percents
    assert compare(2, ASKED["frequency"]) > 1e-3


def test_counts_of_other_than_emitted_tokens_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "count", counts_everything)
    with pytest.raises(AssertionError, match="counts are those of the emitted"):
        compare(2, ASKED["frequency"])


def test_a_draft_under_other_penalties_costs_no_exactness() -> None:
    """What the draft leaves out makes it draft worse, not wrong: its law is the one it drew from."""
    asked = ASKED["all"]
    target = random_table(3, asked.limit + 2, VOCAB) + 1.5
    nothing = torch.full((asked.limit + 2, VOCAB, VOCAB), -math.inf, dtype=torch.float64)
    ours, wanted = decoded_law(target, nothing, 2, asked, REJECTION), target_law(target, asked)
    assert max(abs(ours.get(key, 0.0) - wanted.get(key, 0.0)) for key in ours.keys() | wanted.keys()) < TOLERANCE
