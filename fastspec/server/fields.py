"""Bodies of requests: OpenAI's fields, checked. A closed list: what is not served is named and refused."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from transformers import PreTrainedTokenizerBase

from fastspec.inputs.table import NUMBERS, ROWS
from fastspec.server.errors import Refusal
from fastspec.server.prediction import Prediction
from fastspec.state import MAX_TOP_LOGPROBS

Stop = Annotated[str, Field(min_length=1, max_length=256)]
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
# parameters of transformers' method, and its names for the messages on their way to the template
_TEMPLATED = frozenset(
    [*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "conversations", "messages"]
)
_ID = re.compile("0|[1-9][0-9]{0,17}")
_TOLD = 80  # characters of a value that a message repeats


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class Schema(BaseModel):
    """The schema of an answer of type json_schema; the answer follows it also without `strict`."""

    model_config = ConfigDict(extra="forbid")

    name: str
    content: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """The format of an answer."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    @property
    def schema_of_text(self) -> dict[str, Any] | None:
        """JSON schema of the answer; None: any text."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise Refusal("response_format of type json_schema, and no other, has a json_schema", "response_format")
        if self.json_schema is not None:
            return self.json_schema.content
        return {"type": "object"} if self.type == "json_object" else None


# ranges of the protocol, where they are not those of the option
_RANGES: Mapping[str, FieldInfo] = {
    "temperature": Field(ge=0, le=2),
    "top_k": Field(ge=-1),
    "repetition_penalty": Field(gt=0, le=10),
}


def _numeric_fields() -> dict[str, Any]:
    """Fields for the options that are one number a row, by the names that the protocol has for them."""
    fields: dict[str, Any] = {}
    for keyword, number in NUMBERS.items():
        kind: Any = int if isinstance(number.neutral, int) else float
        limits = _RANGES.get(keyword) or Field(ge=number.low, le=number.high)
        fields[ROWS[keyword].field] = (Annotated[kind, limits] | None, None)
    return fields


class Body(create_model("Numbers", **_numeric_fields())):  # type: ignore[misc]
    """Fields that both kinds of completion share.

    A field that is null counts as left out. Fields of other servers that this one has, too: `top_k` (-1 is 0),
    `min_p`, `repetition_penalty`, `min_tokens`, `ignore_eos`,
    `skip_special_tokens`. Its own: `speculative_tokens`, drafts a step, or "auto".
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
    prediction: Prediction | None = None
    # these name the client or the purpose, and change no answer
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None

    @model_validator(mode="before")
    @classmethod
    def _given(cls, body: Any) -> Any:
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body

    @property
    def stops(self) -> list[str]:
        """Texts that end an answer, and are no part of it."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def recorded(self) -> int | None:
        """Number of most probable tokens to tell at each place; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def limit(self) -> tuple[str, int | None]:
        """Name and value of the field that limits the number of tokens."""
        return "max_tokens", self.max_tokens

    def options(self) -> dict[str, Any]:
        """Keywords of `submit` for the given fields: all others keep the checkpoint's defaults."""
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
            options["eos_token_id"] = []
        if self.logit_bias:
            options["logit_bias"] = {_id(key): value for key, value in self.logit_bias.items()}
        if self.stops:
            options |= {"stop_strings": self.stops, "stop_across_prompt": False}
        if self.speculative_tokens is not None:
            options["num_speculative_tokens"] = self.speculative_tokens
        if self.prediction is not None and self.prediction.text:
            options["predictions"] = self.prediction.text
        if self.recorded is not None:
            options["logprobs"] = self.recorded or True
        if self.response_format is not None and (schema := self.response_format.schema_of_text) is not None:
            if self.min_tokens:
                raise Refusal(
                    "min_tokens: an answer that follows a schema may end before; leave one of them out", "min_tokens"
                )
            options["json_schema"] = schema
        return options


class Completion(Body):
    """The body of POST /v1/completions."""

    prompt: str | Ids | Annotated[list[str], Field(min_length=1)] | Annotated[list[Ids], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: Literal[False] | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _all_of_them(self) -> Completion:
        if self.best_of not in (None, self.n):
            raise Refusal(
                f"best_of must be n, which is {self.n}: no answers are left out; got {self.best_of}", "best_of"
            )
        return self

    @property
    def recorded(self) -> int | None:
        """The field `logprobs`, a number here."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """Prompts: one for each text or list of ids."""
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
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    sanitize_control_tokens: bool | None = None

    @model_validator(mode="after")
    def _together(self) -> Chat:
        if self.top_logprobs is not None and not self.logprobs:
            raise Refusal("top_logprobs needs logprobs=true", "top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise Refusal("max_tokens and max_completion_tokens are the same; give one", "max_completion_tokens")
        if taken := sorted(_TEMPLATED & set(self.chat_template_kwargs or {})):
            raise Refusal(
                f"chat_template_kwargs are variables of the template, and {', '.join(taken)} is none; leave it out",
                "chat_template_kwargs",
            )
        return self

    @property
    def recorded(self) -> int | None:
        """The field `top_logprobs`, where `logprobs` is true."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> tuple[str, int | None]:
        """`max_completion_tokens`, else `max_tokens`."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


def _id(key: str) -> int:
    if not _ID.fullmatch(key):  # one way to write an id: no entry replaces another's
        raise Refusal(f"logit_bias must map token ids to numbers, got the key {key[:_TOLD]!r}", "logit_bias")
    return int(key)


def _of_union(place: str) -> bool:
    """True if it names a member of a union; pydantic puts these between the names of fields."""
    return place in ("str", "int") or place.startswith(("constrained-", "list[", "literal["))


def read(kind: type[Body], data: bytes) -> Any:
    """Reads the body of a request, and checks it.

    Raises:
        Refusal: it is no JSON, lacks a field, or has one that is not served or out of range; the error names it.
    """
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        found = error.errors(include_url=False)
        first, names = found[0], _names(found[0])
        field = names[0] if names else None
        if first["type"] == "extra_forbidden":
            served = ", ".join(kind.model_fields)
            raise Refusal(f"{'.'.join(names)} is not supported; leave it out. Supported: {served}", field) from None
        raise Refusal("; or ".join(_nearest(first["loc"], found)), field) from None


def _names(error: ErrorDetails) -> list[str]:
    """Names the fields on the way to the value that an error is about."""
    return [str(part) for part in error["loc"] if not _of_union(str(part))]


def _nearest(place: tuple[int | str, ...], errors: list[ErrorDetails]) -> list[str]:
    """Says what is wrong with one field, once for each type of a union that matched deepest."""
    each: dict[object, ErrorDetails] = {}
    for error in errors:
        if error["loc"][:1] == place[:1]:
            each.setdefault(error["loc"][1:2], error)
    deepest = max(len(_names(error)) for error in each.values())
    said = [_said(error) for error in each.values() if len(_names(error)) == deepest]
    return list(dict.fromkeys(said))


def _said(error: ErrorDetails) -> str:
    given = "" if error["type"] in ("missing", "json_invalid") else f", got {str(error['input'])[:_TOLD]!r}"
    return f"{'.'.join(_names(error)) or 'the body'}: {error['msg']}{given}"
