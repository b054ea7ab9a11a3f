"""The set of waiting deliveries: handles join and leave while other threads read the set."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastspec import FastSpecGenerator
from fastspec.scheduling.handle import Delivery
from fastspec.scheduling.loop import Loop
from tests.helpers.services import opened

ENDLESS: dict[str, Any] = {"max_new_tokens": 500, "eos_token_id": []}


class Interleaved(Delivery):
    """A delivery with which another thread calls `submit` while an attribute of it is read."""

    def __init__(self, gen: FastSpecGenerator) -> None:
        super().__init__([])
        self.gen: FastSpecGenerator | None = gen
        self.submitted: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        if name in ("done", "requests") and (gen := vars(self).get("gen")) is not None:
            self.gen = None
            thread = threading.Thread(target=lambda: self.submitted.append(gen.submit([1, 2, 3], **ENDLESS)))
            thread.start()
            thread.join()
        return super().__getattribute__(name)


@pytest.fixture
def busy(pair: tuple[Path, Path]) -> Iterator[tuple[FastSpecGenerator, Loop]]:
    """A generator whose thread runs, without requests."""
    with opened(pair, max_batch_size=4, max_length=512) as gen:
        gen.submit([1, 2, 3], max_new_tokens=1).result()
        yield gen, gen._loop


def test_a_handle_that_joins_during_in_use_is_kept(busy: tuple[FastSpecGenerator, Loop]) -> None:
    gen, loop = busy
    between = Interleaved(gen)
    between.ended = 0.0
    loop._joined.add(between)
    _ = loop.in_use  # the submit comes in between
    (handle,) = between.submitted
    assert loop.in_use, "the handle that joined was lost"
    handle.cancel()


def test_a_handle_that_joins_during_leave_is_kept(busy: tuple[FastSpecGenerator, Loop]) -> None:
    gen, loop = busy
    between = Interleaved(gen)
    loop._joined.add(between)
    loop.leave([])
    (handle,) = between.submitted
    loop._joined.discard(between)
    assert loop.in_use, "the handle that joined was lost"
    handle.cancel()


def test_a_call_that_has_ended_is_forgotten(busy: tuple[FastSpecGenerator, Loop]) -> None:
    gen, loop = busy
    handle = gen.submit([1, 2, 3], max_new_tokens=4)
    handle.result()
    gen.warmup()  # waits until the thread has handled everything
    assert loop._joined == set()
