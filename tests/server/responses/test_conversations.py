"""Conversations: responses continue them and add to them; their items are listed, added and removed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from fastspec import FastSpecGenerator
from fastspec.server.access import Access
from fastspec.server.responses.store import ResponseStore, StoredConversation
from fastspec.server.service import Limits
from tests.server.conftest import Running, running
from tests.server.responses.test_responses import client_of
from tests.server.test_refusals import get, post

SHORT: dict[str, Any] = {"model": "small", "max_output_tokens": 3}


@pytest.fixture(scope="module")
def keeping(gen: FastSpecGenerator) -> Iterator[Running]:
    with running(gen, response_store=2) as made:
        yield made


def test_a_response_continues_a_conversation(keeping: Running) -> None:
    client = client_of(keeping)
    first: Any = {"type": "message", "role": "user", "content": "hello"}
    made = client.conversations.create(items=[first], metadata={"a": "b"})
    assert (made.object, made.metadata) == ("conversation", {"a": "b"})
    one = client.responses.create(**SHORT, input="and now?", conversation=made.id)
    assert one.conversation is not None
    assert one.conversation.id == made.id
    two = client.responses.create(**SHORT, input="more", conversation={"id": made.id}, store=False)
    listed = [item.to_dict() for item in client.conversations.items.list(made.id, order="asc")]
    assert [item["content"][0]["text"] for item in listed] == [
        *("hello", "and now?", one.output_text, "more", two.output_text),
    ]
    asked: Any = [
        {name: value for name, value in item.items() if name in ("type", "role", "content")} for item in listed[:-1]
    ]
    direct = client.responses.create(**SHORT, input=asked)
    assert direct.usage is not None
    assert two.usage is not None
    assert (direct.output_text, direct.usage.input_tokens) == (two.output_text, two.usage.input_tokens)


def test_items_and_metadata_are_changed(keeping: Running) -> None:
    client = client_of(keeping)
    made = client.conversations.create()
    assert made.metadata == {}
    new: Any = [{"role": "user", "content": text} for text in ("a", "b", "c")]
    added = client.conversations.items.create(made.id, items=new)
    assert len(added.data) == 3
    middle: Any = added.data[1]
    assert client.conversations.items.retrieve(middle.id, conversation_id=made.id).to_dict() == middle.to_dict()
    client.conversations.items.delete(middle.id, conversation_id=made.id)
    listed: list[Any] = list(client.conversations.items.list(made.id, limit=1))
    assert [item.content[0].text for item in listed] == ["c", "a"], "by pages, the newest first"
    with pytest.raises(openai.NotFoundError, match="list its items"):
        client.conversations.items.retrieve(middle.id, conversation_id=made.id)
    assert client.conversations.update(made.id, metadata={"x": "y"}).metadata == {"x": "y"}
    assert client.conversations.retrieve(made.id).metadata == {"x": "y"}
    wrong: Any = [{"type": "computer_call"}]
    with pytest.raises(openai.BadRequestError, match=r"items\[0\]\.type must be one of message") as raised:
        client.conversations.items.create(made.id, items=wrong)
    assert raised.value.param == "items"
    assert client.conversations.delete(made.id).deleted
    for call in (client.conversations.retrieve, client.conversations.items.list, client.conversations.delete):
        with pytest.raises(openai.NotFoundError, match="the last 2 are kept"):
            call(made.id)  # type: ignore[operator]
    with pytest.raises(openai.BadRequestError, match="there is no conversation"):
        client.responses.create(**SHORT, input="x", conversation=made.id)


def test_one_response_at_a_time(keeping: Running) -> None:
    client = client_of(keeping)
    made = client.conversations.create()
    long: Any = {"max_output_tokens": 380, "extra_body": {"logit_bias": {"258": -100}}, "background": True}
    running_one = client.responses.create(model="small", input="x", conversation=made.id, **long)
    with pytest.raises(openai.ConflictError, match="still being generated; wait for its end") as raised:
        client.responses.create(**SHORT, input="y", conversation=made.id)
    assert raised.value.code == "conversation_locked"
    client.responses.cancel(running_one.id)
    assert list(client.conversations.items.list(made.id)) == [], "a cancelled response adds nothing"
    wrong = {**SHORT, "input": "y", "conversation": made.id, "max_output_tokens": 10**6}
    assert post(keeping, wrong, "responses")[0] == 400, "a refusal holds nothing"
    client.responses.create(**SHORT, input="y", conversation=made.id)
    assert len(list(client.conversations.items.list(made.id))) == 2


def test_conversations_are_bounded(gen: FastSpecGenerator, server: Running) -> None:
    told = post(server, {}, "conversations")
    assert (told[0], "serve with --response-store N" in told[1]["error"]["message"]) == (400, True)
    store = ResponseStore(1)
    held = store.begin(StoredConversation({}, None, busy=True))
    names = [store.begin(StoredConversation({}, None)).id for _ in range(2)]
    assert list(store._conversations) == [held.id, names[1]]
    with running(gen, response_store=1, limits=Limits(body=2000), access=Access(("one", "two"))) as served:
        keys = [{"Authorization": f"Bearer {key}"} for key in ("one", "two")]
        _, made = post(served, {}, "conversations", keys[0])
        path = f"conversations/{made['id']}"
        assert get(served, f"/v1/{path}", keys[1])[0] == 404, "of another key"
        items = {"items": [{"role": "user", "content": "x" * 900}]}
        answers = [post(served, items, f"{path}/items", keys[0]) for _ in range(4)]
        assert [status for status, _ in answers] == [200, 200, 200, 400]
        assert "begin another one" in answers[-1][1]["error"]["message"]
        status, told = post(served, {**SHORT, "input": "x", "conversation": made["id"]}, "responses", keys[0])
        assert (status, told["error"]["param"]) == (400, "conversation")
        listed = json.loads(get(served, f"/v1/{path}/items", keys[0])[1])["data"]
        assert served.service.responses.conversation(made["id"], "one").size == sum(
            len(json.dumps({"role": "user", "content": "x" * 900, "id": item["id"]})) for item in listed
        )
