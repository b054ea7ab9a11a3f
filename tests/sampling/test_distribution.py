"""Philox against its published vectors, the race against the law it must follow, filters against transformers."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from fastspec.sampling import distribution
from fastspec.sampling.distribution import (
    ACCEPT,
    DRAFT,
    TARGET,
    PhiloxDraws,
    SamplerRows,
    compute_probs,
    exponentials,
    philox,
    uniforms,
)
from tests.helpers.chance import chi_square_limit


def words(*values: int) -> tuple[Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # known-answer vectors of the Random123 distribution for philox4x32-10
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
            (0xFFFFFFFF, 0xFFFFFFFF),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    got = philox(words(*counter), words(*key))  # type: ignore[arg-type]
    assert tuple(int(word) for word in got) == expected


def test_numbers_do_not_depend_on_the_row() -> None:
    seeds = torch.tensor([5, -7, 2**62, 5])
    positions = torch.tensor([3, 9, 2**31 + 5, 3])
    together = exponentials(seeds, positions, TARGET, 11)
    assert torch.equal(together[0], together[3])
    for row in range(4):
        alone = exponentials(seeds[row : row + 1], positions[row : row + 1], TARGET, 11)
        assert torch.equal(alone[0], together[row])
    # nor on how many tokens are asked for
    assert torch.equal(exponentials(seeds, positions, TARGET, 6), together[:, :6])


def test_seed_position_and_purpose_all_matter() -> None:
    def draw(seed: int, position: int, purpose: int) -> Tensor:
        return exponentials(torch.tensor([seed]), torch.tensor([position]), purpose, 8)

    base = draw(1, 2, DRAFT)
    for other in (draw(2, 2, DRAFT), draw(1 + 2**40, 2, DRAFT), draw(1, 3, DRAFT), draw(1, 2, TARGET)):
        assert not torch.equal(base, other)
    coins = uniforms(torch.tensor([1]), torch.tensor([[2, 3]]), ACCEPT)
    assert coins[0, 0] != coins[0, 1]


def race_counts(probs: Tensor, draws: int, purpose: int = TARGET) -> Tensor:
    counts = torch.zeros(len(probs), dtype=torch.int64)
    batch = 50_000
    for start in range(0, draws, batch):
        positions = torch.arange(start, start + batch)
        seeds = torch.full_like(positions, 1234)
        picks = PhiloxDraws(seeds).sample(probs.expand(batch, -1), positions, purpose)
        counts += torch.bincount(picks, minlength=len(probs))
    return counts


def test_the_race_follows_its_law() -> None:
    probs = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.04, 0.009, 0.001, 0.0])
    draws = 1_000_000
    counts = race_counts(probs, draws)
    assert counts[-1] == 0
    expected = probs[:-1].double() / probs.sum() * draws
    statistic = ((counts[:-1] - expected) ** 2 / expected).sum().item()
    assert statistic < chi_square_limit(len(expected) - 1)
    biased = (counts[:-1] * 1.01 - expected).square().div(expected).sum().item()
    assert biased > chi_square_limit(len(expected) - 1), "the test could not see a bias of 1%"


def test_rare_tokens_win_as_often_as_they_should() -> None:
    """A coarse uniform would never, or far too often, let a token of probability 1e-5 win."""
    probs = torch.tensor([1 - 3e-5, 1e-5, 2e-5])
    draws = 1_000_000
    counts = race_counts(probs, draws).double()
    for token in (1, 2):
        expected = float(probs[token]) * draws
        assert abs(counts[token] - expected) < 5 * math.sqrt(expected)  # five sigmas of a Poisson count


def test_uniforms_keep_their_precision_however_small() -> None:
    """Of 64 random bits, down to the least: three roundings to fp32 off, and never 0 or 1."""
    for word in (0, 1, *(2**bits + 12345 for bits in range(14, 64)), 2**64 - 2**40, 2**64 - 1):
        got = Fraction(distribution._unit(torch.tensor(word >> 32), torch.tensor(word % 2**32)).item())
        exact = Fraction(2 * word + 1, 2**65)
        assert 0 < got < 1
        assert abs(got - exact) <= 3 * exact / 2**24, word


@pytest.mark.parametrize("rare", [1e-7, 1e-9, 1e-12, 1e-15])
def test_the_race_is_exact_in_the_small_tail(rare: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chance of a rare token, not by draws but counted: over 2^16 slices of the other token's random word, how many
    words of its own would let it win. The largest word that wins is found by bisection, for earlier is always better.
    """
    slices, other = 2**16, torch.arange(2**16) * 2**16 + 2**15
    zero = torch.zeros(slices, 1, dtype=torch.int64)
    probs = torch.tensor([1.0 - rare, rare]).expand(slices, 2)
    draws = PhiloxDraws(torch.zeros(slices, dtype=torch.int64))
    low, high = torch.full((slices,), -1), torch.full((slices,), 2**62)
    for _ in range(63):
        word = (low + high) // 2
        given = other[:, None], zero, (word >> 32)[:, None], (word % 2**32)[:, None]
        monkeypatch.setattr(distribution, "philox", lambda counter, key, given=given: given)
        won = draws.sample(probs, zero[:, 0], TARGET) == 1
        low, high = torch.where(won, word, low), torch.where(won, high, word)
    chance = ((low + 1).double() / 2.0**64).mean().item()
    # the slices' middles are off by about log(2) / 2^17, the shares of words by 2^-24 and the law by 2^-24
    assert abs(chance / float(probs[0, 1]) - 1) < 1e-5


