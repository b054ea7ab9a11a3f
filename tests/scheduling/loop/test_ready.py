"""Steps that requests may come to are made ready before the first of them runs."""

from __future__ import annotations

from pathlib import Path

from fastspec.scheduling.requests import PreparedCall
from tests.helpers.services import opened


def test_steps_are_made_ready_behind_a_stream_that_was_left(pair: tuple[Path, Path]) -> None:
    """What the stream left is still in the scheduler then; nobody waits for it."""
    with opened(pair) as gen:
        loop, asked = gen._loop, list[PreparedCall]()
        make_ready = loop._make_all_ready

        def seen(call: PreparedCall) -> None:
            asked.append(call)
            make_ready(call)

        loop._make_all_ready = seen  # type: ignore[method-assign]
        stream = gen.stream([[1, 2, 3]], max_new_tokens=20)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        gen.submit([5, 6], max_new_tokens=1).result()
        assert len(asked) == 1
