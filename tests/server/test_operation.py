"""Operation of a server: origins, TLS, a Unix socket, ids, the access log, models that load, and the smaller paths."""

from __future__ import annotations

import http.client
import json
import logging
import re
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import fastspec
from fastspec import FastSpecGenerator
from fastspec.scheduling.scheduler import Scheduler
from fastspec.server.access import Access
from fastspec.server.openapi import description
from fastspec.server.request_log import AccessLog, RequestRecord
from fastspec.server.responses.body import ResponseBody
from fastspec.server.run import Certificate, Server, answering_that_models_load, listening, listening_at
from fastspec.server.service import Service
from fastspec.server.texts import Answer
from fastspec.server.tokens import Tokens
from tests.helpers.limits import HANGS
from tests.helpers.services import opened
from tests.server.conftest import Running, running
from tests.server.test_refusals import CHAT, TEXT, get, post, raw

HERE = Path(__file__).parent
CERTIFICATE = Certificate(HERE / "localhost.pem", HERE / "localhost_key.pem")
PAGE = "https://chat.example"


def asked(
    server: Running, method: str, path: str, headers: dict[str, str], body: Any = None
) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANGS)
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer


PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}
JSON = {"Content-Type": "application/json"}
SCORED: dict[str, Any] = TEXT | {"echo": True, "logprobs": 1}
TURNS: dict[str, Any] = {"model": "small", "max_output_tokens": 4}
TURNS["input"] = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]


