"""First tokens of long prompts come from the last pass over them: the same with drafts, without, and beside others."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import fastspec.scheduling.scheduler as scheduler_module
import fastspec.step as step_module
from fastspec.scheduling.scheduler import Scheduler
from fastspec.state import PREFILLED
from tests.helpers.scheduling import nothing_leaked, with_prefix_cache
from tests.helpers.tiny import VOCAB, tiny_engine
from tests.scheduling.test_prefix import Found, Turn, finish, found, together

LONG = 20
TOKENS = tuple(random.Random(3).choices(range(VOCAB), k=120))
LENGTHS = (20, 21, 32, 33, 64, 65, 100)  # the first is a short prompt; passes have 32 tokens


def scheduler_of(**options: Any) -> Scheduler:
    return Scheduler(tiny_engine(**{"k": 3, "batch": 3, "long_prompt": LONG, **options}))


def turns(k: int = 3) -> list[Turn]:
    return [Turn(TOKENS[:length], 7, seed, k) for length in LENGTHS for seed in (None, 5)]


def plainly() -> list[Found]:
    """Each alone, without drafts."""
    scheduler = scheduler_of()
    return [found(together(scheduler, [replace(turn, k=0)])[0])[:2] for turn in turns()]  # type: ignore[misc]


@pytest.mark.parametrize("depth", [1, 2])
def test_greedy_text_is_the_same_with_drafts_and_beside_others(depth: int) -> None:
    alone = plainly()[::2]
    scheduler = scheduler_of(depth=depth)
    beside = together(scheduler, turns()[::2])
    assert [found(request)[:2] for request in beside] == alone
    assert [request.steps_at[0] for request in beside] == [int(length > LONG) for length in LENGTHS]
    nothing_leaked(scheduler.engine)


@pytest.mark.parametrize("budget", [None, 32])
def test_what_is_kept_of_earlier_prompts_changes_nothing(budget: int | None) -> None:
    alone = plainly()
    scheduler = Scheduler(with_prefix_cache(tiny_engine(k=3, batch=3, long_prompt=LONG), budget))
    for _ in range(2):
        again = together(scheduler, turns(k=0))
        assert [found(request)[:2] for request in again] == alone
    assert sum(request.cached for request in again) > 0
    nothing_leaked(scheduler.engine)


def test_the_first_token_is_the_one_that_a_step_picks() -> None:
    """Of a short prompt the step reads the last token; both read the same tokens."""
    short = scheduler_of(long_prompt=10**6)
    for turn, expected in zip(turns(k=0), plainly(), strict=True):
        (request,) = together(short, [turn])
        assert request.new_tokens == expected[0]
        torch.testing.assert_close(torch.tensor(request.logprobs), torch.tensor(expected[1]))


def test_a_request_may_leave_before_its_first_token() -> None:
    scheduler = scheduler_of(depth=2)
    (running, leaving) = (Turn(TOKENS[:10], 30).request(), Turn(TOKENS[:65], 9).request())
    for request in (running, leaving):
        scheduler.add(request, scheduler_module.CallPlan((), "greedy", lambda made: 0))
    while not leaving.prefilled and not leaving.steps:
        scheduler.step()
    scheduler.cancel(leaving)
    finish(scheduler)
    assert (leaving.finish_reason, running.finish_reason) == ("cancelled", "length")
    nothing_leaked(scheduler.engine)


def kept_too_early(self: Any, index: Any, hidden: Any, features: Any) -> None:
    self.hidden.copy_(hidden[:, 0])


@pytest.mark.parametrize(
    ("place", "name", "bug"),
    [
        (step_module.PromptEnd, "keep", kept_too_early),
        (step_module, "PREFILLED", PREFILLED + 1),
    ],
)
def test_the_checks_above_can_fail(place: Any, name: str, bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, name, bug)
    with pytest.raises(AssertionError):
        test_the_first_token_is_the_one_that_a_step_picks()


def test_a_drafts_passes_may_be_larger_than_the_pieces_that_prompts_share() -> None:
    """Where the smallest passes leave other bits in the draft alone, it has no such ones; the target's stay small."""
    sizes = replace(tiny_engine(chunks=(32, 64)).sizes, same_bits=(32, 64), draft_chunks=(64,))
    assert (sizes.grid_unit, sizes.passes(60, 32), sizes.passes(60, 32, draft=True)) == (32, [32], [64])
    assert sizes.passes(190, 32, 32, draft=True) == [64] * 3
