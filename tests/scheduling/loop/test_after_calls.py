"""What may follow a call at once: work that needs the generator alone, and the end of a `with` block."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastspec import FastSpecGenerator
from tests.helpers.services import opened

TIMES = {"warmup": 10, "calibrate": 1}  # both enter `alone`; the second takes a second each
ALONE: dict[str, Callable[[FastSpecGenerator], object]] = {
    "warmup": lambda gen: gen.warmup(),
    "calibrate": lambda gen: gen.calibrate([[1, 2, 3]], max_new_tokens=4),
}


def by_handle(gen: FastSpecGenerator) -> None:
    gen.submit([1, 2, 3], max_new_tokens=5).result()


def by_cancelled_handle(gen: FastSpecGenerator) -> None:
    handle = gen.submit([1, 2, 3], max_new_tokens=50)
    next(iter(handle))
    handle.cancel()


def by_call(gen: FastSpecGenerator) -> None:
    gen.generate([[1, 2, 3], [4]], max_new_tokens=5)


def by_left_stream(gen: FastSpecGenerator) -> None:
    stream: Any = gen.stream([[1, 2, 3]], max_new_tokens=50)
    next(stream)
    stream.close()


@pytest.mark.parametrize("work", ALONE)
@pytest.mark.parametrize("call", [by_handle, by_cancelled_handle, by_call, by_left_stream])
def test_work_that_needs_the_generator_alone_may_follow_a_call_at_once(
    pair: tuple[Path, Path], call: Callable[[FastSpecGenerator], None], work: str
) -> None:
    with opened(pair) as gen:
        by_handle(gen)  # from here on the thread makes the steps
        for _ in range(TIMES[work]):
            call(gen)
            ALONE[work](gen)


@pytest.mark.parametrize("work", ALONE)
def test_it_is_refused_while_someone_waits(pair: tuple[Path, Path], work: str) -> None:
    with opened(pair, max_length=512) as gen:
        handle = gen.submit([1, 2, 3], max_new_tokens=500, eos_token_id=[])
        with pytest.raises(RuntimeError, match="in use by other calls or handles; wait for them, or cancel them"):
            ALONE[work](gen)
        handle.cancel()
        ALONE[work](gen)


def test_two_threads_do_not_work_alone_together(pair: tuple[Path, Path]) -> None:
    with opened(pair) as gen, gen._loop.alone():
        refused: list[BaseException] = []

        def other() -> None:
            try:
                gen.warmup()
            except RuntimeError as error:
                refused.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert "in use by other calls" in str(refused[0])


class TheCallers(Exception):
    pass


class Raising:
    """A streamer that fails at the first token."""

    def __init__(self) -> None:
        self.calls = 0

    def put(self, tokens: object) -> None:
        self.calls += 1
        if self.calls == 2:
            raise TheCallers

    def end(self) -> None:
        pass


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("where", ["stream", "generate"])
def test_an_error_of_the_block_stays_the_error(pair: tuple[Path, Path], where: str, threaded: bool) -> None:
    gen = opened(pair)
    streams: list[Any] = []  # keeps the stream alive, as the frame of a debugger or a traceback does

    def block() -> None:
        with gen:
            if threaded:
                by_handle(gen)
            if where == "generate":
                gen.generate([[1, 2, 3]], max_new_tokens=20, streamer=Raising())  # type: ignore[call-overload]
            streams.append(gen.stream([[1, 2, 3]], max_new_tokens=50))
            next(streams[0])
            raise TheCallers

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TheCallers):
            block()
    with pytest.raises(RuntimeError, match="closed"):
        gen.generate([[1]], max_new_tokens=1)
    assert all(next(stream, None) is None for stream in streams)


def test_without_an_error_a_stream_that_goes_on_is_told_of(pair: tuple[Path, Path]) -> None:
    gen = opened(pair)
    stream: Any = gen.stream([[1, 2, 3]], max_new_tokens=50)
    next(stream)
    with pytest.raises(RuntimeError, match="in use by another call"), gen:
        pass
    stream.close()
    gen.close()
