"""num_speculative_tokens="auto" through the public class: the text of every k, counts, seeds, plans, words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastspec import FastSpecGenerator, GenerateOutput, NGram, SyntheticAcceptance
from fastspec.adaptive.controller import Controller, Observation, StepContext
from fastspec.scheduling.requests import Request
from fastspec.scheduling.scheduler import StepTimer
from fastspec.shapes import GREEDY
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.devices import devices
from tests.helpers.scheduling import run_all
from tests.helpers.tiny import tiny_engine
from tests.scheduling.test_scheduler import GREEDY_ROW, prompts

pytestmark = [
    pytest.mark.filterwarnings("ignore:the tokenizers of:UserWarning"),
    pytest.mark.filterwarnings("ignore:drafting does not pay:UserWarning"),
]
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]
KS = (0, 1, 2, 4, 6, 8)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, draft = (
        make_checkpoint(tmp_path_factory.mktemp(role), "llama2", seed=seed, num_hidden_layers=2 - seed)
        for seed, role in enumerate("td")
    )
    return target, draft


def made(pair: tuple[Path, Path], device: str = "cpu", **options: Any) -> FastSpecGenerator:
    given = {"num_speculative_tokens": "auto", "max_batch_size": 2, "max_length": 200, "dtype": "float32"}
    return FastSpecGenerator(*pair, device=device, progress=False, **{**given, **options})


@pytest.fixture(scope="module", params=devices())
def gen(request: pytest.FixtureRequest, pair: tuple[Path, Path]) -> Iterator[FastSpecGenerator]:
    with made(pair, request.param) as generator:
        yield generator


def full(gen: FastSpecGenerator, **options: Any) -> GenerateOutput:
    options = {"max_new_tokens": 24, "eos_token_id": None, "return_dict_in_generate": True, **options}
    out = gen.generate(options.pop("prompts", PROMPTS), **options)
    assert isinstance(out, GenerateOutput)
    return out


def walk(monkeypatch: pytest.MonkeyPatch, order: Callable[[int], int]) -> None:
    """Makes every controller choose by the number of steps seen, so that a test decides what is switched when.

    With two steps under way, a step that drafts after plain ones waits until the last of them is seen: a choice that
    is to be made must be the order's for two numbers in a row.
    """
    monkeypatch.setattr(Controller, "choose", lambda self, context: order(self._seen))


def test_greedy_text_is_that_of_every_k(gen: FastSpecGenerator) -> None:
    auto = full(gen)
    for k in KS:
        assert torch.equal(full(gen, num_speculative_tokens=k).sequences, auto.sequences)
    assert torch.equal(full(gen, num_speculative_tokens="auto").sequences, auto.sequences)


def test_whatever_is_chosen_when_the_text_stays(gen: FastSpecGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = full(gen, num_speculative_tokens=0).sequences
    for pattern in ((0, 8), (4, 0, 1), (8, 6, 4, 2, 1, 0, 0, 0), (0, 0, 0, 0, 0, 2)):
        with monkeypatch.context() as patch:
            walk(patch, lambda seen, pattern=pattern: pattern[seen // 2 % len(pattern)])  # type: ignore[misc]
            switched = full(gen)
        assert torch.equal(switched.sequences, plain)
        assert set(switched.stats.steps_at) == set(pattern)
        assert sum(switched.stats.steps_at.values()) == switched.stats.steps


def test_statistics_tell_the_steps_of_each_k(gen: FastSpecGenerator) -> None:
    stats = full(gen).stats
    assert stats.auto == "auto"
    assert stats.k == 8
    assert set(stats.steps_at) <= set(KS)
    assert sum(stats.steps_at.values()) == stats.steps
    for row in stats.rows:
        assert sum(row.steps_at) == row.steps
    assert "k = auto (" in str(stats)
    fixed = full(gen, num_speculative_tokens=2).stats
    assert fixed.auto is None
    assert fixed.steps_at[2] == fixed.steps - fixed.plain_steps  # those for first tokens alone are plain
    assert set(fixed.steps_at) <= {0, 2}
    assert "k = 2" in str(fixed)


def test_a_seed_repeats_its_text(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Under block verification only because k is held: with another k another text comes of the same seed."""
    sampled: dict[str, Any] = {"do_sample": True, "top_k": 0, "seed": 5}
    with made((pair[0], pair[0])) as gen:  # all drafts are accepted, so that k matters
        first = full(gen, **sampled)
        assert first.stats.steps_at == {4: first.stats.steps}
        assert first.stats.auto is not None
        assert "k held at 4" in first.stats.auto
        assert "coupled" in str(first.stats)
        walk(monkeypatch, lambda seen: 8)
        assert torch.equal(full(gen, **sampled).sequences, first.sequences)
        assert full(gen, **{**sampled, "seed": None}).stats.steps_at.keys() == {8}
        assert full(gen, seed=5).stats.steps_at.keys() == {8}  # greedy rows draw nothing
        monkeypatch.setattr("fastspec.scheduling.draft_length.REPEATABLE", 8)
        assert not torch.equal(full(gen, **sampled).sequences, first.sequences)


