"""/v1/responses by the `openai` package: items, events, conversations, and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response
from pydantic import BaseModel

from fastspec import FastSpecGenerator
from fastspec.server.access import Access
from fastspec.server.errors import Refusal
from fastspec.server.responses.body import ResponseBody
from fastspec.server.responses.items import _KEYS, MessageBuilder, encoded
from fastspec.server.responses.store import ResponseStore, StoredResponse
from tests.helpers.agent_pair import AFTER, ARGUMENTS, BEFORE, REASONING, agent_pair
from tests.helpers.services import opened
from tests.server.conftest import Running, running, stop_answers
from tests.server.test_refusals import get, post

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "default": None}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "name": "Weather", "description": "of a city", "parameters": SCHEMA}
ASKED: dict[str, Any] = {"model": "small", "instructions": "Be brief.", "tools": [WEATHER]}
QUESTION = "Will it rain?"
NAMES = sorted({"text", "id", *(name for names in _KEYS.values() for name in names)})


class Weather(BaseModel):
    city: str
    unit: Literal["C", "F"]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    pair = agent_pair(tmp_path_factory.mktemp("agent"))
    with opened(pair, max_length=1200, max_batch_size=2) as generator, running(generator, response_store=2) as made:
        yield made


def client_of(server: Running) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=server.url, api_key="none", max_retries=0, default_headers={"Connection": "close"}, timeout=60
    )


@pytest.fixture(scope="module")
def whole(scripted: Running) -> Response:
    return client_of(scripted).responses.create(**ASKED, input=QUESTION, metadata={"a": "b"})


def shown(item: Any) -> dict[str, Any]:
    """An item without its ids."""
    told = {name: value for name, value in item.to_dict().items() if name not in ("id", "call_id", "parsed_arguments")}
    if "content" in told:
        told["content"] = [{name: part[name] for name in part if name != "parsed"} for part in told["content"]]
    return told


def test_a_response_has_reasoning_text_and_a_call(whole: Response) -> None:
    Response.model_validate(whole.to_dict())  # the client builds it without a check of its own
    reasoning, message, call = whole.output
    assert shown(reasoning) == {
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": REASONING}],
    }
    assert shown(message)["content"] == [{"type": "output_text", "text": BEFORE, "annotations": [], "logprobs": []}]
    assert shown(call) == {
        "type": "function_call",
        "status": "completed",
        "name": "Weather",
        "arguments": ARGUMENTS,
    }
    assert (whole.status, whole.error, whole.incomplete_details) == ("completed", None, None)
    assert (whole.instructions, whole.metadata, whole.tool_choice) == ("Be brief.", {"a": "b"}, "auto")
    assert whole.tools[0].to_dict() == WEATHER
    assert whole.usage is not None
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens


def test_events_tell_the_same_piece_by_piece(scripted: Running, whole: Response) -> None:
    with client_of(scripted).responses.stream(**ASKED, input=QUESTION, store=False) as stream:
        events = list(stream)
        made = stream.get_final_response()
    assert [shown(item) for item in made.output] == [shown(item) for item in whole.output]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds)) == [
        *("created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done", "output_text.delta", "output_text.done"),
        *("function_call_arguments.delta", "function_call_arguments.done", "completed"),
    ]
    for kind, text in (
        ("reasoning_text", REASONING),
        ("output_text", BEFORE),
        ("function_call_arguments", ARGUMENTS),
    ):
        own: list[Any] = [event for event in events if event.type.startswith(f"response.{kind}.")]
        assert len(own) > 2
        assert "".join(event.delta for event in own[:-1]) == text
        assert getattr(own[-1], "arguments" if "call" in kind else "text") == text
        assert {event.item_id for event in own} == {made.output[own[0].output_index].id}


def test_the_next_turn_has_the_items_of_the_one_before(scripted: Running, whole: Response) -> None:
    """Given as items or by the id of the response: the prompt is that of the same chat."""
    client, call = client_of(scripted), whole.output[2]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}  # type: ignore[union-attr]
    items: Any = [{"role": "user", "content": QUESTION}, *(item.to_dict() for item in whole.output), result]
    texts: Any = [{"type": "input_text", "text": QUESTION}]
    stateless = client.responses.create(**ASKED, input=[{"role": "user", "content": texts}, *items[1:]])
    assert [shown(item)["content"][0]["text"] for item in stateless.output] == [AFTER]
    by_id = client.responses.create(**ASKED, input=[result], previous_response_id=whole.id)
    reference: Any = [items[0], *({"type": "item_reference", "id": item.id} for item in whole.output), result]
    by_items = client.responses.create(**ASKED, input=reference)
    tool: Any = {"type": "function", "function": {name: WEATHER[name] for name in WEATHER if name != "type"}}
    function: Any = {"name": "Weather", "arguments": ARGUMENTS}
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": QUESTION},
        {
            "role": "assistant",
            "content": BEFORE,
            "reasoning_content": REASONING,
            "tool_calls": [{"id": "x", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "x", "content": "rain"},
    ]
    chat = client.chat.completions.create(model="small", messages=messages, tools=[tool])
    assert chat.choices[0].message.content == AFTER
    assert chat.usage is not None
    for response in (stateless, by_id, by_items):
        assert response.output_text == AFTER
        assert response.usage is not None
        assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert by_id.previous_response_id == whole.id


def test_stored_responses_are_read_and_forgotten(scripted: Running) -> None:
    client = client_of(scripted)
    made = client.responses.create(model="small", input="x", max_output_tokens=2)
    assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    sent: Any = [{"role": "user", "content": "y"}, {"role": "assistant", "content": "z"}]
    more = client.responses.create(model="small", input=sent, max_output_tokens=1, previous_response_id=made.id)
    listed = [item.to_dict() for item in client.responses.input_items.list(more.id, order="asc", limit=2)]
    assert [(item["role"], item["content"][0]["text"]) for item in listed[:1] + listed[-2:]] == [
        ("user", "x"),
        ("user", "y"),
        ("assistant", "z"),
    ]
    assert listed[1:-2] == [item.to_dict() for item in made.output], "an answer is an input of the next response"
    assert [item.to_dict() for item in client.responses.input_items.list(more.id)] == listed[::-1]
    for query in ("limit=0", "limit=x", "order=up", "after=msg_x"):
        status, told = get(scripted, f"/v1/responses/{more.id}/input_items?{query}")
        assert (status, json.loads(told)["error"]["param"]) == (400, query.partition("=")[0])
    client.responses.delete(made.id)
    left_out = client.responses.create(model="small", input="x", max_output_tokens=1, store=False)
    for id in (made.id, left_out.id):
        with pytest.raises(openai.NotFoundError, match="the last 2 are kept, unless store was false"):
            client.responses.retrieve(id)
        with pytest.raises(openai.BadRequestError, match="there is no response") as raised:
            client.responses.create(model="small", input="x", previous_response_id=id)
        assert raised.value.param == "previous_response_id"
    assert get(scripted, f"/v1/responses/{more.id}?stream=true")[0] == 400


def test_logprobs_are_those_of_the_text(scripted: Running) -> None:
    include: Any = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    tools: Any = [WEATHER]
    made = client_of(scripted).responses.create(model="small", input="x", tools=tools, include=include, top_logprobs=1)
    assert made.output[0].encrypted_content == encoded(REASONING)  # type: ignore[union-attr]
    part: Any = made.output[1].content[0]  # type: ignore[index, union-attr]
    assert "".join(entry.token for entry in part.logprobs) == BEFORE
    assert [entry.top_logprobs[0].token for entry in part.logprobs] == [entry.token for entry in part.logprobs]


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "Weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "Weather"}]},
    ],
    ids=["named", "allowed"],
)
def test_a_call_is_demanded(scripted: Running, choice: Any) -> None:
    other: Any = {**WEATHER, "name": "Time"}
    made = client_of(scripted).responses.create(
        model="small", input="x", tools=[other, WEATHER], tool_choice=choice, parallel_tool_calls=False
    )
    reasoning, call = made.output
    assert reasoning.type == "reasoning"
    assert (call.name, json.loads(call.arguments)) == ("Weather", json.loads(ARGUMENTS))  # type: ignore[union-attr]


def test_text_follows_a_schema(scripted: Running) -> None:
    made = client_of(scripted).responses.parse(model="small", input="x", text_format=Weather)
    assert made.output_parsed == Weather(city="Paris", unit="C")


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": []}, "input", "at least 1 item"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input", "input has no message"),
    ({"input": [{"type": "computer_call"}]}, "input", r"input[0].type must be one of message, function_call,"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input", "input[0].role must be one of"),
    ({"input": [{"role": "user", "content": 3}]}, "input", "input[0].content must be a text or a list of parts"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input",
        "input[0].content[0] must be of type input_text or output_text with a text, got 'input_image'",
    ),
    ({"input": [{"role": "user", "content": "x", "name": "y"}]}, "input", "input[0].name is not supported"),
    ({"input": [{"type": "function_call", "name": "x"}]}, "input", "input[0].arguments must be a text, got 'None'"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input", "only by the server that wrote it"),
    ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "input", "this server keeps no responses: send the item"),
    ({"input": "x" * 500}, "input", "prompt and answer together may have"),
    ({"max_output_tokens": 500}, "max_output_tokens", "max_output_tokens must be at most"),
    ({"previous_response_id": "resp_x"}, "previous_response_id", "serve with --response-store N"),
    ({"background": True}, "background", "serve with --response-store N, or send stream=true"),
    ({"background": True, "store": False}, "background", "leave store=false out"),
    ({"conversation": "conv_x"}, "conversation", "serve with --response-store N to keep some"),
    ({"conversation": {"id": "conv_x"}, "previous_response_id": "x"}, "conversation", "give one"),
    ({"truncation": "last"}, "truncation", "Input should be 'auto' or 'disabled'"),
    *(
        ({"tools": [{"type": kind}]}, "tools", f"tools.0.type must be function, got '{kind}': the server runs no tools")
        for kind in ("web_search", "file_search", "code_interpreter", "computer", "mcp", "image_generation", "custom")
    ),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools", "tools.0.name: String should match"),
    ({"tool_choice": {"type": "x"}}, "tool_choice", "tool_choice.type: Input should be 'function', got 'x'"),
    ({"conversation": 5}, "conversation", "conversation: Input should be a"),
    ({"tool_choice": "required"}, "tool_choice", "tool_choice is required, and there are no tools"),
    ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "names 'x', which is none of the tools"),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]}},
        "tool_choice",
        "names 'x', which is none of the tools",
    ),
    (
        {"tools": [{"type": "function", "name": "f"}], "tool_choice": "required"},
        "tools",
        "the chat template shows no known format of tool calls",
    ),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text", "must have name and schema if its type is"),
    (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "y"}}}},
        "text",
        "Invalid type: y",
    ),
    ({"reasoning": {"effort": "high"}}, "reasoning", "reasoning.effort: the chat template reads none of"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options", "Input should be False"),
    ({"n": 2}, "n", "n is not supported"),
    ({"model": "other"}, "model", "the model 'other' is not here"),
]


@pytest.mark.parametrize(("fields", "param", "says"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_field_of_a_response_is_named(server: Running, fields: dict[str, Any], param: str, says: str) -> None:
    status, answer = post(server, {"model": "small", "input": "x"} | fields, "responses")
    assert (status, answer["error"]["param"]) == (404 if param == "model" else 400, param), answer
    assert says in answer["error"]["message"], answer["error"]["message"]


def test_without_a_store_nothing_is_kept(server: Running) -> None:
    status, made = post(server, {"model": "small", "input": "x", "max_output_tokens": 1}, "responses")
    assert (status, made["store"]) == (200, False)
    status, told = get(server, f"/v1/responses/{made['id']}")
    assert (status, json.loads(told)["error"]["code"]) == (404, "response_not_found")
    with pytest.raises(ValueError, match="response_store must be 0 or more"):
        ResponseStore(-1)


def test_an_answer_that_fails_is_told_by_an_event(gen: FastSpecGenerator) -> None:
    with running(gen) as server:
        stop_answers(server)
        events = list(client_of(server).responses.create(model="small", input="x", max_output_tokens=90, stream=True))
        last: Any = events[-1]
        assert (last.type, last.response.status, last.response.error.code) == (
            "response.failed",
            "failed",
            "server_error",
        )
        assert "--limit seconds=TIME" in last.response.error.message


def test_a_response_belongs_to_its_key(gen: FastSpecGenerator) -> None:
    with running(gen, access=Access(("one", "two")), response_store=1) as server:
        keys = [{"Authorization": f"Bearer {key}"} for key in ("one", "two")]
        asked = {"model": "small", "input": "x", "max_output_tokens": 1}
        _, made = post(server, asked, "responses", keys[0])
        path = f"/v1/responses/{made['id']}"
        assert [get(server, path, each)[0] for each in (keys[1], keys[0], {})] == [404, 200, 401]
        assert post(server, asked | {"previous_response_id": made["id"]}, "responses", keys[1])[0] == 400


def test_the_store_is_bounded() -> None:
    store = ResponseStore(2)
    for name in "abc":
        store.keep(StoredResponse({"id": name, "output": []}, ({"id": f"msg_{name}"},), None))
        store.get("a", None) if name == "b" else None
    assert [name for name in "abc" if name in store._stored] == ["a", "c"], "a was used after b"
    assert store.resolved([{"id": "msg_c"}, {"role": "user"}], None) == [{"id": "msg_c"}, {"role": "user"}]


def test_items_of_one_turn_are_one_message() -> None:
    def call(id: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"}

    def reasoning(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    built = MessageBuilder()
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]}
    items = [reasoning("r"), said, call("1"), call("2"), reasoning("s"), call("3"), said, reasoning("t")]
    built.add("input", items)
    made = [
        (
            message.get("reasoning_content"),
            message["content"],
            [each["id"] for each in message.get("tool_calls", [])],
        )
        for message in built.messages
    ]
    assert made == [("r", "A", ["1", "2"]), ("s", None, ["3"]), (None, "A", []), ("t", "", [])]
    built = MessageBuilder()
    built.add("input", [{"type": "reasoning", "summary": [], "encrypted_content": encoded("größer")}])
    assert built.messages == [{"role": "assistant", "content": "", "reasoning_content": "größer"}]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["", "x", "{}", "user", "fastspec.eA==", *_KEYS]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=6),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None)
@given(items=st.lists(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6), min_size=1, max_size=4))
def test_any_items_are_read_or_refused(items: list[dict[str, Any]]) -> None:
    body, field = ResponseBody.model_validate({"model": "x", "input": items}), "input"
    try:
        messages = body.asked([], ResponseStore().resolved(body.items, None)).chat.messages
    except Refusal as error:
        messages, field = [{"role": "none"}], str(error.field)
    assert field == "input"
    assert messages
    assert all("role" in message for message in messages)


def test_errors_name_the_items_that_a_message_was_made_of() -> None:
    built = MessageBuilder()
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    said = {"role": "assistant", "content": "A"}
    built.add("input", [{"type": "reasoning", "summary": [{"text": "r"}]}, said, call, call, said])
    assert built.renamed("messages[0].tool_calls[1].function.arguments, messages[1].x, messages[9]") == (
        "input[3].arguments, input[4].x, messages[9]"
    )
