"""Prompts that begin like earlier ones: the bits of a fresh generator, whatever is kept and whenever it is given up."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastspec.engine.engine import Engine
from fastspec.engine.prompt_passes import PromptPart, PromptPasses
from fastspec.inputs.options import RowOptions
from fastspec.scheduling import prefill as prefill_queue
from fastspec.scheduling.prefill import PrefillQueue
from fastspec.scheduling.requests import CallPlan, Request, lengths_of
from fastspec.scheduling.scheduler import Scheduler
from fastspec.shapes import FULL, UNTILED, chunks_of
from tests.helpers.devices import devices
from tests.helpers.scheduling import check_pages, nothing_leaked, with_prefix_cache
from tests.helpers.tiny import VOCAB, tiny_engine

UNIT = 32  # of `tiny_engine`: its chunks, of two pages
LONG = 60  # tokens: the first token of a longer prompt comes from its last pass
GREEDY_ROW = RowOptions(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
HEAD = tuple(random.Random(5).choices(range(VOCAB), k=100))


@dataclass(frozen=True)
class Turn:
    """A prompt and what is asked for."""

    prompt: tuple[int, ...]
    new: int
    seed: int | None = None
    k: int = 3

    @property
    def options(self) -> RowOptions:
        return GREEDY_ROW if self.seed is None else replace(GREEDY_ROW, temperature=1.0, seed=self.seed)

    def request(self) -> Request:
        return Request(list(self.prompt), self.new, self.options)


Found = tuple[list[int], list[float], int]  # text, what its log-probabilities were, drafts accepted


def found(request: Request) -> Found:
    return request.new_tokens, request.logprobs, request.accepted


def call_of(requests: list[Request], k: int) -> CallPlan:
    return CallPlan((), FULL, lambda made: k, 1, lengths=lengths_of(requests))


def together(scheduler: Scheduler, turns: list[Turn], each_step: Callable[[], None] = lambda: None) -> list[Request]:
    """Runs the turns as one call each."""
    requests = [turn.request() for turn in turns]
    for request, turn in zip(requests, turns, strict=True):
        scheduler.add(request, call_of([request], turn.k))
    finish(scheduler, each_step)
    return requests


def finish(scheduler: Scheduler, each_step: Callable[[], None] = lambda: None) -> None:
    """Steps to the end of all requests; looks at the pages after each step."""
    while not scheduler.idle:
        scheduler.step()
        check_pages(scheduler.engine)
        for request in scheduler._rows.values():
            shared = len(request.nodes) * (scheduler.engine.prefix.unit if scheduler.engine.prefix is not None else 0)
            assert shared <= max(0, len(request.prompt) - 2), "steps write to a page that others may have"
        each_step()


@cache
def oracle_engine(device: str) -> Engine:
    return tiny_engine(k=3, batch=3, device=device, long_prompt=LONG)


@cache
def fresh(turn: Turn, device: str = "cpu") -> Found:
    """As a generator that has seen nothing."""
    (request,) = together(Scheduler(oracle_engine(device)), [turn])
    assert request.cached == 0
    return found(request)


def engine_of(num_pages: int | None = None, budget: int | None = None, **options: Any) -> Engine:
    return with_prefix_cache(tiny_engine(k=3, batch=3, num_pages=num_pages, long_prompt=LONG, **options), budget)


class Chats:
    """Conversations that branch: each turn's prompt is an earlier one with its answer, and more."""

    def __init__(self, scheduler: Scheduler, seed: int) -> None:
        self.scheduler = scheduler
        self.rng = random.Random(seed)
        self.texts: list[tuple[int, ...]] = [HEAD[:40], HEAD[:70]]
        self.cached = 0

    def turn(self) -> Turn:
        rng = self.rng
        start = rng.choice([rng.choice(self.texts), (), HEAD[: rng.randint(1, 90)]])[:130]
        more = rng.choices(range(VOCAB), k=rng.choice([1, 2, 5, 31, 33]))
        return Turn((*start, *more), rng.randint(1, 6), rng.choice([None, rng.randrange(3)]), rng.choice([0, 3, 3]))

    def round(self, each_step: Callable[[], None] = lambda: None) -> None:
        turns = [self.turn() for _ in range(self.rng.randint(1, 3))]
        turns += [turns[0]] * self.rng.choice([0, 0, 2])
        for request, turn in zip(together(self.scheduler, turns, each_step), turns, strict=True):
            # of a row without drafts the oracle has none either
            assert found(request) == fresh(turn), (turn, request.cached)
            assert request.cached % UNIT == 0
            assert request.cached <= max(0, len(turn.prompt) - 2)
            assert request.stats().cached_tokens == request.cached
            self.cached += request.cached
            self.texts.append((*turn.prompt, *request.new_tokens))


