"""Builds the response bodies and stream events of completions and chats from their answers."""

from __future__ import annotations

import time
import uuid
from typing import Any

import fastspec
from fastspec.server.completions.echo import Echo
from fastspec.server.fields import Body, Chat, StreamOptions
from fastspec.server.service import Service
from fastspec.server.texts import Answer, Piece


class Envelope:
    """Builds the response body, or the stream events, of one request.

    Args:
        body: body of the request.
        service: has the name of the model, which each body and event repeats.
    """

    def __init__(self, body: Body, service: Service) -> None:
        self.chat = isinstance(body, Chat)
        options = body.stream_options or StreamOptions()
        self.with_usage = options.include_usage
        self.always_usage = options.include_usage and options.continuous_usage_stats
        self.drawn, self.num_answers = body.drawn, body.n
        self._with_ids, self._recorded = body.return_token_ids, body.recorded is not None
        self._sent: dict[int, int] = {}  # index of an answer -> number of its token ids that were sent
        self._id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._name, self._created = service.name, int(time.time())
        self._begun: set[int] = set()  # indices of the answers of which a part was sent
        self._echo, self._prompt_logprobs = Echo(body), body.prompt_logprobs

    def _whole(self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        shared: dict[str, Any] = {"id": self._id, "object": kind, "created": self._created, "model": self._name}
        shared |= {"system_fingerprint": f"fastspec-{fastspec.__version__}", "choices": choices}
        return shared if usage is None else shared | {"usage": usage}

    def whole(self, texts: list[tuple[Answer, str, str]], usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the response body with all answers. `texts`: (answer, its text, its finish reason) of each answer."""
        choices: list[dict[str, Any]] = []
        for answer, text, reason in texts:
            count = len(answer.request.new_tokens)
            shared = {"index": answer.index, "finish_reason": reason}
            if self.chat:
                logprobs = answer.chat_logprobs(0, count)
                choices.append({**shared, "message": answer.message(), "logprobs": logprobs})
            else:
                choice = {**shared, "text": text, "logprobs": answer.text_logprobs(0, count)}
                choices.append(self._echo.added(answer, choice))
            if not self._recorded:  # log-probabilities may have been recorded to choose the best answers
                choices[-1]["logprobs"] = None
            choices[-1] |= self._ids(answer, count)
        whole = self._whole("chat.completion" if self.chat else "text_completion", choices, self._echo.usage(usage))
        return whole | self._prompt_ids(texts[0][0]) | self._prompt_scores(texts[0][0])

    def _ids(self, answer: Answer, stop: int) -> dict[str, Any]:
        """Returns the field `token_ids`: ids of the answer's tokens before index `stop` that were not sent yet.

        The first time, a completion also gets `prompt_token_ids`. Empty if the request does not want ids.
        """
        if not self._with_ids:
            return {}
        start = self._sent.get(answer.index)
        self._sent[answer.index] = stop = 0 if self._echo.silent else stop
        prompt = {"prompt_token_ids": answer.request.prompt} if start is None and not self.chat else {}
        return {"token_ids": answer.request.new_tokens[start or 0 : stop], **prompt}

    def _prompt_ids(self, answer: Answer) -> dict[str, Any]:
        """Returns the field `prompt_token_ids` of a chat. Empty if the request does not want ids, or is no chat."""
        return {"prompt_token_ids": answer.request.prompt} if self.chat and self._with_ids else {}

    def _prompt_scores(self, answer: Answer) -> dict[str, Any]:
        """Returns the field `prompt_logprobs` of a chat. Empty if the request does not want it, or is no chat."""
        wanted = self._prompt_logprobs if self.chat else None
        return {} if wanted is None else {"prompt_logprobs": answer.prompt_logprobs(wanted)}

    def scores_prompt(self, answer: Answer) -> bool:
        """True if the next piece of an answer has the log-probabilities of its prompt, which take long to build."""
        return self._echo.scored and answer.index not in self._begun

    def piece(self, answer: Answer, piece: Piece) -> list[dict[str, Any]]:
        """Returns the stream events for a piece of an answer: its text or its deltas, then the finish reason."""
        shared: dict[str, Any] = {"index": answer.index, "finish_reason": None}
        choices = [{**shared, **one} for one in (self._deltas if self.chat else self._texts)(answer, piece)]
        if piece.reason is not None:
            end: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
            choices.append({**shared, **end, "logprobs": None, "finish_reason": piece.reason})
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        told: dict[str, Any] = {"usage": None} if self.with_usage else {}  # the last event has the usage
        if not self._sent:
            told |= self._prompt_ids(answer)
        if choices:
            choices[0] |= self._ids(answer, piece.stop)
        return [self._whole(kind, [one], None) | told for one in choices]

    def _texts(self, answer: Answer, piece: Piece) -> list[dict[str, Any]]:
        """Returns the entries of `choices` for a piece of a completion.

        With `echo` the prompt comes before the first piece.
        """
        first = answer.index not in self._begun
        if not piece.text and piece.start == piece.stop and not first:
            return []
        self._begun.add(answer.index)
        before = self._echo.begin(answer) if first else None
        texts = [] if before is None else [before]
        if not self._echo.silent:
            texts.append({"text": piece.text, "logprobs": answer.text_logprobs(piece.start, piece.stop)})
        return texts

    def _deltas(self, answer: Answer, piece: Piece) -> list[dict[str, Any]]:
        """Returns the entries of `choices` for a piece of a chat's answer, one for each event of the parser.

        The first entry has the log-probabilities of all tokens of the piece.
        """
        logprobs = answer.chat_logprobs(piece.start, piece.stop) if piece.start < piece.stop else None
        deltas = [answer.delta(event) for event in piece.events]
        first = answer.index not in self._begun
        if not deltas and (logprobs is not None or (first and piece.reason is not None)):
            deltas = [{"content": ""}]
        if deltas and first:
            self._begun.add(answer.index)
            deltas[0] = {"role": "assistant", "content": None, **deltas[0]}
        return [{"delta": delta, "logprobs": None if at else logprobs} for at, delta in enumerate(deltas)]

    def last(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the last event of a stream, with the token counts."""
        return self._whole("chat.completion.chunk" if self.chat else "text_completion", [], self._echo.usage(usage))
