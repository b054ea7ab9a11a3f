"""The command `llm`, the real one: the shipped pair and a model of the user's answer prompts, streamed or not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

llm = pytest.importorskip("llm", reason="runs with `make test-integrations`")

from llm.plugins import load_plugins, pm  # noqa: E402

import fastspec.integrations.llm as plugin  # noqa: E402
from fastspec import FastSpecGenerator, demo_pair  # noqa: E402
from fastspec.integrations.llm import FastSpecModel  # noqa: E402
from tests.helpers.services import small_pair  # noqa: E402

TARGET, DRAFT = map(str, demo_pair())
PROMPT = "Add two numbers."


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    with pytest.MonkeyPatch.context() as patch:  # other plugins may be here, such as SmolLM2's, which wants llama.cpp
        patch.setattr("llm.plugins.LLM_LOAD_PLUGINS", "fastspec-decoding")
        load_plugins()
    if not pm.is_registered(plugin):  # by its entry point, where the package is installed
        pm.register(plugin)


@pytest.fixture(scope="module")
def text() -> str:
    with FastSpecGenerator(TARGET, DRAFT, max_length=1024, progress=False) as gen:
        asked = [{"role": "user", "content": PROMPT}]
        ids = gen.tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
        (new,) = gen.generate([ids], max_new_tokens=24, return_dict_in_generate=True).new_tokens
        return str(gen.tokenizer.decode(new, skip_special_tokens=True))


@pytest.mark.parametrize("stream", [False, True])
def test_text_is_that_of_generate(stream: bool, text: str) -> None:
    model = llm.get_model("fastspec-demo")
    response = model.prompt(PROMPT, stream=stream, max_tokens=24)
    pieces = list(response)
    assert "".join(pieces) == text
    assert (len(pieces) > 1) is stream
    usage = response.usage()
    assert (usage.input > 0, usage.output) == (True, 24)


def test_conversations_go_through_the_chat_template(tmp_path: Path) -> None:
    target, draft = small_pair(tmp_path)
    model = FastSpecModel("small", str(target), str(draft), {"max_length": 400, "device": "cpu"})
    chat = model.conversation()
    first = chat.prompt("hello", system="be brief", max_tokens=8).text()
    seen: list[Any] = []
    ids = FastSpecModel._ids

    def watched(self: FastSpecModel, generator: Any, prompt: Any) -> list[int]:
        seen.append(ids(self, generator, prompt))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FastSpecModel, "_ids", watched)
        chat.prompt("and now?", max_tokens=8).text()
    assert model._generator is not None
    read = model._generator.tokenizer.decode(seen[0])
    assert read == f"<system>be brief\n<user>hello\n<assistant>{first}\n<user>and now?\n<assistant>"


def test_the_command(tmp_path: Path, text: str) -> None:
    """Found by its entry point where the package is installed; here the module is named."""
    place = {**os.environ, "LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": ""}

    def run(*arguments: str) -> str:
        code = (
            "from llm.plugins import load_plugins, pm; import fastspec.integrations.llm as plugin; load_plugins()\n"
            "pm.is_registered(plugin) or pm.register(plugin)\n"
            "from llm.cli import cli; plugin.register_commands(cli) if 'fastspec' not in cli.commands else None; cli()"
        )
        done = subprocess.run([sys.executable, "-c", code, *arguments], env=place, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("fastspec", "add", "mine", TARGET, "--draft", DRAFT, "--option", "max_length", "512")
    assert "mine" in run("models")
    assert run("-m", "mine", "-o", "max_tokens", "24", "--no-stream", PROMPT) == text + "\n"
    run("fastspec", "remove", "mine")
    assert "mine" not in run("models")
