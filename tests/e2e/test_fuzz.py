"""Random sequences of calls on one generator against a model that decodes plainly.

The model: a greedy row is transformers' own text, cut at a stop id or the cap; a sampled row is what it is alone in
another generator; a call that raised, was dropped or failed half way changed nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from transformers.generation.streamers import BaseStreamer

from fastspec import FastSpecGenerator, GenerateOutput, UnsupportedOption
from fastspec.sampling.rules import BLOCK, COUPLED, MODES
from tests.helpers.fuzz_calls import CONTEXT, DRAFTS, VOCAB, Call, calls
from tests.helpers.fuzzing import CI, NIGHTLY, PROPOSERS, How, Pair, raised_by_us

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # the pair has no tokenizers
SAMPLE = {"do_sample": True}
PROMPT = [[3, 1, 4]]
BAD_CALLS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no prompt": ([], {}, "holds no prompt"),
    "empty prompt": ([[1], []], {}, "prompt 1 is empty"),
    "empty batch": (torch.empty(0, 3, dtype=torch.int64), {}, "holds no prompt"),
    "negative id": ([[1, -1]], {}, "position 1: token id -1 is outside"),
    "id too large": ([[VOCAB]], {}, f"token id {VOCAB} is outside"),
    "huge id": ([[2**70]], {}, "is outside"),
    "float id": ([[1.0]], {}, "1.0 is not an integer"),
    "bool id": ([[True]], {}, "True is not an integer"),
    "float tensor": (torch.tensor([[1.0]]), {}, "must hold integers, got dtype torch.float32"),
    "bool tensor": (torch.tensor([[True]]), {}, "must hold integers, got dtype torch.bool"),
    "0-d tensor": (torch.tensor(1), {}, "must have shape"),
    "3-d tensor": (torch.ones(1, 1, 1, dtype=torch.int64), {}, "must have shape"),
    "deep list": ([[[1]]], {}, "not an integer"),
    "mixed list": ([1, [2]], {}, "mixes ids and lists"),
    "text": ("text", {}, "tokenize text first"),
    "texts": (["text"], {}, "not an integer"),
    "none": (None, {}, "got NoneType"),
    "meta tensor": (torch.ones(1, 2, dtype=torch.int64, device="meta"), {}, "input_ids"),
    "sparse tensor": (torch.ones(1, 2, dtype=torch.int64).to_sparse(), {}, "input_ids"),
    "prompt too long": ([[1] * (CONTEXT + 1)], {}, f"more than max_length={CONTEXT}"),
    "no room": ([[1] * (CONTEXT - 1)], {"max_new_tokens": 2}, f"more than max_length={CONTEXT}"),
    "mask of nan": (PROMPT, {"attention_mask": [[math.nan, 1, 1]]}, "nan is neither 0 nor 1"),
    "mask of 2": (PROMPT, {"attention_mask": [[2, 1, 1]]}, "2 is neither 0 nor 1"),
    "mask with hole": (PROMPT, {"attention_mask": [[1, 0, 1]]}, "a 0 after a 1"),
    "mask of zeros": (PROMPT, {"attention_mask": [[0, 0, 0]]}, "prompt 0 is empty"),
    "mask shape": (PROMPT, {"attention_mask": [[1, 1]]}, "they must be the same"),
    "mask of text": (PROMPT, {"attention_mask": "111"}, "attention_mask must be"),
    "mask of nothing": (PROMPT, {"attention_mask": [[None, 1, 1]]}, "attention_mask must be"),
    "mask of another type": (PROMPT, {"attention_mask": {}}, "attention_mask must be"),
    "cap 0": (PROMPT, {"max_new_tokens": 0}, "max_new_tokens must be"),
    "cap bool": (PROMPT, {"max_new_tokens": True}, "max_new_tokens must be"),
    "cap float": (PROMPT, {"max_new_tokens": 2.0}, "max_new_tokens must be"),
    "cap huge": (PROMPT, {"max_new_tokens": 10**30}, "more than max_length"),
    "length below prompt": (PROMPT, {"max_new_tokens": None, "max_length": 3}, "leaves no room"),
    "stop too large": (PROMPT, {"eos_token_id": VOCAB}, "eos_token_id must be"),
    "stop negative": (PROMPT, {"eos_token_id": [1, -1]}, "eos_token_id must be"),
    "stop text": (PROMPT, {"eos_token_id": "5"}, "eos_token_id must be"),
    "too many stops": (PROMPT, {"eos_token_id": [1] * 65}, "at most 64"),
    "pad too large": (PROMPT, {"pad_token_id": VOCAB}, "pad_token_id must be"),
    "pads": (PROMPT, {"pad_token_id": torch.tensor([1, 2])}, "pad_token_id"),
    "k too large": (PROMPT, {"num_speculative_tokens": DRAFTS + 1}, "but the generator was made"),
    "k negative": (PROMPT, {"num_speculative_tokens": -1}, "num_speculative_tokens must be"),
    "k bool": (PROMPT, {"num_speculative_tokens": True}, "num_speculative_tokens must be"),
    "logprobs too many": (PROMPT, {"logprobs": 21}, "logprobs must be"),
    "temperature nan": (PROMPT, {"temperature": math.nan, **SAMPLE}, "temperature must be"),
    "temperature inf": (PROMPT, {"temperature": math.inf, **SAMPLE}, "temperature must be"),
    "temperature negative": (PROMPT, {"temperature": -1.0, **SAMPLE}, "temperature must be"),
    "temperature text": (PROMPT, {"temperature": "1", **SAMPLE}, "temperature must be"),
    "temperature beyond float": (PROMPT, {"temperature": 10**400, **SAMPLE}, "temperature must be"),
    "temperature beyond fp32": (PROMPT, {"temperature": 1e300, **SAMPLE}, "temperature must be"),
    "temperatures": (PROMPT, {"temperature": [1.0, 1.0], **SAMPLE}, "2 values for 1 prompts"),
    "top_p above 1": (PROMPT, {"top_p": 1.5, **SAMPLE}, "top_p must be"),
    "top_k negative": (PROMPT, {"top_k": -1, **SAMPLE}, "top_k must be"),
    "top_k huge": (PROMPT, {"top_k": 2**70, **SAMPLE}, "top_k must be"),
    "top_k text": (PROMPT, {"top_k": "", **SAMPLE}, "top_k must be"),
    "seed float": (PROMPT, {"seed": 1.0, **SAMPLE}, "seed must be"),
    "seed huge": (PROMPT, {"seed": 2**63, **SAMPLE}, "seed must be"),
    "seeds": (PROMPT, {"seed": [], **SAMPLE}, "0 values for 1 prompts"),
    "do_sample tensor": (PROMPT, {"do_sample": torch.tensor([1, 2])}, "do_sample"),
    "do_sample text": (PROMPT, {"do_sample": "no"}, "do_sample"),
    "unknown option": (PROMPT, {"temprature": 1.0}, "unknown option 'temprature'; did you mean temperature?"),
    "beams": (PROMPT, {"num_beams": 2}, "num_beams"),
    "penalty": (PROMPT, {"repetition_penalty": -1.1}, "repetition_penalty"),
    "penalties": (PROMPT, {"repetition_penalty": torch.tensor([1.0, 2.0])}, "repetition_penalty"),
    "stop strings": (PROMPT, {"stop_strings": ["x"]}, "stop_strings"),
    "processors": (PROMPT, {"logits_processor": [len]}, "logits_processor"),
    "config of another type": (PROMPT, {"generation_config": {}}, "must be a transformers GenerationConfig"),
}

BAD_NAMES = sorted(BAD_CALLS)
HOWS: st.SearchStrategy[How] = st.sampled_from(
    [(BLOCK, "model"), (COUPLED, "model"), *((mode, name) for mode in MODES for name in PROPOSERS)]
)


class Failure(Exception):
    """The consumer's."""


