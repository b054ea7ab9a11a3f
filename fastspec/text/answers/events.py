"""Events of an answer that is parsed while it arrives, and the whole answer that they make up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: name of the function.
        parameters: JSON schema of its arguments, which are a JSON object.
        strict: True if the arguments must follow the schema.
    """

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer's text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning that the model writes before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """The beginning of a tool call.

    Attributes:
        index: number of the call in the answer, from 0.
        name: name of the tool.
    """

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the arguments of a tool call, which are JSON text.

    Attributes:
        index: number of the call in the answer, from 0.
        text: the piece.
    """

    index: int
    text: str


Event: TypeAlias = "Content | Reasoning | CallBegins | Arguments"


@dataclass(slots=True)
class WholeCall:
    """A tool call with the whole JSON text of its arguments."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class WholeAnswer:
    """An answer that is joined from its events: content, reasoning and tool calls."""

    reasoning: str = ""
    content: str = ""
    calls: list[WholeCall] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        """Appends the texts and tool calls of the next events."""
        for event in events:
            if isinstance(event, Content):
                self.content += event.text
            elif isinstance(event, Reasoning):
                self.reasoning += event.text
            elif isinstance(event, CallBegins):
                self.calls.append(WholeCall(event.name))
            else:
                self.calls[event.index].arguments += event.text
