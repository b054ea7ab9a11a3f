"""The clients of a soak that come over HTTP: they wait for whole answers, stream them, or are gone in the middle."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastspec import FastSpecGenerator
from fastspec.server.run import Server, listening
from fastspec.server.service import Limits, Service
from tests.helpers.limits import HANGS

FATES = ("answer", "stream", "gone while it streams", "gone at once")
_SENT = {"max_new_tokens": "max_tokens", "temperature": "temperature", "seed": "seed"}
_SENT |= {"num_speculative_tokens": "speculative_tokens", "stop_strings": "stop"}
_SENT |= {"repetition_penalty": "repetition_penalty"}


@contextmanager
def served(generator: FastSpecGenerator) -> Iterator[int]:
    """The port of a server in a thread."""
    up, service = threading.Event(), Service(generator, "soak", Limits(requests=10_000))
    server = Server(service, started=up.set)
    with listening("127.0.0.1", 0) as on:
        thread = threading.Thread(target=server.serve_on, args=(on,))
        thread.start()
        try:
            assert up.wait(HANGS), "the server is up"
            yield on.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def body_of(prompt: list[int], options: dict[str, Any]) -> dict[str, Any]:
    """What such a request says over HTTP."""
    told = {_SENT[name]: value for name, value in options.items() if name in _SENT}
    return {"model": "soak", "prompt": prompt, "temperature": 0.0, **told}


def ask(port: int, body: dict[str, Any], fate: str) -> str | None:
    """The text of an answer; None of one that nobody waited for."""
    stream = fate != "answer"
    data = json.dumps({**body, "stream": stream}).encode()
    if fate == "gone at once":
        with socket.create_connection(("127.0.0.1", port)) as gone:
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            gone.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return None
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANGS)
    try:
        connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200, (answer.status, answer.read()[:300])
        if not stream:
            return str(json.loads(answer.read())["choices"][0]["text"])
        if fate == "gone while it streams":
            answer.readline()
            return None
        lines = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        events = [json.loads(line) for line in lines[:-1]]
        return "".join(event["choices"][0]["text"] for event in events if event["choices"])
    finally:
        connection.close()
