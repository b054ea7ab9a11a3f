"""Rows that follow a grammar through whole calls: texts, neighbours, joins, ends and errors."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from fastspec import FastSpecGenerator, GenerateOutput, InvalidLogits, NGram, UnsupportedOption
from fastspec.engine.engine import Engine
from fastspec.grammar.row import RowGrammar
from fastspec.grammar.spec import GrammarSpec
from fastspec.graphs.keys import StepKey
from fastspec.inputs.row_options import RowOptions
from fastspec.scheduling.requests import CallPlan, Request, lengths_of
from fastspec.scheduling.scheduler import Scheduler
from fastspec.shapes import FULL, GRAMMAR_ONLY, GREEDY, MIXED_DRAFTS, StepShape
from tests.engine.test_recapture import Recorder
from tests.helpers.devices import devices
from tests.helpers.services import END, opened, small_pair
from tests.helpers.tiny import VOCAB, tiny_engine, with_runner

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"the": {"enum": ["the", "hehe"]}, "list": {"type": "array", "items": {"enum": [1, 22]}}},
    "required": ["the", "list"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
REGEX = "the(he|[a-f]{3})+the!"
PROMPTS = [[1, 2, 3], [40, 41, 42, 43, 44], [9]]
DRAFTERS = ["model", "lookup", "both", "none"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return small_pair(tmp_path_factory.mktemp("pair"))


def made(pair: tuple[Path, Path], drafter: str, **options: Any) -> FastSpecGenerator:
    proposer = NGram() if drafter in ("lookup", "both") else None
    models = pair if drafter in ("model", "both") else (pair[0],)
    return opened(models, proposer=proposer, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=DRAFTERS)
def each(pair: tuple[Path, Path], request: pytest.FixtureRequest) -> Iterator[FastSpecGenerator]:
    with made(pair, request.param) as generator:
        yield generator


@pytest.fixture(scope="module")
def gen(pair: tuple[Path, Path]) -> Iterator[FastSpecGenerator]:
    with made(pair, "model") as generator:
        yield generator


@pytest.fixture(scope="module")
def plain(pair: tuple[Path, Path]) -> Iterator[FastSpecGenerator]:
    with made(pair, "none", num_speculative_tokens=0) as generator:
        yield generator


def output(generator: FastSpecGenerator, prompts: Any = PROMPTS, **options: Any) -> GenerateOutput:
    given = {"max_new_tokens": 60, "return_dict_in_generate": True, **options}
    found = generator.generate(prompts, **given)
    assert isinstance(found, GenerateOutput)
    return found


def text_of(generator: FastSpecGenerator, tokens: list[int]) -> str:
    tokenizer: Any = generator.tokenizer
    return str(tokenizer.decode([token for token in tokens if token != END]))


@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.3, "logit_bias": {5: 2.0}}, {"logprobs": 3}], ids=str)
def test_greedy_texts_are_those_of_plain_decoding(
    each: FastSpecGenerator, plain: FastSpecGenerator, more: dict[str, Any]
) -> None:
    """Bit for bit, with whatever drafts, alone and beside rows without a grammar, whose texts stay theirs."""
    given = {"json_schema": [SCHEMA, None, None], "regex": [None, None, REGEX], "do_sample": False, **more}
    found, expected = output(each, **given), output(plain, **given)
    assert torch.equal(found.sequences, expected.sequences)
    assert found.finish_reasons == expected.finish_reasons
    assert found.logprobs == expected.logprobs
    assert found.top_logprobs == expected.top_logprobs
    free = output(plain, PROMPTS[1:2], do_sample=False, **more)
    assert found.new_tokens[1] == free.new_tokens[0]
    for reason, tokens, form in zip(found.finish_reasons, found.new_tokens, ("json", "", "regex"), strict=True):
        if reason == "stop" and form == "json":
            assert json.loads(text_of(each, tokens)).keys() == {"the", "list"}
        if reason == "stop" and form == "regex":
            assert re.fullmatch(REGEX, text_of(each, tokens))


def test_what_is_forced_is_drafted_without_a_draft_pass(
    gen: FastSpecGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer = gen._open().engine.modules.proposer
    assert proposer is not None
    monkeypatch.setattr(type(proposer), "propose", lambda *given, **more: pytest.fail("a draft pass"))
    found = output(gen, PROMPTS[:1], regex="the list of the heads", do_sample=False)
    (stats,) = found.stats.rows
    assert text_of(gen, found.new_tokens[0]) == "the list of the heads"
    assert found.finish_reasons == ["stop"]
    assert stats.accepted == stats.drafted > 0
    assert stats.steps <= -(-len(found.new_tokens[0]) // 5) + 1


def test_log_probabilities_are_the_raw_targets(gen: FastSpecGenerator) -> None:
    found = output(gen, PROMPTS[:1], regex="the list", logprobs=2, do_sample=False)
    assert found.logprobs is not None
    assert found.top_logprobs is not None
    assert max(found.logprobs[0]) < -0.5, "what is forced is not certain"
    assert not {pairs[0][0] for pairs in found.top_logprobs[0]} <= set(found.new_tokens[0])


def test_sampled_texts_follow_the_grammar(each: FastSpecGenerator) -> None:
    seen = set()
    for seed in range(4):
        found = output(
            each, PROMPTS[:1] * 4, regex="[ab]{3}(the)?", do_sample=True, seed=seed, top_k=0, temperature=3.0
        )
        texts = [text_of(each, tokens) for tokens in found.new_tokens]
        assert all(re.fullmatch("[ab]{3}(the)?", text) for text in texts)
        assert found.finish_reasons == ["stop"] * 4
        seen |= set(texts)
    assert len(seen) > 4


def test_handles_join_beside_free_ones(gen: FastSpecGenerator, plain: FastSpecGenerator) -> None:
    kinds: list[dict[str, Any]] = [{}, {"json_schema": SCHEMA}, {}, {"regex": REGEX}, {"regex": "a{20}"}]
    handles = [gen.submit(PROMPTS[at % 3], max_new_tokens=50, do_sample=False, **kind) for at, kind in enumerate(kinds)]
    for at, (kind, handle) in enumerate(zip(kinds, handles, strict=True)):
        expected = output(plain, [PROMPTS[at % 3]], max_new_tokens=50, do_sample=False, **kind)
        assert handle.result().new_tokens[0] == expected.new_tokens[0]
    assert "grammars" in gen.explain()


def test_a_row_that_is_cancelled_leaves_nothing_behind(pair: tuple[Path, Path], plain: FastSpecGenerator) -> None:
    """Its place goes to rows with a grammar of their own, or with none."""
    with made(pair, "model", max_batch_size=1) as generator:
        for kind in ({}, {"regex": REGEX}, {}):
            handle = generator.submit(PROMPTS[0], regex="[a-z]{90}", max_new_tokens=100, do_sample=False)
            next(iter(handle))
            handle.cancel()
            found = generator.submit(PROMPTS[1], max_new_tokens=20, do_sample=False, **kind).result()
            expected = output(plain, PROMPTS[1:2], max_new_tokens=20, do_sample=False, **kind)
            assert found.new_tokens == expected.new_tokens


def test_without_stop_ids_a_text_ends_where_its_grammar_does(each: FastSpecGenerator) -> None:
    streamed: list[int] = []
    for emitted in each.stream(PROMPTS[:1], regex="(ab){4}", eos_token_id=[], max_new_tokens=30, do_sample=False):
        streamed += emitted[0]
    assert text_of(each, streamed) == "abababab"
    handle = each.submit(PROMPTS[0], regex="(ab){4}", eos_token_id=[], max_new_tokens=30, do_sample=False)
    assert handle.result().finish_reasons == ["stop"]
    assert handle.result().new_tokens[0] == streamed


def test_stop_strings_end_it_earlier(each: FastSpecGenerator) -> None:
    found = output(each, PROMPTS[:1], regex="(ab){9}", stop_strings=["bab"], do_sample=False)
    assert (found.finish_reasons, text_of(each, found.new_tokens[0])) == (["stop"], "abab")
    whole = output(each, PROMPTS[:1], regex="(ab){4}", eos_token_id=[], stop_strings=["never"], do_sample=False)
    assert whole.texts == ["abababab"], "without the token that a step scored behind the end of the grammar's text"


def test_auto_and_opting_out(pair: tuple[Path, Path], plain: FastSpecGenerator) -> None:
    given = {"json_schema": [SCHEMA, None, SCHEMA], "do_sample": False}
    expected = output(plain, **given).sequences
    with made(pair, "model", num_speculative_tokens="auto") as generator:
        for drafts in (None, 0, [0, 2, 3]):
            found = output(generator, num_speculative_tokens=drafts, **given)
            assert torch.equal(found.sequences, expected)
        assert not found.stats.rows[0].drafted, "it has opted out"


@pytest.mark.parametrize("schemas", [SCHEMA, [SCHEMA, None, None]], ids=["all rows", "one row"])
def test_steps_with_grammars_are_captured_before_the_first(pair: tuple[Path, Path], schemas: Any) -> None:
    with made(pair, "model") as generator:
        runner, scheduler = Recorder(), generator._open().scheduler
        scheduler.engine = with_runner(scheduler.engine, runner)
        handle = next(iter(generator.stream(PROMPTS, json_schema=schemas, max_new_tokens=40, do_sample=False)))
        before = {key for key in runner.keys if isinstance(key, StepKey)}
        output(generator, json_schema=schemas, max_new_tokens=40, do_sample=False)
        assert {key for key in runner.keys if isinstance(key, StepKey)} == before
        kinds = {key.shape.grammars for key in before}
        assert kinds == ({GRAMMAR_ONLY} if schemas is SCHEMA else {None, GRAMMAR_ONLY, MIXED_DRAFTS})
        assert handle


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"json_schema": {"type": "nonsense"}}, ValueError, "json_schema cannot be used"),
        ({"regex": ["a", "b"]}, ValueError, "regex has 2 values for 3 prompts"),
        ({"regex": "a", "grammar": "b"}, ValueError, "regex and grammar are given"),
        ({"regex": "a", "num_beams": 2}, UnsupportedOption, "num_beams"),
    ],
)
def test_grammars_that_cannot_be_used_are_refused(
    gen: FastSpecGenerator, options: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        output(gen, **options)
    with pytest.raises(ValueError, match=r"calibrate .*leave out regex"):
        gen.calibrate(PROMPTS, regex="a+")


def test_options_that_leave_nothing_of_a_grammar(gen: FastSpecGenerator, plain: FastSpecGenerator) -> None:
    tokenizer: Any = gen.tokenizer
    (b,) = tokenizer("b")["input_ids"]
    with pytest.raises(InvalidLogits, match=r"prompt 0, position 5.*the grammar") as caught:
        output(gen, PROMPTS[:2], regex=["aab", None], suppress_tokens=[[b], None], do_sample=False)
    made = caught.value.output
    assert isinstance(made, GenerateOutput)
    assert text_of(gen, made.new_tokens[0]) == "aa", "as without drafts"
    assert made.new_tokens[1] == output(plain, PROMPTS[1:2], do_sample=False).new_tokens[0]


def test_a_grammar_that_fails_midway_is_named(
    gen: FastSpecGenerator, plain: FastSpecGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its texts can be read in more ways than the library follows, as from some length on with its usual limits."""

    def limited(spec: GrammarSpec, vocabulary: LLTokenizer) -> LLMatcher:
        limits = LLParserLimits(max_items_in_row=20)
        return LLMatcher(vocabulary, LLMatcher.grammar_from_lark(spec.text), log_level=0, limits=limits)

    monkeypatch.setattr("fastspec.grammar.library._compiled", limited)
    with pytest.raises(
        InvalidLogits, match=r"^the grammar of prompt 0, position \d+ has failed: .*21 items; max is 20"
    ) as caught:
        output(gen, PROMPTS[:2], grammar=['start: a\na: a a | "x"', None], do_sample=False)
    made = caught.value.output
    assert isinstance(made, GenerateOutput)
    assert set(text_of(gen, made.new_tokens[0])) == {"x"}
    assert made.new_tokens[1] == output(plain, PROMPTS[1:2], do_sample=False).new_tokens[0]


