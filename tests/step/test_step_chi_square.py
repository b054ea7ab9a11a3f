"""Some hundred thousand sampled decodes through the step and its real randomness, against the target's exact law."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import pytest
import torch

from fastspec.sampling import verify
from fastspec.sampling.distribution import PhiloxDraws
from fastspec.shapes import FULL
from fastspec.step import step
from tests.helpers.devices import devices
from tests.helpers.tables import random_table, shape_of, table_modules, table_state

VOCAB, NEW, PROMPT = 4, 3, (1, 2)
ROWS, BATCHES = 50_000, 6


def sampled_counts(device: str, batches: int) -> Counter[tuple[int, ...]]:
    """How often each continuation of three tokens was drawn, over ROWS x batches rows with seeds of their own."""
    target = random_table(1, 8, VOCAB, zeros=0.2).to(device)
    modules = table_modules(target, random_table(2, 8, VOCAB, zeros=0.2).to(device))
    shape = shape_of(2, FULL)
    counts: Counter[tuple[int, ...]] = Counter()
    for batch in range(batches):
        contexts = torch.tensor([PROMPT]).expand(ROWS, -1)
        state = table_state(contexts, k=2, vocab=VOCAB, limit=len(PROMPT) + NEW, stop_ids=[], device=device)
        state.seeds.copy_(torch.arange(batch * ROWS, (batch + 1) * ROWS))
        for _ in range(NEW):  # every step emits at least one token
            step(modules, state, shape, PhiloxDraws(state.seeds))
        new = state.tokens[:, len(PROMPT) : len(PROMPT) + NEW]
        code = (new * VOCAB ** torch.arange(NEW, device=device)).sum(dim=1)
        for value, count in enumerate(torch.bincount(code, minlength=VOCAB**NEW).tolist()):
            counts[tuple(value // VOCAB**j % VOCAB for j in range(NEW))] += count
    return counts


def exact_law() -> dict[tuple[int, ...], float]:
    target = random_table(1, 8, VOCAB, zeros=0.2).softmax(-1)
    law = {}
    for tokens in product(range(VOCAB), repeat=NEW):
        context, p = list(PROMPT), 1.0
        for token in tokens:
            p *= target[len(context) - 1, context[-1], token].item()
            context.append(token)
        law[tokens] = p
    return law


def statistic(counts: Counter[tuple[int, ...]], draws: int) -> tuple[float, int]:
    """(chi-square, degrees of freedom) over the continuations that are possible; impossible ones must not occur."""
    total, cells = 0.0, 0
    for tokens, p in exact_law().items():
        if p == 0:
            assert counts[tokens] == 0
            continue
        total += (counts[tokens] - draws * p) ** 2 / (draws * p)
        cells += 1
    return total, cells - 1


def limit(degrees: int) -> float:
    """The 1 - 1e-6 quantile of chi-square (Wilson and Hilferty); the seeds are fixed, so it holds or it does not."""
    return degrees * (1 - 2 / (9 * degrees) + 4.7534 * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize("device", devices())
def test_decodes_follow_the_law(device: str) -> None:
    found, degrees = statistic(sampled_counts(device, BATCHES), ROWS * BATCHES)
    assert degrees > 20
    assert found < limit(degrees)


@pytest.mark.parametrize("bug", ["residual", "accept_probability"])
def test_the_test_sees_a_planted_bug(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    invalid = (lambda p, q: p) if bug == "residual" else (lambda p, q: (p >= q).to(p.dtype))
    monkeypatch.setattr(verify, bug, invalid)
    found, degrees = statistic(sampled_counts("cpu", 2), ROWS * 2)
    assert found > 10 * limit(degrees)