def test_every_part_of_the_key_matters() -> None:
    """Seeds and positions beyond 32 bits, and purposes, of coins as of races: none has the numbers of another."""
    keys = [(seed, place, purpose) for seed in (1, 1 + 2**40) for place in (2, 3, 2 + 2**35) for purpose in (0, 1, 2)]
    races = {exponentials(torch.tensor([s]), torch.tensor([at]), purpose, 1).item() for s, at, purpose in keys}
    coins = {uniforms(torch.tensor([s]), torch.tensor([[at]]), purpose).item() for s, at, purpose in keys}
    assert len(races) == len(coins) == len(keys)


def test_certain_acceptance_never_fails_and_impossible_never_happens() -> None:
    draws = PhiloxDraws(torch.arange(100_000))
    positions = torch.zeros(100_000, 1, dtype=torch.int64)
    assert draws.accept(torch.ones(100_000, 1), positions).all()
    assert not draws.accept(torch.zeros(100_000, 1), positions).any()


def rows(temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, count: int = 1) -> SamplerRows:
    return SamplerRows(
        torch.full((count,), temperature),
        torch.full((count,), top_k),
        torch.full((count,), top_p),
        torch.full((count,), min_p),
    )


def transformers_law(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    return scores.softmax(-1)


@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.6])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 0.01])
@pytest.mark.parametrize("top_k", [0, 1, 3, 50, 500])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.9])
def test_filters_equal_transformers(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(6, 111, generator=torch.Generator().manual_seed(top_k)) * 3
    ours = compute_probs(logits[:, None], rows(temperature, top_k, top_p, min_p, 6))[:, 0]
    theirs = transformers_law(logits, temperature, top_k, top_p, min_p)
    assert torch.equal(ours > 0, theirs > 0)
    # two fp32 softmaxes over 111 values: a few ulp (1.2e-7) of one
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_top_k_keeps_ties_as_transformers_does() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    ours = compute_probs(logits[:, None], rows(1.0, top_k=2))[0, 0]
    assert (ours > 0).tolist() == [True, True, True, True, False]
    assert torch.equal(ours > 0, transformers_law(logits, 1.0, 2, 1.0, 0.0)[0] > 0)


def test_greedy_rows_are_one_hot_on_the_lowest_of_equals() -> None:
    logits = torch.tensor([[[1.0, 7.0, 7.0]], [[1.0, 7.0, 7.0]]])
    options = SamplerRows(torch.tensor([0.0, 1.0]), torch.tensor([0, 0]), torch.ones(2), torch.zeros(2))
    got = compute_probs(logits, options)
    assert got[0, 0].tolist() == [0.0, 1.0, 0.0]
    assert got[1, 0, 1] == got[1, 0, 2] > 0.49


def test_filters_off_leave_the_law_alone() -> None:
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0))
    plain = compute_probs(logits, rows(0.7, count=2))
    assert torch.equal(compute_probs(logits, rows(0.7, count=2)), plain)
