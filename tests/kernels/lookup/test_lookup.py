"""Lookup of drafts: the kernels against their torch definition, on rows, predictions and texts of few different ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from fastspec.kernels import reference
from fastspec.kernels.cpu.ops import CPU_OPS
from fastspec.kernels.reference import lookup as definition
from fastspec.kernels.reference.lookup import LookUp, Predictions, SharedTexts
from fastspec.proposers.texts import TextIndex, rungs_between
from tests.helpers.devices import devices

lookup = pytest.importorskip("fastspec.kernels.lookup.dispatch", reason="Triton ships for Linux only")

WIDTH, ROOM, CAPACITY = 70, 50, 200
SEARCHES = [(1, 1, 1), (1, 4, 3), (2, 16, 8), (3, 5, 15), (2, 32, 32)]  # min_n, max_n, k


def drawn(generator: torch.Generator, ids: int, *shape: int) -> Tensor:
    return torch.randint(ids, shape, generator=generator)


def a_call(
    seed: int, min_n: int, max_n: int, device: str, *, rows: int = 5, wide: int = 1, weighted: bool = False
) -> LookUp:
    """Everything that a lookup can search, with junk behind every end. weighted: with drawn weights of the sources."""

    def weight() -> float:
        return float(drawn(generator, 12, 1) + 1) / 3  # products of some of them round

    generator = torch.Generator().manual_seed(seed)
    ids = 2 + seed % 3
    tokens = drawn(generator, ids, rows, WIDTH * wide)
    lengths = drawn(generator, WIDTH * wide - 1, rows) + 1
    lengths[0], lengths[-1] = 1, WIDTH * wide
    prediction = Predictions(
        drawn(generator, ids, rows, ROOM * wide).to(device),
        (drawn(generator, ROOM * wide, rows) * (torch.arange(rows) != 1)).to(device),
        (lengths - drawn(generator, 30, rows)).clamp_min(0).to(device),
    )
    if seed % 2:  # the row writes its prediction, with an edit now and then
        row = int(lengths.argmax())
        tokens[row, : ROOM * wide] = prediction.tokens[row].cpu()
        tokens[row, 3 :: 9 + seed] = 0
        prediction.lengths[row], prediction.prompt_lengths[row] = ROOM * wide, 0
    texts = []
    for table in range(seed % 3):
        index, start = TextIndex(CAPACITY * wide, rungs_between(min_n, max_n), torch.device(device)), 0
        for number in range(6):
            text = drawn(generator, ids, int(drawn(generator, 30 * wide, 1)) + 1).tolist()
            index.write(start, text, number, int(drawn(generator, 2, 1)))
            start += len(text)
        index.sort()
        owners = drawn(generator, 4, rows) - 1 if table else torch.zeros(rows).long()
        texts.append(SharedTexts(index.table, owners.to(device), weight() if weighted else 1.0))
    if weighted:
        prediction = replace(prediction, weight=weight())
    given = prediction if seed % 5 else None
    per_match = (None, 2)[seed % 7 > 1]
    own = weight() if weighted else 1.0
    return LookUp(tokens.to(device), lengths.to(device), min_n, max_n, given, tuple(texts), per_match, own)


def assert_equal(
    call: LookUp, k: int, tried: Callable[[LookUp, int], tuple[Tensor, Tensor]] = lookup.look_up
) -> Tensor:
    found = []
    for look_up in (tried, reference.look_up):
        drafts, counts = look_up(call, k)
        valid = torch.arange(k, device=drafts.device) < counts[:, None]
        found.append((counts, torch.where(valid, drafts, 0)))
    (counts, drafts), (expected, theirs) = found
    assert counts.tolist() == expected.tolist()
    assert torch.equal(drafts, theirs)
    return counts


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("min_n", "max_n", "k"), SEARCHES, ids=str)
def test_the_kernels_equal_their_torch_definition(min_n: int, max_n: int, k: int, device: str) -> None:
    for seed in range(1, 8 if device == "cpu" else 200):
        assert_equal(a_call(seed, min_n, max_n, device, weighted=bool(seed % 2)), k)


@pytest.mark.parametrize(("min_n", "max_n", "k"), SEARCHES, ids=str)
def test_the_cpu_searches_no_column_behind_the_longest_row(
    min_n: int, max_n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[Tensor] = []
    follow = definition.follow
    monkeypatch.setattr(
        definition, "follow", lambda call, source: (searched.append(source.tokens), follow(call, source))[1]
    )

    def on_a_cpu(call: LookUp, k: int) -> tuple[Tensor, Tensor]:
        searched.clear()
        found = CPU_OPS.look_up(call, k)
        assert max(tokens.shape[1] for tokens in searched) == WIDTH
        return found

    for seed in range(1, 20):
        call = a_call(seed, min_n, max_n, "cpu", weighted=bool(seed % 2))
        call = replace(call, tokens=pad(call.tokens, (0, 900), value=1))
        if (given := call.prediction) is not None:
            call = replace(call, prediction=replace(given, tokens=pad(given.tokens, (0, 900), value=1)))
        assert_equal(call, k, on_a_cpu)


def test_each_source_drafts_in_these_calls() -> None:
    """Without one of them other drafts come out somewhere: the test above searches all of them."""

    def counts_of(call: LookUp) -> Tensor:
        return reference.look_up(call, 9)[1]

    calls = [a_call(seed, 1, 4, "cpu") for seed in range(1, 8)]
    for without in ({"prediction": None}, {"texts": ()}, {"per_match": None}):
        changed = [replace(call, **without) for call in calls]  # type: ignore[arg-type]
        assert any(not torch.equal(counts_of(old), counts_of(new)) for old, new in zip(calls, changed, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(1, 8))
def test_long_rows(seed: int) -> None:
    """Several blocks of places, and tables whose search takes several steps."""
    assert_equal(a_call(seed, 2, 16, "cuda", rows=33, wide=100), 15)


def test_tables_of_other_lengths_are_refused() -> None:
    call, other = a_call(2, 1, 4, "cpu"), a_call(2, 1, 8, "cpu")
    mixed = replace(call, texts=(*call.texts, *other.texts))
    with pytest.raises(ValueError, match="the tables index n-grams of lengths"):
        lookup.look_up(mixed, 3)
