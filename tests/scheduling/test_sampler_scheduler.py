"""The full sampler in the loop: rows that are their own, counts, draft limits, broken logits, one capture for all."""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec.engine.engine import Engine
from fastspec.graphs.keys import PromptKey, describe
from fastspec.inputs.options import RowOptions
from fastspec.scheduling.requests import Request
from fastspec.shapes import FULL, GREEDY
from fastspec.state import RUNNING, DecodeState
from tests.helpers.devices import devices
from tests.helpers.scheduling import run_all
from tests.helpers.tiny import VOCAB, tiny_engine

NEW = 24


def options(**given: Any) -> RowOptions:
    return RowOptions(**{"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5, **given})


ROWS = [
    options(repetition_penalty=1.3),
    options(presence_penalty=0.7, frequency_penalty=0.4),
    options(temperature=1.0, repetition_penalty=1.2, top_k=20),
    options(bias=((3, 4.0), (7, -float("inf")))),
    options(temperature=0.8, allowed=tuple(range(5, 60)), frequency_penalty=0.2),
    options(),
    options(temperature=1.2, min_p=0.05, top_p=0.9, draft_limit=1),
    options(min_new_tokens=12, draft_limit=0),
]


def prompts(count: int = len(ROWS), seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))] for _ in range(count)]


def run(
    engine: Engine, rows: list[RowOptions], given: list[list[int]] | None = None, *, k: int = 4, **loop: Any
) -> list[Request]:
    given = prompts(len(rows)) if given is None else given
    requests = [Request(list(prompt), NEW, row) for prompt, row in zip(given, rows, strict=True)]
    stop_ids, sampler = loop.get("stop_ids", ()), loop.get("sampler", FULL)
    for _ in run_all(engine, requests, stop_ids, sampler, lambda made: k):
        engine.pages.check_integrity()
    assert engine.pages.num_free + engine.pages.num_idle == engine.pages.num_pages - 1
    return requests


def texts(requests: list[Request]) -> list[list[int]]:
    return [request.new_tokens for request in requests]


@pytest.mark.parametrize("device", devices())
def test_a_mixed_batch_is_its_rows_alone(device: str) -> None:
    engine = tiny_engine(batch=3, device=device, depth=2)
    together = run(engine, ROWS, stop_ids=(9, 11))
    for index, (row, prompt) in enumerate(zip(ROWS, prompts(), strict=True)):
        alone = run(engine, [row], [prompt], stop_ids=(9, 11))
        assert texts(alone)[0] == together[index].new_tokens, index


@pytest.mark.parametrize("device", devices())
def test_greedy_rows_with_penalties_do_not_depend_on_drafts(device: str) -> None:
    rows = [row for row in ROWS if row.temperature == 0]
    plain = run(tiny_engine(device=device), rows, k=0)
    for k in (1, 4):
        assert texts(run(tiny_engine(device=device, k=k), rows, k=k)) == texts(plain)
    neutral = next(index for index, row in enumerate(rows) if row.plain)
    greedy = run(tiny_engine(device=device), [options()], [prompts(len(rows))[neutral]], sampler=GREEDY)
    assert texts(plain)[neutral] == texts(greedy)[0], "a row without processing runs the same in either kind"
    assert len({tuple(text) for text in texts(plain)}) == len(rows)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("same", [False, True], ids=["most drafts rejected", "all accepted"])
def test_counts_are_those_of_the_text_after_every_step(same: bool, device: str) -> None:
    """Rejected drafts nowhere, rows admitted and moved over what others left, a prompt's ids not in the output's."""
    engine = tiny_engine(batch=3, device=device, same=same)
    requests = [Request(list(prompt), NEW, row) for prompt, row in zip(prompts(seed=3), ROWS, strict=True)]
    state, checked = engine.state, 0
    for _ in run_all(engine, requests, (), FULL, lambda made: 4):
        for row in (state.finish == RUNNING).nonzero().flatten().tolist():
            text = state.tokens[row, : state.lengths[row]].cpu()
            prompt, output = text[: state.limits[row] - NEW], text[state.limits[row] - NEW :]
            assert torch.equal(state.output_counts[row].cpu(), torch.bincount(output, minlength=VOCAB).int())
            assert state.in_prompt[row].nonzero().flatten().tolist() == sorted(set(prompt.tolist()))
            checked += len(output) > 2
    assert checked > 30
    assert sum(request.accepted for request in requests) > 5
    assert same or sum(request.drafted - request.accepted for request in requests) > 5


@pytest.mark.parametrize("device", devices())
def test_a_model_accepts_itself_under_any_options(device: str) -> None:
    """draft = target: every draft is accepted, so the draft proposes under the same penalties, bans and filters."""
    for request in run(tiny_engine(device=device, same=True), ROWS, stop_ids=(9, 11)):
        assert request.accepted == request.drafted, request.options


