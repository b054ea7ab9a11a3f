"""A scheduler that outlives calls: requests join, share steps, are cancelled, from any thread; texts stay their own."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest

from fastspec.engine.engine import Engine
from fastspec.errors import OutOfPages
from fastspec.inputs.options import RowOptions
from fastspec.scheduling.requests import CallPlan, Request, lengths_of
from fastspec.scheduling.scheduler import Scheduler
from fastspec.shapes import FULL, GREEDY
from tests.helpers.devices import devices
from tests.helpers.scheduling import run_all
from tests.helpers.tiny import capture_all, tiny_engine
from tests.scheduling.test_scheduler import GREEDY_ROW, prompts, sampled_row

PENALISED = replace(sampled_row(5), repetition_penalty=1.4, presence_penalty=0.5, bias=((3, 2.0),))


def call_of(requests: list[Request], sampler: str = GREEDY, k: int = 4, top: int | None = None) -> CallPlan:
    return CallPlan((), sampler, lambda made: k, top, lengths=lengths_of(requests))


def alone(engine: Engine, request: Request, sampler: str = GREEDY, k: int = 4) -> list[int]:
    again = Request(request.prompt, request.max_new_tokens, request.options)
    for _ in run_all(engine, [again], (), sampler, lambda made: k):
        pass
    return again.new_tokens


def finish(scheduler: Scheduler) -> None:
    while not scheduler.idle:
        scheduler.step()
        scheduler.engine.pages.check_integrity()
    assert scheduler.engine.pages.num_free == scheduler.engine.pages.num_pages - 1


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("depth", [1, 3])
def test_calls_of_every_kind_share_steps_and_keep_their_texts(depth: int, device: str) -> None:
    """Greedy, sampled, penalised and undrafted calls come one after the other, into steps that already run."""
    engine = tiny_engine(batch=4, device=device, depth=depth)
    kinds: list[tuple[RowOptions, str, int]] = [
        (GREEDY_ROW, GREEDY, 4),
        (sampled_row(3), FULL, 4),
        (GREEDY_ROW, GREEDY, 0),
        (PENALISED, FULL, 2),
        (sampled_row(8), FULL, 1),
    ]
    requests = [Request(row, 40, kind[0]) for row, kind in zip(prompts(5, seed=2), kinds, strict=True)]
    expected = [
        alone(tiny_engine(batch=4, device=device), request, sampler, k)
        for request, (_, sampler, k) in zip(requests, kinds, strict=True)
    ]
    scheduler = Scheduler(engine)
    for request, (_, sampler, k) in zip(requests, kinds, strict=True):
        scheduler.add(request, call_of([request], sampler, k, top=2 if k == 2 else None))
        scheduler.step()
    finish(scheduler)
    assert [request.new_tokens for request in requests] == expected
    assert [request.finish_reason for request in requests] == ["length"] * 5
    assert requests[2].drafted == 0
    assert [len(request.logprobs) for request in requests] == [0, 0, 0, 40, 0]
    assert all(len(pairs) == 2 for pairs in requests[3].top_logprobs)


@pytest.mark.gpu
def test_steps_that_calls_share_are_captured_when_they_come() -> None:
    engine = tiny_engine(batch=2, device="cuda", depth=2, graphs=True)
    capture_all(engine, {4}, GREEDY)
    capture_all(engine, {2}, FULL)
    requests = [Request(row, 60, options) for row, options in zip(prompts(2, 4), (GREEDY_ROW, PENALISED), strict=True)]
    expected = [alone(engine, requests[0]), alone(engine, requests[1], FULL, 2)]
    scheduler = Scheduler(engine)
    scheduler.add(requests[0], call_of(requests[:1]))
    scheduler.step()
    scheduler.add(requests[1], call_of(requests[1:], FULL, 2))
    finish(scheduler)
    assert [request.new_tokens for request in requests] == expected


@pytest.mark.parametrize("device", devices())
def test_a_cancelled_request_leaves_the_others_alone(device: str) -> None:
    engine = tiny_engine(batch=2, device=device, depth=3)
    requests = [Request(row, 50, GREEDY_ROW) for row in prompts(5, seed=10)]
    expected = [alone(tiny_engine(device=device), request) for request in requests]
    scheduler = Scheduler(engine)
    call = call_of(requests)
    for request in requests:
        scheduler.add(request, call)
    for _ in range(3):
        scheduler.step()
    scheduler.cancel(requests[0])  # it runs
    scheduler.cancel(requests[3])  # it waits
    finish(scheduler)
    scheduler.cancel(requests[1])  # it has ended
    finish(scheduler)
    assert [request.finish_reason for request in requests] == ["cancelled", "length", "length", "cancelled", "length"]
    assert [requests[index].new_tokens for index in (1, 2, 4)] == [expected[index] for index in (1, 2, 4)]
    assert requests[0].new_tokens == expected[0][: len(requests[0].new_tokens)]


def test_requests_come_from_many_threads() -> None:
    """Eight threads add while one steps; every text is its own."""
    engine = tiny_engine(batch=4)
    requests = [Request(row, 12, GREEDY_ROW) for row in prompts(16, seed=6, longest=20)]
    expected = [alone(tiny_engine(), request) for request in requests]
    scheduler = Scheduler(engine)
    call = call_of(requests)
    start = threading.Barrier(9)

    def add(own: list[Request]) -> None:
        start.wait()
        for request in own:
            scheduler.add(request, call)

    threads = [threading.Thread(target=add, args=(requests[place::8],)) for place in range(8)]
    for thread in threads:
        thread.start()
    start.wait()
    while any(request.finish_reason is None for request in requests):
        scheduler.step()
    for thread in threads:
        thread.join()
    finish(scheduler)
    assert [request.new_tokens for request in requests] == expected


def test_one_scheduler_serves_call_after_call_and_abandoned_ones() -> None:
    engine = tiny_engine(batch=2, depth=2)
    scheduler, rng = Scheduler(engine), random.Random(4)
    for seed in range(6):
        requests = [Request(row, 30, GREEDY_ROW) for row in prompts(3, seed=seed)]
        running = scheduler.run(requests, call_of(requests))
        if seed % 2:
            for _ in range(rng.randrange(4)):
                next(running)
            running.close()  # the requests are cancelled, whatever is in flight
            assert not all(request.finish_reason == "length" for request in requests)
        else:
            emitted = list(running)
            assert all(emitted)
            for index, request in enumerate(requests):
                assert request.new_tokens == alone(tiny_engine(), request)
                assert [token for step in emitted for token in step.get(index, [])] == request.new_tokens
    finish(scheduler)


def test_an_interrupted_step_ends_its_rows_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(batch=1)
    requests = [Request(row, 20, GREEDY_ROW) for row in prompts(2, seed=3)]
    expected = alone(tiny_engine(), requests[1])
    scheduler = Scheduler(engine)
    for request in requests:
        scheduler.add(request, call_of(requests))
    scheduler.step()
    with monkeypatch.context() as broken:

        def interrupted(*args: object) -> None:
            raise KeyboardInterrupt

        broken.setattr(Scheduler, "_collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scheduler.step()
    finish(scheduler)
    assert [request.finish_reason for request in requests] == ["error", "length"]
    assert requests[1].new_tokens == expected


def test_what_can_never_fit_is_refused_at_once() -> None:
    scheduler = Scheduler(tiny_engine(num_pages=4))
    request = Request([1, 2], 100, GREEDY_ROW)
    with pytest.raises(OutOfPages, match="the cache has 3"):
        scheduler.add(request, call_of([request]))
    assert scheduler.idle
