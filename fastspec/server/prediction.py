"""OpenAI's field `prediction`: a text that the answer is likely to repeat."""

from __future__ import annotations

from hashlib import blake2b
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from fastspec.generator import FastSpecGenerator


class TextPart(BaseModel):
    """A part of a predicted text."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class Prediction(BaseModel):
    """A predicted text, in one piece or in parts."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["content"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]

    @property
    def text(self) -> str:
        """The whole text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


def session_of(generator: FastSpecGenerator, api_key: str | None) -> dict[str, str]:
    """Returns the keyword `session` for requests with this API key.

    Empty if the generator keeps no answers by session, or if there is no key: strangers share no answers.
    """
    if api_key is None or generator.remembers != "session":
        return {}
    return {"session": blake2b(api_key.encode(), digest_size=16).hexdigest()}


def predicted(generator: FastSpecGenerator, prediction: Prediction | None) -> dict[str, str]:
    """Returns the keyword `predictions`; empty if there is no text, or if the generator has no room for one.

    A prediction changes no answer, so a server without room for it takes it, too.
    """
    if prediction is None or not prediction.text or not generator.prediction_tokens:
        return {}
    return {"predictions": prediction.text}
