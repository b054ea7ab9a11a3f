"""OpenAI's protocol through Ray Serve, real Ray: two replicas, one of which dies while it answers."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="runs with `make test-integrations`")
serve = pytest.importorskip("ray.serve", reason="runs with `make test-integrations`")

import openai  # noqa: E402
import torch  # noqa: E402

from fastspec import FastSpecGenerator, NGram, UnsupportedOption, demo_pair  # noqa: E402
from fastspec.integrations.ray_serve import REPLICA_HEADER, deployment  # noqa: E402
from fastspec.text import TextStream  # noqa: E402

# what openai talks by: its newer versions bring another one
httpx = import_module("httpx2" if find_spec("httpx2") else "httpx")
TARGET, DRAFT = map(str, demo_pair())
GENERATOR = {"device": "cpu", "max_length": 128, "max_batch_size": 4}
TOKENS = 24
DEADLY, BREAKING, HELD = "killed = me(", "break_the_model(", "with hold("


class Events(NGram):
    """A lookup before the draft. In the middle of an answer to one of three prompts it ends the process, or makes this
    step and all later ones fail, or waits; files in a folder say whether.
    """

    def __init__(self, folder: Path, prompts: dict[str, list[int]]) -> None:
        super().__init__()
        self.folder, self.prompts, self.broken = folder, prompts, False

    def guess(self, tokens: torch.Tensor, lengths: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True):
            for name, prompt in self.prompts.items():
                if row[: len(prompt)] == prompt and length >= len(prompt) + TOKENS // 2:
                    self.act(name)
        if self.broken:
            raise RuntimeError("the device is gone")
        return super().guess(tokens, lengths, k)

    def act(self, name: str) -> None:
        armed = self.folder / "armed"
        if name == HELD:
            while (self.folder / "hold").exists():
                threading.Event().wait(0.02)
        elif armed.exists():
            armed.unlink()
            if name == DEADLY:
                os._exit(1)
            self.broken = True


@dataclass
class Asked:
    """A request, repeated by its client until it is answered."""

    prompt: str
    seed: int
    stream: bool
    text: str = ""
    replica: str = ""
    errors: list[Exception] = field(default_factory=list)
    left_by: list[str] = field(default_factory=list)  # replicas that began with it

    def options(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "seed": self.seed, "temperature": 0.8, "max_tokens": TOKENS}

    def ask(self, url: str) -> None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as client:
            while not self.text:
                try:
                    self.text = self.once(client)
                except (openai.APIError, httpx.HTTPError) as error:
                    self.errors.append(error)
                    if self.stream and self.replica:
                        self.left_by.append(self.replica)

    def once(self, client: openai.OpenAI) -> str:
        self.replica = ""
        raw = client.completions.with_raw_response.create(model="demo", stream=self.stream, **self.options())
        self.replica = raw.headers[REPLICA_HEADER]
        made: Any = raw.parse()
        return "".join(one.choices[0].text for one in made) if self.stream else made.choices[0].text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("events")


@pytest.fixture(scope="module")
def generator(folder: Path) -> Iterator[FastSpecGenerator]:
    """As one replica has it."""
    with FastSpecGenerator(TARGET, DRAFT, progress=False, **GENERATOR) as plain:
        prompts = {name: plain.tokenizer(name)["input_ids"] for name in (DEADLY, BREAKING, HELD)}
    with FastSpecGenerator(TARGET, DRAFT, proposer=Events(folder, prompts), progress=False, **GENERATOR) as made:
        yield made


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


def served(folder: Path, generator: FastSpecGenerator, **more: Any) -> Any:
    prompts = {name: generator.tokenizer(name)["input_ids"] for name in (DEADLY, BREAKING, HELD)}
    options = {**GENERATOR, "proposer": Events(folder, prompts)}
    return deployment(TARGET, DRAFT, name="demo", api_key="key", generator_options=options, **more)


@pytest.fixture(scope="module")
def two(url: str, folder: Path, generator: FastSpecGenerator) -> str:
    """Address of two replicas."""
    serve.run(served(folder, generator, num_replicas=2, health_check_period_s=0.5))
    return url


def meant(generator: FastSpecGenerator, asked: Asked) -> str:
    ids = generator.tokenizer(asked.prompt)["input_ids"]
    options = {"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": asked.seed, "max_new_tokens": TOKENS}
    stream = TextStream(generator.tokenizer, context=ids)
    tokens = generator.generate([ids], return_dict_in_generate=True, **options).new_tokens[0]
    return stream.push(tokens) + stream.finish()


def replicas(url: str, enough: Callable[[set[str]], bool]) -> set[str]:
    """Those that answer, asked until there are enough."""
    found: set[str] = set()
    with httpx.Client() as client:
        while not enough(found):
            answer = client.get(f"{url}/health")
            if answer.status_code == 200:
                found.add(answer.headers[REPLICA_HEADER])
    return found


def many(prompt: str, stream: bool) -> list[Asked]:
    others = [Asked(f"def f{index}(x):\n", index, bool(index % 2)) for index in range(12)]
    return [*others[:6], Asked(prompt, 77, stream), *others[6:]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_replica_dies_and_every_request_is_answered_once(
    two: str, folder: Path, generator: FastSpecGenerator, stream: bool
) -> None:
    before = replicas(two, lambda found: len(found) == 2)
    asked = many(DEADLY, stream)
    (folder / "armed").touch()
    with ThreadPoolExecutor(len(asked)) as pool:
        list(pool.map(lambda one: one.ask(two), asked))
    assert not (folder / "armed").exists()
    assert asked[6].errors, "it was taken back from nobody: its client had to repeat it"
    assert [one.text for one in asked] == [meant(generator, one) for one in asked]
    dead = {one for request in asked for one in request.left_by}
    assert len(dead) <= 1, "requests of the other replica went on"
    for error in (error for one in asked for error in one.errors):  # a stream that had begun breaks off
        assert error.status_code == 500 if isinstance(error, openai.APIStatusError) else True
    after = replicas(two, lambda found: len(found - dead) == 2 and bool(found - before))
    assert len(after & before) <= 1


def test_a_replica_whose_steps_fail_is_replaced(two: str, folder: Path) -> None:
    before = replicas(two, lambda found: len(found) == 2)
    (folder / "armed").touch()
    one = openai.OpenAI(base_url=f"{two}/v1", api_key="key", max_retries=0)
    with one as client, pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="demo", prompt=BREAKING, max_tokens=TOKENS)
    assert caught.value.code == "generation_failed"  # fastspec's, so its process was there
    replicas(two, lambda found: bool(found - before))


def test_the_key_the_names_and_the_limits_are_those_of_the_server(two: str) -> None:
    with openai.OpenAI(base_url=f"{two}/v1", api_key="key", max_retries=0) as client:
        assert [one.id for one in client.models.list()] == ["demo"]
        with pytest.raises(openai.NotFoundError, match="the model 'other' is not here"):
            client.completions.create(model="other", prompt="a")
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()


def test_a_client_that_goes_ends_its_answer_and_an_end_waits_for_the_others(
    url: str, folder: Path, generator: FastSpecGenerator
) -> None:
    (folder / "hold").touch()
    app = served(folder, generator, graceful_shutdown_timeout_s=600, limits={"tokens": 64})
    serve.run(app, name="small", route_prefix="/small")
    asked, here = Asked(HELD, 5, True), f"{url}/small"
    with openai.OpenAI(base_url=f"{here}/v1", api_key="key", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="at most 64"):
            client.completions.create(model="demo", prompt="a", max_tokens=65)
        with client.completions.create(model="demo", stream=True, **asked.options()) as gone:
            next(iter(gone))  # events come while the step is held
            assert running(here) == 1
        while running(here):
            pass
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(asked.ask, here)
        while not running(here):
            pass
        deleted = pool.submit(serve.delete, "small")
        while httpx.get(f"{here}/health").status_code != 404:
            pass
        assert not answer.done()
        assert not deleted.done()
        (folder / "hold").unlink()
        answer.result()
        deleted.result()
    assert asked.text == meant(generator, asked)
    assert not asked.errors


def running(url: str) -> int:
    """Answers that are written by the one replica."""
    told = httpx.get(f"{url}/metrics", headers={"Authorization": "Bearer key"}).text
    return int(float(re.findall(r"^fastspec_answers_running (\S+)$", told, re.MULTILINE)[0]))


def test_what_no_replica_can_be_is_refused_before_one_is_started() -> None:
    for options, message in {
        "tensor_parallel": ({"generator_options": {"tensor_parallel": 2}}, "a replica is one process on one GPU"),
        "unknown": ({"generator_options": {"batch": 2}}, "generator_options batch are not known, wanted some of"),
        "limits": ({"limits": {"token": 2}}, "limits token are not known, wanted some of body, requests"),
        "gpus": ({"ray_actor_options": {"num_gpus": 2}}, "num_gpus=2: a replica runs on one GPU"),
    }.values():
        with pytest.raises(UnsupportedOption, match=message):
            deployment("no such directory", **options)
    with pytest.raises(ValueError, match="limits: requests must be a whole number at least 1"):
        deployment("no such directory", limits={"requests": 0})
    with pytest.raises(ValueError, match="api_key is empty"):
        deployment("no such directory", api_key=" ")
    with pytest.raises(TypeError, match="replicas"):
        deployment("no such directory", replicas=2)


def test_what_ray_owns_passes_and_a_replica_has_a_gpu_unless_it_is_told_otherwise() -> None:
    def made(**options: Any) -> Any:
        return deployment("org/model", **options)._bound_deployment

    plain = made(num_replicas=3, health_check_period_s=2.0)
    assert (plain.num_replicas, plain.name, plain.max_ongoing_requests) == (3, "fastspec", 256)
    assert plain.ray_actor_options["num_gpus"] == 1
    assert plain._deployment_config.graceful_shutdown_timeout_s == 60
    assert plain.init_args[2] == "org/model"
    on_cpu = made(generator_options={"device": "cpu"}, limits={"requests": 7}, ray_actor_options={"num_cpus": 2})
    assert on_cpu.ray_actor_options == {"num_cpus": 2}
    assert on_cpu.max_ongoing_requests == 7
    assert made(ray_actor_options={"num_gpus": 0.5}).ray_actor_options["num_gpus"] == 0.5
