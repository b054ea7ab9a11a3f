"""A page of another origin in a real browser lists models and chats, as front ends do that call a server directly."""

from __future__ import annotations

import json
import queue
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fastspec import FastSpecGenerator
from fastspec.server.access import Access
from tests.helpers.limits import HANGS
from tests.helpers.services import opened, small_pair
from tests.server.conftest import running
from tests.server.test_refusals import post

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)
SECONDS = 120.0  # for the browser to start and to ask
KEY = "secret"
ASKED: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 24}
# a front end: the headers of a browser's client, models, a streamed chat, its title, and a stream that is left
PAGE = """<!doctype html><script>
const headers = { Authorization: "Bearer KEY", "Content-Type": "application/json", "X-Stainless-Lang": "js" };
const ask = (path, body, more) =>
  fetch("URL/" + path, body ? { method: "POST", headers, body: JSON.stringify(body), ...more } : { headers });
async function streamed(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "", rest = "", pieces = 0, usage = null, ended = false;
  for (let part; !(part = await reader.read()).done; ) {
    const lines = (rest + part.value).split("\\n");
    rest = lines.pop();
    for (const line of lines.filter((line) => line.startsWith("data: "))) {
      if (line === "data: [DONE]") { ended = true; continue; }
      const event = JSON.parse(line.slice(6));
      text += event.choices[0]?.delta.content ?? "";
      pieces += 1;
      usage = event.usage ?? usage;
    }
  }
  return { text, pieces, usage, ended };
}
async function main() {
  const told = {};
  const models = await ask("models");
  told.models = (await models.json()).data.map((model) => model.id);
  const chat = await ask("chat/completions", { ...ASKED, stream: true, stream_options: { include_usage: true } });
  told.id = chat.headers.get("x-request-id");
  told.chat = await streamed(chat);
  told.title = await (await ask("chat/completions", ASKED)).json();
  told.refused = (await (await ask("chat/completions", { ...ASKED, nonsense: 1 })).json()).error.param;
  const stop = new AbortController();
  const left = await ask("chat/completions", { ...ASKED, max_tokens: 350, stream: true }, { signal: stop.signal });
  await left.body.getReader().read();
  stop.abort();
  return told;
}
main().catch((error) => ({ error: String(error) }))
  .then((told) => fetch("/told", { method: "POST", body: JSON.stringify(told) }));
</script>"""


class Front(ThreadingHTTPServer):
    """An origin with one page.

    Attributes:
        page: its text.
        told: what the page tells of itself.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.page, self.told = "", queue.Queue[dict[str, Any]]()

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Front

    def do_GET(self) -> None:
        self._answer(self.server.page if self.path == "/" else "")

    def do_POST(self) -> None:
        self.server.told.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer("")

    def _answer(self, body: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *given: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def gen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastSpecGenerator]:
    with opened(small_pair(tmp_path_factory.mktemp("pair")), max_length=400, max_batch_size=2) as made:
        yield made


@pytest.fixture
def front() -> Iterator[Front]:
    with Front() as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def opened_in_browser(front: Front, folder: Path) -> dict[str, Any]:
    """Opens the page in a browser. Returns what it tells."""
    command = [str(BROWSER), *FLAGS, f"--user-data-dir={folder / 'profile'}", front.origin + "/"]
    command.insert(1, "--remote-debugging-port=0")  # without it a headless browser ends with the page
    with (folder / "said").open("w+") as said, subprocess.Popen(command, stdout=said, stderr=said) as process:
        try:
            return front.told.get(timeout=SECONDS)
        except queue.Empty:
            said.seek(0)
            raise AssertionError(f"the page told nothing within {SECONDS:.0f} s: {said.read()[-2000:]}") from None
        finally:
            process.terminate()


@pytest.mark.integration
@pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium")
@pytest.mark.parametrize("allowed", [True, False], ids=["allowed", "other"])
def test_a_page_of_another_origin_chats_if_it_is_allowed(
    gen: FastSpecGenerator, front: Front, tmp_path: Path, allowed: bool
) -> None:
    access = Access((KEY,), (front.origin if allowed else "https://chat.example",))
    with running(gen, access=access) as server:
        front.page = PAGE.replace("URL", server.url).replace("KEY", KEY).replace("ASKED", json.dumps(ASKED))
        told = opened_in_browser(front, tmp_path)
        if not allowed:
            assert told == {"error": "TypeError: Failed to fetch"}
            return
        _, whole = post(server, ASKED, "chat/completions", {"Authorization": f"Bearer {KEY}"})
        assert told["models"] == ["small"]
        assert re.fullmatch("[0-9a-f]{32}", told["id"]), "the header X-Request-Id is exposed"
        assert told["chat"]["text"] == whole["choices"][0]["message"]["content"] != ""
        assert told["chat"]["pieces"] > 3
        assert told["chat"]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        assert told["chat"]["ended"]
        assert told["title"]["choices"] == whole["choices"]
        assert told["refused"] == "nonsense"
        end = time.monotonic() + HANGS
        while server.service.running:  # the stream that was left frees its row
            assert time.monotonic() < end
            time.sleep(0.01)
