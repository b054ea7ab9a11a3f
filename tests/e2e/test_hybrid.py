"""Models with recurrent states: text is transformers', whatever is drafted, and states are those of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from fastspec import FastSpecGenerator, UnsupportedOption
from fastspec.distributed.slices import check_divides
from fastspec.engine.engine import Engine
from fastspec.inputs.row_options import RowOptions
from fastspec.models.checkpoints.resolve import resolve
from fastspec.scheduling.requests import CallPlan, Request, lengths_of
from fastspec.scheduling.scheduler import Scheduler
from fastspec.shapes import GREEDY
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.fuzzing import CI, NIGHTLY
from tests.helpers.hybrid import VOCAB, make_hybrid, save_published
from tests.helpers.state_runs import DRAFTS, OPTIONS, PLAIN, One, output, same

NEW = 130
LENGTHS = (1, 2, 5, 9, 17, 40, 90)
# of transformers in fp32: chunks of 64 tokens there, and token by token here, differ by some 1e-4 of logits around 10
GAP = 2e-4
SEEDS = {"qwen3_5": 0, "next": 1, "qwen3_5_moe": 0}

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # no tokenizers, drafts that do not pay, parts left out


class Model:
    """A checkpoint, and its plain texts."""

    def __init__(self, kind: str, root: Path) -> None:
        self.live: PreTrainedModel = make_hybrid(kind, SEEDS[kind])
        self.directory = root / kind
        if kind == "next":
            self.live.save_pretrained(self.directory)
        else:
            save_published(self.live, self.directory)
        rng = random.Random(SEEDS[kind])
        self.prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]
        with FastSpecGenerator(self.directory, max_batch_size=len(LENGTHS), **OPTIONS) as gen:
            self.explained = gen.explain()
            self.texts = output(gen, self.prompts, NEW).new_tokens


@pytest.fixture(scope="module", params=SEEDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model("qwen3_5", tmp_path_factory.mktemp("hybrid"))


@torch.inference_mode()
def test_greedy_text_is_that_of_transformers(model: Model) -> None:
    for prompt, text in zip(model.prompts, model.texts, strict=True):
        logits = model.live(torch.tensor([prompt + text[:-1]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == text
        top = logits.topk(2, dim=-1).values
        assert float((top[:, 0] - top[:, 1]).min()) > GAP
        assert len(set(text)) > VOCAB // 4, "a text that repeats itself tests little"
    assert "3 of them recurrent" in model.explained
    assert "also the recurrent states after a prompt's last piece" in model.explained


def test_a_draft_that_is_the_target_is_always_right(model: Model) -> None:
    with FastSpecGenerator(model.directory, model.directory, num_speculative_tokens=DRAFTS, **OPTIONS) as gen:
        for k, new in ((1, 40), (3, 60), (DRAFTS, NEW)):
            out = output(gen, model.prompts, new, num_speculative_tokens=k)
            assert out.new_tokens == [text[:new] for text in model.texts]
            assert out.stats.acceptance_rate == 1.0


def test_other_drafts_and_other_targets(qwen: Model, tmp_path: Path) -> None:
    """Models of which the other attends alone, or is wrong nearly always."""
    make_hybrid("next", 9, num_hidden_layers=2, layer_types=["linear_attention"] * 2).save_pretrained(tmp_path / "next")
    dense = make_checkpoint(tmp_path / "dense", "llama2", seed=3, vocab_size=VOCAB, num_hidden_layers=1)
    for target, draft in ((qwen.directory, tmp_path / "next"), (qwen.directory, dense), (dense, qwen.directory)):
        with FastSpecGenerator(target, draft, num_speculative_tokens=3, **OPTIONS) as gen:
            plain = output(gen, qwen.prompts[:4], 40, num_speculative_tokens=0).new_tokens
            assert output(gen, qwen.prompts[:4], 40).new_tokens == plain
            assert (plain == [text[:40] for text in qwen.texts[:4]]) == (target == qwen.directory)


def test_sampled_text_does_not_depend_on_drafts_where_they_are_coupled(qwen: Model) -> None:
    how = {"do_sample": True, "temperature": 0.7, "seed": 5}
    with FastSpecGenerator(
        qwen.directory, qwen.directory, num_speculative_tokens=3, verification="coupled", **OPTIONS
    ) as gen:
        plain = output(gen, qwen.prompts[:3], 40, num_speculative_tokens=0, **how)
        drafted = output(gen, qwen.prompts[:3], 40, **how)
    assert drafted.new_tokens == plain.new_tokens
    assert drafted.stats.acceptance_rate == 1.0


@pytest.fixture(scope="module")
def one(qwen: Model) -> Iterator[One]:
    made = One(qwen)
    with made.gen:
        yield made


@pytest.mark.parametrize("k", [1, 3, DRAFTS])
def test_a_rejection_at_every_place_leaves_the_states_of_plain_decoding(one: One, k: int) -> None:
    for place in range(k + 1):
        same(one, 2, 24, [place], [k])
    assert one.proposer.steps == -(-24 // (k + 1)), "the last script was right"


patterns = st.tuples(
    st.sampled_from(range(len(LENGTHS))),
    st.integers(1, 30),
    st.lists(st.integers(0, DRAFTS), min_size=1, max_size=9),
    st.lists(st.sampled_from([0, 1, 2, 3, DRAFTS]), min_size=1, max_size=5),
)


def any_pattern(one: One, pattern: tuple[int, int, list[int], list[int]]) -> None:
    same(one, *pattern)


@settings(CI, max_examples=15)
@given(pattern=patterns)
def test_states_after_any_pattern_are_those_of_plain_decoding(
    one: One, pattern: tuple[int, int, list[int], list[int]]
) -> None:
    any_pattern(one, pattern)


@pytest.mark.slow
@settings(NIGHTLY, max_examples=1000)
@given(pattern=patterns)
def test_states_after_many_patterns(one: One, pattern: tuple[int, int, list[int], list[int]]) -> None:
    any_pattern(one, pattern)


class Pair:
    """A hybrid model that drafts for itself, in three rows."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.gen = FastSpecGenerator(
            model.directory, model.directory, num_speculative_tokens=DRAFTS, max_batch_size=3, **OPTIONS
        )
        self.engine: Engine = self.gen._open().engine

    def run(
        self, rows: list[int], caps: list[int], limits: list[int | None], ks: list[list[int]], dropped: dict[int, int]
    ) -> list[Request]:
        """Runs these prompts, in as many calls as there are `ks`; `dropped` ones are cancelled behind so many steps."""
        requests = [
            Request(self.model.prompts[row], cap, RowOptions(**PLAIN, draft_limit=limit))
            for row, cap, limit in zip(rows, caps, limits, strict=True)
        ]
        lengths = lengths_of(requests)
        calls = [
            CallPlan((), GREEDY, lambda made, own=own: own[made % len(own)], lengths=lengths, joined=True)  # type: ignore[misc]
            for own in ks
        ]
        scheduler, steps = Scheduler(self.engine), 0
        for index, request in enumerate(requests):
            scheduler.add(request, calls[index % len(calls)])
        while any(request.finish_reason is None for request in requests):
            scheduler.step()
            for index in (index for index, when in dropped.items() if when == steps):
                scheduler.cancel(requests[index])
            steps += 1
        return requests


