"""Text of an answer up to a stop string, and the log-probabilities of its tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from fastspec.scheduling.handle import Handle
from fastspec.text.answers.events import Arguments, CallBegins, Content, Event, WholeAnswer
from fastspec.text.answers.parser import AnswerParser
from fastspec.text.answers.reader import overlap
from fastspec.text.decoding import decoder_of
from fastspec.text.text_stream import TextStream, bytes_of

BROKEN = "\ufffd"  # a decoder writes this for a part of a character


class Visible:
    """Decodes the tokens of an answer to text while they arrive, up to the first stop string.

    Text that may be the beginning of a stop string is held back until the next tokens decide. The joined pieces do not
    depend on the number of tokens in each call of `push`.

    Args:
        tokenizer: the target's tokenizer.
        prompt: token ids before the answer.
        stops: stop strings. The text ends before the first of them.
        skip_special_tokens: True leaves special tokens out of the text, see `decode` of transformers.
        marks: id -> text of special tokens that stay in the text. None: there are none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: list[int],
        stops: list[str],
        *,
        skip_special_tokens: bool = True,
        marks: Mapping[int, str] | None = None,
    ) -> None:
        self._stream = TextStream(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
        self._stops, self._held, self._ended = stops, "", False
        self._kept = {} if marks is None or not skip_special_tokens else marks

    def push(self, tokens: list[int]) -> str:
        """Receives new tokens. Returns the new text that later tokens cannot change. It may be empty."""
        if not self._kept.keys() & set(tokens):
            return self._release(self._stream.push(tokens), last=False)
        pieces = [self._kept[token] if token in self._kept else self._stream.push([token]) for token in tokens]
        return self._release("".join(pieces), last=False)

    def finish(self) -> str:
        """Returns the text that was held back. Call it after the last token."""
        return self._release(self._stream.finish(), last=True)

    def _release(self, piece: str, *, last: bool) -> str:
        if self._ended:
            return ""
        text = self._held + piece
        ends = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if ends:
            self._ended, self._held = True, ""
            return text[: min(ends)]
        keep = 0 if last else max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


@dataclass(frozen=True, slots=True)
class Piece:
    """New part of an answer, from one or more decode steps.

    Attributes:
        text: new text. It may be empty.
        start, stop: indices of the first new token in the answer, and of the token after the last new one.
        reason: finish reason in the last piece: "stop", "length", "tool_calls" or "abort". None in other pieces.
        events: events that the parser of a chat's answer found in the text. Empty for a completion.
    """

    text: str
    start: int
    stop: int
    reason: str | None = None
    events: tuple[Event, ...] = ()


class Answer:
    """One answer of a request while it is decoded.

    Args:
        index: number of the answer in its request, from 0.
        handle: gives the answer's tokens as they are decoded.
        tokenizer: the target's tokenizer.
        stops: stop strings. The text ends before the first of them.
        skip_special_tokens: True leaves special tokens out of the text.
        parser: parser for the reasoning and the tool calls of a chat's answer. None for /v1/completions, where the text
            is not parsed.
        marks: id -> text of special tokens that the parser needs. None: there are none.
        new_call_id: makes the id of each tool call.

    Attributes:
        whole: the parsed answer of a chat so far.
        call_ids: id of each tool call so far.
        reasoning_tokens: number of tokens of the reasoning, with the tokens that mark its beginning and end.
    """

    def __init__(
        self,
        index: int,
        handle: Handle,
        tokenizer: PreTrainedTokenizerBase,
        stops: list[str],
        *,
        skip_special_tokens: bool = True,
        parser: AnswerParser | None = None,
        marks: Mapping[int, str] | None = None,
        new_call_id: Callable[[], str] = str,
    ) -> None:
        self.index, self.handle, self._tokenizer, self._stops = index, handle, tokenizer, stops
        self._skip, self._parser, self._marks, self._new_call_id = skip_special_tokens, parser, marks, new_call_id
        self.whole, self.call_ids, self.reasoning_tokens = WholeAnswer(), list[str](), 0
        self.request = handle.call.requests[0]
        self._decoded = decoder_of(tokenizer)
        self._placed = TextStream(tokenizer, self.request.prompt, skip_special_tokens=skip_special_tokens)
        self._offsets = [0]

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the new tokens. 0 if there are none."""
        values = self.request.logprobs
        return sum(values) / len(values) if values else 0.0

    @property
    def open(self) -> bool:
        """True until the answer has ended."""
        return not self.handle.done

    @property
    def waited(self) -> float | None:
        """Seconds from `submit` until this answer got a batch slot. None: it has no slot yet."""
        admitted = self.request.admitted
        return None if admitted is None else max(0.0, admitted - self.handle.delivery.started)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yields pieces of the answer while they are decoded. The last piece has the finish reason.

        Raises:
            InvalidLogits, RuntimeError: see `Handle.result`.
        """
        visible = Visible(
            self._tokenizer,
            self.request.prompt,
            self._stops,
            skip_special_tokens=self._skip,
            marks=self._marks,
        )
        shown, stop_ids = 0, self.handle.call.options.stop_ids
        async for start, shown in self.handle.pieces_in_loop():
            new = self.request.new_tokens[start:shown]
            # a stop id is not part of the text, even if it is not a special token
            text = self._read(visible, new[:-1] if new[-1] in stop_ids else new)
            yield Piece(text, start, shown, events=self._events())
        text = visible.finish()
        if self._parser:
            self._parser.push(text)
            self._parser.finish()
        events, reason = self._events(), self.request.finish_reason
        yield Piece(text, shown, shown, "tool_calls" if reason == "stop" and self.call_ids else reason, events)

    def _read(self, visible: Visible, tokens: list[int]) -> str:
        """Passes new tokens to `visible`, and the new final text to the parser. Returns this text."""
        if self._parser is None:
            return visible.push(tokens)
        pieces = []
        # token by token if answers may have reasoning, whose tokens are counted
        for part in ([token] for token in tokens) if self._parser.reads_reasoning else [tokens]:
            before = self._parser.in_reasoning
            pieces.append(visible.push(part))
            self._parser.push(pieces[-1])
            self.reasoning_tokens += before or self._parser.in_reasoning
        return "".join(pieces)

    def _events(self) -> tuple[Event, ...]:
        events = self._parser.events() if self._parser else []
        self.whole.add(events)
        self.call_ids += [self._new_call_id() for event in events if isinstance(event, CallBegins)]
        return tuple(events)

    def message(self) -> dict[str, Any]:
        """Returns the complete answer of a chat as OpenAI's `message` object."""
        whole = self.whole
        content = whole.content if whole.content or not whole.calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if whole.reasoning:
            message |= {"reasoning_content": whole.reasoning, "reasoning": whole.reasoning}
        if whole.calls:
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for id, call in zip(self.call_ids, whole.calls, strict=True)
            ]
        return message

    def delta(self, event: Event) -> dict[str, Any]:
        """Converts an event of the parser to OpenAI's `delta` object, a part of a streamed message."""
        if isinstance(event, Content):
            return {"content": event.text}
        if isinstance(event, CallBegins):
            call = {"id": self.call_ids[event.index], "type": "function"}
            return {"tool_calls": [{"index": event.index, **call, "function": {"name": event.name, "arguments": ""}}]}
        if isinstance(event, Arguments):
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
        return {"reasoning_content": event.text, "reasoning": event.text}

    def chat_logprobs(self, start: int, stop: int) -> dict[str, Any] | None:
        """Returns the log-probabilities of the answer's tokens `start` to `stop` - 1, as in /v1/chat/completions.

        Returns None if log-probabilities were not requested.
        """
        if self.handle.call.options.top_logprobs is None:
            return None
        content = []
        for place in range(start, stop):
            tops = self.request.top_logprobs[place]
            entry = self._entry(self.request.new_tokens[place], self.request.logprobs[place])
            content.append(entry | {"top_logprobs": [self._entry(*top) for top in tops]})
        return {"content": content, "refusal": None}

    def text_logprobs(self, start: int, stop: int) -> dict[str, Any] | None:
        """Returns the log-probabilities of the answer's tokens `start` to `stop` - 1, as in /v1/completions.

        Returns None if log-probabilities were not requested.
        """
        if self.handle.call.options.top_logprobs is None:
            return None
        chosen, values = self.request.new_tokens[start:stop], self.request.logprobs[start:stop]
        tops = self.request.top_logprobs[start:stop]
        return {
            "tokens": [self._key(token) for token in chosen],
            "token_logprobs": values,
            "top_logprobs": [
                self._by_text({token: value, **dict(pairs)})
                for token, value, pairs in zip(chosen, values, tops, strict=True)
            ],
            "text_offset": self._offsets_of(start, stop),
        }

    def prompt_text(self) -> str:
        """Returns the text of the prompt's tokens."""
        stream = TextStream(self._tokenizer, skip_special_tokens=self._skip)
        return stream.push(self.request.prompt) + stream.finish()

    def echoed_logprobs(self) -> dict[str, Any] | None:
        """Returns the log-probabilities of the prompt's tokens in the form of `text_logprobs`.

        Returns None if log-probabilities were not requested. The first token of a prompt has no log-probability.
        """
        scores, top = self.request.scores, self.handle.call.options.top_logprobs
        if scores is None or top is None:
            return None
        prompt, values, tops = self.request.prompt, scores.logprobs, scores.top_logprobs
        stream, offsets = TextStream(self._tokenizer, skip_special_tokens=self._skip), [0]
        for token in prompt[:-1]:
            offsets.append(offsets[-1] + len(stream.push([token])))
        return {
            "tokens": [self._key(token) for token in prompt],
            "token_logprobs": [None, *values],
            "top_logprobs": [
                None,
                *(
                    self._by_text({token: value, **dict(pairs[:top])})
                    for token, value, pairs in zip(prompt[1:], values, tops, strict=True)
                ),
            ],
            "text_offset": offsets,
        }

    def prompt_logprobs(self, top: int) -> list[dict[str, Any] | None]:
        """Returns vLLM's `prompt_logprobs`: a dict for each token of the prompt, but None for the first token.

        The keys of a dict are the token's id and the ids of the `top` most probable tokens at its position. A rank is
        None if the token is not among the recorded most probable tokens.
        """
        scores = self.request.scores
        assert scores is not None, "the request asks for them"
        places: list[dict[str, Any] | None] = [None]
        for token, value, pairs in zip(self.request.prompt[1:], scores.logprobs, scores.top_logprobs, strict=True):
            ranks = {one: rank for rank, (one, _) in enumerate(pairs, 1)}
            values = {token: value, **dict(pairs[:top])}
            places.append(
                {
                    str(one): {"logprob": each, "rank": ranks.get(one), "decoded_token": self._name(one)}
                    for one, each in values.items()
                }
            )
        return places

    def _offsets_of(self, start: int, stop: int) -> list[int]:
        """Returns the number of the answer's characters before each of its tokens `start` to `stop` - 1.

        Tokens that are parts of the same character have the same number.
        """
        for token in self.request.new_tokens[len(self._offsets) - 1 : stop]:
            self._offsets.append(self._offsets[-1] + len(self._placed.push([token])))
        return self._offsets[start:stop]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        name = self._name(token)
        made = bytes_of(self._tokenizer, token) if BROKEN in name else name.encode()
        return {"token": name, "logprob": logprob, "bytes": None if made is None else list(made)}

    def _by_text(self, values: dict[int, float]) -> dict[str, float]:
        """Replaces the token ids in `values` by the texts of the tokens.

        If several tokens have the same text, the keys of all but the first are `token_id:ID`.
        """
        named: dict[str, float] = {}
        for token, value in values.items():
            name = self._key(token)
            named[f"token_id:{token}" if name in named else name] = value
        return named

    def _key(self, token: int) -> str:
        """Returns the text of a token, or its bytes in OpenAI's notation if it is only a part of a character."""
        name = self._name(token)
        made = bytes_of(self._tokenizer, token) if BROKEN in name else None
        return name if made is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in made)

    def _name(self, token: int) -> str:
        """Returns the text that a token adds after other tokens.

        A token that is decoded alone may lose its leading space.
        """
        one, two = self._decoded([token], False), self._decoded([token] * 2, False)
        return two[len(one) :] if two.startswith(one) else one
