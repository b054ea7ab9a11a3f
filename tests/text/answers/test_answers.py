"""Parts of answers: the same for every division of the text, and the formats that templates show."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastspec.text.answers.choose import NONE, REASONING_FORMATS, TOOL_FORMATS, AnswerFormats, formats_of
from fastspec.text.answers.events import Arguments, CallBegins, Event, Tool, WholeAnswer
from fastspec.text.answers.interface import ToolFormat
from fastspec.text.answers.parser import AnswerParser
from fastspec.text.answers.reader import Steps, TextReader
from fastspec.text.answers.values import dumped, json_of_literal, json_of_text, types_of
from tests.helpers.answers import TOOLS, WRITTEN, Written
from tests.helpers.chat_templates import PUBLISHED

MARKS = sorted({mark for kind in TOOL_FORMATS.values() for mark in kind("").marks} | {"<function=", "</function>"})
PIECES = [*MARKS, *"{}[]()<>\"'\\,:=;\n ", "weather", '"name"', '"arguments"', "city", "<parameter=", "Île", "<think>"]


def parsed(formats: AnswerFormats, text: str, cuts: list[int], *, opened: bool = False) -> list[Event]:
    parser = AnswerParser(formats, TOOLS, opened=opened)
    events: list[Event] = []
    for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parser.push(text[start:stop])
        events += parser.events()
    parser.finish()
    return events + parser.events()


def whole_of(events: list[Event]) -> WholeAnswer:
    whole = WholeAnswer()
    whole.add(events)
    return whole


def formats(case: Written) -> AnswerFormats:
    return formats_of(case.template)


@pytest.mark.parametrize("name", WRITTEN)
def test_every_format_is_chosen_and_read(name: str) -> None:
    case = WRITTEN[name]
    chosen = formats(case)
    assert (chosen.tools.name if chosen.tools else NONE) == case.format
    assert (chosen.reasoning.name if chosen.reasoning else NONE) == case.thinks
    if chosen.reasoning:
        assert chosen.reasoning.opens(case.prompt_end) == case.opened
    whole = whole_of(parsed(chosen, case.script, [], opened=case.opened))
    assert (whole.content, whole.reasoning) == (case.content, case.reasoning)
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == case.calls


@pytest.mark.parametrize("name", WRITTEN)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_answers_do_not_depend_on_how_they_arrive(name: str, data: st.DataObject) -> None:
    """Also answers that are cut off, or whose characters are changed: whole equals streamed."""
    case = WRITTEN[name]
    text = case.script[: data.draw(st.integers(0, len(case.script)))]
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(st.sampled_from(PIECES)) + text[at + data.draw(st.integers(0, 3)) :]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    chosen = formats(case)
    whole = parsed(chosen, text, [], opened=case.opened)
    assert whole_of(parsed(chosen, text, cuts, opened=case.opened)) == whole_of(whole)
    assert whole_of(parsed(chosen, text, list(range(1, len(text))), opened=case.opened)) == whole_of(whole)
    ordered(whole)


@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=25))
def test_any_text_is_read(name: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    for reasoning in (NONE, "think", "harmony"):
        chosen = formats_of("", tools=name, reasoning=reasoning)
        whole = parsed(chosen, text, [])
        assert whole_of(parsed(chosen, text, list(range(1, len(text))))) == whole_of(whole)
        ordered(whole)


def ordered(events: list[Event]) -> None:
    """Calls begin once, in order, and have their arguments after that."""
    begun = -1
    for event in events:
        if isinstance(event, CallBegins):
            assert event.index == begun + 1
            begun = event.index
        if isinstance(event, Arguments):
            assert event.index == begun


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_text_that_becomes_no_call_is_content(name: str) -> None:
    for text in ("It is {warm}.", '{"name": 3}', "[1] says (so)", " two\n\nlines \n", "<tool_call", "[TOOL_CALLS"):
        assert whole_of(parsed(formats_of("", tools=name), text, [])) == WholeAnswer(content=text)


@pytest.mark.parametrize("text", ["<tool_call>", "<tool_call>\nno JSON</tool_call> end", '<tool_call>{"name": "wea'])
def test_a_mark_without_a_call_is_content(text: str) -> None:
    assert whole_of(parsed(formats_of("", tools="hermes"), text, [])) == WholeAnswer(content=text)


def test_without_tools_marks_are_text() -> None:
    case = WRITTEN["hermes"]
    parser = AnswerParser(formats(case), ())
    parser.push(case.script)
    parser.finish()
    assert whole_of(parser.events()) == WholeAnswer(content=case.script)
    assert parser.marks == frozenset()


def test_reasoning_ends_at_its_mark() -> None:
    parser = AnswerParser(formats_of("", reasoning="think"), (), opened=True)
    told = []
    for piece in ("a", "\n", "\n</th", "ink>", "\n\n", "b"):
        parser.push(piece)
        told.append((parser.in_reasoning, parser.events()))
    assert [reasons for reasons, _ in told] == [True, True, True, False, False, False]
    assert whole_of([event for _, events in told for event in events]) == WholeAnswer("a", "b")


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("json calls", "hermes"),
        ("xml calls", "qwen3_coder"),
        ("text calls", "deepseek_v3"),
        ("calls in brackets", "mistral"),
        ("channels", "harmony"),
        ("pairs of arguments", "glm4"),
        ("headers and calls", "llama3_json"),
        *((name, NONE) for name, each in PUBLISHED.items() if each.arguments is None),
    ],
)
def test_templates_show_their_format(name: str, format: str) -> None:
    tools = formats_of(PUBLISHED[name].text).tools
    assert (tools.name if tools else NONE) == format


def test_a_name_overrides_the_template() -> None:
    template = PUBLISHED["json calls"].text
    chosen = formats_of(template, tools="mistral", reasoning="think").tools
    assert chosen is not None
    assert chosen.name == "mistral"
    assert formats_of(template, tools=NONE) == AnswerFormats(None, None)
    with pytest.raises(ValueError, match="no format of tool calls 'harmonia'; there are auto, none, harmony"):
        formats_of(template, tools="harmonia")
    with pytest.raises(ValueError, match="no reasoning format 'thoughts'; there are auto, none, harmony, think"):
        formats_of(template, reasoning="thoughts")
    for name, says in (
        ("no_module:X", "could not be created: No module"),
        ("json:No", "no attribute 'No'"),
        ("json:JSONDecoder", "must be a subclass"),
    ):
        with pytest.raises(ValueError, match=says):
            formats_of(template, tools=name)
    assert set(REASONING_FORMATS) >= {"think", "harmony", "gemma4"}


class Arrow(ToolFormat):
    """A user's own format: `=> NAME {...}` on a line."""

    name = "arrow"

    def parse(self, text: TextReader) -> Steps[None]:
        while (yield from text.content_until("=> ")):
            tool, mark = yield from text.take_until(" ")
            if mark and tool in text.tools:
                text.begin_call(tool)
                yield from text.json_value(text.arguments)


