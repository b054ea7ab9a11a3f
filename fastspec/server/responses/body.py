"""Body of POST /v1/responses, and its conversion to the body of a chat."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from fastspec.server.errors import Refusal
from fastspec.server.field_table import RESPONSE_ROW_OF, RESPONSE_TAKEN, SAME_AS_CHAT, without_neutral
from fastspec.server.fields import Chat, Function, taken_fields, words_of
from fastspec.server.responses.items import Item, MessageBuilder

_CHAT_FIELDS: Final = tuple(name for names in SAME_AS_CHAT.values() for name in names)
# field of a chat -> field of /v1/responses with the same meaning, for errors
_NAMES: Final = {
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning",
    "response_format": "text",
    "messages": "input",
}
_SHOWN_NAMES: Final = {"response_format": "text.format", "reasoning_effort": "reasoning.effort"}
_RENAMED: Final = re.compile(rf"\b({'|'.join(_NAMES)})\b")
_SHOWN: Final = 80  # characters of a value that an error repeats
Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class FlatFunction(Function):
    """A function that the model may call, in the form of /v1/responses: its fields are not nested in `function`."""

    type: Literal["function"]
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None

    @property
    def tool(self) -> dict[str, Any]:
        """This function as an entry of a chat's `tools`."""
        kept = self.model_dump(exclude_none=True, exclude={"type", "allowed_callers", "defer_loading"})
        return {"type": "function", "function": kept}


class FunctionChoice(BaseModel):
    """A tool_choice that names the one function that must be called."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    name: str

    @property
    def choice(self) -> dict[str, Any]:
        """This choice as a chat's `tool_choice`."""
        return {"type": "function", "function": {"name": self.name}}


class AllowedTools(BaseModel):
    """A tool_choice that lists the functions that may be called."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1)]

    @property
    def choice(self) -> dict[str, Any]:
        """This choice as a chat's `tool_choice`."""
        return {"type": self.type, self.type: {"mode": self.mode, "tools": [tool.choice for tool in self.tools]}}


class TextFormat(BaseModel):
    """The field text.format: the format that the answer must have."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    content: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None

    @property
    def response_format(self) -> dict[str, Any]:
        """This format as a chat's `response_format`."""
        if (self.type == "json_schema") != (self.content is not None and self.name is not None):
            raise Refusal("text.format must have name and schema if its type is json_schema, and only then", "text")
        if self.content is None:
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.content}}


class TextOptions(BaseModel):
    """The field text: options of the answer's text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(BaseModel):
    """The field reasoning. Only `effort` has an effect: no summaries are written."""

    model_config = ConfigDict(extra="forbid", strict=True)

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "all_turns"] | None = None
    mode: Literal["standard"] | None = None


class NamedConversation(BaseModel):
    """The field `conversation` as an object with the id of a stored conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str


class ObfuscationOptions(BaseModel):
    """The field stream_options. Events are never padded, so include_obfuscation can only be false."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_obfuscation: Literal[False] | None = None


@dataclass(frozen=True, slots=True)
class AskedChat:
    """Chat to which a request of /v1/responses was converted.

    Attributes:
        chat: body of the chat.
        built: builder of the chat's messages. It knows from which items of the request each message was made.
    """

    chat: Chat
    built: MessageBuilder

    @contextmanager
    def naming_items(self) -> Iterator[None]:
        """Context in which a refusal of the chat names the request's items and fields instead of the chat's."""
        try:
            yield
        except Refusal as error:
            told = self.built.renamed(error.message)
            told = _RENAMED.sub(lambda found: _SHOWN_NAMES.get(found[0], _NAMES[found[0]]), told)
            raise error.renamed(told, None if error.field is None else _NAMES.get(error.field, error.field)) from error


def _as_in_chat() -> dict[str, Any]:
    """Returns pydantic's definitions of the fields that /v1/responses shares with chats."""
    return {name: (Chat.model_fields[name].annotation, Chat.model_fields[name]) for name in _CHAT_FIELDS}


