"""A tiny pair behind a server in a thread, on a free port of the loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from fastspec import FastSpecGenerator
from fastspec.server.access import Access
from fastspec.server.errors import too_late
from fastspec.server.run import Server, listening
from fastspec.server.service import Limits, Service
from fastspec.text.answers.choose import AUTO
from tests.helpers.limits import HANGS
from tests.helpers.services import opened, small_pair


@dataclass
class Running:
    """A server that answers.

    Attributes:
        url: of its /v1.
        service: what it serves.
        server: ends by `should_exit`.
    """

    url: str
    service: Service
    server: Server

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    @property
    def port(self) -> int:
        return int(self.root.rsplit(":", 1)[1])


def stop_answers(server: Running) -> None:
    """From now on every answer of the server is stopped at its begin, as if it took too long."""
    start = server.service.start

    async def hurried(*given: Any) -> Any:
        job = await start(*given)
        job.stop(too_late(1))
        return job

    server.service.start = hurried  # type: ignore[method-assign]


@contextmanager
def running(
    generator: FastSpecGenerator,
    *,
    name: str = "small",
    aliases: Sequence[str] = (),
    limits: Limits | None = None,
    access: Access | None = None,
    drain: float = 60.0,
    response_store: int = 0,
    tool_call_parser: str = AUTO,
) -> Iterator[Running]:
    up = threading.Event()
    service = Service(
        generator,
        name,
        limits,
        aliases=aliases,
        tool_call_parser=tool_call_parser,
        response_store=response_store,
    )
    server = Server(service, access=access, drain=drain, started=up.set)
    with listening("127.0.0.1", 0) as on:
        thread = threading.Thread(target=server.serve_on, args=(on,))
        thread.start()
        try:
            assert up.wait(HANGS)
            yield Running(f"http://127.0.0.1:{on.getsockname()[1]}/v1", service, server)
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return small_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def gen(pair: tuple[Path, Path]) -> Iterator[FastSpecGenerator]:
    with opened(pair, max_batch_size=4, max_length=400) as made:
        yield made


@pytest.fixture(scope="session")
def server(gen: FastSpecGenerator) -> Iterator[Running]:
    with running(gen) as made:
        yield made


@pytest.fixture(scope="session")
def client(server: Running) -> openai.OpenAI:
    # a connection each: one that lies idle for seconds, on a slow machine, is closed just when it is used again
    alone = {"Connection": "close"}
    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, default_headers=alone)