def test_coupled_calls_adapt_and_repeat(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    sampled: dict[str, Any] = {"do_sample": True, "top_k": 0, "seed": 5}
    with made(pair, verification="coupled") as gen:
        texts = []
        for order in (lambda seen: 0, lambda seen: KS[seen % 6]):
            walk(monkeypatch, order)
            texts.append(full(gen, **sampled))
            assert texts[-1].stats.auto == "auto"
        assert torch.equal(texts[0].sequences, texts[1].sequences)


@pytest.mark.parametrize("device", devices())
def test_switching_captures_nothing(
    pair: tuple[Path, Path], device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gen = made(pair, device)
    with gen:
        engine = gen._open().engine
        assert engine.missing(2, KS, GREEDY, None) == []
        if engine.runner.static:
            monkeypatch.setattr(engine.runner, "_capture", None)  # calling it would raise
        for order in (lambda seen: KS[seen % 6], lambda seen: KS[-1 - seen % 6]):
            walk(monkeypatch, order)
            full(gen)
    assert capsys.readouterr().err == ""  # progress=False


def test_progress_is_announced(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    with FastSpecGenerator(*pair, num_speculative_tokens="auto", max_batch_size=1, max_length=64, device="cpu"):
        assert "timing steps" in capsys.readouterr().err


def test_no_acceptance_is_told_of_drafts_that_no_step_had(pair: tuple[Path, Path]) -> None:
    with made(pair, num_speculative_tokens=3) as gen:
        stats = full(gen, num_speculative_tokens=[1, 2, 1]).stats
        assert max(stats.steps_at) == 2
        assert stats.accepted_per_position is not None
        assert len(stats.accepted_per_position) == 2


def test_auto_in_one_call_of_a_generator_made_for_a_number(pair: tuple[Path, Path]) -> None:
    with made(pair, num_speculative_tokens=3) as gen:
        assert gen.num_speculative_tokens == 3
        out = full(gen, num_speculative_tokens="auto")
        assert out.stats.auto == "auto"
        assert set(out.stats.steps_at) <= {0, 1, 2, 3}
        assert full(gen).stats.steps_at == {3: full(gen).stats.steps}
        rows = full(gen, num_speculative_tokens=["auto", 0, 1])
        assert torch.equal(rows.sequences, out.sequences)
        assert rows.stats.auto == "auto"
        assert rows.stats.rows[1].drafted == 0
        assert "auto chooses among 0, 1, 2, 3" in gen.explain()
        gen.warmup("auto")
        assert gen._drafting.for_warmup("auto", GREEDY).ks == (0, 1, 2, 3)
        assert gen._drafting.for_warmup(None, GREEDY).ks == (0, 3)


def test_without_a_draft_auto_is_plain(pair: tuple[Path, Path]) -> None:
    with FastSpecGenerator(pair[0], num_speculative_tokens="auto", max_length=80, device="cpu", progress=False) as gen:
        assert gen.num_speculative_tokens == 0
        stats = full(gen).stats
        assert (stats.k, stats.auto, stats.drafted) == (0, None, 0)
        assert full(gen, num_speculative_tokens="auto").stats.auto is None


def test_other_proposers_and_synthetic_acceptance(pair: tuple[Path, Path]) -> None:
    with FastSpecGenerator(
        pair[0],
        proposer=NGram(),
        num_speculative_tokens="auto",
        max_length=80,
        dtype="float32",
        device="cpu",
        progress=False,
    ) as lookup:
        assert torch.equal(full(lookup).sequences, full(lookup, num_speculative_tokens=0).sequences)
        assert "auto chooses among 0, 1, 2, 4, 6, 8, 12, 16" in lookup.explain()
        prompt = [[5, 6, 7, 8] * 4]
        tried = lookup.calibrate(prompt, max_new_tokens=60, eos_token_id=[])
        assert [trial.k for trial in tried.trials] == [0, 1, 2, 4, 6, 8, 12, 16]
    with pytest.warns(UserWarning, match="synthetic"):
        synthetic = made(pair, verification=SyntheticAcceptance(rate=1.0))
    with synthetic:
        assert full(synthetic, do_sample=True, seed=1).stats.auto == "auto"  # there is no text to repeat


@pytest.mark.parametrize("wrong", ["fast", "AUTO", ""])
def test_other_words_are_refused(pair: tuple[Path, Path], gen: FastSpecGenerator, wrong: str) -> None:
    message = f"num_speculative_tokens must be a whole number or 'auto', got {wrong!r}"
    with pytest.raises(ValueError, match=message):
        made(pair, num_speculative_tokens=wrong)
    with pytest.raises(ValueError, match=message):
        full(gen, num_speculative_tokens=wrong)
    with pytest.raises(ValueError, match=message):
        full(gen, num_speculative_tokens=[wrong, 1, 2])


def test_the_plan_is_that_of_the_largest_k(pair: tuple[Path, Path]) -> None:
    def plan(k: int | str) -> int:
        sizes: dict[str, Any] = {"max_batch_size": 2, "max_length": 100, "device": "cpu"}
        return FastSpecGenerator.plan(*pair, num_speculative_tokens=k, **sizes).total

    assert plan("auto") == plan(8) > plan(4)
    with_lookup: dict[str, Any] = {"proposer": NGram(), "max_length": 100, "device": "cpu"}
    alone = [FastSpecGenerator.plan(pair[0], num_speculative_tokens=k, **with_lookup).total for k in ("auto", 16, 8)]
    assert alone[0] == alone[1] > alone[2]


def test_explain_says_what_was_chosen_and_why(gen: FastSpecGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a call that drafted: whether one of this length does is a matter of the machine's times."""
    choose = Controller.choose
    monkeypatch.setattr(Controller, "choose", lambda self, context: choose(self, context) or 4)
    full(gen)
    text = gen.explain()
    assert "k = auto; auto chooses among 0, 1, 2, 4, 6, 8 by measured tokens per second" in text
    assert "greedy sampler: " in text
    assert "plain steps; steps: " in text


@pytest.mark.parametrize("depth", [1, 2])
def test_the_loop_reports_every_step_in_order(depth: int) -> None:
    """ks in turn, rows that come, go and catch up: every step is observed once, and only quiet ones are timed."""
    engine = tiny_engine(batch=2, depth=depth)

    class Turns:
        few = None

        def __init__(self) -> None:
            self.contexts: list[StepContext] = []
            self.steps: list[Observation] = []

        def choose(self, context: StepContext) -> int:
            self.contexts.append(context)
            return (4, 4, 4, 0, 0, 0, 2)[len(self.steps) % 7]

        def observe(self, step: Observation) -> None:
            self.steps.append(step)

    turns = Turns()
    requests = [Request(row, 30, GREEDY_ROW) for row in prompts(4)]
    for _ in run_all(engine, requests, (), GREEDY, lambda made: 0, policy=turns):
        pass
    emitted = sum(sum(step.accepted) + len(step.accepted) for step in turns.steps)
    behind = emitted - sum(len(request.new_tokens) for request in requests)  # the ends of rows, which only steps see
    assert 0 <= behind <= 4 * len(requests)
    counts = [sum(request.steps_at[k] for request in requests) for k in (0, 2, 4)]
    assert counts == [sum(len(step.accepted) for step in turns.steps if step.k == k) for k in (0, 2, 4)]
    assert turns.steps[0].seconds is None  # nothing before it
    timed = [step for step in turns.steps if step.seconds is not None]
    assert timed
    assert all(step.seconds > 0 for step in timed if step.seconds is not None)
    assert any(step.caught_up for step in turns.steps)  # plain steps left the draft behind
    assert all(step.k for step in turns.steps if step.caught_up is not None)
    assert 2 in {context.bucket for context in turns.contexts} <= {1, 2}
    assert max(context.remaining for context in turns.contexts) == 30


class FewAtTimes:
    """Drafts in one row, in two, in all or in none, in turn."""

    turns = ((4, 1), (4, 1), (0, None), (2, 2), (4, None), (0, None), (0, None), (1, 1))

    def __init__(self) -> None:
        self.steps: list[Observation] = []

    @property
    def few(self) -> int | None:
        return self.turns[len(self.steps) % len(self.turns)][1]

    def choose(self, context: StepContext) -> int:
        assert list(context.draft_lag) == sorted(context.draft_lag)
        return self.turns[len(self.steps) % len(self.turns)][0]

    def observe(self, step: Observation) -> None:
        self.steps.append(step)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("depth", [1, 2])
def test_a_look_drafts_in_few_rows(depth: int, device: str) -> None:
    """The others go on plainly, and when they draft again the draft has taken in what it missed."""
    rows = prompts(5, seed=3)
    plain = [Request(row, 60, GREEDY_ROW) for row in rows]
    for _ in run_all(tiny_engine(batch=3, device=device), plain, (), GREEDY, lambda made: 0):
        pass
    engine, policy = tiny_engine(batch=3, device=device, same=True, depth=depth), FewAtTimes()
    looked = [Request(row, 60, GREEDY_ROW) for row in rows]
    for _ in run_all(engine, looked, (), GREEDY, lambda made: 0, policy=policy):
        pass
    assert [request.new_tokens for request in looked] == [request.new_tokens for request in plain]
    assert all(request.accepted == request.drafted for request in looked)  # the draft is the target
    ones = [step for step in policy.steps if step.k == 4 and step.rows == 3 and len(step.accepted) == 1]
    assert ones
    assert all(step.tokens == 1 + sum(step.accepted) / 3 for step in ones)
    counted, seen = sum(request.drafted for request in looked), sum(sum(step.accepted) for step in policy.steps)
    ends = sum(request.stats().dropped for request in looked)  # rows that ended at a draft: up to 3 more lay behind it
    assert counted <= seen <= counted + 3 * ends  # nothing counted in a row that was held


def test_a_row_keeps_its_own_limit_after_a_look() -> None:
    options = dataclasses.replace(GREEDY_ROW, draft_limit=2)
    requests = [Request([1, 2, 3], 60, GREEDY_ROW), Request([4], 60, options)]
    engine = tiny_engine(batch=2, same=True)
    for _ in run_all(engine, requests, (), GREEDY, lambda made: 0, policy=FewAtTimes()):
        pass
    assert max(index for index, count in enumerate(requests[1].histogram) if count) == 2
    assert max(index for index, count in enumerate(requests[0].histogram) if count) == 4


def test_the_clock_leaves_the_reader_out() -> None:
    now = [0.0]

    def passes(seconds: float) -> None:
        now[0] += seconds

    one = StepTimer(ahead=False, clock=lambda: now[0])
    assert one.arrived(waited=True) is None
    one.leave()
    passes(10.0)
    one.back()
    passes(1.0)
    assert one.arrived(waited=True) == 1.0  # nothing ran while the reader was away
    two = StepTimer(ahead=True, clock=lambda: now[0])
    two.arrived(waited=True)
    two.leave()
    passes(0.7)
    two.back()
    passes(0.3)
    assert two.arrived(waited=True) == pytest.approx(1.0)  # the device went on, and was waited for
    two.leave()
    passes(5.0)
    two.back()
    assert two.arrived(waited=False) is None  # it may have come long before
    passes(1.0)
    assert two.arrived(waited=False) == pytest.approx(1.0)  # late, but by the loop's own doing