@pytest.fixture(scope="module")
def pair(qwen: Model) -> Iterator[Pair]:
    made = Pair(qwen)
    with made.gen:
        yield made


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, ...]:
    count = draw(st.integers(1, 6))

    def each(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=count, max_size=count))

    rows, caps = each(st.sampled_from(range(len(LENGTHS)))), each(st.integers(1, 40))
    limits = each(st.sampled_from([None, None, 0, 1, 3]))
    of_call = st.lists(st.sampled_from([0, 0, 1, 3, DRAFTS]), min_size=1, max_size=6)
    ks = draw(st.lists(of_call, min_size=1, max_size=2))
    dropped = draw(st.dictionaries(st.integers(0, count - 1), st.integers(0, 9), max_size=2))
    return rows, caps, limits, ks, dropped


def right(pair: Pair, call: tuple[Any, ...]) -> None:
    """Whatever comes, goes, moves, drafts or does not: texts are plain, and of its own drafts none is refused."""
    for row, request in zip(call[0], pair.run(*call), strict=True):
        assert request.new_tokens == pair.model.texts[row][: len(request.new_tokens)]
        assert request.finish_reason in ("length", "cancelled")
        assert request.dropped <= DRAFTS, "at the end of the row alone"
        assert request.accepted == request.drafted


def test_rows_of_two_calls_draft_in_turn(pair: Pair) -> None:
    """Steps of one call's drafts leave the states of the other's draft as they are."""
    call = [2, 3, 4], [40, 40, 40], [None] * 3, [[3, 3, 3, 0, 0], [0, 0, DRAFTS, DRAFTS, 0, 1]], {}
    right(pair, call)


@settings(CI, max_examples=25)
@given(call=calls())
def test_any_call_of_a_model_that_drafts_for_itself(pair: Pair, call: tuple[Any, ...]) -> None:
    right(pair, call)


@pytest.mark.slow
@settings(NIGHTLY, max_examples=1000)
@given(call=calls())
def test_many_calls_of_a_model_that_drafts_for_itself(pair: Pair, call: tuple[Any, ...]) -> None:
    right(pair, call)


def test_what_hybrids_cannot_have_is_refused(qwen: Model) -> None:
    with pytest.raises(ValueError, match="compile=True is for models that attend in every layer"):
        FastSpecGenerator(qwen.directory, compile=True, exact=False, **OPTIONS)
    with pytest.raises(UnsupportedOption, match=r"recurrent key heads 2; use one of 1, 2$"):
        check_divides(resolve(qwen.directory, role="target").native, 4, "m")
