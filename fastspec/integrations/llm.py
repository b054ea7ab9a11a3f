"""A plugin for the command-line program `llm`. It adds models that run with fastspec, under names that the user gives.

Needs the package llm, which finds this module by its entry point. `llm fastspec add NAME TARGET [--draft DRAFT]` gives
a model a name. `llm -m fastspec-demo "Sort a list."` answers with the pair of tiny models in this package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click
import llm
from pydantic import Field

from fastspec.demo import demo_pair
from fastspec.generator import FastSpecGenerator
from fastspec.text import TextStream
from fastspec.text.chat_template import ChatTemplate

_FILE: Final = "fastspec-models.json"
_DEMO: Final = "fastspec-demo"


class PromptOptions(llm.Options):  # type: ignore[misc]  # llm is an extra, whose types are not read
    """Options of a prompt."""

    max_tokens: int = Field(default=512, ge=1, description="New tokens at most.")
    temperature: float = Field(default=0.0, ge=0.0, description="0 is greedy; above, tokens are drawn.")
    top_p: float | None = Field(default=None, gt=0.0, le=1.0, description="Draw from the tokens that reach p.")
    top_k: int | None = Field(default=None, ge=0, description="Draw from the k most probable tokens; 0 is all.")
    seed: int | None = Field(default=None, description="Makes a draw repeatable.")

    def keywords(self) -> dict[str, Any]:
        """Returns the sampling options as keyword arguments of `FastSpecGenerator.submit`."""
        chosen = {name: getattr(self, name) for name in ("top_p", "top_k", "seed")}
        sampled = {"do_sample": True, "temperature": self.temperature} if self.temperature else {"do_sample": False}
        return sampled | {name: value for name, value in chosen.items() if value is not None and self.temperature}


class FastSpecModel(llm.Model):  # type: ignore[misc]
    """One model of the program `llm`. It is loaded when it gets its first prompt.

    Args:
        model_id: name of the model.
        target, draft: see `FastSpecGenerator`.
        options: further arguments of `FastSpecGenerator`.
    """

    can_stream = True
    Options = PromptOptions

    def __init__(self, model_id: str, target: str, draft: str | None, options: Mapping[str, Any]) -> None:
        self.model_id, self._target, self._draft, self._options = model_id, target, draft, dict(options)
        self._generator: FastSpecGenerator | None = None

    def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any = None) -> Iterator[str]:
        """Answers a prompt. Yields pieces of the text as they are generated, or without `stream` the whole text.

        Raises:
            ModelError: the conversation leaves no room for an answer.
        """
        if self._generator is None:
            self._generator = FastSpecGenerator(self._target, self._draft, **{"progress": False, **self._options})
        generator = self._generator
        ids = self._ids(generator, prompt)
        room = generator.max_length - len(ids)
        if room < 1:
            raise llm.ModelError(
                f"the conversation has {len(ids)} tokens; with its answer it may have {generator.max_length}; begin a "
                "new one"
            )
        options = prompt.options
        handle = generator.submit(ids, max_new_tokens=min(options.max_tokens, room), **options.keywords())
        text, pieces, stop_ids = TextStream(generator.tokenizer, ids), [], handle.call.options.stop_ids
        for token in handle:
            if token not in stop_ids and (piece := text.push([token])):
                pieces.append(piece)
                if stream:
                    yield piece
        pieces.append(text.finish())
        yield pieces[-1] if stream else "".join(pieces)
        new = handle.result().stats.emitted
        response.set_usage(input=len(ids), output=new)

    def _ids(self, generator: FastSpecGenerator, prompt: Any) -> list[int]:
        """Returns the token ids of a conversation. Without a chat template, its texts are joined by newlines."""
        messages = [
            {"role": message.role, "content": "".join(part.text for part in message.parts if hasattr(part, "text"))}
            for message in prompt.messages
        ]
        template = ChatTemplate(generator.tokenizer)
        if template.exists:
            return template.ids(messages)
        return list(generator.tokenizer("\n".join(each["content"] for each in messages))["input_ids"])


def _file() -> Path:
    """Returns the path of the file that lists the user's models."""
    return Path(llm.user_dir()) / _FILE


def _models() -> dict[str, dict[str, Any]]:
    """Reads the user's models: name -> target, draft and options."""
    found: dict[str, dict[str, Any]] = json.loads(_file().read_text()) if _file().is_file() else {}
    return found


@llm.hookimpl
def register_models(register: Callable[[FastSpecModel], None]) -> None:
    """Registers the demo pair and the user's models. `llm` calls it."""
    target, draft = demo_pair()
    register(FastSpecModel(_DEMO, str(target), str(draft), {"max_length": 1024}))
    for name, each in _models().items():
        register(FastSpecModel(name, each["target"], each.get("draft"), each.get("options", {})))


@llm.hookimpl
def register_commands(cli: click.Group) -> None:
    """Adds the command `llm fastspec` with its subcommands. `llm` calls it."""

    @cli.group(name="fastspec")
    def group() -> None:
        """Models of fastspec"""

    @group.command(name="add")
    @click.argument("name")
    @click.argument("target")
    @click.option("--draft", help="Draft model, learned drafter, or mtp.")
    @click.option("--option", "options", multiple=True, type=(str, str), help="Argument of FastSpecGenerator, as JSON.")
    def add(name: str, target: str, draft: str | None, options: tuple[tuple[str, str], ...]) -> None:
        """Give a pair of models a name for `llm -m NAME`"""
        given = {key: _value(value) for key, value in options}
        models = _models() | {name: {"target": target, "draft": draft, "options": given}}
        _file().write_text(json.dumps(models, indent=2) + "\n")

    @group.command(name="remove")
    @click.argument("name")
    def remove(name: str) -> None:
        """Forget a model"""
        models = _models()
        if models.pop(name, None) is None:
            raise click.ClickException(f"there is no model {name!r}; there are {', '.join(models) or 'none'}")
        _file().write_text(json.dumps(models, indent=2) + "\n")


def _value(text: str) -> Any:
    """Parses the value of an option as JSON. Returns the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
