"""Handles: requests from any thread on one scheduler, each with the text that it has alone."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from fastspec import FastSpecGenerator, GenerateOutput, OutOfPages, UnsupportedOption
from fastspec.errors import InvalidLogits
from fastspec.scheduling.handle import Handle
from fastspec.scheduling.loop import Loop
from tests.helpers.limits import HANGS
from tests.helpers.services import END, opened

PROMPTS = [[5, 6, 7, 8], [250, 20, 41], [9] * 70, [77, 100, 12, 13, 14]]
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "seed": 5}
KINDS: list[dict[str, Any]] = [
    {},
    {**SAMPLED, "top_p": 0.9, "logprobs": 2},
    {"num_speculative_tokens": 0, "logprobs": True},
    {"repetition_penalty": 1.3, "num_speculative_tokens": 2, "stop_strings": ["e", "\n"]},
    {**SAMPLED, "logit_bias": {3: 2.0}, "min_new_tokens": 3, "eos_token_id": [19, END]},
    {"num_speculative_tokens": "auto"},
]

pytestmark = pytest.mark.filterwarnings("ignore:drafting does not pay")


def alone(gen: FastSpecGenerator, prompt: list[int], **options: Any) -> GenerateOutput:
    output = gen.generate([prompt], return_dict_in_generate=True, **options)
    assert isinstance(output, GenerateOutput)
    return output


def same(one: GenerateOutput, other: GenerateOutput) -> None:
    assert torch.equal(one.sequences, other.sequences)
    for name in ("new_tokens", "finish_reasons", "logprobs", "top_logprobs", "texts"):
        assert getattr(one, name) == getattr(other, name), name
    assert one.stats.emitted == other.stats.emitted


def settled(gen: FastSpecGenerator) -> None:
    """Nothing is left of earlier requests: messages are obeyed in their order, so they are before a later result."""
    gen.submit([1, 2], max_new_tokens=1).result()
    assert not gen._loop.deliveries
    pages = gen._open().engine.pages
    pages.check_integrity()
    assert pages.num_free + pages.num_idle == pages.num_pages - 1
    assert gen._open().scheduler.idle


def in_threads(*works: Callable[[], None]) -> None:
    """Runs all at once; raises what one of them did."""
    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(work) for work in works]:
            done.result()


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_result_is_what_generate_returns(gen: FastSpecGenerator, options: dict[str, Any]) -> None:
    expected = alone(gen, PROMPTS[0], max_new_tokens=24, **options)
    handle = gen.submit(PROMPTS[0], max_new_tokens=24, **options)
    assert list(handle) == expected.new_tokens[0]
    same(handle.result(), expected)
    assert list(handle) == expected.new_tokens[0], "every iteration begins at the first token"
    assert handle.done
    handle.cancel()
    assert handle.result().finish_reasons == expected.finish_reasons


@pytest.mark.parametrize("form", [tuple, torch.tensor, lambda ids: [ids], lambda ids: {"input_ids": [ids]}])
def test_prompts_of_every_form(gen: FastSpecGenerator, form: Callable[[list[int]], Any]) -> None:
    expected = alone(gen, PROMPTS[0], max_new_tokens=4)
    same(gen.submit(form(PROMPTS[0]), max_new_tokens=4).result(), expected)


def test_all_kinds_from_all_threads_go_together(gen: FastSpecGenerator) -> None:
    """More requests than rows, calls of `generate` and streams among them."""
    cases = [(prompt, kind) for prompt in PROMPTS for kind in KINDS[:5]]
    expected = [alone(gen, prompt, max_new_tokens=8, **kind) for prompt, kind in cases]
    batch = gen.generate(PROMPTS, max_new_tokens=10)

    def submits(start: int) -> None:
        handles = [gen.submit(prompt, max_new_tokens=8, **kind) for prompt, kind in cases[start::3]]
        for handle, whole in zip(handles, expected[start::3], strict=True):
            same(handle.result(), whole)

    def generates() -> None:
        assert torch.equal(torch.as_tensor(gen.generate(PROMPTS, max_new_tokens=10)), torch.as_tensor(batch))

    def streams() -> None:
        texts: list[list[int]] = [[] for _ in PROMPTS]
        for step in gen.stream(PROMPTS, max_new_tokens=10):
            for index, tokens in step.items():
                texts[index] += tokens
        alone_too = gen.generate(PROMPTS, max_new_tokens=10, return_dict_in_generate=True)
        assert texts == alone_too.new_tokens  # type: ignore[union-attr]

    in_threads(*(lambda start=start: submits(start) for start in range(3)), generates, streams)
    settled(gen)


def test_whoever_submits_while_the_thread_starts_sees_no_dead_one(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    with opened(pair) as gen:
        loop = gen._loop

        def slowly(thread: threading.Thread) -> None:
            loop.check_open()
            start(thread)
            loop.check_open()

        monkeypatch.setattr(threading.Thread, "start", slowly)
        assert len(gen.submit(PROMPTS[0], max_new_tokens=4).result().new_tokens[0]) == 4


def test_a_stream_that_is_under_way_goes_on_beside_handles(pair: tuple[Path, Path]) -> None:
    """Its first steps are its caller's, the others the thread's; it is suspended while handles come to their ends."""
    with opened(pair, max_batch_size=3) as gen:
        whole = gen.generate(PROMPTS[:2], max_new_tokens=20, return_dict_in_generate=True).new_tokens  # type: ignore[union-attr]
        other = alone(gen, PROMPTS[3], max_new_tokens=20)
        for steps in (0, 1, 3, 8):
            assert not gen._loop.running or steps
            stream = gen.stream(PROMPTS[:2], max_new_tokens=20)
            pieces = [next(stream) for _ in range(steps)]
            same(gen.submit(PROMPTS[3], max_new_tokens=20).result(), other)
            pieces += list(stream)
            assert [[token for piece in pieces for token in piece.get(row, [])] for row in (0, 1)] == whole
            settled(gen)


@pytest.mark.parametrize("steps", [1, 4])
def test_a_thread_takes_over_from_a_caller(pair: tuple[Path, Path], steps: int) -> None:
    with opened(pair, max_batch_size=3) as gen:
        whole = gen.generate(PROMPTS[:2], max_new_tokens=20, return_dict_in_generate=True).new_tokens  # type: ignore[union-attr]
        other = alone(gen, PROMPTS[3], max_new_tokens=20)
        assert not gen._loop.running
        stream = gen.stream(PROMPTS[:2], max_new_tokens=20)
        pieces = [next(stream) for _ in range(steps)]
        handle = gen.submit(PROMPTS[3], max_new_tokens=20)
        same(handle.result(), other)
        assert gen._loop.running
        pieces += list(stream)
        assert [[token for piece in pieces for token in piece.get(row, [])] for row in (0, 1)] == whole
        settled(gen)


def left_early(gen: FastSpecGenerator) -> None:
    for _ in gen.submit(PROMPTS[0], max_new_tokens=90):
        break


def dropped(gen: FastSpecGenerator) -> None:
    gen.submit(PROMPTS[0], max_new_tokens=90)


def dropped_in_a_cycle(gen: FastSpecGenerator) -> None:
    handle: Any = gen.submit(PROMPTS[0], max_new_tokens=90)
    handle.itself = handle
    next(iter(handle))
    del handle
    gc.collect()


def cancelled(gen: FastSpecGenerator) -> None:
    with gen._loop.turn:  # no step is made meanwhile
        handle = gen.submit(PROMPTS[0], max_new_tokens=90)
        handle.cancel()
    output = handle.result()
    assert output.finish_reasons == ["cancelled"]
    assert len(output.new_tokens[0]) < 90


def timed_out(gen: FastSpecGenerator) -> None:
    with gen._loop.turn:  # no step is made meanwhile
        handle = gen.submit(PROMPTS[0], max_new_tokens=90)
        with pytest.raises(TimeoutError, match="has not ended within 0 s; it continues"):
            handle.result(timeout=0)
        assert not handle.done


def interrupted(gen: FastSpecGenerator) -> None:
    stream: Any = gen.stream(PROMPTS[:1], max_new_tokens=90)
    next(stream)
    with pytest.raises(KeyboardInterrupt):
        stream.throw(KeyboardInterrupt())


def awaited_no_more(gen: FastSpecGenerator) -> None:
    async def main() -> None:
        handle = gen.submit(PROMPTS[0], max_new_tokens=90)
        task = asyncio.ensure_future(handle._result())
        async for _ in gen.submit(PROMPTS[1], max_new_tokens=90):
            break
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await handle).finish_reasons == ["cancelled"]

    asyncio.run(main())


WAYS = [left_early, dropped, dropped_in_a_cycle, cancelled, timed_out, interrupted, awaited_no_more]


@pytest.mark.parametrize("leave", WAYS, ids=lambda way: way.__name__)
def test_who_leaves_gives_back_its_pages_and_disturbs_nobody(
    gen: FastSpecGenerator, leave: Callable[[FastSpecGenerator], None]
) -> None:
    cases = list(zip(PROMPTS, KINDS, strict=False))[:3]
    expected = [alone(gen, prompt, max_new_tokens=8, **kind) for prompt, kind in cases]
    handles = [gen.submit(prompt, max_new_tokens=8, **kind) for prompt, kind in cases]
    leave(gen)
    for handle, whole in zip(handles, expected, strict=True):
        same(handle.result(), whole)
    leave(gen)
    settled(gen)


def test_requests_that_nobody_ends_are_seen(gen: FastSpecGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the test above finds what it looks for."""
    kept = gen.submit(PROMPTS[0], max_new_tokens=90)
    monkeypatch.setattr(Loop, "leave", lambda self, requests: None)
    with pytest.raises(AssertionError):
        settled(gen)
    kept.result()


