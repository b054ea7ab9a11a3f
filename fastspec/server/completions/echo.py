"""Completions that repeat their prompt (`echo`), or report the log-probabilities of its tokens."""

from __future__ import annotations

from typing import Any

from fastspec.server.fields import Body, Completion
from fastspec.server.texts import Answer

_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class Echo:
    """Adds the prompt, or the log-probabilities of its tokens, to the choices of a completion.

    It adds only what the request asks for, by `echo` and `prompt_logprobs`. It does not change the answers of chats.

    Args:
        body: body of the request.
    """

    def __init__(self, body: Body) -> None:
        self._body = body if isinstance(body, Completion) else None

    @property
    def silent(self) -> bool:
        """True if the answer has no new tokens, because max_tokens is 0."""
        return self._body is not None and self._body.max_tokens == 0

    @property
    def scored(self) -> bool:
        """True if an answer begins with its prompt and the log-probabilities of the prompt's tokens."""
        return self._body is not None and self._body.echo and self._body.logprobs is not None

    def begin(self, answer: Answer) -> dict[str, Any] | None:
        """Returns text and log-probabilities of an answer's prompt as fields of a choice.

        Returns None if the request does not have `echo`.
        """
        if self._body is None or not self._body.echo:
            return None
        given = self._body.prompts[answer.index // self._body.n]
        text = given if isinstance(given, str) else answer.prompt_text()
        return {"text": text, "logprobs": answer.echoed_logprobs()}

    def added(self, answer: Answer, choice: dict[str, Any]) -> dict[str, Any]:
        """Returns a whole answer's `choice` with the additions that the request asks for.

        These are the prompt before the text, and the log-probabilities of the prompt's tokens.
        """
        if self._body is None:
            return choice
        if self.silent:
            choice = {**choice, "text": "", "logprobs": None, "finish_reason": "length"}
        if (before := self.begin(answer)) is not None:
            logprobs = before["logprobs"]
            if logprobs is not None and choice["logprobs"] is not None:
                after = self.shifted(choice["logprobs"], len(before["text"]))
                logprobs = {name: logprobs[name] + after[name] for name in _LISTS}
            choice = {**choice, "text": before["text"] + choice["text"], "logprobs": logprobs}
        if self._body.prompt_logprobs is not None:
            choice = {**choice, "prompt_logprobs": answer.prompt_logprobs(self._body.prompt_logprobs)}
        return choice

    def shifted(self, logprobs: dict[str, Any], characters: int) -> dict[str, Any]:
        """Returns the `logprobs` of a choice with `characters` added to each text offset."""
        return {**logprobs, "text_offset": [characters + at for at in logprobs["text_offset"]]}

    def usage(self, counted: dict[str, Any]) -> dict[str, Any]:
        """Returns the `usage` object of the request. If max_tokens is 0, the decoded token is not counted."""
        if not self.silent:
            return counted
        return {**counted, "completion_tokens": 0, "total_tokens": counted["prompt_tokens"]}
