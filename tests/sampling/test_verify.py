"""The acceptance rule, enumerated in exact fractions: no sampling, no tolerance."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from fastspec.sampling import verify
from fastspec.sampling.distribution import TARGET
from fastspec.state import AT_LIMIT, RUNNING, STOPPED, DecodeState
from tests.helpers.states import copy_of, random_state
from tests.helpers.tables import all_outcomes

VOCAB = 4
Law = dict[tuple[int, ...], Fraction]
# powers of two, so that p / q and p - q are exact in float64 and the enumeration holds without rounding
DRAFT_LAWS = [(8, 4, 2, 2), (4, 4, 4, 4), (8, 8, 0, 0), (16, 0, 0, 0), (8, 4, 4, 0)]


def dyadic_law(rng: random.Random, draft: bool) -> list[Fraction]:
    if draft:
        parts = list(rng.choice(DRAFT_LAWS))
        rng.shuffle(parts)
    else:
        parts = [rng.choice((0, 1, 2, 5)) for _ in range(VOCAB - 1)]
        parts.insert(rng.randrange(VOCAB), 16 - sum(parts))
    return [Fraction(part, 16) for part in parts]


class Tables:
    """Laws of every context, drawn when first asked for."""

    def __init__(self, seed: int, draft: bool) -> None:
        self.seed, self.draft = seed, draft

    def __call__(self, context: tuple[int, ...]) -> list[Fraction]:
        return dyadic_law(random.Random(f"{self.seed}{self.draft}{context}"), self.draft)


class ExactDraws:
    """Follows scripted outcomes; multiplies their probabilities as fractions of what it was handed."""

    def __init__(self, accepted: Tensor, last: Tensor) -> None:
        self.accepted, self.last = accepted, last
        self.weight = [Fraction(1)] * len(last)

    def accept(self, probability: Tensor, positions: Tensor) -> Tensor:
        coins = torch.arange(probability.shape[1]) < self.accepted[:, None]
        for row, count in enumerate(self.accepted.tolist()):
            for place, chance in enumerate(probability[row].tolist()[: count + 1]):
                self.weight[row] *= Fraction(chance) if place < count else 1 - Fraction(chance)
        return coins

    def sample(self, probs: Tensor, positions: Tensor, purpose: int) -> Tensor:
        for row, token in enumerate(self.last.tolist()):
            law = [Fraction(value) for value in probs[row].tolist()]
            self.weight[row] *= law[token] / sum(law)
        return self.last


def emitted_law(p: Tables, q: Tables, k: int) -> Law:
    """Law of the first k + 1 tokens: what verify.rejection emits, continued by the target where it is short."""
    drafts, accepted, last = all_outcomes(VOCAB, k)
    prefixes = [[tuple(row[:j]) for j in range(k + 1)] for row in drafts.tolist()]
    p_rows = torch.tensor([[[float(x) for x in p(ctx)] for ctx in row] for row in prefixes], dtype=torch.float64)
    q_rows = torch.tensor([[[float(x) for x in q(ctx)] for ctx in row[:k]] for row in prefixes], dtype=torch.float64)
    draws = ExactDraws(accepted, last)
    positions = torch.arange(k + 1).expand(len(drafts), -1)
    counts, block = verify.rejection(
        p_rows,
        q_rows.view(len(drafts), k, VOCAB),
        drafts,
        torch.full((len(drafts),), k),
        positions,
        draws,
        purpose=TARGET,
    )
    result: Law = {}
    for row, path in enumerate(drafts.tolist()):
        weight = draws.weight[row]
        for j, token in enumerate(path):
            weight *= q(tuple(path[:j]))[token]
        if weight:
            head = tuple(block[row, : counts[row] + 1].tolist())
            for whole, share in continued(head, k + 1, p).items():
                result[whole] = result.get(whole, Fraction(0)) + weight * share
    return result


def continued(head: tuple[int, ...], length: int, p: Tables) -> Law:
    rows: Law = {head: Fraction(1)}
    for _ in range(length - len(head)):
        rows = {(*ctx, x): w * px for ctx, w in rows.items() for x, px in enumerate(p(ctx)) if px}
    return rows


def assert_lossless(k: int, seeds: range) -> None:
    for seed in seeds:
        p, q = Tables(seed, draft=False), Tables(seed, draft=True)
        assert emitted_law(p, q, k) == continued((), k + 1, p), f"seed {seed}"


@pytest.mark.parametrize(("k", "seeds"), [(0, range(5)), (1, range(40)), (2, range(12)), (3, range(3))])
def test_rejection_emits_exactly_the_targets_law(k: int, seeds: range) -> None:
    assert_lossless(k, seeds)


def inverted_ratio(p: Tensor, q: Tensor) -> Tensor:
    return torch.where(p > 0, (q / p.clamp_min(1e-300)).clamp(max=1.0), 1.0)


BUGS: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "residual is the target": ("residual", lambda p, q: p),
    "ratio inverted": ("accept_probability", inverted_ratio),
    "no coin": ("accept_probability", lambda p, q: (p >= q).to(p.dtype)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_enumeration_finds_planted_bugs(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, invalid = BUGS[bug]
    monkeypatch.setattr(verify, name, invalid)
    for k in (1, 2):
        with pytest.raises(AssertionError):
            assert_lossless(k, range(6))


def test_accept_probability_at_the_edges() -> None:
    p = torch.tensor([0.5, 0.0, 0.3, 0.0, 0.2])
    q = torch.tensor([0.25, 0.5, 0.3, 0.0, 0.4])
    assert verify.accept_probability(p, q).tolist() == pytest.approx([1.0, 0.0, 1.0, 0.0, 0.5])
    assert verify.accept_probability(torch.tensor([0.1]), torch.tensor([0.0])).item() == 1.0


def test_residual_of_equal_laws_is_the_law() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    assert torch.equal(verify.residual(p, p), p)


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    logits = torch.tensor([[[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [0.0, 5.0, 5.0]]])
    accepted, block = verify.greedy(logits, torch.tensor([[1, 0]]), torch.tensor([2]))
    assert accepted.tolist() == [2]
    assert block.tolist() == [[1, 0, 1]]
    accepted, block = verify.greedy(logits, torch.tensor([[2, 0]]), torch.tensor([2]))
    assert accepted.tolist() == [0]
    assert block[0, 0].item() == 1


def test_an_acceptance_after_a_rejection_does_not_count() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([[3, 2, 1, 0]]), 4).float()
    accepted, _ = verify.greedy(logits, torch.tensor([[3, 0, 1]]), torch.tensor([3]))
    assert accepted.tolist() == [1]


def committed(state: DecodeState, row: int, accepted: int, block: list[int]) -> dict[str, object]:
    """The definition, token by token: what a row holds after a commit."""
    length, limit = int(state.lengths[row]), int(state.limits[row])
    tokens, finish = state.tokens[row, :length].tolist(), int(state.finish[row])
    fed, counts, emitted = int(state.draft_lengths[row]), int(state.draft_counts[row]), 0
    if finish != RUNNING:
        return {"tokens": tokens, "finish": finish, "draft_lengths": fed, "emitted": 0, "accepted": -1}
    for token in block[: accepted + 1]:
        if finish == RUNNING and len(tokens) < limit:
            tokens.append(token)
            emitted += 1
            if token in state.stop_ids[row].tolist():
                finish = STOPPED
    if finish == RUNNING and emitted == limit - length:  # also where nothing was to be emitted
        finish = AT_LIMIT
    if counts:  # the draft has seen all drafts but its last, and keeps what is in the row, less the row's last token
        fed = min(length + counts - 1, len(tokens) - 1)
    return {"tokens": tokens, "finish": finish, "draft_lengths": fed, "emitted": emitted, "accepted": accepted}


def test_a_commit_is_its_definition() -> None:
    k, rows, found = 3, 200, set()
    for seed in range(4):
        state, _ = random_state(seed, batch=rows, k=k, vocab=12, device="cpu")
        generator = torch.Generator().manual_seed(seed)
        state.stop_ids[:, :2] = torch.randint(12, (rows, 2), generator=generator)
        block = torch.randint(12, (rows, k + 1), generator=generator)
        accepted = torch.randint(k + 1, (rows,), generator=generator)
        before = copy_of(state)
        verify.commit(state, accepted, block)
        for row in range(rows):
            wanted = committed(before, row, int(accepted[row]), block[row].tolist())
            got = {name: getattr(state, name)[row].tolist() for name in wanted}
            got["tokens"] = got["tokens"][: state.lengths[row]]
            assert got == wanted, row
            found.add((wanted["finish"], wanted["emitted"]))
    assert len(found) > 12  # stops and caps at every place
