"""Parts of an answer in the order in which they arrive."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: name of the function.
        parameters: JSON schema of its arguments, an object.
        strict: True if the arguments must follow the schema.
    """

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the text before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """The beginning of a call.

    Attributes:
        index: among the calls of the answer.
        name: name of the tool.
    """

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the arguments of a call, which are JSON text.

    Attributes:
        index: index of the call.
        text: the piece.
    """

    index: int
    text: str


Event: TypeAlias = "Content | Reasoning | CallBegins | Arguments"


@dataclass(slots=True)
class WholeCall:
    """A call with all of its arguments."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class WholeAnswer:
    """An answer with all of its parts."""

    reasoning: str = ""
    content: str = ""
    calls: list[WholeCall] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        """Appends the next events."""
        for event in events:
            if isinstance(event, Content):
                self.content += event.text
            elif isinstance(event, Reasoning):
                self.reasoning += event.text
            elif isinstance(event, CallBegins):
                self.calls.append(WholeCall(event.name))
            else:
                self.calls[event.index].arguments += event.text