@settings(max_examples=24, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10**6),
    num_pages=st.sampled_from([None, 30, 25]),
    budget=st.sampled_from([None, 32, 64]),
    joined=st.sampled_from([0, 64, 96]),
)
def test_texts_of_branching_chats_are_those_of_a_fresh_generator(
    seed: int, num_pages: int | None, budget: int | None, joined: int
) -> None:
    engine = engine_of(num_pages, budget, prefill_batch_tokens=joined)
    chats = Chats(Scheduler(engine), seed)
    for _ in range(3):
        chats.round()
    nothing_leaked(engine)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10**6),
    num_pages=st.sampled_from([None, 40, 25]),
    budget=st.sampled_from([None, 32, 64]),
    joined=st.sampled_from([0, 64, 96]),
)
def test_long_random_chats_have_the_text_of_a_fresh_generator(
    seed: int, num_pages: int | None, budget: int | None, joined: int
) -> None:
    engine = engine_of(num_pages, budget, depth=1 + seed % 2, prefill_batch_tokens=joined)
    chats = Chats(Scheduler(engine), seed)
    for _ in range(8):
        chats.round()
    assert chats.cached
    nothing_leaked(engine)


def test_everything_that_can_be_given_up_is_at_every_step() -> None:
    """Whenever the cache is emptied as far as it may be, texts stay, and so do the pages of rows."""
    turns = [Turn(HEAD[:80], 4), Turn(HEAD[:90], 3, seed=1), Turn((*HEAD[:70], 1), 2), Turn(HEAD[:80], 4)]
    for point in range(9):
        engine = engine_of(budget=32)
        scheduler, steps = Scheduler(engine), iter(range(10**6))

        def empty(engine: Engine = engine, steps: Any = steps, point: int = point) -> None:
            if next(steps) == point:
                assert engine.prefix is not None
                engine.prefix.make_room(engine.pages.num_pages)

        for each in (turns, turns[::-1]):
            requests = together(scheduler, each, empty)
            assert [found(request) for request in requests] == [fresh(turn) for turn in each]
        nothing_leaked(engine)


@pytest.mark.parametrize("device", devices())
def test_cached_tokens_are_counted(device: str) -> None:
    """Whole cells alone, and never the last two tokens."""
    scheduler = Scheduler(engine_of(device=device))
    expected = [
        (HEAD[:66], 0),
        (HEAD[:66], 64),
        (HEAD[:65], 32),  # the second cell ends at the token before the last one, which a draft feeds in a step
        (HEAD[:33], 0),
        (HEAD[:34], 32),
        ((*HEAD[:64], 3, 3, 3), 64),
        ((*HEAD[:63], 3, 3, 3), 32),
        ((3, *HEAD[1:66]), 0),
        (HEAD[:100], 64),
        (HEAD[:100], 96),
        (HEAD[:1], 0),
    ]
    for prompt, cached in expected:
        (request,) = together(scheduler, [Turn(prompt, 3)])
        assert request.cached == cached, len(prompt)
        assert found(request) == fresh(Turn(prompt, 3), device)
    nothing_leaked(scheduler.engine)