def test_in_an_event_loop(gen: FastSpecGenerator) -> None:
    expected = [alone(gen, prompt, max_new_tokens=20, **SAMPLED) for prompt in PROMPTS]

    async def tokens(handle: Handle) -> list[int]:
        return [token async for token in handle]

    async def main() -> None:
        handles = [gen.submit(prompt, max_new_tokens=20, **SAMPLED) for prompt in PROMPTS]
        texts = await asyncio.gather(*(tokens(handle) for handle in handles))
        assert texts == [output.new_tokens[0] for output in expected]
        for handle, whole in zip(handles, expected, strict=True):
            same(await handle, whole)

    asyncio.run(main())
    settled(gen)


def test_an_error_of_a_step_reaches_everybody_and_the_generator_goes_on(
    gen: FastSpecGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone(gen, PROMPTS[0], max_new_tokens=20)
    gen.submit(PROMPTS[0], max_new_tokens=1).result()
    scheduler = gen._open().scheduler
    step, made = scheduler.step, iter(range(100))

    def failing() -> Any:
        if next(made) == 3:
            raise RuntimeError("the device fell off")
        return step()

    monkeypatch.setattr(scheduler, "step", failing)
    handles = [gen.submit(prompt, max_new_tokens=40) for prompt in [*PROMPTS, *PROMPTS]]
    for handle in handles:
        with pytest.raises(RuntimeError, match=r"a step failed, .*the device fell off. Submit them again"):
            handle.result()
        with pytest.raises(RuntimeError, match="fell off"):
            list(handle)
    same(gen.submit(PROMPTS[0], max_new_tokens=20).result(), expected)
    settled(gen)

    made = iter([3] * 4)
    with pytest.raises(RuntimeError, match="a step failed"):
        gen.generate(PROMPTS, max_new_tokens=10)
    monkeypatch.undo()
    same(alone(gen, PROMPTS[0], max_new_tokens=20), expected)
    settled(gen)


def test_invalid_logits_are_the_requests_own(pair: tuple[Path, Path]) -> None:
    with opened(pair, max_batch_size=2) as gen:
        expected = alone(gen, PROMPTS[1], max_new_tokens=20)
        norms = gen._open().engine.modules.target.weights.norm  # type: ignore[attr-defined]
        before = norms.clone()
        norms.fill_(float("nan"))
        broken = gen.submit(PROMPTS[0], max_new_tokens=20)
        with pytest.raises(InvalidLogits, match="prompt 0, position 4") as caught:
            broken.result()
        assert isinstance(caught.value.output, GenerateOutput)
        assert caught.value.output.finish_reasons == ["error"]
        with pytest.raises(InvalidLogits, match="prompt 0, position 4") as caught:
            list(broken)
        assert isinstance(caught.value.output, GenerateOutput), "who iterates gets what was made, too"
        norms.copy_(before)
        same(gen.submit(PROMPTS[1], max_new_tokens=20).result(), expected)
        settled(gen)


def test_what_belongs_to_a_process_says_so_where_it_is_copied(gen: FastSpecGenerator) -> None:
    handle = gen.submit(PROMPTS[0], max_new_tokens=2)
    for one, says in ((gen, "make one in each process"), (handle, "pass its result")):
        for copied in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=f"a {type(one).__name__} cannot be copied or pickled; {says}"):
                copied(one)
    same(pickle.loads(pickle.dumps(handle.result())), handle.result())


