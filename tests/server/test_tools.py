"""Tool calls and reasoning through the server: a scripted model writes them, and the `openai` package reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from fastspec import demo_pair
from tests.helpers.answers import PARAMETERS, TIME, WEATHER, WRITTEN, Written
from tests.helpers.scripted import scripted_pair
from tests.helpers.services import opened
from tests.server.conftest import Running, running

ASKED: dict[str, Any] = {
    "model": "small",
    "messages": [{"role": "user", "content": "Will it rain in Paris?"}],
    "max_completion_tokens": 250,
}
TOOLS = [WEATHER, TIME]
ROWS = 4  # answers at once


def client_of(server: Running) -> Any:
    return openai.OpenAI(
        base_url=server.url, api_key="none", max_retries=0, default_headers={"Connection": "close"}, timeout=60
    )


def tools_of(case: Written) -> dict[str, Any]:
    return {"tools": TOOLS} if case.format != "none" else {}


def with_strict(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "strict": True}}


@pytest.fixture(scope="module", params=WRITTEN)
def case(request: pytest.FixtureRequest) -> Written:
    return WRITTEN[request.param]


@pytest.fixture(scope="module")
def scripted(case: Written, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with served(case, tmp_path_factory.mktemp("scripted")) as made:
        yield made


class served:  # noqa: N801  # used as a function
    """A server whose model writes the script of a case."""

    def __init__(self, case: Written, folder: Path, script: str | None = None) -> None:
        text = case.script if script is None else script
        pair = scripted_pair(folder, case.template, text, case.prompt_end, marks=case.marks, special=case.special)
        self._generator = opened(pair, max_length=2000, max_batch_size=ROWS)

    def __enter__(self) -> Running:
        self._running = running(self._generator)
        return self._running.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._running.__exit__(*error)
        self._generator.close()


def streamed(chunks: Any) -> tuple[dict[str, Any], str, list[Any]]:
    """The message that the deltas of a stream make, its finish reason, and the deltas."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    reason, deltas = None, []
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta.model_dump(exclude_unset=True)
            deltas.append(delta)
            message["content"] += delta.get("content") or ""
            message["reasoning"] += delta.get("reasoning") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls") or []:
                if call["index"] == len(message["tool_calls"]):
                    assert call["type"] == "function"
                    message["tool_calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            reason = choice.finish_reason or reason
    return message, str(reason), deltas


@pytest.fixture(scope="module")
def answer(case: Written, scripted: Running) -> Any:
    """The whole answer of a case."""
    return client_of(scripted).chat.completions.create(**ASKED, **tools_of(case))


def test_whole_answers_have_their_parts(case: Written, answer: Any) -> None:
    (choice,) = answer.choices
    message = choice.message
    assert message.content == (case.content or (None if case.calls else ""))
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]
    assert calls == case.calls
    assert choice.finish_reason == ("tool_calls" if case.calls else "stop")
    ids = [call.id for call in message.tool_calls or []]
    assert len(set(ids)) == len(ids)
    assert all(len(id) == 9 if case.format == "mistral" else id.startswith("call_") for id in ids)
    for name in ("reasoning", "reasoning_content"):
        assert getattr(message, name, "") == case.reasoning
    count = answer.usage.completion_tokens_details.reasoning_tokens
    assert (0 < count < answer.usage.completion_tokens) == bool(case.reasoning)


@pytest.mark.parametrize("drafts", [0, 3])
def test_streamed_answers_are_the_whole_ones(case: Written, scripted: Running, drafts: int) -> None:
    chunks = client_of(scripted).chat.completions.create(
        **ASKED, **tools_of(case), stream=True, extra_body={"speculative_tokens": drafts}
    )
    message, reason, deltas = streamed(chunks)
    assert (message["content"], message["reasoning"]) == (case.content, case.reasoning)
    assert [(call["name"], json.loads(call["arguments"])) for call in message["tool_calls"]] == case.calls
    assert reason == ("tool_calls" if case.calls else "stop")
    assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]


def test_without_tools_calls_stay_text(case: Written, scripted: Running) -> None:
    for fields in ({}, {**tools_of(case), "tool_choice": "none"}):
        (choice,) = client_of(scripted).chat.completions.create(**ASKED, **fields).choices
        assert choice.message.tool_calls is None
        assert choice.finish_reason == "stop"
        assert getattr(choice.message, "reasoning", "") == case.reasoning
        assert case.content in choice.message.content


def test_an_answer_that_is_cut_ends_with_length(case: Written, scripted: Running, answer: Any) -> None:
    client, total = client_of(scripted), answer.usage.completion_tokens

    def asked(limit: int) -> tuple[Any, tuple[dict[str, Any], str, list[Any]]]:
        """The answer with so many tokens, whole and streamed."""
        cut = {**ASKED, **tools_of(case), "max_completion_tokens": limit}
        return client.chat.completions.create(**cut), streamed(client.chat.completions.create(**cut, stream=True))

    with ThreadPoolExecutor(ROWS) as pool:
        answers = list(pool.map(asked, (1, 2, total // 2, total - 2)))
    for cut, (message, reason, _) in answers:
        assert cut.choices[0].finish_reason == reason == "length"
        assert (cut.choices[0].message.content or "") == message["content"]
        assert getattr(cut.choices[0].message, "reasoning", "") == message["reasoning"]
        arguments = [call.function.arguments for call in cut.choices[0].message.tool_calls or []]
        assert arguments == [call["arguments"] for call in message["tool_calls"]]


def test_what_a_user_writes_is_no_call(case: Written, scripted: Running, answer: Any) -> None:
    """Marks in the prompt are text of the prompt: the answer is the same as without them."""
    forged = [{"role": "user", "content": case.script}, *ASKED["messages"]]
    if "alternate" in case.template or "raise_exception('System" in case.template:
        forged = [{"role": "user", "content": case.script + ASKED["messages"][0]["content"]}]
    asked = {**ASKED, **tools_of(case), "messages": forged}
    found = client_of(scripted).chat.completions.create(**asked).choices[0].message
    assert found.content == answer.choices[0].message.content
    assert len(found.tool_calls or []) == len(case.calls)


@pytest.fixture(scope="module")
def shipped() -> Iterator[Running]:
    with opened(demo_pair(), max_length=1000, max_batch_size=2) as generator, running(generator) as made:
        yield made


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_are_demanded_follow_their_schema(shipped: Running, choice: Any, stream: bool) -> None:
    """The shipped pair knows no tools: what it writes is a call all the same."""
    asked = {**ASKED, "tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
    answer = client_of(shipped).chat.completions.create(**asked, stream=stream)
    if stream:
        message, reason, _ = streamed(answer)
        calls = [(call["name"], call["arguments"]) for call in message["tool_calls"]]
    else:
        (found,) = answer.choices
        reason = found.finish_reason
        calls = [(call.function.name, call.function.arguments) for call in found.message.tool_calls or []]
    assert reason == "tool_calls"
    assert [name for name, _ in calls] == ["weather"] * len(calls) != []
    for _, arguments in calls:
        jsonschema.validate(json.loads(arguments), PARAMETERS)
