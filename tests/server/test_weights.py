"""Routes of a trainer: new weights for a server, pauses around them, and who may ask."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

from fastspec import FastSpecGenerator
from fastspec.cli.app import app
from fastspec.models.checkpoints.updates import WeightUpdate
from fastspec.server.access import Access
from fastspec.server.openapi import description
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.limits import HANGS
from tests.helpers.services import END, opened
from tests.helpers.tokenizers import byte_tokenizer
from tests.server.conftest import Running, running
from tests.server.test_refusals import TEXT

KEY = {"Authorization": "Bearer key", "Content-Type": "application/json"}
ALLOWED = Access(("key",), weight_updates=True)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of the same shapes with other weights."""
    path = tmp_path_factory.mktemp("new") / "target"
    sizes: dict[str, Any] = {"vocab_size": END + 1, "eos_token_id": END, "bos_token_id": None, "std": 0.12}
    make_checkpoint(path, "llama2", seed=8, num_hidden_layers=2, **sizes)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def server(pair: tuple[Path, Path]) -> Iterator[Running]:
    with opened(pair, max_batch_size=2, max_length=400) as gen, running(gen, access=ALLOWED) as made:
        yield made


def asked(server: Running, method: str, path: str, body: Any = None, headers: Any = KEY) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANGS)
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def text(server: Running) -> str:
    status, answer = asked(server, "POST", "/v1/completions", TEXT | {"max_tokens": 12})
    assert status == 200, answer
    return answer["choices"][0]["text"]


def client_of(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="key", max_retries=0)


def paused(server: Running) -> bool:
    status, answer = asked(server, "GET", "/is_paused")
    assert status == 200
    return answer["is_paused"]


def test_answers_after_an_update_are_those_of_the_new_weights(server: Running, pair: Any, new: Path) -> None:
    with opened((new, pair[1]), max_length=400) as fresh:
        ids = fresh.tokenizer(TEXT["prompt"], return_tensors="pt")["input_ids"]
        output = fresh.generate(ids, max_new_tokens=12, return_dict_in_generate=True)
        expected = fresh.tokenizer.decode(output.new_tokens[0], skip_special_tokens=True)  # type: ignore[union-attr]
    before = text(server)
    assert before != expected
    assert asked(server, "GET", "/weight_version") == (200, {"weight_version": 0})
    body = {"path": str(new), "version": "step 7"}
    assert asked(server, "POST", "/update_weights", body) == (200, {"weight_version": "step 7"})
    assert asked(server, "GET", "/weight_version") == (200, {"weight_version": "step 7"})
    assert not paused(server)
    assert text(server) == expected
    draft = {"path": str(pair[1]), "target_model": False}
    assert asked(server, "POST", "/update_weights", draft) == (200, {"weight_version": "step 7"})
    assert text(server) == expected


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"path": "DRAFT"}, "path", "its config is not that of the target"),
        ({"path": "/nowhere"}, "path", "nowhere"),
        ({"version": "x", "target_model": False}, "path", "leave it out"),
        ({"path": ""}, "path", "at least 1 character"),
        ({"running": "never"}, "running", "'abort' or 'wait'"),
        ({"weights": 3}, "weights", ""),
    ],
)
def test_an_update_that_does_not_fit_changes_nothing(
    server: Running, pair: Any, new: Path, change: dict[str, Any], field: str, says: str
) -> None:
    before = text(server)
    body = {"path": str(new)} | change
    if body["path"] == "DRAFT":
        body["path"] = str(pair[1])
    status, answer = asked(server, "POST", "/update_weights", body)
    assert (status, answer["error"]["param"]) == (400, field), answer
    assert says in answer["error"]["message"]
    assert not paused(server)
    assert text(server) == before


