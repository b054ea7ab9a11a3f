"""Request bodies of chats and completions, as pydantic classes. An unknown field is refused, and the error names it."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from transformers import PreTrainedTokenizerBase

from fastspec.grammar.library import constraints
from fastspec.inputs.table import NUMBERS, ROWS
from fastspec.server.errors import Refusal
from fastspec.server.field_table import ROW_OF, TAKEN, RequestField, without_neutral
from fastspec.state import MAX_TOP_LOGPROBS
from fastspec.text.answers.events import Tool

Stop = Annotated[str, Field(min_length=1, max_length=256)]
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
# names that variables of a chat template may not have: parameters of transformers' method, and its own variables
_TEMPLATED = frozenset(
    [*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "conversations", "messages"]
)
_ID = re.compile("0|[1-9][0-9]{0,17}")
_TOLD = 80  # characters of a value that an error message repeats
# classes that are one type of a union, here and in `responses.body`
_UNITED = ("NamedChoice", "AllowedChoice", "FunctionChoice", "AllowedTools", "NamedConversation")


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] | None = None


class Schema(BaseModel):
    """JSON schema in a response_format of type json_schema. The answer follows it even without `strict`."""

    model_config = ConfigDict(extra="forbid")

    name: str
    content: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """The field response_format: the format that the answer must have."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    @property
    def schema_of_text(self) -> dict[str, Any] | None:
        """JSON schema that the answer must follow. None: any text."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise Refusal(
                "response_format must have json_schema if its type is json_schema, and only then", "response_format"
            )
        if self.json_schema is not None:
            return self.json_schema.content
        return {"type": "object"} if self.type == "json_object" else None


class StructuredOutputs(BaseModel):
    """vLLM's field structured_outputs: the form that the answer must have. Exactly one of its fields is given."""

    model_config = ConfigDict(extra="forbid", strict=True)

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    grammar: str | None = None
    json_object: Literal[True] | None = None

    @property
    def option(self) -> tuple[str, str | dict[str, Any]]:
        """(name, value) of the keyword argument of `FastSpecGenerator.submit` that demands this form.

        Raises:
            Refusal: none of the fields is given, or several are given.
        """
        choice = None if self.choice is None else "|".join(re.escape(one) for one in self.choice)
        options = {
            "json_schema": self._schema,
            "regex": self.regex if choice is None else choice,
            "grammar": self.grammar,
        }
        given = {keyword: value for keyword, value in options.items() if value is not None}
        if len(self.model_fields_set) != 1 or (not given and not self.json_object):
            raise Refusal(
                "structured_outputs must have exactly one of json, regex, choice, grammar and json_object",
                "structured_outputs",
            )
        return next(iter(given.items()), ("json_schema", {"type": "object"}))

    @property
    def _schema(self) -> dict[str, Any] | None:
        if not isinstance(self.json_, str):
            return self.json_
        try:
            schema = json.loads(self.json_)
        except ValueError as error:
            raise Refusal(f"structured_outputs.json is no JSON: {error}", "structured_outputs") from None
        if not isinstance(schema, dict):
            raise Refusal(
                f"structured_outputs.json must be a JSON schema, got {self.json_[:_TOLD]}", "structured_outputs"
            )
        return schema


class TextPart(BaseModel):
    """A part of a predicted text."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class Prediction(BaseModel):
    """The field prediction: a text that the answer is likely to repeat, in one piece or in parts."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["content"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]

    @property
    def text(self) -> str:
        """The predicted text, with its parts joined."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class Function(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow", strict=True)  # a template may read more

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(BaseModel):
    """An entry of a chat's `tools`."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["function"]
    function: Function


class Named(BaseModel):
    """The name of a function."""

    model_config = ConfigDict(extra="forbid")

    name: str


class NamedChoice(BaseModel):
    """A tool_choice that names the one function that must be called."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    function: Named


class AllowedFunctions(BaseModel):
    """Functions that may be called. With the mode "required" the answer must call one of them."""

    model_config = ConfigDict(extra="forbid")

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1)]


class AllowedChoice(BaseModel):
    """A tool_choice that lists the functions that may be called."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


# ranges of fields where the protocol's range differs from that of the generator's option, by the option's keyword
_RANGES: Mapping[str, FieldInfo] = {
    "temperature": Field(ge=0, le=2),
    "top_k": Field(ge=-1),
    "repetition_penalty": Field(gt=0, le=10),
}