@pytest.mark.parametrize("device", devices())
def test_a_model_accepts_itself_where_drafts_penalise_each_other(device: str) -> None:
    """Among five ids every step repeats some, so a draft's law depends on the drafts before it in the step."""
    few = {"allowed": (5, 6, 7, 8, 9), "draft_limit": None}
    rows = [
        options(**few, frequency_penalty=1.5),
        options(**few, temperature=1.0, presence_penalty=2.0),
        options(**few, temperature=0.7, repetition_penalty=1.5, frequency_penalty=0.5),
    ]
    for request in run(tiny_engine(device=device, same=True), rows):
        assert request.accepted == request.drafted > 0, request.options


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("depth", [1, 3])
def test_rows_never_have_more_drafts_than_their_limit(depth: int, device: str) -> None:
    """Ragged drafts in one step: the target's own text everywhere, and never more drafts than asked for."""
    engine = tiny_engine(batch=5, device=device, depth=depth, same=True)
    limits = [0, 1, 2, 4, None]
    requests = run(engine, [options(draft_limit=limit) for limit in limits], sampler=GREEDY)
    plain = run(engine, [options()] * 5, k=0, sampler=GREEDY)
    assert texts(requests) == texts(plain)
    for request, limit in zip(requests, limits, strict=True):
        most = 4 if limit is None else limit
        assert request.drafted == most * (request.steps - request.plain_steps)
        assert request.accepted == request.drafted  # the draft is the target
        assert request.plain_steps == (request.steps if most == 0 else 0)


def test_rows_that_all_opted_out_decode_plainly() -> None:
    """The step is then the plain one: no draft pass is made."""
    engine = tiny_engine(batch=2)
    run(engine, [options(draft_limit=0)] * 2, sampler=GREEDY)
    seen: list[int] = []
    proposer = engine.modules.proposer
    assert proposer is not None
    original = type(proposer).propose
    type(proposer).propose = lambda self, *given: seen.append(1) or original(self, *given)  # type: ignore
    try:
        run(engine, [options(draft_limit=0)] * 2, sampler=GREEDY)
        assert seen == []
        run(engine, [options(draft_limit=0), options(draft_limit=1)], sampler=GREEDY)
        assert seen
    finally:
        type(proposer).propose = original  # type: ignore[method-assign]


class Poisoned:
    """A target whose logits are spoilt at one position of one prompt.

    Args:
        model: the target.
        state: of the engine; a row is known by its first token.
        first: of the row to spoil.
        position: that the spoilt logits choose a token for.
        value: what they become.
    """

    def __init__(self, model: Any, state: DecodeState, first: int, position: int, value: float) -> None:
        self._model, self._state, self._first, self._position, self._value = model, state, first, position, value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def logits(self, hidden: Tensor, tiling: Any) -> Tensor:
        logits = self._model.logits(hidden, tiling)
        batch, places = logits.shape[:2]
        at = self._state.lengths[:batch, None] + torch.arange(places, device=logits.device)
        hit = (self._state.tokens[:batch, :1] == self._first) & (at == self._position)
        return torch.where(hit[..., None], self._value, logits)


def poisoned(engine: Engine, first: int, position: int, value: float) -> Engine:
    from dataclasses import replace

    target = Poisoned(engine.modules.target, engine.state, first, position, value)
    return replace(engine, modules=replace(engine.modules, target=target))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("sampler", [GREEDY, FULL])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_broken_logits_end_their_row_alone(value: float, sampler: str, depth: int, device: str) -> None:
    """At every place of a block: the row's text up to there, the others' whole, pages back, the engine usable."""
    rows = [options()] * 5 if sampler == GREEDY else [ROWS[0], ROWS[2], ROWS[1], ROWS[4], ROWS[5]]
    given = [[50 + index, *prompt] for index, prompt in enumerate(prompts(5, seed=8))]
    engine = tiny_engine(batch=3, device=device, depth=depth, same=True)
    expected = run(engine, rows, given, sampler=sampler)
    for place in (0, 1, 2, 3, 17):
        position = len(given[1]) + place
        bad = poisoned(engine, 51, position, value)
        got = run(bad, rows, given, sampler=sampler)
        assert (got[1].finish_reason, got[1].invalid_at) == ("error", position)
        assert got[1].new_tokens == expected[1].new_tokens[:place], "whatever was drafted"
        for index in (0, 2, 3, 4):
            assert got[index].new_tokens == expected[index].new_tokens
            assert (got[index].finish_reason, got[index].invalid_at) == ("length", None)
    assert texts(run(engine, rows, given, sampler=sampler)) == texts(expected)


