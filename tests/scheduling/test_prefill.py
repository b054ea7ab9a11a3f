"""How prompts come in: by passes between the steps of others, first come first served, and nothing lost on the way."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from fastspec.adaptive.controller import Observation, StepContext
from fastspec.engine.engine import Engine
from fastspec.engine.prompt_passes import PromptPart, PromptPasses
from fastspec.scheduling.prefill import PrefillQueue
from fastspec.scheduling.requests import CallPlan, Request
from fastspec.scheduling.scheduler import Scheduler
from fastspec.shapes import GREEDY
from tests.helpers.scheduling import check_pages, nothing_leaked, with_prefix_cache
from tests.helpers.tiny import VOCAB, tiny_engine
from tests.scheduling.test_prefix import GREEDY_ROW, HEAD, Turn, call_of, finish, found, fresh

LONG = tuple(random.Random(7).choices(range(VOCAB), k=190))


def add(scheduler: Scheduler, *turns: Turn) -> list[Request]:
    """Each is a call of its own."""
    requests = [turn.request() for turn in turns]
    for request, turn in zip(requests, turns, strict=True):
        scheduler.add(request, call_of([request], turn.k))
    return requests


def running(budget: int | None, **options: Any) -> tuple[Scheduler, Request]:
    """A scheduler in which a row runs."""
    engine = with_prefix_cache(tiny_engine(k=3, batch=3, max_length=260, **options), budget)
    scheduler = Scheduler(engine)
    (request,) = add(scheduler, Turn(HEAD[:20], 60))
    scheduler.step()
    return scheduler, request


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Of the passes over prompts there are: whether of the draft, and their tokens. Tests empty it."""
    made: list[tuple[bool, int]] = []
    prefill_row = PromptPasses.feed_row

    def counted(self: Engine, row: int, start: int, chunks: list[int], *, draft: bool, **how: Any) -> None:
        made.extend((draft, chunk) for chunk in chunks)
        prefill_row(self, row, start, chunks, draft=draft, **how)

    monkeypatch.setattr(PromptPasses, "feed_row", counted)
    return made


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("budget", "most"), [(1, 1), (32, 1), (70, 2), (None, 6)])
def test_a_row_never_waits_for_more_of_a_prompt_than_the_budget(
    budget: int | None, most: int, depth: int, fed: list[tuple[bool, int]]
) -> None:
    scheduler, first = running(budget, depth=depth)
    (second,) = add(scheduler, Turn(LONG, 5))
    counts = []
    while second.finish_reason is None:
        fed.clear()
        before = len(first.new_tokens)
        scheduler.step()
        counts.append(sum(not draft for draft, _ in fed))
        cost = sum(tokens / 4 if draft else tokens for draft, tokens in fed)  # a draft reads in a quarter of the time
        assert budget is None or cost <= 1.25 * budget or len(fed) == 1, "they take as long as the budget says"
        assert len(first.new_tokens) > before or first.finish_reason, "the row that runs gets tokens in every step"
    assert max(counts) == most
    assert sum(counts) == 6  # 189 tokens in cells of 32
    finish(scheduler)
    assert found(second)[0] == fresh_long(Turn(LONG, 5))[0]
    assert found(first) == fresh(Turn(HEAD[:20], 60))
    nothing_leaked(scheduler.engine)


def fresh_long(turn: Turn) -> tuple[list[int], list[float], int]:
    scheduler = Scheduler(tiny_engine(k=3, batch=1, max_length=260))
    (request,) = add(scheduler, turn)
    finish(scheduler)
    return found(request)


def test_rows_of_its_own_call_do_not_make_a_prompt_wait(fed: list[tuple[bool, int]]) -> None:
    scheduler = Scheduler(with_prefix_cache(tiny_engine(k=3, batch=3), 32))
    requests = [Turn((place, *HEAD[:90]), 4).request() for place in range(3)]
    call = call_of(requests, 3)
    for request in requests:
        scheduler.add(request, call)
    scheduler.step()
    assert sum(not draft for draft, _ in fed) == 9
    assert all(request.new_tokens for request in requests)
    finish(scheduler)


def test_requests_that_join_a_call_wait_for_each_other_no_longer_than_others_do(fed: list[tuple[bool, int]]) -> None:
    """Requests of many users may be one call to the scheduler."""
    scheduler = Scheduler(with_prefix_cache(tiny_engine(k=3, batch=3), 32))
    requests = [Turn((place, *HEAD[:90]), 9).request() for place in range(3)]
    call = CallPlan((), GREEDY, lambda made: 3, joined=True)
    for request in requests:
        scheduler.add(request, call)
    scheduler.step()
    assert sum(not draft for draft, _ in fed) == 3, "the first whole, for nobody runs; then pieces"
    finish(scheduler)


