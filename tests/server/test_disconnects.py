"""Clients that go, that read slowly, and a server that is told to end: rows and pages are free, other texts whole."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fastspec import FastSpecGenerator
from fastspec.scheduling.requests import Request
from fastspec.scheduling.scheduler import Scheduler
from tests.helpers.limits import HANGS
from tests.server.conftest import Running, running
from tests.server.test_refusals import TEXT, get, post

ROOT = Path(__file__).parents[2]
LONG = {**TEXT, "max_tokens": 390}


def request_of(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return f"{head}\r\n\r\n".encode() + data


def settled(server: Running) -> None:
    """Waits until no answer is written any more, then looks for what is left."""
    while server.service._running:
        get(server, "/health")  # lets the server's loop go on
    assert post(server, TEXT)[0] == 200
    loop = server.service.generator._open()
    assert not loop.deliveries
    loop.engine.pages.check_integrity()
    assert loop.engine.pages.num_free + loop.engine.pages.num_idle == loop.engine.pages.num_pages - 1


def test_a_client_that_goes_before_its_body_is_no_error(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    sent = request_of(LONG)
    with socket.create_connection(("127.0.0.1", server.port)) as gone:
        gone.sendall(sent[:-5])
    counted = 'fastspec_requests_total{status="499"}'
    while counted not in get(server, "/metrics")[1]:
        assert not [entry for entry in caplog.records if entry.exc_info], caplog.text
    settled(server)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_its_rows(server: Running, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = post(server, {**TEXT, "max_tokens": 40})[1]["choices"]
    cancelled: set[Request] = set()
    cancel = Scheduler.cancel

    def seen(self: Scheduler, request: Request) -> None:
        cancelled.add(request)
        cancel(self, request)

    monkeypatch.setattr(Scheduler, "cancel", seen)
    for _ in range(2):
        with socket.create_connection(("127.0.0.1", server.port)) as gone:
            gone.sendall(request_of({**LONG, "stream": stream, "n": 2, "logit_bias": {"258": -100}}))
            if stream:
                assert b"data: " in gone.recv(2000) + gone.recv(2000)
            else:
                while server.service._running < 2:
                    get(server, "/health")
        assert post(server, {**TEXT, "max_tokens": 40})[1]["choices"] == expected
    settled(server)
    assert len(cancelled) == 4
    assert {request.finish_reason for request in cancelled} == {"cancelled"}


def test_a_client_that_reads_nothing_holds_up_nobody(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow.sendall(request_of({**LONG, "stream": True, "logprobs": 20, "n": 2}))
        for _ in range(3):
            assert post(server, TEXT)[0] == 200
    settled(server)


@pytest.mark.parametrize("by", ["a second signal", "time"])
def test_answers_that_a_server_cuts_off_are_told_why(gen: FastSpecGenerator, by: str) -> None:
    with running(gen, drain=1e-3 if by == "time" else 60.0) as server, ThreadPoolExecutor(1) as pool:
        endless = {**LONG, "logit_bias": {"258": -100}}
        whole = pool.submit(post, server, endless)
        while server.service.running < 1:
            get(server, "/health")
        with socket.create_connection(("127.0.0.1", server.port)) as streamed:
            streamed.sendall(request_of({**endless, "stream": True}))
            data = streamed.recv(200)
            for _ in range(1 if by == "time" else 2):
                server.server.handle_exit(signal.SIGTERM, None)
            while more := streamed.recv(65536):
                data += more
        status, answer = whole.result()
        assert (status, answer["error"]["code"]) == (503, "shutting_down")
        events = [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: {")]
        assert events[-1]["error"]["code"] == "shutting_down"
        assert all("error" not in event for event in events[:-1])
        assert server.service.cut_off == 2
    with running(gen) as again:
        settled(again)


def test_a_server_that_ends_lets_answers_come_to_their_ends(gen: FastSpecGenerator) -> None:
    with running(gen) as server:
        expected = post(server, {**TEXT, "max_tokens": 200})[1]["choices"][0]["text"]
        with socket.create_connection(("127.0.0.1", server.port)) as late:
            late.sendall(request_of({**TEXT, "max_tokens": 200, "stream": True}))
            data = late.recv(200)
            server.server.should_exit = True
            while more := late.recv(65536):
                data += more
    lines = [line[6:] for line in data.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == expected


def test_the_command_drains_at_sigterm(pair: tuple[Path, Path], gen: FastSpecGenerator) -> None:
    target, draft = pair
    command = [sys.executable, "-m", "fastspec.cli", "serve", str(target), "--draft", str(draft), "--port", "0"]
    command += ["--device", "cpu", "--max-length", "400", "--name", "small", "--limit", "seconds=50"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if " at http" in line)
        url = line.split(" at ")[1].strip()
        port = int(url.removesuffix("/v1").rsplit(":", 1)[1])
        if curl := shutil.which("curl"):
            told = subprocess.run([curl, "-sf", f"{url}/models"], capture_output=True, text=True, check=True).stdout
            assert json.loads(told)["data"][0]["id"] == "small"
        with socket.create_connection(("127.0.0.1", port)) as late:
            late.sendall(request_of({**TEXT, "max_tokens": 200, "stream": True, "logit_bias": {"258": -100}}))
            data = late.recv(200)
            process.send_signal(signal.SIGTERM)
            while more := late.recv(65536):
                data += more
        rest = process.stderr.read()
        assert process.wait(HANGS) == 0, rest
    assert "all answers are complete" in rest
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") or b"data: [DONE]" in data
