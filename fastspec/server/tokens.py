"""Bodies and answers of POST /tokenize and POST /detokenize, as in vLLM. Also the answers of /health and /version."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fastspec.server.errors import Refusal
from fastspec.server.service import Service


class Tokenize(BaseModel):
    """The body of POST /tokenize: a prompt, or the messages of a chat.

    `model` may be left out. The fields of a chat have the same meaning as in /v1/chat/completions.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Tokenize:
        if (self.prompt is None) == (self.messages is None):
            raise Refusal("give one of prompt and messages", "prompt")
        if self.messages is not None and self.add_special_tokens:
            raise Refusal(
                "the chat template writes the special tokens of messages; leave add_special_tokens out",
                "add_special_tokens",
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise Refusal(
                "continue_final_message needs add_generation_prompt=false: the last message goes on",
                "continue_final_message",
            )
        return self


class Detokenize(BaseModel):
    """The body of POST /detokenize."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


class Tokens(BaseModel):
    """The answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Prompt(BaseModel):
    """The answer of POST /detokenize."""

    prompt: str


class Health(BaseModel):
    """The answer of GET /health and GET /ping."""

    status: Literal["ok", "loading"]


class Version(BaseModel):
    """The answer of GET /version."""

    version: str


def tokenized(service: Service, body: Tokenize) -> Tokens:
    """Returns the token ids of a prompt, or of the messages of a chat.

    Raises:
        Refusal: the template refuses the messages.
    """
    if body.messages is not None:
        ids = service.template_ids(
            body.messages,
            tools=body.tools,
            variables=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
    else:
        special = body.add_special_tokens is not False
        ids = list(service.tokenizer(str(body.prompt), add_special_tokens=special)["input_ids"])
    names: Any = service.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
    return Tokens(count=len(ids), max_model_len=service.generator.max_length, tokens=ids, token_strs=names)


def detokenized(service: Service, body: Detokenize) -> Prompt:
    """Returns the text of token ids, with special tokens.

    Raises:
        Refusal: an id is outside the vocabulary.
    """
    size = len(service.tokenizer)
    if wrong := [token for token in body.tokens if token >= size][:1]:
        raise Refusal(f"tokens must be ids below {size}, got {wrong[0]}", "tokens")
    return Prompt(prompt=str(service.tokenizer.decode(body.tokens)))
