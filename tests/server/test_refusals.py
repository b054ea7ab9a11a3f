"""What a server refuses, and how it says so: OpenAI's shape, with the field's name."""

from __future__ import annotations

import gzip
import http.client
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fastspec import FastSpecGenerator
from fastspec.server.access import Access
from fastspec.server.service import Limits
from tests.helpers.limits import HANGS
from tests.helpers.services import opened, small_pair
from tests.server.conftest import Running, running, stop_answers

TEXT: dict[str, Any] = {"model": "small", "prompt": "the", "max_tokens": 4}
CHAT: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}


def post(
    server: Running, body: Any, path: str = "completions", headers: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANGS)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", f"/v1/{path}", data, {"Content-Type": "application/json", **(headers or {})})
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def raw(server: Running, body: dict[str, Any]) -> str:
    """A streamed completion as it comes over the wire, without the chunks of HTTP."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANGS)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    told = connection.getresponse().read().decode()
    connection.close()
    return told


def get(server: Running, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANGS)
    connection.request("GET", path, headers=headers or {})
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("suffix", "x", "suffix is not supported. Text is only added at the end of a prompt"),
        ("best_of", 65, "best_of"),
        ("n", 0, "n: .*greater than or equal to 1, got '0'"),
        ("n", 65, "n"),
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", 10_000, "max_tokens must be at most"),
        ("max_tokens", "4", "max_tokens: .*integer"),
        ("temperature", 3, "temperature"),
        ("top_k", -2, "top_k"),
        ("stop_token_ids", [100_000], "eos_token_id"),
        ("stop_token_ids", [-1], "stop_token_ids"),
        ("allowed_token_ids", [100_000], "allowed_token_ids"),
        ("structured_outputs", {}, "exactly one of json, regex, choice"),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}, "exactly one of"),
        ("structured_outputs", {"json_object": False}, "structured_outputs.json_object"),
        ("structured_outputs", {"regex": "("}, "regex"),
        ("structured_outputs", {"json": {"type": "y"}}, "json_schema cannot be used: Invalid type: y"),
        ("structured_outputs", {"json": "{"}, "structured_outputs.json is no JSON"),
        ("structured_outputs", {"json": "[]"}, "must be a JSON schema"),
        ("guided_json", {}, "guided_json is not supported. .* use structured_outputs"),
        ("use_beam_search", True, "use_beam_search is not supported. There is no beam search"),
        ("user", 3, "user: .*string"),
        ("nonsense", 3, "nonsense is not supported; leave it out. Supported: "),
        ("min_tokens", 5, "min_new_tokens=5 is more than"),
        ("top_p", 1.1, "top_p"),
        ("logprobs", 21, "logprobs"),
        ("logit_bias", {"x": 1}, "logit_bias"),
        ("logit_bias", {"100000": 1}, "logit_bias: an id must be"),
        ("logit_bias", {"9" * 5000: 1}, "got the key '9{80}'"),  # more digits than Python reads
        ("logit_bias", {"3": 5, "03": -5}, "got the key '03'"),  # one of two would be lost
        ("logit_bias", {"٣": 1}, "got the key"),
        ("stop", "", "stop"),
        ("stop", ["x"] * 17, "stop"),
        ("seed", 2**63, "seed"),
        ("speculative_tokens", "x", "^speculative_tokens: .*integer, got 'x'; or speculative_tokens: .*'auto'"),
        ("speculative_tokens", 9, "speculative_tokens=9|num_speculative_tokens=9"),
        ("prompt", "", "prompt has no tokens"),
        ("prompt", [], "prompt"),
        ("prompt", [100_000], "prompt"),
        ("prompt", ["x", [1]], "^prompt.0: .*integer, got 'x'; or prompt.1: .*string, got '.1.'; or prompt.0"),
        ("prompt", [[1], []], "^prompt.0: .*; or prompt.1: .*at least 1 item"),
        ("prompt", 3, "^prompt: .*string, got '3'; or prompt: [^;]*array, got '3'$"),
        ("prompt", "x" * 500, "the prompt has 500 tokens"),
        ("stream_options", {"include_usage": True}, "stream_options needs stream=true"),
        ("stream_options", {"include_obfuscation": True}, "^stream_options.include_obfuscation: "),
        ("stream_options", {"x": 1}, "^stream_options.x is not supported; leave it out$"),
    ],
)
def test_a_field_of_a_completion_is_named(server: Running, field: str, value: Any, says: str) -> None:
    status, answer = post(server, {**TEXT, field: value})
    assert (status, answer["error"]["type"], answer["error"]["param"]) == (400, "invalid_request_error", field)
    assert re.search(says, answer["error"]["message"]), answer["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("audio", {}, "audio is not supported"),
        ("functions", [], "functions is not supported"),
        ("response_format", {"type": "xml"}, "^response_format.type: .*'json_object'"),
        ("response_format", {"type": "json_schema"}, "must have json_schema if its type is json_schema"),
        ("response_format", {"type": "text", "json_schema": {"name": "x", "schema": {}}}, "and only then"),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "x"}},
            "^response_format.json_schema.schema: Fie",
        ),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "y"}}},
            "json_schema cannot be used: Invalid type: y",
        ),
        ("tool_choice", "required", "tool_choice"),
        ("tool_choice", "any", "^tool_choice: .*'auto', 'none' or 'required', got 'any'; or tool_choice: .*object"),
        ("tool_choice", {"type": "x"}, "^tool_choice.type: .*'function', got 'x'; or tool_choice.type: .*'allowed"),
        (
            "chat_template_kwargs",
            {"chat_template": "{{ 1 }}"},
            "may not set chat_template, which the server sets",
        ),
        ("chat_template_kwargs", {"tokenize": False}, "may not set tokenize"),
        ("top_logprobs", 2, "top_logprobs needs logprobs=true"),
        ("max_completion_tokens", 5, "mean the same, got 4 and 5; give one"),
        ("continue_final_message", True, "set add_generation_prompt to false"),
        ("chat_template", "{{ 1 }}", "serve with --chat-template FILE"),
        ("messages", [], "messages"),
        ("messages", [{"role": "robot", "content": "x"}], r"messages\[0\].role must be one of"),
        ("messages", [{"role": "user", "content": 3}], r"messages\[0\].content must be a text"),
        (
            "messages",
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "parts of type text alone, got 'image_url'; leave that part out",
        ),
        ("messages", [{"role": "user", "content": ["x"]}], "parts of type text alone, got 'x'"),
        ("messages", [{"role": "user", "content": [{"type": "text", "text": 3}]}], "text of each part must be a text"),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}], "text of each part must be a text"),
        (
            "messages",
            [{"role": "user", "content": "fail:" + "x"}],
            "template refuses these messages: ZeroDivisionError",
        ),
        ("chat_template_kwargs", {"messages": []}, "may not set messages"),
        ("chat_template_kwargs", {"conversations": []}, "may not set conversations"),
        ("messages", [{"role": "user", "content": "x" * 500}], "prompt and answer together may have"),
    ],
)
def test_a_field_of_a_chat_is_named(server: Running, field: str, value: Any, says: str) -> None:
    status, answer = post(server, {**CHAT, field: value}, "chat/completions")
    assert (status, answer["error"]["param"]) == (400, field)
    assert re.search(says, answer["error"]["message"]), answer["error"]["message"]


def test_a_schema_may_end_before_the_least_tokens(server: Running) -> None:
    status, answer = post(server, {**TEXT, "min_tokens": 3, "response_format": {"type": "json_object"}})
    assert (status, answer["error"]["param"]) == (400, "min_tokens")
    assert post(server, {**TEXT, "min_tokens": 3, "response_format": {"type": "text"}})[0] == 200


def test_bodies_that_are_none(server: Running) -> None:
    assert post(server, b"{")[0] == 400
    assert post(server, b"[]")[0] == 400
    missing = post(server, {"model": "small"})
    assert (missing[0], missing[1]["error"]["param"]) == (400, "prompt")
    other = post(server, {**TEXT, "model": "gpt"})
    assert (other[0], other[1]["error"]["code"]) == (404, "model_not_found")
    assert post(server, TEXT, headers={"Content-Type": "text/plain"})[0] == 415
    assert post(server, TEXT, headers={"Content-Type": "Application/JSON; charset=utf-8"})[0] == 200
    status, answer = post(server, gzip.compress(json.dumps(TEXT).encode()), headers={"Content-Encoding": "gzip"})
    assert (status, answer["error"]["message"]) == (
        415,
        "bodies are read uncompressed, got content-encoding 'gzip'; leave it out",
    )
    assert post(server, TEXT, headers={"Content-Encoding": "Identity"})[0] == 200
    for (status, told), says in (
        (get(server, "/v1/nothing"), "there is no /v1/nothing here"),
        (get(server, "/" + "x" * 9000), f"there is no /{'x' * 79} here"),
        (get(server, "/v1/completions"), "GET is not allowed on /v1/completions"),
    ):
        error = json.loads(told)["error"]
        assert (status, error["type"]) == (405 if "GET" in says else 404, "invalid_request_error")
        assert says in error["message"]
    assert post(server, TEXT)[0] == 200


def test_requests_beyond_a_limit_are_refused(gen: FastSpecGenerator) -> None:
    with running(gen, limits=Limits(body=2000, tokens=20, requests=3, seconds=60)) as server:
        status, answer = post(server, {**TEXT, "user": "x" * 2000})
        assert (status, "more than 2000 bytes" in answer["error"]["message"]) == (413, True)
        assert "--limit body=BYTES" in answer["error"]["message"]
        assert post(server, {**TEXT, "max_tokens": 21})[1]["error"]["param"] == "max_tokens"
        chat = post(server, {name: CHAT[name] for name in ("model", "messages")}, "chat/completions")
        assert chat[1]["usage"]["completion_tokens"] == 20
        for field, value in (("n", 4), ("prompt", ["x"] * 4)):  # later would be no better
            status, answer = post(server, {**TEXT, field: value})
            assert (status, answer["error"]["param"]) == (400, field)
            assert "the request asks for 4 answers, and 3 are allowed at once" in answer["error"]["message"]
        server.service._running = 1
        status, answer = post(server, {**TEXT, "n": 3})
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
        server.service._running = 0
        assert post(server, {**TEXT, "n": 3})[0] == 200, "there is room again, and always was"


def test_an_answer_that_takes_too_long_is_stopped(gen: FastSpecGenerator) -> None:
    with running(gen, limits=Limits(seconds=1e-3)) as server:
        server.service.limits = Limits(seconds=60)  # for the body; what the answer has is asked anew
        assert post(server, TEXT)[0] == 200
    with running(gen) as server:
        stop_answers(server)
        status, answer = post(server, {**TEXT, "max_tokens": 300})
        assert (status, answer["error"]["type"]) == (504, "timeout")
        assert "--limit seconds=TIME" in answer["error"]["message"]
        assert server.service._running == 0


def test_requests_without_the_api_key_are_refused(gen: FastSpecGenerator) -> None:
    with running(gen, access=Access(("other", "sésame"))) as server:
        for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": "sésame"}):
            status, answer = post(server, TEXT, headers={k: v.encode().decode("latin-1") for k, v in headers.items()})
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert get(server, "/v1/models")[0] == get(server, "/metrics")[0] == 401
        assert get(server, "/health") == (200, '{"status":"ok"}')
        key = {"Authorization": "Bearer sésame".encode().decode("latin-1")}
        assert post(server, TEXT, headers=key)[0] == get(server, "/metrics", key)[0] == 200


def test_metrics_count_requests_and_tokens(server: Running) -> None:
    def value(name: str) -> float:
        lines = get(server, "/metrics")[1].splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name} ")), 0.0)

    before = value('fastspec_tokens_total{kind="completion"}'), value('fastspec_requests_total{status="200"}')
    status, answer = post(server, {**TEXT, "n": 2, "temperature": 1})
    assert status == 200
    after = value('fastspec_tokens_total{kind="completion"}'), value('fastspec_requests_total{status="200"}')
    assert after[0] - before[0] == answer["usage"]["completion_tokens"]
    assert after[1] - before[1] == 3, "this one, and those for metrics before and after it"
    assert value("fastspec_answers_running") == 0
    unknown = value('fastspec_requests_total{status="404"}')
    get(server, "/v1/nothing")
    assert value('fastspec_requests_total{status="404"}') == unknown + 1
    assert value("fastspec_first_token_seconds_count") > 0


def test_without_a_template_there_is_no_chat(tmp_path: Path) -> None:
    with opened(small_pair(tmp_path, template=False)) as gen, running(gen) as server:
        status, answer = post(server, CHAT, "chat/completions")
        assert (status, answer["error"]["param"]) == (400, "messages")
        assert "send a prompt to /v1/completions" in answer["error"]["message"]


def test_an_error_of_the_device_is_the_servers(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> Any:
        raise RuntimeError("the device fell off")

    with monkeypatch.context() as plant:
        plant.setattr(server.service.generator._open().scheduler, "step", failing)
        status, answer = post(server, TEXT)
        assert (status, answer["error"]["type"]) == (500, "server_error")
        assert "fell off" in answer["error"]["message"]
    with monkeypatch.context() as plant:
        plant.setattr(server.service.generator, "submit", lambda *prompt, **options: failing())
        status, answer = post(server, TEXT)
        assert (status, answer["error"]["type"]) == (500, "server_error")
    with monkeypatch.context() as plant:  # a fault of the server itself
        plant.setattr(server.service, "check_model", lambda name: {}[name])
        status, answer = post(server, TEXT)
        assert (status, answer["error"]["type"]) == (500, "server_error")
    assert post(server, TEXT)[0] == 200


@pytest.mark.parametrize(
    "limits",
    [{"body": 0}, {"tokens": 0}, {"requests": "8"}, {"requests": 1.5}, {"seconds": 0}, {"seconds": True}],
    ids=str,
)
def test_limits_that_let_nothing_through_are_none(limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"limits: {next(iter(limits))} must be a"):
        Limits(**limits)


def test_an_empty_key_is_none() -> None:
    with pytest.raises(ValueError, match="api_key is empty"):
        Access((" ",))
