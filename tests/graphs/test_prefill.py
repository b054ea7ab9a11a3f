"""A prompt's K/V and its first logits are its own: alone, in a batch, admitted while others decode."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec.engine.engine import Engine
from fastspec.inputs.options import RowOptions
from fastspec.scheduling import admission
from fastspec.scheduling.prefill import PrefillQueue
from fastspec.scheduling.requests import CallPlan, Request, lengths_of
from fastspec.scheduling.scheduler import Scheduler
from fastspec.shapes import GREEDY, chunks_of
from fastspec.state import DecodeState
from tests.helpers.devices import devices
from tests.helpers.tiny import VOCAB, capture_all, tiny_engine

CHUNKS = (32, 64)
GREEDY_ROW = RowOptions(0.0, 0, 1.0, 0.0, seed=0)


class Watched(PrefillQueue):
    """A queue that keeps each prompt's K/V as its prefill left it."""

    kept: dict[Request, Tensor]

    def _finish(self, request: Request, row: int) -> None:
        cache = self.engine.modules.target.cache  # type: ignore[attr-defined]
        pages = self.engine.state.block_table[row]
        keys, values = (x[:, pages].flatten(1, 2)[:, : len(request.prompt) - 1] for x in (cache.keys, cache.values))
        self.kept[request] = torch.stack((keys, values)).cpu()
        PrefillQueue._finish(self, request, row)


def watched(engine: Engine, prompts: list[list[int]], caps: list[int]) -> tuple[dict[int, Tensor], list[Request]]:
    requests = [Request(list(prompt), cap, GREEDY_ROW) for prompt, cap in zip(prompts, caps, strict=True)]
    capture_all(engine, {4}, GREEDY, 5)
    scheduler, watching = Scheduler(engine), Watched(engine)
    scheduler._queue, watching.kept = watching, {}
    for _ in scheduler.run(requests, CallPlan((), GREEDY, lambda made: 4, 5, lengths=lengths_of(requests))):
        pass
    return {index: watching.kept[request] for index, request in enumerate(requests)}, requests


@pytest.mark.parametrize("device", devices())
def test_a_prompt_alone_in_a_batch_and_admitted_in_flight(device: str) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (2, 17, 33, 64, 90, 5, 120)]
    engine = tiny_engine(batch=3, device=device, chunks=CHUNKS, graphs=device == "cuda")
    caps = [3, 30, 9, 25, 4, 40, 12]
    together, rows = watched(engine, prompts, caps)
    assert len(together) == len(prompts)
    for index, prompt in enumerate(prompts):
        alone, (row,) = watched(engine, [prompt], [caps[index]])
        assert torch.equal(alone[0], together[index])
        assert row.top_logprobs[0] == rows[index].top_logprobs[0]
        assert row.new_tokens == rows[index].new_tokens


def test_the_check_sees_a_prompt_that_depends_on_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (90, 90)]
    engine = tiny_engine(batch=2, chunks=CHUNKS)
    expected, _ = watched(engine, [prompts[1]], [2])
    fill = admission.fill_prompt

    def planted(state: DecodeState, row: int, *given: Any) -> None:
        fill(state, row, *given)
        state.tokens[row, 0] += row > 0  # what reading a neighbour's token would do

    monkeypatch.setattr(admission, "fill_prompt", planted)
    got, _ = watched(engine, prompts, [2, 2])
    assert not torch.equal(got[1], expected[0])


@pytest.mark.parametrize("sizes", [(64,), (64, 128, 256, 512, 1024, 2048), CHUNKS])
def test_chunks_cover_a_prompt_and_cost_as_little_as_any(sizes: tuple[int, ...]) -> None:
    """Against all ways to cover it; a pass costs as much as 128 tokens."""
    step, longest = sizes[0], 4500 if len(sizes) > 2 else 400
    least = [0]  # for so many times the smallest size, all of which are its multiples
    for count in range(1, -(-longest // step) + 1):
        least.append(min(size + 128 + least[max(0, count - size // step)] for size in sizes))
    for length in range(1, longest + 1):
        chunks = chunks_of(sizes, length)
        assert set(chunks) <= set(sizes)
        assert chunks == sorted(chunks, reverse=True)
        assert sum(chunks[:-1]) < length <= sum(chunks)
        assert sum(chunk + 128 for chunk in chunks) == least[-(-length // step)]
    assert chunks_of(sizes, 0) == chunks_of(sizes, -1) == []


@pytest.mark.parametrize("sizes", [(64,), (64, 128, 256, 512, 1024, 2048), CHUNKS])
def test_chunks_lie_on_an_absolute_grid(sizes: tuple[int, ...]) -> None:
    """Whole cells are the same passes for every length, and a prompt may be taken up again at the edge of any."""
    cell = sizes[-1]
    for stop in range(1, 4 * cell, 37):
        whole = chunks_of(sizes, stop)
        assert whole[: stop // cell] == [cell] * (stop // cell)
        for start in range(0, stop, cell):
            assert [cell] * (start // cell) + chunks_of(sizes, stop, start) == whole
    with pytest.raises(AssertionError, match="multiple of the grid"):
        chunks_of(sizes, 4 * cell, cell + 1)


def test_chunks_of_some_lengths() -> None:
    """Room for a few tokens more is cheaper than another pass, for many it is not."""
    sizes = (64, 128, 256, 512, 1024, 2048)
    found = {length: chunks_of(sizes, length) for length in (64, 65, 129, 300, 400, 700, 800, 1100, 2049)}
    assert found == {
        64: [64],
        65: [128],
        129: [256],
        300: [256, 64],
        400: [512],
        700: [512, 256],
        800: [1024],
        1100: [1024, 128],
        2049: [2048, 64],
    }
