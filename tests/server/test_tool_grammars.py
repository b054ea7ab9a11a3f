"""Demanded calls and strict functions in every format of tool calls, over HTTP: noise becomes calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from fastspec import FastSpecGenerator
from fastspec.grammar.library import _vocabulary
from fastspec.grammar.spec import GRAMMAR, GrammarSpec
from fastspec.text.answers.choose import TOOL_FORMATS, formats_of
from fastspec.text.answers.events import Tool
from fastspec.text.answers.interface import ToolFormat
from fastspec.text.answers.parser import AnswerRule
from fastspec.text.answers.reader import Steps, TextReader
from tests.helpers.answers import TOOLS, WRITTEN
from tests.helpers.scripted import _ids, _split, _tokenizer
from tests.helpers.services import opened, small_pair
from tests.helpers.tokenizers import byte_tokenizer
from tests.server.conftest import running
from tests.server.test_refusals import post

MARKS = tuple(sorted({mark for kind in TOOL_FORMATS.values() for mark in kind("").marks}))
# the token that the model is led to, so that a call begins by itself
BEGINS = {
    "deepseek_v3": "<｜tool▁calls▁begin｜>",  # noqa: RUF001
    "glm4": "<tool_call>",
    "harmony": "c",  # of "commentary", behind the mark of a channel
    "hermes": "<tool_call>",
    "llama3_json": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "pythonic": "[",
    "qwen3_coder": "<tool_call>",
}
TEMPLATE = "{% if tools %}{{ tools | length }} tools{% endif %}{{ messages[-1].content }}<assistant>"
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 3}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
BLANKS: dict[str, float] = {str(byte_tokenizer().convert_tokens_to_ids(letter)): -100 for letter in "ĠĉĊč"}
SCHEMAS = {"weather": PLACE, "time": NOTHING}


class Bare(ToolFormat):
    """A format without a grammar."""

    name = "bare"

    def parse(self, text: TextReader) -> Steps[None]:
        yield from text.rest()


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastSpecGenerator]:
    """A tiny pair that writes noise; the marks of all formats are tokens of its vocabulary."""
    pair = small_pair(tmp_path_factory.mktemp("noisy"), marks=MARKS)
    with opened(pair, max_length=400, max_batch_size=1) as generator:
        generator.tokenizer.chat_template = TEMPLATE
        yield generator


def asked(*, strict: bool, bias: dict[str, float] | None = None, **fields: Any) -> dict[str, Any]:
    """A request of a chat; blanks are made unlikely, for noise may be blanks between parts of JSON without end."""
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in SCHEMAS.items()
    ]
    body = {"model": "small", "messages": [{"role": "user", "content": "x"}], "tools": tools, "max_tokens": 200}
    return body | {"parallel_tool_calls": False, "logit_bias": BLANKS | (bias or {})} | fields


def called(answer: dict[str, Any]) -> tuple[str, Any]:
    """Name and arguments of the one call of an answer."""
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls", choice
    (call,) = choice["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    jsonschema.validate(arguments, SCHEMAS[call["function"]["name"]])
    return call["function"]["name"], arguments


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_calls_are_demanded_and_strict_in_every_format(noisy: FastSpecGenerator, name: str) -> None:
    begins = {str(noisy.tokenizer.convert_tokens_to_ids(BEGINS[name])): 100}
    with running(noisy, tool_call_parser=name) as server:
        required = post(server, asked(strict=False, tool_choice="required"), "chat/completions")[1]
        assert called(required)[0] in SCHEMAS
        weather = {"type": "function", "function": {"name": "weather"}}
        named = post(server, asked(strict=False, tool_choice=weather), "chat/completions")[1]
        assert called(named)[0] == "weather"
        some = {"mode": "required", "tools": [{"type": "function", "function": {"name": "time"}}]}
        allowed = {"type": "allowed_tools", "allowed_tools": some}
        assert called(post(server, asked(strict=False, tool_choice=allowed), "chat/completions")[1])[0] == "time"
        by_itself = post(server, asked(strict=True, bias=begins), "chat/completions")[1]
        assert called(by_itself)[0] in SCHEMAS


@pytest.mark.parametrize("name", ["none", f"{Bare.__module__}:Bare"], ids=["none", "bare"])
def test_a_format_without_a_grammar_is_refused_by_name(noisy: FastSpecGenerator, name: str) -> None:
    says = "the format bare of tool calls has no grammar" if "Bare" in name else "shows no known format of tool calls"
    with running(noisy, tool_call_parser=name) as server:
        for fields in ({"strict": False, "tool_choice": "required"}, {"strict": True}):
            status, answer = post(server, asked(**fields), "chat/completions")
            assert (status, answer["error"]["param"]) == (400, "tools")
            assert says in answer["error"]["message"]
        fields = {"strict": False, "parallel_tool_calls": None, "max_tokens": 1}
        assert post(server, asked(**fields), "chat/completions")[0] == 200


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("name", [name for name, case in WRITTEN.items() if case.calls])
def test_grammars_allow_what_models_write(name: str, required: bool) -> None:
    case = WRITTEN[name]
    tokenizer = _tokenizer([], case.marks, case.template, special=case.special)
    strict = tuple(Tool(tool.name, tool.parameters, strict=True) for tool in TOOLS)
    rule = AnswerRule(strict, required=required)
    grammar = rule.grammar(formats_of(case.template), tokenizer.get_added_vocab(), opened=case.opened)
    vocabulary = _vocabulary(GrammarSpec(GRAMMAR, grammar), tokenizer, len(tokenizer))
    matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    script = case.script.removesuffix("<|call|>")  # a stop id, which is no part of the text
    if required and case.content:  # nothing comes before a demanded call
        before, _, after = script.partition(case.content)
        script = before + after.lstrip("\n")
    ids = _ids(tokenizer, _split(script, case.marks), case.marks)
    taken = [token for token in ids if matcher.consume_token(token)]
    assert tokenizer.decode(taken) == tokenizer.decode(ids)
    assert matcher.is_accepting()