def _numeric_fields() -> dict[str, Any]:
    """Returns pydantic's definitions of the fields with one number, such as temperature, by the API's field names."""
    fields: dict[str, Any] = {}
    for keyword, number in NUMBERS.items():
        kind: Any = int if isinstance(number.neutral, int) else float
        limits = _RANGES.get(keyword) or Field(ge=number.low, le=number.high)
        fields[ROWS[keyword].field] = (Annotated[kind, limits] | None, None)
    return fields


def taken_fields(rows: Mapping[str, RequestField]) -> dict[str, Any]:
    """Returns pydantic's definitions of the fields that are accepted but change no answer. Their types are checked.

    Args:
        rows: rows of these fields in `field_table`, by field name.
    """
    return {name: (row.kind | None, None) for name, row in rows.items()}


class Body(create_model("Numbers", **_numeric_fields(), **taken_fields(TAKEN))):  # type: ignore[misc]
    """Fields that the bodies of chats and of completions share.

    A field that is null counts as left out. `field_table` lists all fields with their meaning.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=64)] = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    skip_special_tokens: bool = True
    speculative_tokens: Annotated[int, Field(ge=0)] | Literal["auto"] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    allowed_token_ids: Ids | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool = False
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    prediction: Prediction | None = None

    @model_validator(mode="before")
    @classmethod
    def _given(cls, body: Any) -> Any:
        return without_neutral(body, cls.model_fields, ROW_OF)

    @model_validator(mode="after")
    def _prompts_are_scored_whole(self) -> Body:
        if self.stream and self.prompt_logprobs is not None:
            raise Refusal("prompt_logprobs come with whole answers; leave out stream or prompt_logprobs", "stream")
        return self

    @property
    def taken(self) -> list[str]:
        """Names of the request's fields that are accepted but change no answer."""
        return [name for name in TAKEN if name in self.model_fields_set]

    @property
    def stops(self) -> list[str]:
        """Stop strings. An answer ends before the first of them. Empty: there are none."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def recorded(self) -> int | None:
        """Number of most probable tokens to report for each new token. None: no log-probabilities are reported."""
        raise NotImplementedError

    @property
    def scored(self) -> int | None:
        """Number of most probable tokens to report for each prompt token. None: no log-probabilities are reported."""
        return self.prompt_logprobs

    @property
    def drawn(self) -> int:
        """Number of answers to decode for each prompt. The best `n` of them are returned."""
        return self.n

    @property
    def limit(self) -> tuple[str, int | None]:
        """(name, value) of the field that limits the number of new tokens. The value is None if it is not given."""
        return "max_tokens", self.max_tokens

    def options(self) -> dict[str, Any]:
        """Returns the keyword arguments of `FastSpecGenerator.submit` that the request's fields set."""
        given = {keyword: getattr(self, ROWS[keyword].field) for keyword in NUMBERS}
        options: dict[str, Any] = {keyword: value for keyword, value in given.items() if value is not None}
        if options.get("top_k") == -1:
            options["top_k"] = 0
        if options.get("temperature") == 0:
            del options["temperature"]
            options["do_sample"] = False
        elif any(not NUMBERS[keyword].changes_greedy for keyword in options):
            options["do_sample"] = True
        if self.min_tokens is not None:
            options["min_new_tokens"] = self.min_tokens
        if self.ignore_eos:
            options["eos_token_id"] = self.stop_token_ids or []
        if self.allowed_token_ids:
            options["allowed_token_ids"] = self.allowed_token_ids
        if self.logit_bias:
            options["logit_bias"] = {_id(key): value for key, value in self.logit_bias.items()}
        if self.stops:
            options |= {"stop_strings": self.stops, "stop_across_prompt": False}
        if self.speculative_tokens is not None:
            options["num_speculative_tokens"] = self.speculative_tokens
        if self.recorded is not None:
            options["logprobs"] = self.recorded or True
        if self.scored is not None:
            options["prompt_logprobs"] = self.scored or True
        return options | self.constraint()

    @property
    def schema_of_text(self) -> dict[str, Any] | None:
        """JSON schema that the answer must follow. None: no schema is demanded."""
        schema: dict[str, Any] | None = self.constraint().get("json_schema")
        return schema

    def constraint(self) -> dict[str, Any]:
        """Returns the keyword argument of `FastSpecGenerator.submit` that restricts the answer's text.

        An empty dict allows any text.

        Raises:
            Refusal: two fields restrict the text, or min_tokens is given beside a restriction.
        """
        schema = None if self.response_format is None else self.response_format.schema_of_text
        constraint: dict[str, Any] = {} if schema is None else {"json_schema": schema}
        if self.structured_outputs is not None:
            keyword, value = self.structured_outputs.option
            if constraint:
                raise Refusal(
                    "structured_outputs and response_format both say what the answer must follow; leave one out",
                    "structured_outputs",
                )
            constraint = {keyword: value}
        if constraint and self.min_tokens:
            raise Refusal(
                "min_tokens: an answer that follows a schema may end earlier; leave out min_tokens or the schema",
                "min_tokens",
            )
        return constraint