def test_the_draft_takes_a_prompt_in_beside_the_target(fed: list[tuple[bool, int]]) -> None:
    """So that the first step that drafts for it is as short as any; where nobody drafts it is not fed."""
    for k, drafts in ((3, 6), (0, 0)):
        scheduler, _ = running(32)
        fed.clear()
        (request,) = add(scheduler, Turn(LONG, 5, k=k))
        while not request.new_tokens:
            scheduler.step()
        assert sum(draft for draft, _ in fed) == drafts
        finish(scheduler)


@pytest.mark.parametrize(("running", "wanted"), [(16, 8), (400, 8), (4000, 2), (0, 8)])
def test_no_waiting_request_is_looked_at_again_in_each_step(running: int, wanted: int) -> None:
    """Long prompts among them do not count, and a cancelled one counts no more."""
    lengths = []

    class Prompt:
        def __init__(self, tokens: int) -> None:
            self.tokens = tokens

        def __len__(self) -> int:
            lengths.append(self.tokens)
            return self.tokens

    engine: Any = SimpleNamespace(sizes=SimpleNamespace(batch_tokens=64))
    queue = PrefillQueue(engine)
    asked: list[Any] = [SimpleNamespace(prompt=Prompt(33 if number % 2 else 32)) for number in range(4000)]
    for request in asked:
        queue.add(request)
    seen = len(lengths)
    assert queue.budgets(running) == wanted
    assert len(lengths) == seen
    for request in asked[:-4:2]:  # all short ones but two
        queue.drop(request)
    assert queue.budgets(1) == 8
    queue.drop(asked[-4])
    assert queue.budgets(2) == 2
    queue.drop(asked[-2])
    assert queue.budgets(1) == 1


def test_without_shared_passes_no_prompt_is_short() -> None:
    engine: Any = SimpleNamespace(sizes=SimpleNamespace(batch_tokens=0))
    queue, request = PrefillQueue(engine), SimpleNamespace(prompt=[1, 2])
    for _ in range(9):
        queue.add(request)  # type: ignore[arg-type]
    assert queue.budgets(1) == 1


