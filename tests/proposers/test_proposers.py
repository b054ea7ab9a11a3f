"""Proposers other than a draft model: lookup, lookup before a model, and one's own."""

from __future__ import annotations

import random
from typing import cast

import pytest
import torch
from torch import Tensor

import fastspec
from fastspec.engine.engine import Engine
from fastspec.inputs.options import RowOptions
from fastspec.models.decoder import Decoder
from fastspec.proposers import draft_model
from fastspec.proposers.choose import Guarded, check, choose
from fastspec.proposers.combined import LookupThenModel, learn
from fastspec.proposers.deterministic import DeterministicProposer
from fastspec.proposers.interface import Proposer, is_deterministic
from fastspec.proposers.ngram import NGram
from fastspec.sampling.rules import BLOCK, COUPLED, MODES
from fastspec.scheduling.requests import Request
from fastspec.shapes import FULL
from fastspec.state import DecodeState
from tests.helpers.devices import devices
from tests.helpers.lookup_definition import followed
from tests.helpers.scheduling import run_all
from tests.helpers.tiny import VOCAB, tiny_engine
from tests.helpers.variants import judging, looking_up_first, proposing
from tests.scheduling.test_scheduler import prompts, run, sampled_row, texts


def looked_up(tokens: list[int], min_n: int, max_n: int, k: int) -> list[int]:
    """The definition: what follows the place at which the row repeats itself, over and over."""
    place, matched = followed(tokens, tokens, len(tokens), min_n, max_n)
    grown = list(tokens)
    for j in range(k if matched else 0):
        grown.append(grown[place + j])
    return grown[len(tokens) :]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("min_n", "max_n"), [(1, 1), (1, 4), (2, 3), (3, 3), (1, 32)])
def test_lookup_is_its_definition(min_n: int, max_n: int, device: str) -> None:
    rng = random.Random(max_n)
    rows = [[rng.randrange(rng.choice((1, 2, 3, 9))) for _ in range(rng.randint(1, 30))] for _ in range(200)]
    lengths = torch.tensor([len(row) for row in rows], device=device)
    padded = [row + [rng.randrange(3) for _ in range(41 - len(row))] for row in rows]  # junk beyond a row's end
    for k in (1, 4):
        drafts, counts = NGram(min_n, max_n).guess(torch.tensor(padded, device=device), lengths, k)
        for row, tokens, count in zip(rows, drafts.tolist(), counts.tolist(), strict=True):
            assert tokens[:count] == looked_up(row, min_n, max_n, k), row


@pytest.mark.parametrize("bad", [(0, 4), (3, 2), (1, 33), (1.0, 2), (True, 2)], ids=str)
def test_bad_lengths_are_refused(bad: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="1 <= min_n <= max_n <= 32, got min_n"):
        NGram(*bad)


def repeating(count: int) -> list[list[int]]:
    """Prompts whose ends stood before, and some whose did not."""
    return [row * 2 if index % 2 else row for index, row in enumerate(prompts(count, seed=31, longest=30))]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("k", [1, 4, 16])
def test_greedy_text_with_lookup_is_plain_text(k: int, device: str) -> None:
    rows = repeating(6)
    plain = run(tiny_engine(k=k, device=device), rows, 60, k=0)
    requests = run(proposing(tiny_engine(k=k, device=device), NGram()), rows, 60, k=k)
    assert texts(requests) == texts(plain)
    assert 0 < sum(request.accepted for request in requests) < sum(request.drafted for request in requests)
    assert all(request.drafted % k == 0 or request.stats().dropped for request in requests)
    assert sum(request.plain_steps for request in requests) > 0  # rows without a match step alone


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("mode", MODES)
def test_rows_with_lookup_do_not_feel_their_neighbours(mode: str, device: str) -> None:
    rows = repeating(5)
    options = [sampled_row(seed, temperature=0.5) for seed in range(5)]
    engine = judging(looking_up_first(tiny_engine(batch=3, device=device), NGram()), mode)
    together = run(engine, rows, 30, options=options)
    for index, row in enumerate(rows):
        assert texts(run(engine, [row], 30, options=[options[index]]))[0] == together[index].new_tokens


class Noise(NGram):
    """Finds `found` arbitrary tokens at every third length, so that the model goes on after them."""

    def __init__(self, found: int) -> None:
        super().__init__()
        self.found = found

    def guess(self, tokens: Tensor, lengths: Tensor, k: int) -> tuple[Tensor, Tensor]:
        places = lengths[:, None] * 7 + torch.arange(k, device=tokens.device)
        return places % VOCAB, torch.where(lengths % 3 == 0, self.found, 0)