def test_broken_logits_that_nobody_needs_do_not_matter() -> None:
    """Behind a rejected draft: a place that the row did not reach by that draft."""
    given = [[50, *prompts(1, seed=8)[0]]]
    engine = tiny_engine(batch=1)
    (expected,) = run(engine, [options()], given, sampler=GREEDY)
    bad = poisoned(engine, 50, len(given[0]) + NEW + 1, float("nan"))  # beyond the last token: only ever drafted
    assert texts(run(bad, [options()], given, sampler=GREEDY)) == [expected.new_tokens]


@pytest.mark.parametrize("sampler", [GREEDY, FULL])
@pytest.mark.parametrize("stops", [False, True])
def test_broken_logits_behind_the_end_of_a_row_do_not_matter(stops: bool, sampler: str) -> None:
    """All drafts are accepted, and one of them ends the row before the place where nothing can be chosen."""
    given = [[51, *prompts(1, seed=8)[0]]]
    engine = tiny_engine(batch=1, same=True)
    (whole,) = run(engine, [options()], given, sampler=sampler)
    stop_ids = (whole.new_tokens[11],) if stops else ()
    (expected,) = run(engine, [options()], given, sampler=sampler, stop_ids=stop_ids)
    end = len(given[0]) + len(expected.new_tokens)
    for position in range(end, end + 4):
        bad = poisoned(engine, 51, position, float("nan"))
        (got,) = run(bad, [options()], given, sampler=sampler, stop_ids=stop_ids)
        assert (got.new_tokens, got.finish_reason) == (expected.new_tokens, "stop" if stops else "length")


def test_an_unmarked_step_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of broken logits can fail: without the mark a token is made up."""
    monkeypatch.setattr("fastspec.sampling.processors.flag_invalid", lambda accepted, places: accepted)
    given = [[51, *prompts(1, seed=8)[0]]]
    engine = tiny_engine(batch=1)
    (request,) = run(poisoned(engine, 51, len(given[0]) + 2, float("nan")), [options()], given, sampler=GREEDY)
    assert request.finish_reason == "length"


def test_options_change_nothing_that_a_step_is_captured_for() -> None:
    """One key per rows, k and kind; whatever the rows' options are, the full sampler is one kind."""
    engine = tiny_engine(batch=1)
    keys: set[Hashable] = set()
    original = engine.runner.run
    engine.runner.run = lambda key, body: keys.add(key) or original(key, body)  # type: ignore
    prompt_passes = {PromptKey(32, False), PromptKey(32, True)}
    for row in ROWS:
        if row.draft_limit != 0:
            run(engine, [row])
    assert {describe(key) for key in keys - prompt_passes} == {"1 rows, k = 4, full, 256 positions"}


def test_a_watch_ends_a_row_inside_a_step() -> None:
    """What the device has decoded beyond is not counted; pages come back, later rows are whole."""
    rows = [options()] * 5
    for depth in (1, 3):
        engine = tiny_engine(batch=2, same=True, depth=depth)
        expected = texts(run(engine, rows, sampler=GREEDY))
        for cut in (1, 2, 3, 4, 5, 9):
            requests = [Request(list(prompt), NEW, row) for prompt, row in zip(prompts(5), rows, strict=True)]
            requests[0].watch = Cut(cut)
            for _ in run_all(engine, requests, (), GREEDY, lambda made: 4):
                engine.pages.check_integrity()
            assert requests[0].new_tokens == expected[0][:cut]
            assert requests[0].finish_reason == "stop"
            assert texts(requests)[1:] == expected[1:]
            for request in requests:
                stats = request.stats()
                assert stats.emitted == len(request.new_tokens) == stats.steps + stats.accepted - stats.dropped
                assert stats.accepted == stats.drafted, "the draft is the target: those behind the end are not counted"


def test_a_row_that_the_host_ended_writes_no_more() -> None:
    """Two rows end together and their pages go to one long row: the other place would go on writing to them."""

    def made(batch: int) -> list[Request]:
        given = [*([5 + index] * 10 for index in range(4)), list(range(100))]
        requests = [Request(prompt, 8 if len(prompt) > 10 else 40, options()) for prompt in given]
        if batch > 1:
            requests[1].watch, requests[2].watch = Cut(3), Cut(3)
        return requests

    def decode(batch: int, num_pages: int) -> list[Request]:
        requests = made(batch)
        for _ in run_all(tiny_engine(batch=batch, k=2, num_pages=num_pages), requests, (), GREEDY, lambda made: 1):
            pass
        return requests

    alone, together = decode(1, 1 + 8), decode(4, 1 + 4 * 4)
    assert len(together[1].new_tokens) == len(together[2].new_tokens) == 3
    assert [together[index].new_tokens for index in (0, 3, 4)] == [alone[index].new_tokens for index in (0, 3, 4)]


class Cut:
    """Ends a row after `left` tokens."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self, tokens: list[int]) -> int | None:
        self.left -= len(tokens)
        return None if self.left > 0 else len(tokens) + self.left
