"""The order of a seeded run of a call and of handles: the requests that step together, and with how many drafts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

import fastspec.scheduling.scheduler as scheduler_module
from tests.helpers.services import opened

# "steps x requests of row 0, 1, .. (drafts, rows launched)", a request being the first token of its prompt
CALL = ["7x 1 2 3 (3, 3)", "1x 4 2 3 (3, 3)", "1x 4 5 3 (3, 3)", "5x 4 5 (3, 2)", "3x 5 (3, 1)"]
HANDLES = [
    *("4x 10 11 13 (3, 3)", "3x 14 11 13 (3, 3)", "3x 14 15 13 (3, 3)", "6x 14 15 20 (3, 3)", "2x 14 15 21 (3, 3)"),
    *("4x 21 15 (3, 2)", "3x 15 (3, 1)"),
]
FIRST_TOKENS = [116, 121, 112, 3, 15, 181, 46]


def test_a_seeded_run_keeps_its_order(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait first come first served, take the lowest free row, and one that is cancelled is never admitted."""
    steps: list[tuple[list[int], int, int]] = []
    real = scheduler_module.InFlightStep

    def launched(sequence: int, requests: dict[int, Any], k: int, bucket: int, *more: Any, **named: Any) -> Any:
        assert sorted(requests) == list(range(len(requests)))
        steps.append(([requests[row].prompt[0] for row in sorted(requests)], k, bucket))
        return real(sequence, requests, k, bucket, *more, **named)

    monkeypatch.setattr(scheduler_module, "InFlightStep", launched)
    with opened(pair, max_batch_size=3, num_speculative_tokens=3) as gen:
        rows = [[first, *range(1, 2 + 5 * first)] for first in range(1, 6)]
        options: dict[str, Any] = {"eos_token_id": [], "do_sample": True, "temperature": 0.9, "top_p": 0.95}
        for _ in gen.stream(rows, max_new_tokens=9, seed=3, **options):
            pass
        assert in_short(steps) == CALL
        steps.clear()
        with gen._loop.turn:  # no step is made until all of them are there
            handles = [
                gen.submit([10 + at, *range(2 + 3 * at)], max_new_tokens=4 + 3 * at, seed=at, **options)
                for at in range(6)
            ]
            handles.pop(2).cancel()
            handles.append(gen.submit([20, 1, 2], max_new_tokens=6, num_speculative_tokens=0))
            handles.append(gen.submit([21, 1, 2], max_new_tokens=6, num_speculative_tokens=2, seed=1, **options))
        results = [handle.result() for handle in handles]
    assert in_short(steps) == HANDLES
    assert [result.new_tokens[0][0] for result in results] == FIRST_TOKENS


def in_short(steps: Iterable[tuple[list[int], int, int]]) -> list[str]:
    return [
        f"{len(list(group))}x {' '.join(map(str, names))} ({k}, {bucket})"
        for (names, k, bucket), group in groupby(steps)
    ]
