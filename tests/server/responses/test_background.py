"""Responses of the background: they go on without their client, and are read, followed and cancelled by their id."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from fastspec import FastSpecGenerator
from fastspec.server.access import Access
from fastspec.server.service import Limits
from tests.helpers.limits import HANGS
from tests.server.conftest import Running, running
from tests.server.responses.test_responses import client_of
from tests.server.test_refusals import get, post

ASKED: dict[str, Any] = {"model": "small", "input": "x", "background": True}
ENDLESS: dict[str, Any] = {**ASKED, "max_output_tokens": 380, "extra_body": {"logit_bias": {"258": -100}}}


@pytest.fixture(scope="module")
def keeping(gen: FastSpecGenerator) -> Iterator[Running]:
    with running(gen, response_store=2) as made:
        yield made


def ended(client: openai.OpenAI, id: str) -> Any:
    """The response when it is made."""
    end = time.monotonic() + HANGS
    while (found := client.responses.retrieve(id)).status in ("queued", "in_progress"):
        assert time.monotonic() < end
    return found


def test_a_response_is_polled(keeping: Running) -> None:
    client = client_of(keeping)
    made = client.responses.create(**ASKED, max_output_tokens=8)
    assert (made.status, made.output, made.background) == ("queued", [], True)
    with pytest.raises(openai.BadRequestError, match="still being generated"):
        client.responses.create(model="small", input="y", previous_response_id=made.id)
    found = ended(client, made.id)
    direct = client.responses.create(model="small", input="x", max_output_tokens=8)
    assert (found.status, found.output_text, found.usage) == ("incomplete", direct.output_text, direct.usage)
    with pytest.raises(openai.BadRequestError, match="only responses of background=true can be cancelled"):
        client.responses.cancel(direct.id)
    assert client.responses.cancel(made.id).to_dict() == found.to_dict(), "one that has ended stays as it is"
    assert [item.to_dict()["content"][0]["text"] for item in client.responses.input_items.list(made.id)] == ["x"]
    more = client.responses.create(model="small", input="y", max_output_tokens=1, previous_response_id=made.id)
    assert len(list(client.responses.input_items.list(more.id))) == 3


def test_a_stream_is_followed_from_any_event(keeping: Running) -> None:
    client = client_of(keeping)
    events: list[Any] = []
    with client.responses.create(**ASKED, max_output_tokens=30, stream=True) as stream:
        for event in stream:
            events.append(event)
            if event.type == "response.output_text.delta":
                break  # the client goes
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    id, last = events[0].response.id, events[-1].sequence_number
    rest: list[Any] = list(client.responses.retrieve(id, stream=True, starting_after=last))
    assert [event.sequence_number for event in rest] == list(range(last + 1, last + 1 + len(rest)))
    text = "".join(event.delta for event in events + rest if event.type == "response.output_text.delta")
    assert rest[-1].type == "response.incomplete"
    assert text == rest[-1].response.output_text == ended(client, id).output_text
    again: list[Any] = list(client.responses.retrieve(id, stream=True))
    assert [event.to_dict() for event in again] == [event.to_dict() for event in events + rest]
    status, told = get(keeping, f"/v1/responses/{id}?stream=true&starting_after=x")
    assert (status, json.loads(told)["error"]["param"]) == (400, "starting_after")


def test_a_response_is_cancelled(keeping: Running) -> None:
    client = client_of(keeping)
    made = client.responses.create(**ENDLESS)
    for event in client.responses.retrieve(made.id, stream=True):
        if event.type == "response.output_text.delta":
            client.responses.cancel(made.id)
            break
    found = client.responses.retrieve(made.id)
    assert (found.status, found.error) == ("cancelled", None)
    assert found.usage is None
    assert [item.status for item in found.output] == ["incomplete"]  # type: ignore[union-attr]
    events: list[Any] = list(client.responses.retrieve(made.id, stream=True))
    assert (events[-1].type, events[-1].response["status"]) == ("response.cancelled", "cancelled")
    gone = client.responses.create(**ENDLESS)
    client.responses.delete(gone.id)
    while keeping.service.running:
        get(keeping, "/health")  # lets the server's loop go on
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(gone.id)


def test_those_that_are_made_stay_in_a_full_store(keeping: Running) -> None:
    client = client_of(keeping)
    endless = client.responses.create(**ENDLESS)
    others = [client.responses.create(model="small", input="y", max_output_tokens=1).id for _ in range(3)]
    assert client.responses.retrieve(endless.id).status in ("queued", "in_progress")
    assert [get(keeping, f"/v1/responses/{id}")[0] for id in others] == [404, 200, 200]
    assert client.responses.cancel(endless.id).status == "cancelled"


def test_time_and_errors_end_a_response(gen: FastSpecGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(gen, response_store=2, limits=Limits(seconds=0.05)) as server:
        client = client_of(server)
        late = ended(client, client.responses.create(**ENDLESS).id)
        assert (late.status, late.error.code) == ("failed", "server_error")
        assert "--limit seconds=TIME" in late.error.message
    with running(gen, response_store=2, access=Access(("one", "two"))) as server:
        keys = [{"Authorization": f"Bearer {key}"} for key in ("one", "two")]
        monkeypatch.setattr("fastspec.server.responses.answer.ResponseBuilder._piece", lambda *given: 1 / 0)
        _, made = post(server, {**ASKED, "max_output_tokens": 2}, "responses", keys[0])
        path = f"/v1/responses/{made['id']}"
        end = time.monotonic() + HANGS
        while (told := json.loads(get(server, path, keys[0])[1]))["status"] in ("queued", "in_progress"):
            assert time.monotonic() < end
        assert (told["status"], told["error"]["message"]) == ("failed", "the server failed; ask again")
        assert post(server, {}, f"responses/{made['id']}/cancel", keys[1])[0] == 404, "of another key"
        assert server.service.running == 0


def test_a_server_that_ends_waits_for_no_response_without_reader(gen: FastSpecGenerator) -> None:
    with running(gen, response_store=2) as server:
        client_of(server).responses.create(**ENDLESS)
    assert (server.service.cut_off, server.service.running) == (1, 0)
    with running(gen) as again, socket.create_connection(("127.0.0.1", again.port)):
        assert post(again, {"model": "small", "input": "x", "max_output_tokens": 1}, "responses")[0] == 200