def test_what_is_refused_is_refused_at_once(gen: FastSpecGenerator) -> None:
    with pytest.raises(ValueError, match="max_new_tokens must be a whole number"):
        gen.submit(PROMPTS[0], max_new_tokens=0)
    with pytest.raises(UnsupportedOption, match="unknown option 'max_tokens'"):
        gen.submit(PROMPTS[0], max_tokens=3)
    with pytest.raises(UnsupportedOption, match="submit takes one prompt and one text of it, got 2"):
        gen.submit(PROMPTS[:2], max_new_tokens=3)
    with pytest.raises(UnsupportedOption, match="got 3"):
        gen.submit(PROMPTS[0], max_new_tokens=3, num_return_sequences=3, do_sample=True)
    with pytest.raises(ValueError, match="for at most 4"):
        gen.submit(PROMPTS[0], max_new_tokens=3, num_speculative_tokens=9)
    settled(gen)


def test_requests_alike_are_one_call(gen: FastSpecGenerator) -> None:
    loop, seen = gen._loop, set()
    handles = [gen.submit(prompt, max_new_tokens=30, num_speculative_tokens="auto") for prompt in PROMPTS[:3]]
    for _ in handles[0]:
        seen.add(len(loop._plans))
    for handle in handles:
        handle.result()
    assert seen <= {0, 1}
    assert 1 in seen
    settled(gen)
    assert not loop._plans
    assert not loop._keys