def passes_of(engine: Engine, run: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Of what passes over prompts there were: whether of the draft, and their tokens."""
    made: list[tuple[bool, int]] = []
    prefill_row = PromptPasses.feed_row

    def counted(self: Engine, row: int, start: int, chunks: Iterable[int], *, draft: bool, **how: Any) -> None:
        made.extend((draft, chunk) for chunk in chunks)
        prefill_row(self, row, start, chunks, draft=draft, **how)

    with monkeypatch.context() as patch:
        patch.setattr(PromptPasses, "feed_row", counted)
        run()
    return made


def test_copies_of_a_prompt_cost_one_prefill_and_their_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = with_prefix_cache(tiny_engine(k=3, batch=4, long_prompt=LONG))
    scheduler, turns = Scheduler(engine), [Turn(HEAD, 3, seed=seed) for seed in range(6)]
    requests: list[Request] = []
    made = passes_of(engine, lambda: requests.extend(together(scheduler, turns)), monkeypatch)
    assert [request.cached for request in requests] == [0, *[96] * 5]
    for draft in (False, True):  # 99 and 98 positions in cells of 32: four passes, then the last of them for each copy
        assert [chunk for each, chunk in made if each == draft] == [32] * (4 + 5)
    assert [found(request) for request in requests] == [fresh(turn) for turn in turns]


def test_short_passes_of_several_prompts_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tails of copies, and the draft's passes over them, go through three at a time."""
    engine, joined = (
        with_prefix_cache(tiny_engine(k=3, batch=6, prefill_batch_tokens=96, long_prompt=LONG)),
        list[tuple[bool, int]](),
    )
    prefill_rows = PromptPasses.feed_rows

    def counted(self: PromptPasses, parts: Sequence[PromptPart], *, draft: bool, **how: Any) -> None:
        joined.append((draft, len(parts)))
        prefill_rows(self, parts, draft=draft, **how)

    monkeypatch.setattr(PromptPasses, "feed_rows", counted)
    scheduler, turns = Scheduler(engine), [Turn(HEAD, 3, seed=seed) for seed in range(6)]
    requests = [turn.request() for turn in turns]
    call = call_of(requests, 3)
    alone = passes_of(engine, lambda: run_as_one(scheduler, requests, call), monkeypatch)
    assert [request.cached for request in requests] == [0, *[96] * 5]
    assert joined == [(False, 3), (False, 2), (True, 3), (True, 2)]
    assert alone == [(False, 32)] * 4 + [(True, 32)] * 4, "but for the first prompt's passes"
    assert [found(request) for request in requests] == [fresh(turn) for turn in turns]
    nothing_leaked(engine)
    engine = tiny_engine(k=3, batch=3, same=True, prefill_batch_tokens=96, long_prompt=LONG)
    scheduler = Scheduler(with_prefix_cache(engine))
    requests = [Turn(HEAD[start:stop], 12).request() for start, stop in ((3, 15), (7, 27), (1, 31))]
    run_as_one(scheduler, requests, call_of(requests, 3))
    assert joined[4:] == [(False, 3), (True, 3)]
    assert all(request.accepted == request.drafted > 0 for request in requests), "the draft has read each to its end"


def run_as_one(scheduler: Scheduler, requests: list[Request], call: CallPlan) -> None:
    for request in requests:
        scheduler.add(request, call)
    finish(scheduler)


def test_a_prompt_that_was_never_drafted_for_is_not_taken_for_one_that_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's K/V are there as far as it was fed: a draft that is the target is right only with all of them."""

    def accepted(steps: tuple[int, ...]) -> bool:
        engine = with_prefix_cache(tiny_engine(k=3, batch=2, same=True, long_prompt=LONG))
        scheduler = Scheduler(engine)
        for model in (engine.modules.target, engine.modules.proposer.model):  # type: ignore[union-attr]
            model.cache.keys.normal_()  # type: ignore[attr-defined]
            model.cache.values.normal_()  # type: ignore[attr-defined]
        requests = [together(scheduler, [Turn(HEAD, 9, k=k)])[0] for k in steps]
        assert [request.cached for request in requests] == [0, *[96] * (len(steps) - 1)]
        return all(request.accepted == request.drafted for request in requests)

    assert accepted((0, 3, 3, 0, 3))
    monkeypatch.setattr(prefill_queue, "drafted_upto", lambda prefix, nodes: len(nodes) * prefix.unit)
    assert not accepted((0, 3))


def test_the_drafts_keys_of_a_kept_prompt_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    scheduler = Scheduler(engine)
    together(scheduler, [Turn(HEAD, 3)])
    made = passes_of(engine, lambda: together(scheduler, [Turn(HEAD, 3, k=0)]), monkeypatch)
    assert made == [(False, 32)]
    made = passes_of(engine, lambda: together(scheduler, [Turn(HEAD, 3)]), monkeypatch)
    assert made == [(False, 32), (True, 32)]


@pytest.mark.parametrize("context", [40, 64, 70])
def test_prompts_beyond_the_drafts_context(context: int) -> None:
    """Behind the draft's context nothing of it is kept, and nothing is waited for."""
    engine = with_prefix_cache(tiny_engine(k=3, batch=2, draft_context=context))
    scheduler = Scheduler(engine)
    expected = together(Scheduler(tiny_engine(k=3, batch=2, draft_context=context)), [Turn(HEAD[:50], 20)])[0]
    for _ in range(3):
        for prompt in (HEAD, HEAD[:50]):
            (request,) = together(scheduler, [Turn(prompt, 20)])
    assert found(request) == found(expected)
    nothing_leaked(engine)


def test_what_steps_wrote_is_kept_where_bits_are_not_promised() -> None:
    engine = with_prefix_cache(tiny_engine(k=3, batch=2, tiling=UNTILED))
    assert engine.prefix is not None
    assert engine.prefix.unit == 16  # a page
    scheduler = Scheduler(engine)
    (first,) = together(scheduler, [Turn(HEAD[:50], 40)])
    (second,) = together(scheduler, [Turn((*HEAD[:50], *first.new_tokens, 1, 2), 10)])
    assert second.cached == 80  # whole pages of the 89 positions that were fed
    (alone,) = together(Scheduler(tiny_engine(k=3, batch=2, tiling=UNTILED)), [Turn(tuple(second.prompt), 10)])
    assert second.new_tokens == alone.new_tokens
    assert second.logprobs == pytest.approx(alone.logprobs, abs=1e-4)  # sums in another order
    nothing_leaked(engine)


def test_rows_move_and_are_cancelled_while_they_share_pages() -> None:
    engine = with_prefix_cache(tiny_engine(k=3, batch=4, long_prompt=LONG))
    scheduler = Scheduler(engine)
    turns = [Turn(HEAD, new, seed=new) for new in (3, 30, 5, 40)]
    requests = [turn.request() for turn in turns]
    for request in requests:
        scheduler.add(request, call_of([request], 3))
    for _ in range(4):
        scheduler.step()
    scheduler.cancel(requests[1])
    finish(scheduler)
    for index in (0, 2, 3):
        assert found(requests[index]) == fresh(turns[index])
    nothing_leaked(engine)


def test_after_an_interrupted_step_nothing_is_taken_for_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(budget=32)
    scheduler = Scheduler(engine)
    together(scheduler, [Turn(HEAD, 3)])
    for place, name in ((PrefillQueue, "_finish"), (PromptPasses, "feed_row"), (Scheduler, "_collect")):
        request = Turn(HEAD, 6).request()
        scheduler.add(request, call_of([request], 3))

        def interrupted(*args: object, **options: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as broken:
            broken.setattr(place, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                finish(scheduler)
        assert together(scheduler, [Turn(HEAD, 3)])[0].cached == 0
        assert request.finish_reason == "error"
        assert found(together(scheduler, [Turn(HEAD, 3)])[0]) == fresh(Turn(HEAD, 3))
    nothing_leaked(engine)


SIZES = (64, 128, 256, 512, 1024, 2048)


def check_kinds(sizes: tuple[int, ...], alike: tuple[int, ...], shared: tuple[int, ...]) -> None:
    """Position by position a prompt that is taken up again has passes of the kinds that it has as a whole.

    Args:
        sizes: of passes.
        alike: of passes that leave the same bits.
        shared: those that are taken for such.
    """
    rng, cell = random.Random(0), shared[0]

    def kinds(chunks: list[int], start: int, stop: int) -> list[int]:
        assert sum(chunks[:-1]) < stop - start <= sum(chunks)
        return [0 if chunk in alike else chunk for chunk in chunks for _ in range(chunk)][: stop - start]

    for stop in {*range(1, 700, 23), *(rng.randrange(1, 6000) for _ in range(40))}:
        whole = kinds(chunks_of(sizes, stop), 0, stop)
        assert whole[: stop // cell * cell] == [0] * (stop // cell * cell)
        for start in range(0, stop, cell):
            for most in (None, 1, 300, 512):
                chunks = chunks_of(sizes, stop, start, shared, max_tokens=most)
                assert kinds(chunks, start, stop) == whole[start:]
                assert all(chunk <= max(most or sizes[-1], cell) for chunk in chunks if chunk in alike)


@pytest.mark.parametrize(("sizes", "alike"), [((64,), (64,)), (SIZES, SIZES[2:]), (SIZES[:3], SIZES[2:3])])
def test_a_prompt_taken_up_again_has_passes_of_the_same_kinds(sizes: tuple[int, ...], alike: tuple[int, ...]) -> None:
    check_kinds(sizes, alike, alike)


def test_a_tail_shared_across_lengths_is_seen() -> None:
    """Planted: a tail is taken for a cell, though in a longer prompt it is part of another kind of pass."""
    with pytest.raises(AssertionError):
        check_kinds(SIZES, SIZES[2:], SIZES[1:])


def test_prompts_are_taken_up_anywhere_where_bits_are_not_promised() -> None:
    for start in range(0, 500, 16):
        for stop in range(start + 1, 700, 13):
            chunks = chunks_of(SIZES, stop, start, SIZES, 1, 300)
            assert sum(chunks[:-1]) < stop - start <= sum(chunks)
            assert max(chunks) <= 256


def test_a_page_that_steps_write_to_is_never_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [Turn(HEAD[:64], 3), Turn(HEAD[:65], 3)]
    together(Scheduler(engine_of()), turns)
    monkeypatch.setattr(PrefillQueue, "_shareable", lambda self, request: len(request.prompt))
    with pytest.raises(AssertionError, match="steps write"):
        together(Scheduler(engine_of()), turns)
