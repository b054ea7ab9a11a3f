"""`abort`, `pause` and `resume`: partial answers, requests that wait, and new weights between them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastspec import FastSpecGenerator
from tests.helpers.limits import HANGS
from tests.helpers.services import opened, small_pair
from tests.scheduling.loop.test_handles import PROMPTS, alone, same, settled

pytestmark = pytest.mark.filterwarnings("ignore:drafting does not pay")
LONG: dict[str, Any] = {"max_new_tokens": 80, "eos_token_id": [], "logprobs": True}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return small_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def gen(pair: tuple[Path, Path]) -> Iterator[FastSpecGenerator]:
    with opened(pair, max_batch_size=2) as made:
        yield made


def test_aborted_answers_keep_their_tokens(gen: FastSpecGenerator) -> None:
    whole = [alone(gen, prompt, **LONG) for prompt in PROMPTS]
    handles = [gen.submit(prompt, **LONG) for prompt in PROMPTS]
    next(iter(handles[0].pieces()))  # leaving it would cancel this one
    tokens = iter(handles[1])
    next(tokens)
    gen.abort()
    assert all(handle.done for handle in handles)
    outputs = [handle.result() for handle in handles]
    for output, expected in zip(outputs, whole, strict=True):
        (reason,), (new,) = output.finish_reasons, output.new_tokens
        assert reason in ("cancelled", "length")
        assert new == expected.new_tokens[0][: len(new)]
        assert output.logprobs is not None
        assert expected.logprobs is not None
        assert output.logprobs[0] == expected.logprobs[0][: len(new)]
    assert outputs[1].finish_reasons == ["cancelled"]
    assert 0 < len(outputs[1].new_tokens[0]) < 80
    assert outputs[3].new_tokens == [[]], "it had no row yet"
    settled(gen)
    same(alone(gen, PROMPTS[0], **LONG), whole[0])


def test_a_call_of_another_thread_is_aborted(gen: FastSpecGenerator) -> None:
    begun, found = threading.Event(), []

    class Streamer:
        def put(self, value: Any) -> None:
            begun.set()

        def end(self) -> None:
            pass

    def call() -> None:
        found.append(
            gen.generate(
                [PROMPTS[0]],
                streamer=Streamer(),  # type: ignore[arg-type]
                return_dict_in_generate=True,
                **{**LONG, "max_new_tokens": 150},
            )
        )

    thread = threading.Thread(target=call)
    thread.start()
    assert begun.wait(HANGS)
    while thread.is_alive():
        gen.abort()
        thread.join(0.01)
    assert found[0].finish_reasons == ["cancelled"]
    assert len(found[0].new_tokens[0]) < 150


def test_requests_wait_for_the_end_of_a_pause(gen: FastSpecGenerator) -> None:
    whole = [alone(gen, prompt, **LONG) for prompt in PROMPTS]
    running = [gen.submit(prompt, **LONG) for prompt in PROMPTS[:3]]
    gen.pause()
    assert all(handle.done for handle in running), "they have ended by themselves"
    for handle, expected in zip(running, whole, strict=False):
        same(handle.result(), expected)
    waiting = [gen.submit(prompt, **LONG) for prompt in PROMPTS]
    with pytest.raises(TimeoutError):
        waiting[0].result(timeout=0.2)
    for refused in (lambda: alone(gen, PROMPTS[0]), lambda: gen.score([[1, 2]]), lambda: next(gen.stream([[1, 2]]))):
        with pytest.raises(RuntimeError, match="this generator is paused"):
            refused()
    waiting[1].cancel()
    assert waiting[1].result(timeout=HANGS).finish_reasons == ["cancelled"]
    gen.resume()
    for handle, expected in zip(waiting[2:], whole[2:], strict=True):
        same(handle.result(timeout=HANGS), expected)
    same(waiting[0].result(timeout=HANGS), whole[0])
    settled(gen)


def test_weights_that_change_in_a_pause(gen: FastSpecGenerator, pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Earlier answers are of the old weights, waiting ones of the new; each says of which."""
    from tests.helpers.checkpoints import make_model

    sizes: dict[str, Any] = {"vocab_size": 259, "eos_token_id": 258, "bos_token_id": None, "std": 0.12}
    state = make_model("llama2", seed=9, num_hidden_layers=2, **sizes).state_dict()
    before = alone(gen, PROMPTS[0], **LONG)
    first = gen.submit(PROMPTS[0], **LONG)
    gen.pause()
    second = gen.submit(PROMPTS[0], **LONG)
    gen.update_weights(state, version="new")
    gen.resume()
    same(first.result(), before)
    after = second.result(timeout=HANGS)
    assert (first.result().stats.weight_version, after.stats.weight_version) == (0, "new")
    assert after.new_tokens != before.new_tokens
    same(after, alone(gen, PROMPTS[0], **LONG))


def test_an_abort_ends_requests_that_wait(gen: FastSpecGenerator) -> None:
    gen.pause()
    handle = gen.submit(PROMPTS[0], **LONG)

    async def awaited() -> Any:
        return await handle

    gen.abort()
    assert asyncio.run(awaited()).finish_reasons == ["cancelled"]
    gen.resume()
    settled(gen)


def test_a_paused_generator_is_closed(pair: tuple[Path, Path]) -> None:
    gen = opened(pair)
    gen.pause()
    handle = gen.submit(PROMPTS[0], **LONG)
    gen.close()
    with pytest.raises(RuntimeError, match="this generator was closed"):
        handle.result(timeout=HANGS)