class FailingStreamer(BaseStreamer):  # type: ignore[misc]
    """Raises at its n-th put."""

    def __init__(self, puts: int) -> None:
        self.left = puts

    def put(self, value: torch.Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            raise Failure

    def end(self) -> None:
        raise Failure


class Calls(RuleBasedStateMachine):
    """One long-lived generator; `pair` is set by a subclass."""

    pair: ClassVar[Pair]
    gen: FastSpecGenerator
    how: How
    closed = False

    @initialize(page_size=st.sampled_from([4, 7, 16]), batch=st.integers(1, 3), how=HOWS)
    def make(self, page_size: int, batch: int, how: How) -> None:
        self.how = how
        self.gen = self.pair.generator(page_size=page_size, batch=batch, verification=how[0], proposer=how[1])

    def call(self, data: st.DataObject, max_rows: int = 4) -> Call:
        """Of one row where a streamer, or little work, is wanted; for a generator without drafts it asks for none."""
        return data.draw(calls_to(self.pair, self.how, max_rows, copies=max_rows > 1))

    def run(self, call: Call) -> GenerateOutput:
        return generated(self.gen, call)

    @precondition(lambda self: not self.closed)
    @rule(data=st.data())
    def generate(self, data: st.DataObject) -> None:
        call = self.call(data)
        self.pair.check(call, self.run(call), self.how)

    @precondition(lambda self: not self.closed)
    @rule(data=st.data(), steps=st.integers(0, 8), how=st.sampled_from(["drop", "close", "throw", "raise"]))
    def leave_a_stream(self, data: st.DataObject, steps: int, how: str) -> None:
        call = self.call(data)
        arguments, options = call.arguments()
        stream: Any = self.gen.stream(*arguments, **options)
        seen: dict[int, list[int]] = {}
        try:
            for _, emitted in zip(range(steps), stream, strict=False):
                for index, tokens in emitted.items():
                    seen.setdefault(index, []).extend(tokens)
            if how == "throw":
                stream.throw(Failure())
            if how == "raise":
                raise Failure
        except Failure:
            pass
        if how == "close":
            stream.close()
        del stream
        for index, tokens in seen.items():
            self.pair.check_row(call, call.whole[index], tokens, None, self.how)

    @precondition(lambda self: not self.closed)
    @rule(data=st.data(), puts=st.integers(0, 4))
    def fail_in_a_streamer(self, data: st.DataObject, puts: int) -> None:
        call = self.call(data, max_rows=1)
        arguments, options = call.arguments()
        with pytest.raises(Failure):
            self.gen.generate(*arguments, **options, streamer=FailingStreamer(puts))

    @precondition(lambda self: not self.closed)
    @rule(data=st.data())
    def use_while_streaming(self, data: st.DataObject) -> None:
        call, other = self.call(data), self.call(data, max_rows=1)
        arguments, options = call.arguments()
        stream = iter(self.gen.stream(*arguments, **options))
        texts: list[list[int]] = [[] for _ in call.whole]
        first = next(stream)
        self.run(other)
        with pytest.raises(RuntimeError, match="in use by another call"):
            self.gen.close()
        for emitted in (first, *stream):
            for index, tokens in emitted.items():
                texts[index] += tokens
        for row, tokens in zip(call.whole, texts, strict=True):
            reason = "length" if call.end(row, tokens) is None else "stop"
            self.pair.check_row(call, row, tokens, reason, self.how)

    @precondition(lambda self: not self.closed)
    @rule(name=st.sampled_from(BAD_NAMES), stream=st.booleans())
    def bad_call(self, name: str, stream: bool) -> None:
        refused(self.gen.stream if stream else self.gen.generate, name)

    @precondition(lambda self: not self.closed)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        arguments, options = self.call(data, max_rows=1).arguments()
        stream = self.gen.stream(*arguments, **options)
        self.gen.close()
        self.gen.close()
        self.closed = True
        with pytest.raises(RuntimeError, match="closed"):
            next(iter(stream))

    @precondition(lambda self: self.closed)
    @rule(data=st.data(), name=st.sampled_from(BAD_NAMES))
    def use_after_close(self, data: st.DataObject, name: str) -> None:
        with pytest.raises(RuntimeError, match="closed"):
            self.run(self.call(data, max_rows=1))
        prompt, options, _ = BAD_CALLS[name]
        with pytest.raises(RuntimeError, match="closed"):
            self.gen.stream(prompt, **options)

    @precondition(lambda self: self.closed)
    @rule(page_size=st.sampled_from([4, 64]), batch=st.integers(1, 3), how=HOWS)
    def make_another(self, page_size: int, batch: int, how: How) -> None:
        self.make(page_size, batch, how)
        self.closed = False

    @invariant()
    def no_call_is_left_running(self) -> None:
        loop = self.gen._loop
        assert not loop.called
        assert loop.running or loop.idle


def calls_to(pair: Pair, how: How, max_rows: int = 4, *, copies: bool = True) -> st.SearchStrategy[Call]:
    """Good calls of such a generator; one without drafts is asked for none."""
    drawn = calls(pair.oracle.text, max_rows, copies=copies)
    return drawn if how[1] != "nothing" else drawn.map(without_drafts)


def without_drafts(call: Call) -> Call:
    return replace(call, k=None, rows=tuple(replace(row, drafts=None) for row in call.rows))


def generated(gen: FastSpecGenerator, call: Call) -> GenerateOutput:
    arguments, options = call.arguments()
    out = gen.generate(*arguments, **options, return_dict_in_generate=True)
    assert isinstance(out, GenerateOutput)
    return out


def fuzz_calls(pair: Pair, mode: str, how: settings) -> None:
    """Calls one after the other on the same few generators, one of each proposer."""
    made: dict[str, FastSpecGenerator] = {}

    @how
    @given(st.sampled_from(sorted(PROPOSERS, key="nothing".__eq__)), st.data())
    def check(proposer: str, data: st.DataObject) -> None:
        if proposer not in made:
            made[proposer] = pair.generator(page_size=7, batch=2, verification=mode, proposer=proposer)
        call = data.draw(calls_to(pair, (mode, proposer)))
        pair.check(call, generated(made[proposer], call), (mode, proposer))

    check()


def refused(method: Callable[..., Any], name: str) -> None:
    prompt, options, message = BAD_CALLS[name]
    with pytest.raises(ValueError, match=r".") as caught:
        method(prompt, **{"max_new_tokens": 4, **options})
    assert type(caught.value) in (ValueError, UnsupportedOption)
    assert message in str(caught.value)
    assert raised_by_us(caught.value)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair.make(tmp_path_factory.mktemp("pair"))


def fuzz(pair: Pair, how: settings) -> None:
    run_state_machine_as_test(type("Machine", (Calls,), {"pair": pair}), settings=settings(how, stateful_step_count=5))


def test_any_sequence_of_calls(pair: Pair) -> None:
    fuzz(pair, settings(CI, max_examples=80))


@pytest.mark.parametrize("mode", MODES)
def test_any_random_call_equals_its_definition(pair: Pair, mode: str) -> None:
    fuzz_calls(pair, mode, settings(CI, max_examples=60))


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("mode", MODES)
def test_any_call_all_night(pair: Pair, mode: str) -> None:
    fuzz_calls(pair, mode, NIGHTLY)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_any_sequence_of_calls_all_night(pair: Pair) -> None:
    fuzz(pair, NIGHTLY)


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_call_names_its_fault_and_changes_nothing(pair: Pair, name: str) -> None:
    gen = pair.lonely(BLOCK, "model")
    before = gen.generate(PROMPT, max_new_tokens=6, eos_token_id=None)
    refused(gen.generate, name)
    after = gen.generate(PROMPT, max_new_tokens=6, eos_token_id=None)
    assert isinstance(before, torch.Tensor)
    assert isinstance(after, torch.Tensor)
    assert torch.equal(after, before)