def test_the_thread_sleeps_when_there_is_nothing_to_do(gen: FastSpecGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    settled(gen)
    loop = gen._loop
    with loop.turn:
        pass
    scheduler, steps, ran = gen._open().scheduler, [], threading.Event()
    step = scheduler.step

    def counted() -> Any:
        steps.append(1)
        ran.set()
        return step()

    monkeypatch.setattr(scheduler, "step", counted)
    for count in range(1, 4):
        ran.clear()
        loop.leave([])  # a message that asks for nothing wakes it for one step, without anything in it
        assert ran.wait(HANGS)
        with loop.turn:
            assert len(steps) == count


def test_close_cancels_handles_and_ends_the_thread(pair: tuple[Path, Path]) -> None:
    gen = opened(pair)
    handles = [gen.submit(prompt, max_new_tokens=20) for prompt in PROMPTS]
    thread = gen._loop._thread
    stream = gen.stream(PROMPTS[:1], max_new_tokens=20)
    next(stream)
    with pytest.raises(RuntimeError, match="in use by another call"):
        gen.close()
    stream.close()  # type: ignore[attr-defined]
    gen.close()
    gen.close()
    assert thread is not None
    assert not thread.is_alive()
    for handle in handles:
        output = handle.result()
        assert output.finish_reasons in (["cancelled"], ["length"])
        assert list(handle) == output.new_tokens[0]
    with pytest.raises(RuntimeError, match="closed"):
        gen.submit(PROMPTS[0], max_new_tokens=3)


@pytest.mark.parametrize("submitted", [False, True])
def test_a_closed_generator_holds_no_buffers(submitted: bool, pair: tuple[Path, Path]) -> None:
    """While the object itself is still there."""
    gen = FastSpecGenerator(*pair, progress=False, max_length=64)
    modules = gen._loop.engine.modules
    held = [weakref.ref(tensor) for tensor in (gen._loop.engine.state.tokens, modules.target.cache.keys)]
    del modules
    if submitted:
        gen.submit([1, 2], max_new_tokens=3).result()
    gen.generate([[1, 2]], max_new_tokens=3)
    gen.close()
    gc.collect()
    assert [tensor() for tensor in held] == [None, None]
    gen.close()


def test_a_generator_that_is_dropped_takes_its_thread_along(pair: tuple[Path, Path]) -> None:
    gen = opened(pair)
    gen.submit(PROMPTS[0], max_new_tokens=3).result()
    thread, engine = gen._loop._thread, weakref.ref(gen._open().engine.ring)
    assert thread is not None
    del gen
    gc.collect()
    thread.join(HANGS)
    assert not thread.is_alive()
    assert engine() is None


def test_a_request_that_never_fits_is_refused(pair: tuple[Path, Path]) -> None:
    with opened(pair, max_batch_size=1) as gen:
        gen._open().engine.pages.num_pages = 2
        with pytest.raises(OutOfPages, match="ask for fewer new tokens"):
            gen.submit(PROMPTS[2], max_new_tokens=20)
