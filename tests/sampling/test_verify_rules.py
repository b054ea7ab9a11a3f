"""Every rule of verification, enumerated in exact fractions: the law of what is emitted, and how much is accepted."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from itertools import product

import pytest
import torch
from torch import Tensor

from fastspec.sampling import verify
from fastspec.sampling.distribution import TARGET, PhiloxDraws
from fastspec.sampling.rules import COUPLED, MODES, SyntheticAcceptance, checked
from tests.helpers.races import agreement, joint
from tests.helpers.rules import exact

VOCAB = 3
Context = tuple[int, ...]
Law = dict[Context, Fraction]
# powers of two: p / q, and all that block verification adds and multiplies, are exact in float64
DRAFT_LAWS = [(8, 4, 4), (8, 8, 0), (16, 0, 0), (4, 8, 4)]


class Tables:
    """Laws of every context; what the target's and the draft's are made of differs."""

    def __init__(self, seed: int, *, draft: bool, deterministic: bool = False) -> None:
        self.seed, self.draft, self.deterministic = seed, draft, deterministic

    def __call__(self, context: Context) -> list[Fraction]:
        rng = random.Random(f"{self.seed}{self.draft}{context}")
        if self.deterministic:
            parts = [16, 0, 0]
        elif self.draft:
            parts = list(rng.choice(DRAFT_LAWS))
        else:
            parts = [rng.choice((0, 1, 2, 5, 8)), rng.choice((0, 3, 7))]
            parts.append(16 - sum(parts))
        rng.shuffle(parts)
        return [Fraction(part, 16) for part in parts]


def rows_of(table: Tables, contexts: list[list[Context]]) -> Tensor:
    return torch.tensor([[[float(x) for x in table(ctx)] for ctx in row] for row in contexts], dtype=torch.float64)


def continued(head: Context, length: int, p: Tables) -> Law:
    rows: Law = {head: Fraction(1)}
    for _ in range(length - len(head)):
        rows = {(*ctx, x): w * px for ctx, w in rows.items() for x, px in enumerate(p(ctx)) if px}
    return rows


class Coins:
    """Every outcome of k coins and one pick, one a row; multiplies the probabilities that it was handed, exactly.

    Coins at places that no longer matter come in every combination too: their probabilities add up to one.
    """

    def __init__(self, coins: Tensor, last: Tensor) -> None:
        self.coins, self.last = coins, last
        self.weight = [Fraction(1)] * len(last)

    def accept(self, probability: Tensor, positions: Tensor) -> Tensor:
        for row, flags in enumerate(self.coins.tolist()):
            for fallen, chance in zip(flags, probability[row].tolist(), strict=True):
                self.weight[row] *= exact(chance) if fallen else 1 - exact(chance)
        return self.coins

    def sample(self, probs: Tensor, positions: Tensor, purpose: int) -> Tensor:
        for row, token in enumerate(self.last.tolist()):
            if self.weight[row]:
                law = [Fraction(value) for value in probs[row].tolist()]
                self.weight[row] *= law[token] / sum(law)
        return self.last


def judged(mode: str, p: Tables, q: Tables, k: int, count: int, one_hot: bool) -> tuple[Law, Fraction]:
    """(law of the first k + 1 tokens, mean of accepted drafts) under rejection or block, `count` drafts counting."""
    outcomes = [*product(*[range(VOCAB)] * k, *[(False, True)] * k, range(VOCAB))]
    drafts = torch.tensor([row[:k] for row in outcomes], dtype=torch.int64).view(len(outcomes), k)
    coins = torch.tensor([row[k : 2 * k] for row in outcomes], dtype=torch.bool).view(len(outcomes), k)
    draws = Coins(coins, torch.tensor([row[-1] for row in outcomes]))
    prefixes = [[tuple(row[:j]) for j in range(k + 1)] for row in drafts.tolist()]
    laws = rows_of(q, [row[:k] for row in prefixes]).view(len(outcomes), k, VOCAB)
    counts = torch.full((len(outcomes),), count)
    rule = getattr(verify, mode)
    places = torch.arange(k + 1).expand(len(outcomes), -1)
    accepted, block = rule(
        rows_of(p, prefixes), None if one_hot else laws, drafts, counts, places, draws, purpose=TARGET
    )
    law: Law = {}
    mean = Fraction(0)
    for row, path in enumerate(drafts.tolist()):
        weight = draws.weight[row]
        for j, token in enumerate(path):
            weight *= q(tuple(path[:j]))[token]
        mean += weight * int(accepted[row])
        if weight:
            for whole, share in continued(tuple(block[row, : accepted[row] + 1].tolist()), k + 1, p).items():
                law[whole] = law.get(whole, Fraction(0)) + weight * share
    return law, mean


CASES = [(0, range(3)), (1, range(25)), (2, range(10)), (3, range(2))]


@pytest.mark.parametrize("mode", ["rejection", "block"])
@pytest.mark.parametrize(("k", "seeds"), CASES)
def test_rejection_and_block_emit_exactly_the_targets_law(mode: str, k: int, seeds: range) -> None:
    for seed in seeds:
        p, q = Tables(seed, draft=False), Tables(seed, draft=True)
        assert judged(mode, p, q, k, k, one_hot=False)[0] == continued((), k + 1, p), f"seed {seed}"


@pytest.mark.parametrize("mode", ["rejection", "block"])
@pytest.mark.parametrize(("k", "count"), [(1, 0), (2, 0), (2, 1), (3, 1), (3, 2)])
def test_when_only_some_drafts_count(mode: str, k: int, count: int) -> None:
    for seed in range(3):
        p, q = Tables(seed, draft=False), Tables(seed, draft=True)
        law, mean = judged(mode, p, q, k, count, one_hot=False)
        assert law == continued((), k + 1, p), f"seed {seed}"
        assert mean <= count


@pytest.mark.parametrize("mode", ["rejection", "block"])
@pytest.mark.parametrize(("k", "count"), [(1, 1), (2, 2), (3, 3), (3, 1)])
def test_certain_drafts_need_no_law(mode: str, k: int, count: int) -> None:
    """q left out says what a one-hot q says."""
    for seed in range(3):
        p, q = Tables(seed, draft=False), Tables(seed, draft=True, deterministic=True)
        without = judged(mode, p, q, k, count, one_hot=True)
        assert without[0] == continued((), k + 1, p), f"seed {seed}"
        assert without == judged(mode, p, q, k, count, one_hot=False)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_block_accepts_at_least_as_many(k: int) -> None:
    gains = []
    for seed in range(4 if k == 3 else 12):
        p, q = Tables(seed, draft=False), Tables(seed, draft=True)
        gains.append(judged("block", p, q, k, k, False)[1] - judged("rejection", p, q, k, k, False)[1])
    assert min(gains) >= 0
    assert (max(gains) > 0) == (k > 1)  # one draft is a block of one


def test_the_papers_example() -> None:
    """Two letters, k = 2, target (1/3, 2/3), draft (2/3, 1/3): 10/9 drafts accepted one by one, 11/9 as a block."""
    p, q = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64), torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)
    for mode, expected in (("rejection", 10 / 9), ("block", 11 / 9)):
        mean = 0.0
        for path in product(range(2), repeat=2):
            seen: list[Tensor] = []

            class Recorder(Coins):
                def accept(self, probability: Tensor, positions: Tensor, seen: list[Tensor] = seen) -> Tensor:
                    seen.append(probability)
                    return self.coins

            for coins in product((False, True), repeat=2):
                draws = Recorder(torch.tensor([coins]), torch.tensor([0]))
                accepted, _ = getattr(verify, mode)(
                    p.expand(1, 3, 2),
                    q.expand(1, 2, 2),
                    torch.tensor([path]),
                    torch.tensor([2]),
                    torch.arange(3)[None],
                    draws,
                    purpose=TARGET,
                )
                chance = torch.where(torch.tensor(coins), seen[-1][0], 1 - seen[-1][0]).prod() * q[list(path)].prod()
                mean += float(chance) * int(accepted)
        assert mean == pytest.approx(expected, abs=1e-14)


class Scripted:
    """Picks what a script says."""

    def __init__(self, picks: Tensor) -> None:
        self.picks = picks

    def sample(self, probs: Tensor, positions: Tensor, purpose: int) -> Tensor:
        assert probs.shape[:2] == positions.shape == self.picks.shape
        assert purpose == TARGET
        return self.picks

    def accept(self, probability: Tensor, positions: Tensor) -> Tensor:
        raise AssertionError("coupled verification tosses no coin")


def coupled_law(p: Tables, q: Tables, k: int, count: int) -> tuple[Law, Fraction]:
    """As `judged`: over all pairs of picks with the same numbers, weighed by their exact joint law."""
    outcomes = [*product(*[range(VOCAB)] * (2 * k + 1))]
    drafts = torch.tensor([row[:k] for row in outcomes], dtype=torch.int64).view(len(outcomes), k)
    picks = torch.tensor([row[k:] for row in outcomes])
    prefixes = [[tuple(row[:j]) for j in range(k + 1)] for row in drafts.tolist()]
    places = torch.arange(k + 1).expand(len(outcomes), -1)
    accepted, block = verify.coupled(
        rows_of(p, prefixes), drafts, torch.full((len(outcomes),), count), places, Scripted(picks), TARGET
    )
    law: Law = {}
    mean = Fraction(0)
    for row, path in enumerate(drafts.tolist()):
        weight = p(tuple(path))[picks[row, k]]
        for j, token in enumerate(path):
            weight *= joint(tuple(q(tuple(path[:j]))), tuple(p(tuple(path[:j]))))[token][picks[row, j]]
        mean += weight * int(accepted[row])
        if weight:
            for whole, share in continued(tuple(block[row, : accepted[row] + 1].tolist()), k + 1, p).items():
                law[whole] = law.get(whole, Fraction(0)) + weight * share
    return law, mean


@pytest.mark.parametrize(("k", "seeds"), [(0, range(3)), (1, range(20)), (2, range(6)), (3, range(1))])
def test_coupled_emits_exactly_the_targets_law(k: int, seeds: range) -> None:
    for seed in seeds:
        p, q = Tables(seed, draft=False), Tables(seed, draft=True)
        for count in range(k + 1):
            law, mean = coupled_law(p, q, k, count)
            assert law == continued((), k + 1, p), f"seed {seed}"
            assert (mean > 0) <= (count > 0)


def test_the_race_of_two_with_the_same_numbers() -> None:
    """The joint law that the test above weighs with: its margins, and how often real numbers agree."""
    for seed in range(20):
        p, q = Tables(seed, draft=False)(()), Tables(seed, draft=True)(())
        table = joint(tuple(q), tuple(p))
        assert [sum(row) for row in table] == q
        assert [sum(column) for column in zip(*table, strict=True)] == p
        assert sum(table[x][x] for x in range(VOCAB)) == agreement(q, p)


def measured_agreement(q: list[Fraction], p: list[Fraction], positions: int, purposes: tuple[int, int]) -> float:
    draws = PhiloxDraws(torch.tensor([5]))
    at = torch.arange(positions)[None]
    picks = [
        draws.sample(torch.tensor([float(x) for x in law]).expand(1, positions, VOCAB), at, purpose)
        for law, purpose in zip((q, p), purposes, strict=True)
    ]
    return float((picks[0] == picks[1]).double().mean())


def test_shared_numbers_agree_as_often_as_the_formula_says() -> None:
    q, p = [Fraction(8, 16), Fraction(4, 16), Fraction(4, 16)], [Fraction(2, 16), Fraction(5, 16), Fraction(9, 16)]
    expected, count = float(agreement(q, p)), 200_000
    bound = 5 * (expected * (1 - expected) / count) ** 0.5  # five standard errors; the numbers are fixed
    assert abs(measured_agreement(q, p, count, (TARGET, TARGET)) - expected) < bound
    # numbers of their own: what a draft that picks with its own purpose would come to
    assert abs(measured_agreement(q, p, count, (0, TARGET)) - expected) > 10 * bound


@pytest.mark.parametrize("positions", [(3,), (2, 3)], ids=["one place", "several"])
def test_picks_at_several_places_are_picks_at_each(positions: tuple[int, ...]) -> None:
    draws = PhiloxDraws(torch.tensor([7, 8]))
    laws = torch.rand(2, 3, 11)
    at = torch.tensor([[4, 9, 5], [0, 1, 2]])
    together = draws.sample(laws, at, TARGET)
    assert torch.equal(together, torch.stack([draws.sample(laws[:, j], at[:, j], TARGET) for j in range(3)], dim=1))


def never_less(excess: Tensor, carried: Tensor, last: Tensor) -> Tensor:
    return carried


def forgets_the_end(excess: Tensor, carried: Tensor, last: Tensor) -> Tensor:
    return excess / (excess + 1 - carried).clamp_min(1e-300)


BLOCK_BUGS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "every coin as if it were the last": ("block_probability", never_less),
    "the last coin as if it were inner": ("block_probability", forgets_the_end),
    "residual is the target": ("residual", lambda p, q: p),
    "nothing carried": ("_carried", lambda p, q, drafts: torch.ones_like(p[:, :, 0])),
}


@pytest.mark.parametrize("bug", BLOCK_BUGS)
def test_the_enumeration_finds_planted_bugs(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, invalid = BLOCK_BUGS[bug]
    monkeypatch.setattr(verify, name, invalid)
    with pytest.raises(AssertionError):
        test_rejection_and_block_emit_exactly_the_targets_law("block", 2, range(6))


def test_the_enumeration_catches_a_certain_draft_taken_for_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_deterministic", lambda drafts, p: p[:, : drafts.shape[1]])
    for mode in ("rejection", "block"):
        with pytest.raises(AssertionError):
            test_certain_drafts_need_no_law(mode, 2, 2)


def test_the_enumeration_catches_coupled_emitting_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(p: Tensor, drafts: Tensor, counts: Tensor, positions: Tensor, draws: verify.Draws, purpose: int) -> object:
        picks = draws.sample(p, positions, purpose)
        return torch.full_like(counts, drafts.shape[1]).minimum(counts), torch.cat((drafts, picks[:, -1:]), dim=1)

    monkeypatch.setattr(verify, "coupled", kept)
    with pytest.raises(AssertionError):
        test_coupled_emits_exactly_the_targets_law(1, range(6))


@pytest.mark.parametrize("rate", [0.0, 0.8, 1.0])
def test_a_synthetic_rate_is_the_rate(rate: float) -> None:
    rows, k = 20_000, 3
    drafts, picks = torch.full((rows, k), 5), torch.full((rows, k + 1), 7)
    accepted, block = verify.synthetic(
        SyntheticAcceptance(rate=rate),
        picks,
        drafts,
        torch.full((rows,), k),
        torch.arange(k + 1).expand(rows, -1),
        PhiloxDraws(torch.arange(rows)),
        torch.zeros(1, dtype=torch.int64),
    )
    for j in range(k):
        share = rate ** (j + 1)
        assert abs(float((accepted > j).double().mean()) - share) <= 5 * (share * (1 - share) / rows) ** 0.5
    assert torch.equal(block == 7, torch.arange(k + 1) == accepted[:, None]) or rate == 0.0
    assert bool((block.gather(1, accepted[:, None]) == 7).all())


def test_a_synthetic_pattern_takes_turns_and_never_more_than_counts() -> None:
    rule = SyntheticAcceptance(pattern=[4, 0, 2])
    found = []
    for number in range(6):
        accepted, _ = verify.synthetic(
            rule,
            torch.zeros(2, 4, dtype=torch.int64),
            torch.ones(2, 3, dtype=torch.int64),
            torch.tensor([3, 1]),
            torch.zeros(2, 4, dtype=torch.int64),
            PhiloxDraws(torch.tensor([0, 1])),
            torch.tensor([number]),
        )
        found.append(accepted.tolist())
    assert found == [[3, 1], [0, 0], [2, 1]] * 2


@pytest.mark.parametrize(
    "options",
    [{}, {"rate": 0.5, "pattern": [1]}, {"rate": 1.5}, {"rate": True}, {"pattern": []}, {"pattern": [1, -1]}],
    ids=str,
)
def test_bad_synthetic_acceptance_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="SyntheticAcceptance"):
        SyntheticAcceptance(**options)  # type: ignore[arg-type]


def test_modes_are_named() -> None:
    assert [checked(mode) for mode in MODES] == list(MODES)
    assert COUPLED in MODES
    with pytest.raises(ValueError, match=r"'rejection', 'coupled', 'block'.*got 'typical'"):
        checked("typical")
    with pytest.raises(ValueError, match="got None"):
        checked(None)