def test_pages_of_allowed_origins_may_read_answers(gen: FastSpecGenerator) -> None:
    with running(gen, access=Access(("key",), (PAGE,))) as server:
        preflight = asked(server, "OPTIONS", "/v1/chat/completions", PREFLIGHT)
        assert preflight.status == 200, "browsers send no key with it"
        assert preflight.headers["access-control-allow-origin"] == PAGE
        assert "POST" in preflight.headers["access-control-allow-methods"]
        for name in ("authorization", "content-type", "x-stainless-lang"):
            assert name in preflight.headers["access-control-allow-headers"]
        key = JSON | {"Authorization": "Bearer key", "Origin": PAGE}
        answer = asked(server, "POST", "/v1/chat/completions", key, CHAT)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
        refused = asked(server, "POST", "/v1/chat/completions", JSON | {"Origin": PAGE}, CHAT)
        assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, PAGE)
        other = asked(server, "OPTIONS", "/v1/chat/completions", PREFLIGHT | {"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


def test_without_origins_no_page_may(server: Running) -> None:
    answer = asked(server, "POST", "/v1/chat/completions", JSON | {"Origin": PAGE}, CHAT)
    assert answer.status == 200
    assert "access-control-allow-origin" not in answer.headers
    assert asked(server, "OPTIONS", "/v1/chat/completions", PREFLIGHT).status == 405


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"origins": ("chat.example",)}, "an origin must be"),
        ({"origins": ("https://chat.example/",)}, "without a path"),
        ({"root_path": "llm"}, "root_path must begin with /"),
        ({"root_path": "/llm/"}, "root_path must begin with /"),
        ({"api_keys": ("a", "")}, "api_key is empty"),
    ],
)
def test_access_that_would_let_nobody_in_is_an_error(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Access(**options)
    Access(("a", "b"), ("*", "http://localhost:3000"), "/llm/v2")


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_a_proxy_may_leave_its_path_or_take_it_off(gen: FastSpecGenerator, prefix: str) -> None:
    with running(gen, access=Access(root_path="/llm")) as server:
        assert json.loads(get(server, f"{prefix}/v1/models")[1])["data"][0]["id"] == "small"
        assert json.loads(get(server, f"{prefix}/openapi.json")[1])["servers"] == [{"url": "/llm"}]
        assert get(server, f"{prefix}/v1/nothing")[0] == 404


def test_the_id_of_a_request_is_that_of_the_client(gen: FastSpecGenerator) -> None:
    records: list[RequestRecord] = []
    with running(gen, access=Access(observers=(records.append,))) as server:
        given = asked(server, "POST", "/v1/completions", JSON | {"X-Request-Id": "trace-7"}, TEXT)
        made = [asked(server, "GET", "/v1/nothing", headers) for headers in ({}, {"X-Request-Id": "two words"})]
        raw(server, TEXT | {"stream": True, "n": 2, "max_tokens": 9})
    assert given.headers["x-request-id"] == "trace-7"
    assert all(re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"]) for answer in made)
    assert [record.id for record in records[:3]] == ["trace-7", *(answer.headers["x-request-id"] for answer in made)]
    assert [record.status for record in records] == [200, 404, 404, 200]
    whole, unknown, _, streamed = (record.facts() for record in records)
    assert "model" not in unknown
    for facts, tokens in ((whole, 4), (streamed, 18)):
        assert (facts["model"], facts["completion_tokens"]) == ("small", tokens)
        assert 0 <= facts["queue_seconds"] <= facts["total_seconds"]  # type: ignore[operator]
        assert 0 < facts["first_token_seconds"] <= facts["total_seconds"]  # type: ignore[operator]
    assert whole["drafted_tokens"] >= whole["accepted_tokens"] >= 0  # type: ignore[operator]


def test_the_access_log_has_a_line_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    def lines(log: AccessLog, *records: RequestRecord) -> list[tuple[str, str]]:
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "fastspec.access"):
            for record in records:
                log(record)
        return [(entry.levelname, entry.message) for entry in caplog.records]

    made = RequestRecord("id-1", "POST", "/v1/completions", {}, status=200, seconds=0.25, model="two words\n")
    forged = RequestRecord("id-2", "GET", "/x\ny 200", {}, status=404, seconds=0.5)
    probe = RequestRecord("id-3", "GET", "/health", {}, status=200, seconds=0.5)
    failed = RequestRecord("id-4", "GET", "/health", {}, status=503, seconds=0.5)
    assert lines(AccessLog(as_json=False), made, forged, probe, failed) == [
        ("INFO", 'POST /v1/completions 200 id=id-1 model="two words\\n" total_seconds=0.25'),
        ("INFO", 'GET "/x\\ny 200" 404 id=id-2 total_seconds=0.5'),
        ("DEBUG", "GET /health 200 id=id-3 total_seconds=0.5"),
        ("INFO", "GET /health 503 id=id-4 total_seconds=0.5"),
    ]
    (level, line), *_ = lines(AccessLog(as_json=True), made)
    assert (level, json.loads(line)) == ("INFO", made.facts())


def test_an_answer_that_its_client_left_is_in_the_log(gen: FastSpecGenerator) -> None:
    told = threading.Event()
    records: list[RequestRecord] = []

    def observe(record: RequestRecord) -> None:
        records.append(record)
        told.set()

    body = json.dumps(TEXT | {"max_tokens": 390, "stream": True, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with running(gen, access=Access(observers=(observe,))) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as gone:
            gone.sendall(f"{head}\r\n\r\n".encode() + body)
            with gone.makefile("rb") as got:  # up to the first event: the head may come before any token
                assert any(line.startswith(b"data: ") for line in got)
        assert told.wait(HANGS)
    facts = records[0].facts()
    assert facts["status"] == 200
    assert 0 < facts["completion_tokens"] <= 390  # type: ignore[operator]


def test_tls_and_a_unix_socket(gen: FastSpecGenerator, tmp_path: Path) -> None:
    trust = ssl.create_default_context(cafile=str(CERTIFICATE.chain))
    for certificate in (None, CERTIFICATE):
        up, path = threading.Event(), tmp_path / "socket"
        server = Server(Service(gen, "small"), certificate=certificate, started=up.set)
        with listening_at(path) as on:
            thread = threading.Thread(target=server.serve_on, args=(on,))
            thread.start()
            assert up.wait(HANGS)
            try:
                with socket.socket(socket.AF_UNIX) as plain:
                    plain.settimeout(HANGS)
                    plain.connect(str(path))
                    client = plain if certificate is None else trust.wrap_socket(plain, server_hostname="localhost")
                    with client:  # which takes the socket over; while it is open, the server waits for its last word
                        client.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                        data = b""
                        while more := client.recv(65536):
                            data += more
            finally:
                server.should_exit = True
                thread.join()
        assert data.startswith(b"HTTP/1.1 200")
        assert b'"id":"small"' in data
        assert not path.exists()


def test_a_socket_file_that_nobody_listens_on_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with listening_at(path):
        with pytest.raises(ValueError, match=f"cannot listen on {path}"), listening_at(path):
            pass
        assert path.exists(), "the other one is in use"
    path.write_text("a file of somebody")
    with pytest.raises(ValueError, match="take another --uds"), listening_at(path):
        pass
    assert path.read_text() == "a file of somebody"


def test_files_that_are_no_certificate(tmp_path: Path) -> None:
    (tmp_path / "none.pem").write_text("nothing")
    for chain, key in (("none.pem", "none.pem"), ("absent.pem", "none.pem")):
        with pytest.raises(ValueError, match=r"cannot use .* for TLS"):
            Certificate(tmp_path / chain, tmp_path / key)
    with pytest.raises(ValueError, match=r"cannot use .* for TLS"):
        Certificate(CERTIFICATE.chain, CERTIFICATE.chain)


def test_a_server_says_that_its_models_load(gen: FastSpecGenerator) -> None:
    def told(port: int, method: str, path: str) -> tuple[int, str | None, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANGS)
        connection.request(method, path)
        answer = connection.getresponse()
        found = answer.status, answer.headers["retry-after"], answer.read()
        connection.close()
        return found

    with listening("127.0.0.1", 0) as on:
        port = on.getsockname()[1]
        with answering_that_models_load(on):
            assert told(port, "GET", "/health") == told(port, "GET", "/ping") == (503, "5", b'{"status": "loading"}')
            assert told(port, "HEAD", "/health") == (503, "5", b"")
            status, retry, body = told(port, "POST", "/v1/completions")
            assert (status, retry, json.loads(body)["error"]["code"]) == (503, "5", "loading")
        up = threading.Event()
        server = Server(Service(gen, "small"), started=up.set)
        with socket.create_connection(("127.0.0.1", port), timeout=HANGS) as between:  # nobody accepts it yet
            between.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            thread = threading.Thread(target=server.serve_on, args=(on,))
            thread.start()
            assert up.wait(HANGS)
            assert between.recv(65536).startswith(b"HTTP/1.1 200")
        assert told(port, "GET", "/health") == (200, None, b'{"status":"ok"}')
        server.should_exit = True
        thread.join()


def test_models_have_several_names_and_vllms_fields(gen: FastSpecGenerator) -> None:
    with running(gen, aliases=("gpt-4o", "small")) as server:
        listed = json.loads(get(server, "/v1/models")[1])["data"]
        assert [model["id"] for model in listed] == ["small", "gpt-4o"]
        for model in listed:
            assert json.loads(get(server, f"/v1/models/{model['id']}")[1]) == model
            assert (model["root"], model["parent"], model["max_model_len"]) == ("small", None, gen.max_length)
            assert model["permission"][0]["allow_sampling"] is True
            assert post(server, TEXT | {"model": model["id"]})[1]["model"] == "small"
        message = post(server, TEXT | {"model": "other"})[1]["error"]["message"]
        assert message == "the model 'other' is not here; this server has 'small', 'gpt-4o'"


def test_tokens_of_texts_and_messages(server: Running, gen: FastSpecGenerator) -> None:
    tokenizer: Any = gen.tokenizer

    def told(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        answer = asked_json(server, path, body)
        return answer

    ids = tokenizer("the €")["input_ids"]
    status, answer = told("/tokenize", {"prompt": "the €", "return_token_strs": True})
    assert (status, answer) == (
        200,
        {
            "count": len(ids),
            "max_model_len": gen.max_length,
            "tokens": ids,
            "token_strs": tokenizer.convert_ids_to_tokens(ids),
        },
    )
    assert told("/detokenize", {"model": "small", "tokens": ids}) == (200, {"prompt": "the €"})
    messages = CHAT["messages"]
    for body, text in (
        ({}, "<user>x\n<assistant>"),
        ({"add_generation_prompt": False}, "<user>x\n"),
        ({"chat_template_kwargs": {"how": "fast"}}, "<user>x\n<assistant>(fast)"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "<user>x"),
    ):
        assert told("/tokenize", {"messages": messages, **body})[1]["tokens"] == tokenizer(text)["input_ids"]
    for path, body, field in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": messages}, "prompt"),
        ("/tokenize", {"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ("/tokenize", {"messages": messages, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": messages, "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/tokenize", {"prompt": "x", "what": 1}, "what"),
        ("/detokenize", {"tokens": [10_000_000]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ):
        status, answer = told(path, body)
        assert (status, answer["error"]["param"]) == (404 if field == "model" else 400, field)


def asked_json(server: Running, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANGS)
    connection.request("POST", path, json.dumps(body), JSON)
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def test_the_version_and_pings(server: Running) -> None:
    assert json.loads(get(server, "/version")[1]) == {"version": fastspec.__version__}
    assert get(server, "/ping") == (200, '{"status":"ok"}')
    for path in ("/health", "/v1/models", "/metrics"):
        answer = asked(server, "HEAD", path, {})
        assert (answer.status, int(answer.headers["Content-Length"]) > 0) == (200, True)


def test_the_description_is_that_of_the_routes(server: Running) -> None:
    told = json.loads(get(server, "/openapi.json")[1])
    assert told == json.loads(json.dumps(description()))
    for path, operations in told["paths"].items():
        for method in operations:
            address = path.replace("{name}", "small").replace("{id}", "resp_x").replace("{item}", "x")
            headers = JSON if method == "post" else {}
            if method == "parameters":
                continue
            status = asked(server, method.upper(), address, headers, {} if method == "post" else None).status
            bodiless = method != "post" or path.endswith("/cancel")
            assert status == (404 if "{id}" in path and bodiless else 200 if bodiless else 400), (method, path)
    assert asked(server, "PATCH", "/version", {}).status == 405
    components = told["components"]

    def valid(name: str, body: Any) -> bool:
        schema = {"$ref": f"#/components/schemas/{name}", "components": components}
        return not list(jsonschema.Draft202012Validator(schema).iter_errors(body))

    operations = {path: one["post"] for path, one in told["paths"].items() if "post" in one}
    assert operations["/v1/completions"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith(
        "Completion"
    )
    assert valid("Completion", TEXT)
    assert not valid("Completion", TEXT | {"n": 0})
    assert not valid("Completion", TEXT | {"nonsense": 0})
    assert valid("Chat", CHAT)
    assert valid("CompletionAnswer", post(server, TEXT)[1])
    assert valid("ChatAnswer", post(server, CHAT, "chat/completions")[1])
    response = {"model": "small", "input": "x", "max_output_tokens": 2}
    assert valid("ResponseBody", response)
    assert not valid("ResponseBody", response | {"messages": []})
    assert valid("ResponseAnswer", post(server, response, "responses")[1])
    assert valid("Error", post(server, {})[1])
    assert valid("Models", json.loads(get(server, "/v1/models")[1]))
    assert not valid("Error", {})


def test_metrics_have_vllms_names(gen: FastSpecGenerator) -> None:
    def values(server: Running) -> dict[str, float]:
        found = re.findall(r"^(vllm:\w+)\{([^}]*)\} (\S+)$", get(server, "/metrics")[1], re.MULTILINE)
        labels = 'engine="0",model_name="small"'
        assert all(labels.split(",")[0] in each and labels.split(",")[1] in each for _, each, _ in found)
        more = ((name, re.findall(r'(?:position|finished_reason)="(\w+)"', each), value) for name, each, value in found)
        return {" ".join([name, *extra]): float(value) for name, extra, value in more if not name.endswith("_bucket")}

    with running(gen) as server:
        start = values(server)
        assert start["vllm:num_requests_running"] == start["vllm:num_requests_waiting"] == 0
        assert start["vllm:kv_cache_usage_perc"] == 0
        usage = post(server, TEXT | {"n": 2, "temperature": 1, "max_tokens": 40, "logit_bias": {"258": -100}})[1][
            "usage"
        ]
        told = values(server)
    details = usage["completion_tokens_details"]
    accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    assert told["vllm:prompt_tokens_total"] == usage["prompt_tokens"]
    assert told["vllm:generation_tokens_total"] == usage["completion_tokens"] == 80
    assert told["vllm:spec_decode_num_draft_tokens_total"] == accepted + rejected > 0
    assert told["vllm:spec_decode_num_accepted_tokens_total"] == accepted
    by_place = [
        value for name, value in told.items() if name.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    ]
    assert sum(by_place) == accepted
    assert by_place == sorted(by_place, reverse=True)
    assert told["vllm:spec_decode_num_drafts_total"] >= by_place[0]
    assert told["vllm:request_success_total length"] == 2
    assert told["vllm:time_to_first_token_seconds_count"] == told["vllm:e2e_request_latency_seconds_count"] == 2
    assert told["vllm:request_queue_time_seconds_count"] == 2
    assert told["vllm:inter_token_latency_seconds_count"] <= 78, "two first tokens follow no other"


def test_gauges_tell_of_running_and_waiting_answers(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, step = threading.Event(), threading.Event(), Scheduler.step

    def held(self: Scheduler) -> Any:
        if any(request.new_tokens for request in self._rows.values()):
            begun.set()
            assert go_on.wait(HANGS)
        return step(self)

    monkeypatch.setattr(Scheduler, "step", held)
    with opened(pair, max_batch_size=1, max_length=400) as gen, running(gen) as server:
        body = TEXT | {"max_tokens": 12, "n": 3, "logit_bias": {"258": -100}}
        thread = threading.Thread(target=lambda: post(server, body))
        thread.start()
        try:
            assert begun.wait(HANGS)
            text = get(server, "/metrics")[1]
        finally:
            go_on.set()
            thread.join()
    gauges = {name: float(value) for name, value in re.findall(r"^vllm:(\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE)}
    assert (gauges["num_requests_running"], gauges["num_requests_waiting"]) == (1, 2)
    assert 0 < gauges["kv_cache_usage_perc"] <= 1


@pytest.mark.parametrize(
    "work",
    [
        *("prompt", "template", "grammar", "tokenize", "token names", "truncation", "items", "count", "counted items"),
        *("scores", "streamed scores"),
    ],
)
def test_long_work_on_a_request_holds_up_no_other(
    server: Running, gen: FastSpecGenerator, work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other requests are answered whole while the work of one is held."""
    begun, go_on = threading.Event(), threading.Event()
    held: dict[str, tuple[Any, str, str, dict[str, Any]]] = {
        "prompt": (type(server.service), "_prompts", "/v1/completions", TEXT),
        "template": (type(server.service.template), "ids", "/v1/chat/completions", CHAT),
        "grammar": (type(gen), "submit", "/v1/completions", TEXT | {"response_format": {"type": "json_object"}}),
        "tokenize": (type(server.service.template), "ids", "/tokenize", {"messages": CHAT["messages"]}),
        "truncation": (type(server.service.template), "ids", "/v1/responses", TURNS | {"truncation": "auto"}),
        "count": (type(server.service.template), "ids", "/v1/responses/input_tokens", TURNS),
        "token names": (Tokens, "model_dump", "/tokenize", {"prompt": "x", "return_token_strs": True}),
        "items": (ResponseBody, "asked", "/v1/responses", TURNS),
        "counted items": (ResponseBody, "asked", "/v1/responses/input_tokens", TURNS),
        "scores": (Answer, "echoed_logprobs", "/v1/completions", SCORED),
        "streamed scores": (Answer, "echoed_logprobs", "/v1/completions", SCORED | {"stream": True}),
    }
    owner, name, path, body = held[work]
    whole = getattr(owner, name)

    def slow(*given: Any, **options: Any) -> Any:
        if not begun.is_set():
            begun.set()
            assert go_on.wait(HANGS)
        return whole(*given, **options)

    monkeypatch.setattr(owner, name, slow)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(asked(server, "POST", path, JSON, body).status))
    thread.start()
    try:
        assert begun.wait(HANGS)
        assert post(server, TEXT)[0] == post(server, CHAT, "chat/completions")[0] == get(server, "/health")[0] == 200
        assert not found
    finally:
        go_on.set()
        thread.join()
    assert found == [200]


def test_many_long_prompts_hold_up_no_other(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than the machine has processors."""
    held, go_on = threading.Semaphore(0), threading.Event()
    whole = Service._prompts

    def slow(self: Service, body: Any) -> list[list[int]]:
        if body.user == "slow":
            held.release()
            assert go_on.wait(HANGS)
        return whole(self, body)

    monkeypatch.setattr(Service, "_prompts", slow)
    found: list[int] = []
    body = TEXT | {"user": "slow"}
    threads = [threading.Thread(target=lambda: found.append(post(server, body)[0])) for _ in range(48)]
    for thread in threads:
        thread.start()
    try:
        for _ in threads:
            assert held.acquire(timeout=HANGS)
        assert post(server, TEXT)[0] == 200
        assert not found
    finally:
        go_on.set()
        for thread in threads:
            thread.join()
    assert found == [200] * 48
