"""Where measuring reaches into a generator: around the launch of every step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING
from unittest import mock

from fastspec import FastSpecGenerator

if TYPE_CHECKING:  # the gate also measures older trees, which have this class elsewhere
    from fastspec.engine.engine import Engine


def engine_of(generator: FastSpecGenerator) -> Engine:
    """What an open generator runs on."""
    return generator._open().engine


@contextmanager
def around_steps(
    generator: FastSpecGenerator, around: Callable[[str], AbstractContextManager[object]]
) -> Iterator[None]:
    """While it is entered, every step is launched within `around(words)`, which say what kind of step it is."""
    runner = engine_of(generator).runner
    launch = runner.run

    def run(key: Hashable, body: Callable[[], None]) -> None:
        words = _in_words(key)
        with nullcontext() if words.startswith("prompt") else around(words):  # a pass over a prompt is no step
            launch(key, body)

    with mock.patch.object(runner, "run", run):
        yield


def _in_words(key: Hashable) -> str:
    if isinstance(key, str):  # in the tree of another commit
        return key
    from fastspec.graphs.keys import describe

    return describe(key)