def test_a_copy_that_fails_lets_nobody_have_half_the_weights(
    server: Running, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(update: WeightUpdate) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(WeightUpdate, "copy", fails)
        status, answer = asked(server, "POST", "/update_weights", {"path": str(new)})
    assert (status, "failed midway" in answer["error"]["message"]) == (500, True), answer
    status, answer = asked(server, "POST", "/v1/completions", TEXT)
    assert (status, "failed midway" in answer["error"]["message"]) == (500, True), answer
    assert asked(server, "POST", "/resume")[0] == 500
    assert asked(server, "POST", "/update_weights", {"path": str(new)})[0] == 200
    assert asked(server, "POST", "/resume") == (200, {"is_paused": False})
    text(server)


def test_requests_wait_while_it_is_paused(server: Running) -> None:
    expected, found = text(server), []
    for _ in range(2):  # a second pause changes nothing
        assert asked(server, "POST", "/pause") == (200, {"is_paused": True})
    assert paused(server)
    thread = threading.Thread(target=lambda: found.append(text(server)))
    thread.start()
    while not server.service.running:
        thread.join(0.01)
    assert not found
    assert asked(server, "POST", "/resume") == (200, {"is_paused": False})
    thread.join()
    assert found == [expected]


def test_running_answers_are_aborted_or_waited_for(server: Running, new: Path) -> None:
    client = client_of(server)

    def stream(tokens: int = 350) -> Iterator[Any]:
        return iter(client.completions.create(model="small", prompt="the", max_tokens=tokens, stream=True))

    answer = stream()
    next(answer)
    assert asked(server, "POST", "/pause?mode=abort") == (200, {"is_paused": True})
    assert [event.choices[0].finish_reason for event in answer][-1] == "abort"
    assert asked(server, "POST", "/resume")[0] == 200
    answer = stream()
    next(answer)
    assert asked(server, "POST", "/update_weights", {"path": str(new), "running": "abort"})[0] == 200
    assert [event.choices[0].finish_reason for event in answer][-1] == "abort"
    answer = stream(100)
    next(answer)
    assert asked(server, "POST", "/pause")[0] == 200
    assert [event.choices[0].finish_reason for event in answer][-1] == "length"
    status, told = asked(server, "POST", "/pause?mode=keep")
    assert (status, told["error"]["param"]) == (400, "mode")


def test_a_model_sleeps_and_wakes(server: Running, new: Path) -> None:
    before = text(server)
    assert asked(server, "GET", "/is_sleeping") == (200, {"is_sleeping": False})
    assert asked(server, "POST", "/wake_up") == (200, {"is_sleeping": False})
    for level in (1, 2):
        for _ in range(2):  # once more changes nothing
            assert asked(server, "POST", f"/sleep?level={level}&mode=abort") == (200, {"is_sleeping": True})
        status, answer = asked(server, "POST", "/v1/completions", TEXT)
        assert (status, answer["error"]["code"]) == (503, "sleeping"), answer
        assert asked(server, "POST", "/wake_up") == (200, {"is_sleeping": False})
        assert not paused(server)
        assert text(server) == before
    asked(server, "POST", "/sleep?level=2")
    status, answer = asked(server, "POST", "/wake_up?path=/nowhere")
    assert (status, answer["error"]["param"]) == (400, "path")
    assert asked(server, "GET", "/is_sleeping") == (200, {"is_sleeping": True})
    assert asked(server, "POST", f"/wake_up?path={new}&version=next") == (200, {"is_sleeping": False})
    assert asked(server, "GET", "/weight_version") == (200, {"weight_version": "next"})
    for query, field in (("level=3", "level"), ("mode=keep", "mode")):
        status, answer = asked(server, "POST", f"/sleep?{query}")
        assert (status, answer["error"]["param"]) == (400, field)
    status, answer = asked(server, "POST", "/wake_up?tags=weights")
    assert (status, answer["error"]["param"]) == (400, "tags")


def test_only_keys_may_ask_and_only_where_it_is_allowed(server: Running, gen: FastSpecGenerator, new: Path) -> None:
    paths = {"/update_weights": "POST", "/weight_version": "GET", "/pause": "POST", "/resume": "POST"}
    paths |= {"/sleep": "POST", "/wake_up": "POST"}
    for path, method in [*paths.items(), ("/is_paused", "GET"), ("/is_sleeping", "GET")]:
        assert asked(server, method, path, {}, {"Content-Type": "application/json"})[0] == 401
    assert asked(server, "GET", "/openapi.json")[1] == json.loads(json.dumps(description(weight_updates=True)))
    with running(gen, access=Access(("key",))) as closed:
        for path, method in paths.items():
            assert asked(closed, method, path, {"path": str(new)})[0] == 404
            assert path not in asked(closed, "GET", "/openapi.json")[1]["paths"]
    with pytest.raises(ValueError, match="weight updates need an api_key"):
        Access(weight_updates=True)
    refused = CliRunner().invoke(app, ["serve", "--allow-weight-updates"])
    assert refused.exit_code == 2
    assert "it needs --api-key" in refused.output