@pytest.mark.parametrize(("joined", "after"), [(0, [1, 2, 3, 4]), (64, [1, 5])])
def test_a_crowd_of_short_prompts_comes_in_quickly(joined: int, after: list[int]) -> None:
    """Four budgets in a step where four times as many wait as run; a long prompt among them is fed by its budget."""
    scheduler = Scheduler(with_prefix_cache(tiny_engine(k=3, batch=6, max_length=260, prefill_batch_tokens=joined), 32))
    call = CallPlan((), GREEDY, lambda made: 3, joined=True)
    requests = [Turn(HEAD[place : place + 20], 30).request() for place in range(5)]
    for request in requests[:1]:
        scheduler.add(request, call)
    scheduler.step()
    for request in requests[1:]:
        scheduler.add(request, call)
    seen = []
    while scheduler._queue.waiting or not seen:
        seen.append(len(scheduler._rows))
        scheduler.step()
    assert [*seen, len(scheduler._rows)] == after
    finish(scheduler)
    assert [found(request)[0] for request in requests] == [
        fresh_long(Turn(HEAD[at : at + 20], 30))[0] for at in range(5)
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_first_token_of_a_long_prompt_does_not_wait_for_the_draft(depth: int, fed: list[tuple[bool, int]]) -> None:
    """Its first step is one for first tokens, alone and beside other rows; the draft reads the prompt behind it."""
    alone = fresh_long(Turn(LONG, 9))
    scheduler = Scheduler(tiny_engine(k=3, batch=3, max_length=260, depth=depth, long_prompt=100))
    fed.clear()
    (request,) = add(scheduler, Turn(LONG, 9))
    while not request.new_tokens:
        scheduler.step()
    before = [draft for draft, _ in fed]
    finish(scheduler)
    (short, beside) = add(scheduler, Turn(HEAD[:20], 20), Turn(LONG, 9))
    finish(scheduler)
    for row in (request, beside):
        assert found(row)[0] == alone[0]
        assert (row.plain_steps, row.steps_at[0]) == (1, 1)
        assert row.drafted > 0
    assert short.plain_steps == 0, "a short prompt drafts at once"
    assert not any(before) or depth > 1, "the draft's passes come behind the first token"


class Steered:
    """Chooses k as it is told, and is told what happened."""

    few = None

    def __init__(self) -> None:
        self.k = 0

    def choose(self, context: StepContext) -> int:
        return self.k

    def observe(self, step: Observation) -> None:
        return


def test_where_k_is_chosen_the_draft_comes_along_while_steps_draft(fed: list[tuple[bool, int]]) -> None:
    for k, drafts in ((0, 0), (3, 6)):
        scheduler, _ = running(32)
        policy = Steered()
        policy.k = k
        other = Request(list(HEAD[30:50]), 60, GREEDY_ROW)
        scheduler.add(other, CallPlan((), GREEDY, lambda made: 0, policy=policy))
        while not other.new_tokens:
            scheduler.step()
        scheduler._last_k = k
        fed.clear()
        request = Request(list(LONG), 3, GREEDY_ROW)
        scheduler.add(request, CallPlan((), GREEDY, lambda made: 0, policy=policy))
        while scheduler._queue.request is not request:
            scheduler.step()
        while scheduler._queue.request is request:
            scheduler.step()
        assert sum(draft for draft, _ in fed) == drafts
        finish(scheduler)


@pytest.mark.parametrize("steps", range(1, 8))
def test_a_prompt_that_is_cancelled_on_its_way_leaves_nothing(steps: int) -> None:
    scheduler, first = running(32)
    before = scheduler.engine.pages.num_free + scheduler.engine.pages.num_idle
    (second,) = add(scheduler, Turn(LONG, 40))
    for _ in range(steps):
        scheduler.step()
    scheduler.cancel(second)
    scheduler.step()
    check_pages(scheduler.engine)
    if first.finish_reason is None:
        assert scheduler.engine.pages.num_free + scheduler.engine.pages.num_idle == before
    (third,) = add(scheduler, Turn(HEAD, 6))
    finish(scheduler)
    assert second.finish_reason == "cancelled"
    assert found(first) == fresh(Turn(HEAD[:20], 60))
    assert found(third) == fresh(Turn(HEAD, 6))
    nothing_leaked(scheduler.engine)


@pytest.mark.parametrize("name", ["feed", "_feed_draft", "_finish", "begin", "plan"])
def test_an_interrupted_prompt_ends_with_the_rows_and_what_waits_goes_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, first = running(32)
    second, third = add(scheduler, Turn(LONG, 4), Turn(HEAD, 6))
    if name not in ("begin", "plan"):
        scheduler.step()

    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(PrefillQueue, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            finish(scheduler)
    finish(scheduler)
    assert first.finish_reason == "error"
    assert second.finish_reason == ("length" if name == "begin" else "error")
    assert found(third) == fresh(Turn(HEAD, 6))
    nothing_leaked(scheduler.engine)


def test_rows_move_while_a_prompt_comes_in() -> None:
    """Those below it end; the highest takes their places, but not the one that the prompt will get."""
    engine = with_prefix_cache(tiny_engine(k=3, batch=4, max_length=260), 32)
    scheduler = Scheduler(engine)
    turns = [Turn(HEAD[:20], 3), Turn(HEAD[20:40], 4), Turn(HEAD[40:60], 50)]
    requests = add(scheduler, *turns)
    scheduler.step()
    while requests[0].finish_reason is None:
        scheduler.step()
    (late,) = add(scheduler, Turn(LONG, 4))
    finish(scheduler)
    for request, turn in zip(requests, turns, strict=True):
        assert found(request) == fresh(turn)
    assert found(late) == fresh_long(Turn(LONG, 4))
    nothing_leaked(engine)


class Starved(Exception):
    """A request was overtaken."""


def in_order(scheduler: Scheduler, requests: list[Request]) -> None:
    """Steps to the end; requests get their rows in the order in which they came."""
    started: list[Request] = []
    for _ in range(5000):
        if scheduler.idle:
            break
        scheduler.step()
        check_pages(scheduler.engine)
        held = [*scheduler._rows.values(), *([scheduler._queue.request] if scheduler._queue.request else [])]
        started += [
            request for request in requests if request not in started and (request in held or request.new_tokens)
        ]
        if started != requests[: len(started)]:
            raise Starved
    if not scheduler.idle:
        raise Starved


def crowd(seed: int, budget: int | None) -> tuple[Scheduler, list[Request], random.Random]:
    """Few pages; short requests, and long ones that need nearly all of them."""
    rng = random.Random(seed)
    engine = with_prefix_cache(tiny_engine(k=3, batch=3, max_length=200, num_pages=16), budget)
    turns = [
        Turn(LONG[:180], 3) if rng.random() < 0.3 else Turn((*HEAD[: rng.randint(1, 60)], rng.randrange(9)), 4)
        for _ in range(10)
    ]
    scheduler = Scheduler(engine)
    return scheduler, add(scheduler, *turns), rng


@pytest.mark.parametrize("budget", [None, 32])
def test_when_pages_run_out_requests_wait_in_line_and_all_are_served(budget: int | None) -> None:
    for seed in range(3):
        scheduler, requests, _ = crowd(seed, budget)
        in_order(scheduler, requests)
        for request in requests:
            assert request.finish_reason == "length"
            turn = Turn(tuple(request.prompt), request.max_new_tokens)
            assert found(request) == (fresh(turn) if len(request.prompt) < 150 else fresh_long(turn))
        nothing_leaked(scheduler.engine)


def test_cancels_and_interrupts_at_random_lose_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request ends, whatever is interrupted; those that nothing happened to have their texts."""
    prefill_row = PromptPasses.feed_row
    for seed in range(4):
        scheduler, requests, rng = crowd(seed, 32)

        def shaky(self: Engine, *args: Any, rng: random.Random = rng, **how: Any) -> None:
            if rng.random() < 0.05:
                raise KeyboardInterrupt
            prefill_row(self, *args, **how)

        with monkeypatch.context() as broken:
            broken.setattr(PromptPasses, "feed_row", shaky)
            while not scheduler.idle:
                if rng.random() < 0.1:
                    scheduler.cancel(rng.choice(requests))
                try:
                    scheduler.step()
                except KeyboardInterrupt:
                    continue
                check_pages(scheduler.engine)
        assert {request.finish_reason for request in requests} <= {"length", "cancelled", "error"}
        for request in requests:
            if request.finish_reason == "length":
                turn = Turn(tuple(request.prompt), request.max_new_tokens)
                assert request.new_tokens == (fresh(turn) if len(request.prompt) < 150 else fresh_long(turn))[0]
        nothing_leaked(scheduler.engine)


def test_a_request_that_is_overtaken_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: who fits goes first."""
    begin = PrefillQueue.begin

    def any_that_fits(self: PrefillQueue, rows: Any, positions: int) -> Any:
        for _ in range(len(self.waiting)):
            needed = self.waiting[0].limit + self.engine.shapes.max_drafts + 1
            if (begun := begin(self, rows, needed)) is not None:
                return begun
            self.waiting.rotate(-1)
        return None

    monkeypatch.setattr(PrefillQueue, "begin", any_that_fits)

    def crowds() -> None:
        for seed in range(3):
            in_order(*crowd(seed, None)[:2])

    with pytest.raises(Starved):
        crowds()


@pytest.mark.parametrize("whole", [1, 10**6])
@pytest.mark.parametrize("depth", [1, 2])
def test_prompts_of_any_length_share_passes(whole: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As few as their blocks of 32 tokens allow, of target and draft; each text is that of the prompt alone."""
    made: list[tuple[bool, list[int]]] = []
    feed_rows = PromptPasses.feed_rows

    def counted(self: PromptPasses, parts: Sequence[PromptPart], *, draft: bool, **how: Any) -> None:
        made.append((draft, [part.tokens for part in parts]))
        feed_rows(self, parts, draft=draft, **how)

    monkeypatch.setattr(PromptPasses, "feed_rows", counted)
    rng = random.Random(4)
    turns = [Turn(tuple(rng.choices(range(VOCAB), k=length)), 6) for length in (70, 33, 100, 5, 64, 20)]
    options: dict[str, Any] = {"prefill_batch_tokens": 256, "long_prompt": whole, "max_length": 260}
    engine = tiny_engine(k=3, batch=6, depth=depth, **options)
    scheduler, requests = Scheduler(engine), [turn.request() for turn in turns]
    call = call_of(requests, 3)
    for request in requests:
        scheduler.add(request, call)
    finish(scheduler)
    alone = Scheduler(tiny_engine(k=3, batch=1, **options))
    for turn, request in zip(turns, requests, strict=True):
        (expected,) = add(alone, turn)
        finish(alone)
        assert (found(request)[0], request.accepted) == (found(expected)[0], expected.accepted)
    less = 0 if whole == 1 else 1
    fed = [70 - less, 33 - less, 100 - less, 5 - less, 64 - less, 20 - less]
    # blocks of the target: 3, 2 (or 1), 4, 1, 2, 1; a pass has 8 of them
    assert [tokens for draft, tokens in made if not draft] == ([fed[:2], fed[2:]] if less == 0 else [fed[:3], fed[3:]])
    # after the first token the draft knows one more of the prompt's tokens
    read = [each - 1 for each in fed]
    assert [tokens for draft, tokens in made if draft] == [read[:3], read[3:]]


def test_the_first_step_with_drafts_is_queued_before_the_first_token_is_read() -> None:
    scheduler = Scheduler(tiny_engine(k=3, batch=2, depth=2, long_prompt=1))
    (request,) = add(scheduler, Turn(HEAD[:40], 9))
    scheduler.step()
    (queued,) = scheduler._in_flight
    assert (len(request.new_tokens), queued.k, queued.first_token) == (1, 3, False)
    finish(scheduler)
    assert found(request)[0] == fresh(Turn(HEAD[:40], 9))[0]