class ResponseBody(create_model("AsInChat", **_as_in_chat(), **taken_fields(RESPONSE_TAKEN))):  # type: ignore[misc]
    """The body of POST /v1/responses. A field that is null counts as left out."""

    model_config = ConfigDict(extra="forbid", strict=True)

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | AllowedTools | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: (
        list[
            Literal[
                "file_search_call.results",
                "web_search_call.results",
                "web_search_call.action.sources",
                "message.input_image.image_url",
                "computer_call_output.output.image_url",
                "code_interpreter_call.outputs",
                "reasoning.encrypted_content",
                "message.output_text.logprobs",
            ]
        ]
        | None
    ) = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | NamedConversation | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata = Field(default_factory=dict)
    stream_options: ObfuscationOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _given(cls, body: Any) -> Any:
        return without_neutral(body, cls.model_fields, RESPONSE_ROW_OF)

    @model_validator(mode="after")
    def _together(self) -> ResponseBody:
        if self.background and self.store is False:
            raise Refusal("background keeps the response until it is asked for; leave store=false out", "background")
        if self.conversation is not None and self.previous_response_id is not None:
            raise Refusal("conversation and previous_response_id both say what is continued; give one", "conversation")
        return self

    @property
    def conversation_id(self) -> str | None:
        """Id of the conversation that the request continues. None: it continues none."""
        return self.conversation.id if isinstance(self.conversation, NamedConversation) else self.conversation

    @property
    def taken(self) -> list[str]:
        """Names of the request's fields that are accepted but change no answer."""
        return [name for name in RESPONSE_TAKEN if name in self.model_fields_set]

    @property
    def items(self) -> list[Item]:
        """Items in the field `input`. A text becomes a message of the user."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input

    @property
    def wants_logprobs(self) -> bool:
        """True if the output has log-probabilities."""
        return self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or [])

    @property
    def wants_encoded(self) -> bool:
        """True if reasoning items have an `encrypted_content`."""
        return "reasoning.encrypted_content" in (self.include or [])

    @property
    def functions(self) -> list[FlatFunction]:
        """Functions that the model may call.

        Raises:
            Refusal: a tool is not a function, or its fields are invalid.
        """
        return [_function_at(at, tool) for at, tool in enumerate(self.tools or [])]

    def asked(self, before: Sequence[Item], given: Sequence[Item], without: frozenset[int] = frozenset()) -> AskedChat:
        """Converts the request, with the conversation that it continues, to a chat.

        Args:
            before: items of the conversation so far.
            given: items of this request.
            without: indices of items that are left out, in the list `[*before, *given]`.

        Raises:
            Refusal: an item or a field of the request cannot be converted.
        """
        built = MessageBuilder(self.instructions)
        built.add("previous_response_id" if self.conversation is None else "conversation", before, without)
        built.add("input", given, frozenset(at - len(before) for at in without))
        if not built.messages:
            raise Refusal("input has no message; give one with a role and a content", "input")
        fields = {name: getattr(self, name) for name in _CHAT_FIELDS if name in self.model_fields_set}
        if "structured_outputs" in fields:
            fields["structured_outputs"] = self.structured_outputs.model_dump(by_alias=True, exclude_unset=True)
        fields["messages"] = built.messages
        if self.wants_logprobs:
            fields["logprobs"] = True
        if self.max_output_tokens is not None:
            fields["max_completion_tokens"] = self.max_output_tokens
        functions = self.functions
        if functions:
            fields["tools"] = [function.tool for function in functions]
        if self.tool_choice is not None:
            fields["tool_choice"] = self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice.choice
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = self.text.format.response_format
        if self.reasoning is not None and self.reasoning.effort is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        return AskedChat(Chat.model_validate(fields), built)

    def told(self) -> dict[str, Any]:
        """Returns the fields of the request that its response repeats, with their values."""
        text = self.text or TextOptions()
        shown: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("instructions", "max_output_tokens", "metadata", "previous_response_id", "temperature")
        }
        shown |= {name: getattr(self, name) for name in ("top_p", "top_logprobs", "user", "max_tool_calls")}
        shown |= {"background": bool(self.background), "truncation": self.truncation or "disabled"}
        id = self.conversation_id
        format = text.format or TextFormat.model_validate({"type": "text"})
        return shown | {
            "conversation": None if id is None else {"id": id},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "tools": self.tools or [],
            "tool_choice": _plain(self.tool_choice) or "auto",
            "text": {"format": _plain(format)} | ({"verbosity": text.verbosity} if text.verbosity else {}),
            "reasoning": {"effort": None, "summary": None} | (_plain(self.reasoning) or {}),
        }


def _plain(value: BaseModel | str | None) -> Any:
    """Converts a pydantic object to a dict for JSON. Returns a text or None unchanged."""
    return value.model_dump(by_alias=True, exclude_none=True) if isinstance(value, BaseModel) else value


def _function_at(at: int, tool: Mapping[str, Any]) -> FlatFunction:
    kind = tool.get("type")
    if kind != "function":
        raise Refusal(
            f"tools.{at}.type must be function, got {str(kind)[:_SHOWN]!r}: the server runs no tools of its own; offer "
            'a function that your client runs, {"type": "function", "name": ..., "parameters": ...}',
            "tools",
        )
    try:
        return FlatFunction.model_validate({name: value for name, value in tool.items() if value is not None})
    except ValidationError as error:
        told = "; or ".join(words_of(one) for one in error.errors(include_url=False))
        raise Refusal(f"tools.{at}.{told}", "tools") from None