class Completion(Body):
    """The body of POST /v1/completions."""

    prompt: str | Ids | Annotated[list[str], Field(min_length=1)] | Annotated[list[Ids], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool = False
    best_of: Annotated[int, Field(ge=1, le=64)] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _enough_of_them(self) -> Completion:
        if self.best_of is not None and self.best_of < self.n:
            raise Refusal(f"best_of must be at least n, which is {self.n}; got {self.best_of}", "best_of")
        if self.stream and self.drawn > self.n:
            raise Refusal("best_of above n needs whole answers; leave out stream or best_of", "best_of")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise Refusal("max_tokens=0 asks for no answer: it needs echo or prompt_logprobs", "max_tokens")
        return self

    @property
    def drawn(self) -> int:
        """Number of answers to decode for each prompt: `best_of` if it is given, else `n`."""
        return self.best_of or self.n

    @property
    def recorded(self) -> int | None:
        """Number of most probable tokens to report for each new token: the field `logprobs`. None: it is not given."""
        return self.logprobs

    @property
    def limit(self) -> tuple[str, int | None]:
        """("max_tokens", its value or None). For 0 the value is 1: the decoded token is left out of the answer."""
        return "max_tokens", None if self.max_tokens is None else max(1, self.max_tokens)

    @property
    def scored(self) -> int | None:
        """Number of most probable tokens to report for each prompt token.

        It is the larger one of `prompt_logprobs` and, with `echo`, `logprobs`. None: neither is given.
        """
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((each for each in wanted if each is not None), default=None)

    @property
    def prompts(self) -> list[str | list[int]]:
        """List of the prompts, each a text or a list of token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        whole = all(isinstance(one, int) for one in self.prompt)
        return [self.prompt] if whole else list(self.prompt)  # type: ignore[list-item, arg-type]


class Chat(Body):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None  # templates read them as the client wrote them
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    sanitize_control_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: Literal[False] = False

    @model_validator(mode="after")
    def _together(self) -> Chat:
        if self.top_logprobs is not None and not self.logprobs:
            raise Refusal("top_logprobs needs logprobs=true", "top_logprobs")
        if self.max_completion_tokens is not None and self.max_tokens not in (None, self.max_completion_tokens):
            raise Refusal(
                f"max_tokens and max_completion_tokens mean the same, got {self.max_tokens} and "
                f"{self.max_completion_tokens}; give one",
                "max_completion_tokens",
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise Refusal(
                "continue_final_message continues the last message, and add_generation_prompt begins a new one; set "
                "add_generation_prompt to false",
                "continue_final_message",
            )
        if taken := sorted(_TEMPLATED & set(self.chat_template_kwargs or {})):
            raise Refusal(
                f"chat_template_kwargs may not set {', '.join(taken)}, which the server sets itself; leave it out",
                "chat_template_kwargs",
            )
        names = [function.name for function in self._functions]
        if len(set(names)) < len(names):
            raise Refusal(f"tools must have different names, got {', '.join(names)}"[: 4 * _TOLD], "tools")
        if self.tool_choice == "required" and not names:
            raise Refusal("tool_choice is required, and there are no tools; give some", "tool_choice")
        for name in self._chosen or ():
            if name not in names:
                raise Refusal(f"tool_choice names {name[:_TOLD]!r}, which is none of the tools", "tool_choice")
        return self

    @property
    def _chosen(self) -> list[str] | None:
        """Names of the functions in `tool_choice`. None: it has no names of functions."""
        if isinstance(self.tool_choice, NamedChoice):
            return [self.tool_choice.function.name]
        if isinstance(self.tool_choice, AllowedChoice):
            return [tool.function.name for tool in self.tool_choice.allowed_tools.tools]
        return None

    @property
    def shown(self) -> list[dict[str, Any]]:
        """Tools that the chat template writes into the prompt."""
        if self.tool_choice == "none":
            return []
        if not isinstance(self.tool_choice, AllowedChoice):
            return self.tools or []
        named = zip(self.tools or [], self._functions, strict=True)
        return [tool for tool, function in named if function.name in (self._chosen or ())]

    @property
    def offered(self) -> tuple[Tool, ...]:
        """Tools that the model may call. If `must_call` is True, it must call one of them."""
        if self.tool_choice == "none":
            return ()
        functions = [one for one in self._functions if self._chosen is None or one.name in self._chosen]
        return tuple(Tool(one.name, _object_schema(one.parameters), bool(one.strict)) for one in functions)

    @cached_property
    def _functions(self) -> list[Function]:  # checked once, with the request
        return [_function_of(at, tool) for at, tool in enumerate(self.tools or [])]

    @property
    def must_call(self) -> bool:
        """True if the answer must call a tool."""
        if isinstance(self.tool_choice, AllowedChoice):
            return self.tool_choice.allowed_tools.mode == "required"
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedChoice)

    @property
    def one_call(self) -> bool:
        """True if the answer may have at most one tool call.

        This is so if parallel_tool_calls is false, or if tool_choice names the one function to call.
        """
        return self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedChoice)

    @property
    def recorded(self) -> int | None:
        """Number of most probable tokens to report for each new token: `top_logprobs`, or 0 if it is not given.

        None if `logprobs` is not true: no log-probabilities are reported.
        """
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> tuple[str, int | None]:
        """(name, value) of `max_completion_tokens` if it is given, else of `max_tokens`. The value may be None."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


def _function_of(at: int, tool: dict[str, Any]) -> Function:
    try:
        return FunctionTool.model_validate(tool).function
    except ValidationError as error:
        said = "; or ".join(words_of(one) for one in error.errors(include_url=False))
        raise Refusal(f"tools.{at}.{said}", "tools") from None


def _object_schema(given: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the JSON schema that the arguments of a call must follow.

    `given` is the field `parameters` of the function. None: the arguments may be any JSON object.
    """
    schema: dict[str, Any] = constraints({"type": "object", **(given or {})})
    return schema


def _id(key: str) -> int:
    if not _ID.fullmatch(key):  # an id has only one accepted spelling, so that no entry replaces another
        raise Refusal(f"logit_bias must map token ids to numbers, got the key {key[:_TOLD]!r}", "logit_bias")
    return int(key)


def _of_union(place: str) -> bool:
    """True if `place`, a part of the location of a pydantic error, names a type of a union instead of a field."""
    return place in ("str", "int", *_UNITED) or place.startswith(("constrained-", "list[", "literal["))


def read(kind: type[BaseModel], data: bytes) -> Any:
    """Parses and checks the JSON body of a request.

    Args:
        kind: pydantic class of the body.
        data: JSON text in UTF-8.

    Raises:
        Refusal: the text is not JSON, or a field is missing, unknown or invalid. The error names the field.
    """
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        found = error.errors(include_url=False)
        first, names = found[0], _names(found[0])
        field = names[0] if names else None
        if first["type"] == "extra_forbidden":
            served = f". Supported: {', '.join(kind.model_fields)}" if len(names) == 1 else ""
            raise Refusal(f"{'.'.join(names)} is not supported; leave it out{served}", field) from None
        raise Refusal("; or ".join(_nearest(first["loc"], found)), field) from None


def _names(error: ErrorDetails) -> list[str]:
    """Returns the path of field names to the value that pydantic refused, from the outermost field."""
    return [str(part) for part in error["loc"] if not _of_union(str(part))]


def _nearest(place: tuple[int | str, ...], errors: list[ErrorDetails]) -> list[str]:
    """Returns texts that describe the errors of one field.

    If the type of the field is a union, pydantic reports an error for each type of the union. Only the most deeply
    nested errors are described, because their types are most like the value.

    Args:
        place: location of one error. Its first part is the name of the field.
        errors: all errors of the body.
    """
    each: dict[object, ErrorDetails] = {}
    for error in errors:
        if error["loc"][:1] == place[:1]:
            each.setdefault(error["loc"][1:2], error)
    deepest = max(len(_names(error)) for error in each.values())
    said = [words_of(error) for error in each.values() if len(_names(error)) == deepest]
    return list(dict.fromkeys(said))


def words_of(error: ErrorDetails) -> str:
    """Formats an error of pydantic as one text with the path of the field, the problem and the value."""
    given = "" if error["type"] in ("missing", "json_invalid") else f", got {str(error['input'])[:_TOLD]!r}"
    return f"{'.'.join(_names(error)) or 'the body'}: {error['msg']}{given}"