class _Modulo:
    """A grammar over numbers: what comes next is the last token plus one, two or three; it never ends."""

    def __init__(self) -> None:
        self._tokens = [0]

    def is_accepting(self) -> bool:
        return False

    def is_stopped(self) -> bool:
        return False

    def is_error(self) -> bool:
        return False

    def get_error(self) -> str:
        return ""

    def deep_copy(self) -> _Modulo:
        copied = _Modulo()
        copied._tokens = list(self._tokens)
        return copied

    def compute_ff_tokens(self) -> list[int]:
        return []

    def _next(self) -> list[int]:
        return [(self._tokens[-1] + more) % VOCAB for more in (1, 2, 3)]

    def validate_tokens(self, tokens: list[int]) -> int:
        known = list(self._tokens)
        for count, token in enumerate(tokens):
            if token not in self._next():
                self._tokens = known
                return count
            self._tokens.append(token)
        self._tokens = known
        return len(tokens)

    def consume_tokens(self, sampled_tokens: list[int]) -> bool:
        for token in sampled_tokens:
            assert token in self._next(), "the grammar allows it"
            self._tokens.append(token)
        return True

    def compute_bitmask(self) -> bytes:
        bits = np.zeros(-(-VOCAB // 32) * 32, dtype=bool)
        bits[self._next()] = True
        return np.packbits(bits, bitorder="little").tobytes()


def _requests(which: str) -> list[Request]:
    options = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
    rows = []
    for at, letter in enumerate(which):
        prompt, spec = [at + 1, 2, 3], GrammarSpec("regex", "x") if letter == "g" else None
        grammar = RowGrammar(_Modulo(), VOCAB, (), (), [1, 2, 3, 4, 5, 6, 7, 8]) if spec else None
        rows.append(Request(prompt, 25, RowOptions(**options, grammar=spec), None, grammar))  # type: ignore[arg-type]
    return rows


def _watched(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[StepShape]:
    """The shapes of all steps to come."""
    shapes: list[StepShape] = []
    launch = Engine.launch

    def watched(self: Engine, rows: int, shape: StepShape) -> int:
        if self is engine:
            shapes.append(shape)
        return launch(self, rows, shape)

    monkeypatch.setattr(Engine, "launch", watched)
    return shapes


@pytest.mark.parametrize("which", ["g", "gg", "gf", "fgf", "gfgfg"])
def test_steps_that_run_ahead(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps launched ahead rows without a grammar step every time, one with a grammar in one step at a time."""
    texts = []
    for depth, k in ((1, 0), (1, 4), (2, 4), (2, 0)):
        engine = tiny_engine(depth=depth, batch=4)
        scheduler, shapes = Scheduler(engine), _watched(engine, monkeypatch)
        requests = _requests(which)
        call = CallPlan((), GREEDY, lambda made, k=k: k, lengths=lengths_of(requests))
        for _ in scheduler.run(requests, call):
            grammars = [[each for each in step.requests.values() if each.grammar] for step in scheduler._in_flight]
            waiting = [request for step in grammars for request in step]
            assert len(waiting) == len(set(waiting))
        monkeypatch.undo()
        texts.append([request.new_tokens for request in requests])
        kinds = {shape.grammars for shape in shapes}
        assert kinds & {GRAMMAR_ONLY, MIXED_DRAFTS}
        if k and "f" in which:
            assert MIXED_DRAFTS in kinds
        if depth == 2 and "f" in which:
            assert None in kinds, "the others step while those with a grammar wait"
        if "f" not in which:
            assert kinds == {GRAMMAR_ONLY}
    assert all(text == texts[0] for text in texts)
    free = _requests("f" * len(which))
    for _ in Scheduler(tiny_engine(batch=4)).run(free, CallPlan((), GREEDY, lambda made: 0, lengths=lengths_of(free))):
        pass
    for letter, text, alone in zip(which, texts[0], free, strict=True):
        assert (text == alone.new_tokens) == (letter == "f")


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("sampler", [GREEDY, FULL])
def test_steps_of_any_kind_leave_the_same(sampler: str, device: str) -> None:
    """Captured on a GPU: with drafts and without, ahead and not, with log-probabilities recorded."""
    texts, recorded = [], []
    for depth, k in ((1, 0), (2, 4)):
        engine = tiny_engine(device=device, depth=depth, batch=4, graphs=device == "cuda" and depth == 2)
        requests = _requests("gfgfg")
        call = CallPlan((), sampler, lambda made, k=k: k, 2, joined=True, lengths=lengths_of(requests))
        for _ in Scheduler(engine).run(requests, call):
            pass
        texts.append([request.new_tokens for request in requests])
        recorded.append([request.logprobs for request in requests])
    assert texts[0] == texts[1]
    assert recorded[0] == recorded[1]


def _random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    kind = rng.choice(["object", "array", "enum", "string", "integer"] if depth else ["enum", "string", "integer"])
    if kind == "object":
        names = rng.sample(["the", "he", "list", "x"], rng.randint(1, 3))
        parts = {name: _random_schema(rng, depth - 1) for name in names}
        required = rng.sample(names, rng.randint(0, len(names)))
        return {"type": "object", "properties": parts, "required": required, "additionalProperties": False}
    if kind == "array":
        return {"type": "array", "items": _random_schema(rng, depth - 1), "minItems": 1, "maxItems": rng.randint(1, 3)}
    if kind == "enum":
        return {"enum": rng.sample(["the", "hehe", 1, 22, None, True], rng.randint(1, 4))}
    return (
        {"type": "integer", "maximum": 50} if kind == "integer" else {"type": "string", "maxLength": rng.randint(1, 6)}
    )


def _follows(value: Any, schema: dict[str, Any]) -> bool:
    """Whether JSON follows such a schema."""
    if "enum" in schema:
        return any(value == one and type(value) is type(one) for one in schema["enum"])
    if schema["type"] == "object":
        parts = schema["properties"]
        known = isinstance(value, dict) and set(schema["required"]) <= value.keys() <= parts.keys()
        return known and all(_follows(one, parts[name]) for name, one in value.items())
    if schema["type"] == "array":
        fits = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return fits and all(_follows(one, schema["items"]) for one in value)
    if schema["type"] == "integer":
        return type(value) is int and value <= 50
    return isinstance(value, str) and len(value) <= schema["maxLength"]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 40))])
def test_texts_of_random_schemas_are_plain_decodings_and_valid_json(
    each: FastSpecGenerator, plain: FastSpecGenerator, seed: int
) -> None:
    """Greedy texts are plain decoding's; texts that end, drawn ones too, are JSON of their schema."""
    rng = random.Random(seed)
    schemas = [_random_schema(rng) for _ in PROMPTS]
    given: dict[str, Any] = {"json_schema": schemas, "max_new_tokens": 80}
    assert torch.equal(
        output(each, do_sample=False, **given).sequences, output(plain, do_sample=False, **given).sequences
    )
    drawn = output(each, do_sample=True, seed=seed, top_k=0, temperature=0.7, **given)
    for schema, reason, tokens in zip(schemas, drawn.finish_reasons, drawn.new_tokens, strict=True):
        if reason == "stop":
            assert _follows(json.loads(text_of(each, tokens)), schema)
