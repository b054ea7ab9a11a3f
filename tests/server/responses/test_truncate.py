"""truncation="auto": the fewest oldest items are dropped, and calls keep their results."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastspec.server.responses.truncate import droppable, dropped
from tests.server.conftest import Running
from tests.server.test_refusals import post

ITEMS: dict[str, dict[str, Any]] = {
    "s": {"role": "system", "content": "s"},
    "u": {"role": "user", "content": "u"},
    "a": {"type": "message", "role": "assistant", "content": "a"},
    "r": {"type": "reasoning", "summary": []},
    "c": {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    "o": {"type": "function_call_output", "call_id": "1", "output": "o"},
}


def groups(kinds: str) -> list[str]:
    """Kinds of the items of each group that can be dropped."""
    return ["".join(kinds[at] for at in group) for group in droppable([ITEMS[kind] for kind in kinds])]


@pytest.mark.parametrize(
    ("kinds", "wanted"),
    [
        ("", []),
        ("u", []),
        ("suaua", ["ua"]),
        ("suuraua", ["uura"]),
        ("auau", ["a", "ua"]),
        ("uaurccooraco", ["ua", "rccoo"]),
        ("usccoosrcoa", ["ccoo", "rco"]),
        ("rcorco", ["rco"]),
    ],
)
def test_groups_are_turns_and_replies(kinds: str, wanted: list[str]) -> None:
    assert groups(kinds) == wanted


@settings(max_examples=60, deadline=None)
@given(kinds=st.text("suarco", max_size=12), room=st.integers(0, 12))
def test_the_fewest_oldest_are_dropped(kinds: str, room: int) -> None:
    items = [ITEMS[kind] for kind in kinds]
    without = dropped(items, lambda without: len(items) - len(without) <= room)
    count, left = 0, len(items)
    for group in droppable(items):
        if left <= room:
            break
        count, left = count + 1, left - len(group)
    assert without == {at for group in droppable(items)[:count] for at in group}
    kept = "".join(kind for at, kind in enumerate(kinds) if at not in without)
    assert kept.count("s") == kinds.count("s")
    assert ("u" in kept) == ("u" in kinds), "the last message of the user stays"


def test_a_long_conversation_is_answered_by_its_end(server: Running, client: openai.OpenAI) -> None:
    turns = [(f"{at} " * 30, "yes " * 12) for at in range(6)]
    items: Any = [{"role": "developer", "content": "be brief"}]
    items += [
        one
        for asked, said in turns
        for one in ({"role": "user", "content": asked}, {"role": "assistant", "content": said})
    ]
    items.append({"role": "user", "content": "now?"})
    body: Any = {"model": "small", "input": items, "max_output_tokens": 20}
    status, told = post(server, body, "responses")
    assert (status, told["error"]["param"]) == (400, "input")
    made = client.responses.create(**body, truncation="auto")
    assert (made.truncation, made.status) == ("auto", "incomplete")
    assert made.usage is not None
    counts = [
        client.responses.input_tokens.count(model="small", input=[items[0], *items[start:]]).input_tokens
        for start in range(1, len(items), 2)
    ]
    room = server.service.generator.max_length - 20
    assert made.usage.input_tokens == max(count for count in counts if count <= room)
    counted = client.responses.input_tokens.count(model="small", input=items, truncation="auto")
    assert counted.input_tokens == max(count for count in counts if count < server.service.generator.max_length)
    alone: Any = {**body, "input": "x" * 500, "truncation": "auto"}
    status, told = post(server, alone, "responses")
    assert (status, told["error"]["param"]) == (400, "input"), "nothing is left to drop"