def test_a_format_of_a_user() -> None:
    chosen = formats_of("", tools=f"{Arrow.__module__}:Arrow")
    text = 'I look => weather {"city": "Rome", "days": 1} => nobody {} end'
    whole = whole_of(parsed(chosen, text, list(range(1, len(text)))))
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == [
        ("weather", {"city": "Rome", "days": 1})
    ]
    assert whole.content == "I look=> nobody {} end"


SCHEMAS: list[tuple[dict[str, Any], str, Any]] = [
    ({"type": "string"}, "12", "12"),
    ({"type": "integer"}, "12", 12),
    ({"type": "integer"}, "twelve", "twelve"),
    ({"type": "number"}, "3", 3),
    ({"type": "boolean"}, "true", True),
    ({"type": "boolean"}, "True", True),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "5", "5"),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5", 5),
    ({"type": "array"}, '["a", 1]', ["a", 1]),
    ({"type": "array"}, "['a', None]", ["a", None]),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "string"}}}, "7", "7"),
    ({}, "7", 7),
    ({}, "seven", "seven"),
    ({}, "NaN", "NaN"),
    ({}, '{"a": 1', '{"a": 1'),
]


@pytest.mark.parametrize(("schema", "text", "value"), SCHEMAS, ids=str)
def test_values_without_quotes_have_the_types_of_their_schema(schema: dict[str, Any], text: str, value: Any) -> None:
    assert json.loads(json_of_text(text, schema)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'a, b'", "a, b"),
        ("true", True),
        ("None", None),
        ("{'a': (1, 2)}", {"a": [1, 2]}),
        ("x + 1", "x + 1"),
        ("{1}", [1]),
    ],
)
def test_literals_of_python_become_json(text: str, value: Any) -> None:
    assert json.loads(json_of_literal(text)) == value


def test_what_has_no_utf8_stays_escaped() -> None:
    assert dumped("é\ud800").encode() == b'"\\u00e9\\ud800"'
    assert dumped("é") == '"é"'
    assert json_of_literal('"\\ud800"').encode()
    assert types_of({"$ref": "#/a"}) == set()
    assert types_of({"$ref": "#"}) == set()
    assert Tool("a").parameters == {}
