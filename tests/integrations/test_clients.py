"""Clients and load generators of others talk to `fastspec serve`, each in an environment of its own from PyPI."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fastspec import demo_pair
from tests.helpers.limits import HANGS

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "build" / "clients"
TARGET = str(demo_pair()[0])


@dataclass(frozen=True)
class Other:
    """A client of somebody else.

    Attributes:
        name: of its environment.
        requirements: for pip.
        command: program and arguments; `{url}`, `{root}`, `{target}` and `{folder}` are replaced. A program that ends
            with .py is a file of the folder.
        files: written into the folder first, name -> text, with the same replacements.
        shows: regular expressions that the output must match.
        variables: of the process, beside those of this one.
    """

    name: str
    requirements: tuple[str, ...]
    command: tuple[str, ...]
    shows: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)


LITELLM = """
import asyncio, json, litellm
asked = dict(model="openai/demo", api_base="{url}", api_key="key", max_tokens=16,
             messages=[dict(role="user", content="Add two numbers.")])
whole = litellm.completion(**asked, user="me", metadata=dict(a="b")).choices[0].message.content
chunks = litellm.completion(**asked, stream=True, stream_options=dict(include_usage=True))
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
awaited = asyncio.run(litellm.acompletion(**asked)).choices[0].message.content
print("equal:", whole == streamed == awaited, len(whole) > 0)
text = litellm.text_completion(model="text-completion-openai/demo", api_base="{url}", api_key="key",
                               prompt="def main():", max_tokens=8)
print("text:", len(text.choices[0].text) > 0)
asked["model"] = "hosted_vllm/demo"
schema = dict(type="object", properties=dict(a=dict(enum=[1, 2])), required=["a"], additionalProperties=False)
form = dict(type="json_schema", json_schema=dict(name="a", schema=schema, strict=True))
answer = litellm.completion(**asked | dict(max_tokens=60), response_format=form)
print("json:", json.loads(answer.choices[0].message.content))
"""
DSPY = """
import dspy
chat, text = ("openai/demo", "chat", "Read a file."), ("text-completion-openai/demo", "text", "def f():")
for model, kind, asked in (chat, text):
    model = dspy.LM(model, api_base="{url}", api_key="key", model_type=kind, max_tokens=16, cache=False)
    print(kind, len(model(asked)[0]) > 0)
"""
INSPECT = """
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate
task = Task(dataset=[Sample(input="Read a file.", target="#")], solver=generate(max_tokens=16), scorer=includes())
for model, more in (("openai-api/demo/demo", dict()), ("vllm/demo", dict(logprobs=True, top_logprobs=2))):
    url = None if model.startswith("openai") else "{url}"
    (log,) = eval(task, model=model, model_base_url=url, log_dir="{folder}/logs", display="none", **more)
    print(model, log.status, len(log.samples[0].output.completion) > 0)
"""
CLIENTS = (
    Other(
        "litellm",
        ("litellm",),
        ("main.py",),
        ("equal: True True", "text: True", r"json: \{'a': [12]\}"),
        {"main.py": LITELLM},
    ),
    Other(
        "llm",
        ("llm",),
        ("llm", "-m", "demo", "-o", "max_tokens", "16", "--key", "key", "Read a file."),
        (r"\w{3}",),
        {"extra-openai-models.yaml": '- model_id: demo\n  model_name: demo\n  api_base: "{url}"\n'},
        {"LLM_USER_PATH": "{folder}"},
    ),
    Other(
        "dspy",
        ("dspy",),
        ("main.py",),
        ("chat True", "text True"),
        {"main.py": DSPY},
        {"DSPY_CACHEDIR": "{folder}/cache"},
    ),
    Other(
        "inspect-ai",
        ("inspect-ai", "openai"),
        ("main.py",),
        ("openai-api/demo/demo success True", "vllm/demo success True"),
        {"main.py": INSPECT},
        {"DEMO_API_KEY": "key", "DEMO_BASE_URL": "{url}", "VLLM_API_KEY": "key"},
    ),
    Other(
        "guidellm",
        ("guidellm>=0.8",),
        (
            *("guidellm", "run", "--disable-progress", "--backend", "kind=openai_http,target={root}"),
            *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=16"),
            *("--tokenizer", "kind=huggingface_auto,model={target}"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
            *("--output", "kind=json,path={folder}/report.json"),
        ),
        (r"\| 16 +\| 0 +\| 0 +\|",),
    ),
    Other(
        "aiperf",
        ("aiperf",),
        (
            *("aiperf", "profile", "--model", "demo", "--url", "{root}", "--endpoint-type", "chat", "--streaming"),
            *("--request-count", "6", "--concurrency", "2", "--tokenizer", "{target}", "--ui", "none"),
            *("--synthetic-input-tokens-mean", "30", "--output-tokens-mean", "8"),
            *("--output-artifact-dir", "{folder}/report"),
        ),
        (r"Request Error Rate \(%\) │ +0\.00", r"Request Count \(requests\) │ +6\.00"),
    ),
)


def environment(name: str, requirements: tuple[str, ...]) -> Path:
    """Folder of programs of an environment with these packages; made once."""
    folder = ENVIRONMENTS / name
    stamp, wanted = folder / "requirements.json", json.dumps(requirements)
    if not stamp.exists() or stamp.read_text() != wanted:
        venv.create(folder, with_pip=True, clear=True)
        pip = [
            str(folder / "bin" / "python"),
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "-q",
            *requirements,
        ]
        subprocess.run(pip, check=True)
        stamp.write_text(wanted)
    return folder / "bin"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of /v1 of a server of the shipped pair, a process of its own."""
    said = tmp_path_factory.mktemp("server") / "stderr"
    command = [sys.executable, "-m", "fastspec.cli", "serve", "--device", "cpu", "--port", "0", "--max-length", "900"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    with said.open("w") as stderr, subprocess.Popen(command, stderr=stderr, env=variables) as process:
        end = time.monotonic() + HANGS
        while (found := re.search(r" at (http\S+)", said.read_text())) is None:
            assert process.poll() is None, said.read_text()
            assert time.monotonic() < end, said.read_text()
            time.sleep(0.1)
        yield found[1]
        process.terminate()
        assert process.wait(HANGS) == 0, said.read_text()


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_client_gets_what_it_asks_for(client: Other, url: str, tmp_path: Path) -> None:
    programs = environment(client.name, client.requirements)

    def filled(text: str) -> str:
        for name, value in {
            "url": url,
            "root": url.removesuffix("/v1"),
            "target": TARGET,
            "folder": str(tmp_path),
        }.items():
            text = text.replace("{" + name + "}", value)
        return text

    for name, text in client.files.items():
        (tmp_path / name).write_text(filled(text))
    program, *arguments = map(filled, client.command)
    python = program.endswith(".py")
    command = [str(programs / "python"), program] if python else [str(programs / program)]
    done = subprocess.run(
        [*command, *arguments],
        cwd=tmp_path,
        env={**os.environ, **{name: filled(value) for name, value in client.variables.items()}},
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert [shown for shown in client.shows if not re.search(shown, said)] == [], said