def same_caches(engine: Engine, row: list[int], options: RowOptions, k: int = 4) -> bool:
    """draft = target: after every step both caches hold the same bits wherever the draft was fed."""
    request = Request(list(row), 45, options)
    proposer = engine.modules.proposer
    assert isinstance(proposer, LookupThenModel)
    target, draft = engine.modules.target, proposer.model.model
    assert isinstance(target, Decoder)
    assert isinstance(draft, Decoder)
    length, equal = len(row), True
    for emitted in run_all(engine, [request], (), FULL, lambda steps: k):
        at = torch.arange(len(row), length + k - 1)
        pages = engine.state.block_table[0, at // engine.pages.page_size]
        for ours, theirs in ((target.cache.keys, draft.cache.keys), (target.cache.values, draft.cache.values)):
            slots = (slice(None), pages, at % engine.pages.page_size)
            equal &= torch.equal(ours[slots], theirs[slots])
        drafted_alone = length % 3 != 0
        if drafted_alone and request.finish_reason is None:
            equal &= len(emitted[0]) == k + 1
        length += len(emitted[0])
    return equal


@pytest.mark.parametrize("found", [1, 2, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", [BLOCK, COUPLED])
def test_the_models_cache_stays_right_whoever_drafted(mode: str, temperature: float, found: int) -> None:
    """And so every draft of a model for itself is accepted, but where noise was put before it."""
    engine = judging(looking_up_first(tiny_engine(same=True, batch=1), Noise(found)), mode)
    assert same_caches(engine, prompts(5, seed=33)[4], sampled_row(3, temperature))


def test_a_model_that_is_fed_its_own_drafts_instead_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: what lookup chose is put into the drafts only once the model has drafted."""
    original = draft_model.DraftModel.propose

    def late(self: object, state: object, shape: object, draws: object, given: tuple[Tensor, Tensor]) -> None:
        original(self, state, shape, draws)  # type: ignore[arg-type]
        for j in range(shape.num_drafts):  # type: ignore[attr-defined]
            draft_model.overwrite_draft(state, shape, given[0][:, j], j < given[1], j)  # type: ignore[arg-type]

    monkeypatch.setattr(draft_model.DraftModel, "propose", late)
    engine = looking_up_first(tiny_engine(same=True, batch=1), Noise(2))
    assert not same_caches(engine, prompts(5, seed=33)[4], sampled_row(3))


class Wrong(NGram):
    """Always finds an id that no text has next."""

    def guess(self, tokens: Tensor, lengths: Tensor, k: int) -> tuple[Tensor, Tensor]:
        last = tokens.gather(1, lengths[:, None] - 1)
        return ((last + 1) % VOCAB).expand(-1, k), torch.full_like(lengths, k)


def test_a_row_drafts_with_what_was_right_in_that_row() -> None:
    """A model that is always right takes over from a lookup that is not, in the rows where it is not."""
    rows = prompts(3, seed=33)

    def steps_of(lookup: NGram | None) -> list[int]:
        engine = tiny_engine(same=True, batch=3)
        engine = engine if lookup is None else looking_up_first(engine, lookup)
        return [request.steps for request in run(engine, rows, 45)]

    model, misled = steps_of(None), steps_of(Wrong())
    # 2.0 falls below 1.0, what nothing known counts, in three steps of none right: 2, 1.5, 1.125, 0.84
    assert all(most <= least + 3 for most, least in zip(misled, model, strict=True))
    assert all(most > least for most, least in zip(misled, model, strict=True)), "lookup was tried"


def test_a_new_row_learns_anew() -> None:
    """Steps of a request are the same in a new engine and behind another request, whose place it takes."""
    first, second = prompts(2, seed=33)
    engine, fresh = (looking_up_first(tiny_engine(same=True, batch=1), Wrong()) for _ in range(2))
    assert run(engine, [first, second], 45)[1].steps == run(fresh, [second], 45)[0].steps


def test_the_averages_count_what_was_right() -> None:
    state = DecodeState.allocate(
        batch=4, max_drafts=3, max_length=9, pages_per_row=1, vocab_size=VOCAB, device=torch.device("cpu")
    )
    state.lookup_drafts.copy_(torch.tensor([[1, 2, 3]] * 4))
    state.lookup_counts.copy_(torch.tensor([3, 2, 3, 0]))
    state.block.copy_(torch.tensor([[1, 2, 9, 9], [1, 2, 3, 9], [1, 2, 3, 9], [1, 2, 3, 9]]))
    state.emitted.copy_(torch.tensor([3, 4, 2, 4]))
    state.accepted.copy_(torch.tensor([2, 3, -1, 3]))  # the third row did not step
    state.draft_source.copy_(torch.tensor([False, True, True, True]))
    state.lengths.copy_(state.emitted + 5)
    learn(state)
    assert (state.lookup_mean.tolist(), state.model_mean.tolist()) == ([2.0] * 4, [1.0] * 4), "nothing was proposed"
    state.proposed_at.fill_(5)
    learn(state)
    assert state.lookup_mean.tolist() == [2.0, 2.0, 2.0, 2.0]
    assert state.model_mean.tolist() == [1.0, 1.5, 1.0, 1.5]
    state.emitted[0], state.lengths[0] = 1, 6
    state.accepted[1:] = -1
    learn(state)
    assert state.lookup_mean.tolist() == [1.75, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("context", [1, 30, 60])
def test_lookup_goes_on_where_the_model_has_no_context_left(context: int, device: str) -> None:
    rows = repeating(5)
    plain = run(tiny_engine(device=device), rows, 70, k=0)
    engine = looking_up_first(tiny_engine(device=device, draft_context=context), NGram())
    requests = run(engine, rows, 70)
    assert texts(requests) == texts(plain)
    assert sum(request.drafted for request in requests) > 0


class Again(DeterministicProposer):
    """The README's example: a row goes on with its last token."""

    def guess(self, tokens: Tensor, lengths: Tensor, k: int) -> tuple[Tensor, Tensor]:
        last = tokens.gather(1, lengths[:, None] - 1)
        return last.expand(-1, k), torch.full_like(lengths, k)


class Unknown(Again):
    """Drafts one id of the target's, then two it does not know, and claims more than k."""

    def guess(self, tokens: Tensor, lengths: Tensor, k: int) -> tuple[Tensor, Tensor]:
        drafts, counts = super().guess(tokens, lengths, k)
        drafts = drafts.clone()
        drafts[:, 1::2], drafts[:, 2::2] = VOCAB, -1
        return drafts, counts + 5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("own", [Again, Unknown])
def test_a_proposer_of_ones_own(own: type[DeterministicProposer], mode: str) -> None:
    rows = prompts(5, seed=35)
    engine = judging(proposing(tiny_engine(), Guarded(own(), VOCAB)), mode)
    requests = run(engine, rows, 50)
    assert texts(requests) == texts(run(tiny_engine(), rows, 50, k=0))
    per_step = 1 if own is Unknown else 4
    for request in requests:  # drafts behind the end of a row are not counted
        behind = per_step * request.steps - request.drafted
        assert 0 <= behind < per_step if request.stats().dropped else behind == 0
    run(engine, rows, 50, options=[sampled_row(seed) for seed in range(5)])


def test_what_is_no_proposer_is_refused() -> None:
    check(None, with_draft=True)
    check(NGram(), with_draft=True)
    check(Again(), with_draft=False)
    with pytest.raises(ValueError, match=r"got the class NGram; write NGram\(\)"):
        check(NGram, with_draft=False)
    with pytest.raises(ValueError, match="str has no propose, catch_up, max_length, deterministic; pass NGram"):
        check("ngram", with_draft=False)
    with pytest.raises(ValueError, match=r"can be combined only with NGram\(\) .* got a Again; leave out"):
        check(Again(), with_draft=True)


def test_the_proposer_follows_from_draft_and_proposer() -> None:
    engine = tiny_engine()
    model = engine.modules.proposer
    assert isinstance(model, draft_model.DraftModel)
    lookup = NGram()
    assert choose(None, model, VOCAB) is model
    assert choose(None, None, VOCAB) is None
    assert choose(lookup, None, VOCAB) is lookup
    assert isinstance(choose(lookup, model, VOCAB), LookupThenModel)
    assert isinstance(choose(Again(), None, VOCAB), Guarded)


def test_old_names_work_for_one_release_and_say_so() -> None:
    with pytest.warns(DeprecationWarning, match="DeterministicProposer"):
        old = fastspec.CertainProposer
    assert old is fastspec.DeterministicProposer

    class Old:
        __slots__ = ()  # no room for another attribute
        max_length, certain = 0, True

        def propose(self, *args: object) -> None: ...

        def catch_up(self, *args: object) -> None: ...

    proposer = Old()
    assert is_deterministic(proposer)
    with pytest.warns(DeprecationWarning, match="`deterministic`"):
        check(proposer, with_draft=False)
    assert not hasattr(proposer, "deterministic")  # the caller's object stays as it was
    assert Guarded(cast("Proposer", proposer), VOCAB).deterministic
