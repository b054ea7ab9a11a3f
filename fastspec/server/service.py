"""Submits HTTP requests to one generator within limits, and counts their tokens."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from transformers import PreTrainedTokenizerBase

from fastspec.errors import InvalidLogits, OutOfPages
from fastspec.generator import FastSpecGenerator
from fastspec.grammar.spec import GrammarError
from fastspec.inputs.row_options import derive_seed
from fastspec.inputs.values import whole
from fastspec.server.errors import Refusal, failed, going_down, of_option, sleeping, too_late
from fastspec.server.fields import Body, Chat, Completion, Prediction
from fastspec.server.metrics import Live, Meters
from fastspec.server.responses.store import ResponseStore
from fastspec.server.texts import Answer, Piece
from fastspec.text.answers.choose import AUTO, AnswerFormats, formats_of
from fastspec.text.answers.lark import NoGrammar
from fastspec.text.answers.parser import AnswerParser, AnswerRule
from fastspec.text.chat_template import ChatTemplate, ConversationError, Message
from fastspec.text.token_bytes import special_tokens

COMPLETION_TOKENS = 16  # default of max_tokens in /v1/completions, as in OpenAI's API
_PROMPT_END = 16  # number of last tokens of a prompt that are searched for the beginning of the reasoning
# variables by which templates turn reasoning on; the first is not a field of a message, a text or a part of a name
_SWITCHES = {
    "reasoning_effort": re.compile(r"\breasoning_effort\b"),
    "enable_thinking": re.compile(r"\benable_thinking\b"),
    "thinking": re.compile(r"(?<![\w.'\"|<-])thinking\b(?!['\">])"),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request, and of all requests together.

    Attributes:
        body: largest number of bytes of a request's body.
        tokens: largest number of new tokens of an answer. None: as many as the context has room for.
        requests: largest number of answers that run or wait, for all clients together.
        seconds: longest time in seconds for all answers of one request.

    Raises:
        ValueError: a limit is not above 0.
    """

    body: int = 2**20
    tokens: int | None = None
    requests: int = 256
    seconds: float = 600.0

    def __post_init__(self) -> None:
        for name in ("body", "tokens", "requests"):
            if name != "tokens" or self.tokens is not None:
                whole(f"limits: {name}", getattr(self, name), low=1)
        if isinstance(self.seconds, bool) or not isinstance(self.seconds, int | float) or not self.seconds > 0:
            raise ValueError(f"limits: seconds must be a number above 0, got {self.seconds!r}")


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Token counts of one request.

    Attributes:
        prompt: tokens of all prompts.
        cached: prompt tokens that were found in the prefix cache, over all answers.
        completion: new tokens of all answers.
        drafted: draft tokens of all answers.
        accepted: accepted draft tokens of all answers.
    """

    prompt: int
    cached: int
    completion: int
    drafted: int
    accepted: int


class Job:
    """Answers of one request, from their submission to `close`. Only one event loop may use it.

    Args:
        answers: submitted answers.
        prompt_tokens: number of tokens of all prompts.
        seconds: time limit. All answers are cancelled after it.
        meters: metrics that record tokens and times.
        release: function that `close` calls last. It makes room for other requests.

    Attributes:
        first_token: seconds from the start to the first token of any answer. None: there is no token yet.
    """

    def __init__(
        self, answers: list[Answer], prompt_tokens: int, seconds: float, meters: Meters, release: Callable[[], None]
    ) -> None:
        self.answers, self._meters, self._release = answers, meters, release
        self._prompt_tokens, self._start = prompt_tokens, time.perf_counter()
        self._why: Refusal | None = None
        self._timer = asyncio.get_running_loop().call_later(seconds, lambda: self.stop(too_late(seconds)))
        self._closed = False
        self.first_token: float | None = None

    @property
    def queue_seconds(self) -> float | None:
        """Longest time in seconds that an answer waited for a batch slot. None: no answer has a slot yet."""
        waits = [answer.waited for answer in self.answers if answer.waited is not None]
        return max(waits, default=None)

    def close(self) -> None:
        """Cancels unfinished answers, and adds the token counts to the metrics. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._timer.cancel()
            self.cancel()
            self._meters.count(self._prompt_tokens, [answer.request for answer in self.answers])
            for answer in self.answers:
                if answer.waited is not None:
                    self._meters.waited(answer.waited)
            self._release()

    def stop(self, why: Refusal) -> None:
        """Cancels all answers. `pieces` and `merged` then raise `why`."""
        self._why = why
        self.cancel()

    def cancel(self) -> None:
        """Cancels all answers."""
        for answer in self.answers:
            answer.handle.cancel()

    async def pieces(self, answer: Answer) -> AsyncIterator[Piece]:
        """Yields the pieces of one answer while they are decoded.

        Raises:
            Refusal: the answer was cancelled or failed.
        """
        last: float | None = None  # time of the piece before
        try:
            async for piece in answer.pieces():
                if piece.reason == "cancelled" and (self._why or self._closed):
                    raise self._why or Refusal("the request was stopped", status=499)
                if piece.reason == "cancelled":  # `FastSpecGenerator.abort` has ended it
                    piece = replace(piece, reason="abort")
                now, count = time.perf_counter(), piece.stop - piece.start
                if last is None:
                    self._meters.first_token(now - self._start)
                    self.first_token = self.first_token or now - self._start
                elif count:
                    self._meters.between_tokens(now - last, count)
                last = now
                yield piece
        except (InvalidLogits, RuntimeError) as error:
            raise failed(error) from error
        self._meters.answer_ended(time.perf_counter() - self._start)

    async def merged(self) -> AsyncIterator[tuple[Answer, Piece]]:
        """Yields (answer, piece) of all answers while they are decoded.

        A slow reader delays no answer, because several pieces are then joined to one.

        Raises:
            Refusal: an answer was cancelled or failed.
        """
        queue: asyncio.Queue[tuple[Answer, Piece | Exception]] = asyncio.Queue(maxsize=len(self.answers))

        async def feed(answer: Answer) -> None:
            try:
                async for piece in self.pieces(answer):
                    await queue.put((answer, piece))
            except Refusal as error:
                await queue.put((answer, error))

        feeds = [asyncio.ensure_future(feed(answer)) for answer in self.answers]
        left = len(feeds)
        try:
            while left:
                answer, piece = await queue.get()
                if isinstance(piece, Exception):
                    raise piece
                left -= piece.reason is not None
                yield answer, piece
        finally:
            for one in feeds:
                one.cancel()

    def counts(self) -> TokenCounts:
        """Returns the token counts of the request so far."""
        rows = [answer.request.stats() for answer in self.answers]
        return TokenCounts(
            self._prompt_tokens,
            sum(row.cached_tokens for row in rows),
            sum(row.emitted for row in rows),
            sum(row.drafted for row in rows),
            sum(row.accepted for row in rows),
        )

    def usage(self) -> dict[str, Any]:
        """Returns the token counts so far as OpenAI's `usage` object.

        Accepted and rejected draft tokens are its accepted and rejected prediction tokens.
        """
        counts = self.counts()
        reasoning = sum(answer.reasoning_tokens for answer in self.answers)
        return {
            "prompt_tokens": counts.prompt,
            "completion_tokens": counts.completion,
            "total_tokens": counts.prompt + counts.completion,
            "prompt_tokens_details": {"cached_tokens": counts.cached},
            "completion_tokens_details": {
                "reasoning_tokens": reasoning,
                "accepted_prediction_tokens": counts.accepted,
                "rejected_prediction_tokens": counts.drafted - counts.accepted,
            },
        }


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """Prompts of a request, with the formats and restrictions of its answers.

    Attributes:
        prompts: token ids of each prompt.
        formats: formats of reasoning and tool calls in a chat's answers. None: the answer of a completion is plain
            text.
        rule: restrictions of each answer.
        opened: True if the prompt ends with the beginning of the reasoning.
    """

    prompts: list[list[int]]
    formats: AnswerFormats | None = None
    rule: AnswerRule = field(default_factory=AnswerRule)
    opened: bool = False

    @property
    def field(self) -> str:
        """Name of the request's field that restricts the answer: "tools" or "response_format". Errors name it."""
        return "tools" if self.rule.tools else "response_format"

    def parser(self) -> AnswerParser | None:
        """Makes a parser for one answer. Returns None for a completion, because its answers are not parsed."""
        return None if self.formats is None else AnswerParser(self.formats, self.rule.tools, opened=self.opened)

    def new_call_id(self) -> str:
        """Makes a new id for a tool call."""
        assert self.formats is not None, "no calls without formats"
        assert self.formats.tools is not None, "no calls without their format"
        return self.formats.tools.call_id()


class Service:
    """Answers the requests of a server with one generator.

    Args:
        generator: generator with a tokenizer.
        name: name of the model, in requests and answers.
        limits: limits of requests. None: the defaults of `Limits`.
        aliases: other names of the model that requests may use.
        sanitize_control_tokens: True encodes control tokens in messages of all requests as plain text.
        tool_call_parser, reasoning_parser: names of formats, see `formats_of`.
        response_store: number of responses to keep, so that later requests of /v1/responses can continue them.

    Attributes:
        responses: store of the kept responses.
        names: all names of the model that requests may use. Answers have the first one.
        cut_off: number of requests that were cancelled because the server ends.
        meters: metrics of /metrics.
        created: time of creation, in seconds since the epoch.

    Raises:
        ValueError: the checkpoint has no tokenizer, or a format is unknown.
    """

    def __init__(
        self,
        generator: FastSpecGenerator,
        name: str,
        limits: Limits | None = None,
        *,
        aliases: Sequence[str] = (),
        sanitize_control_tokens: bool = False,
        tool_call_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        response_store: int = 0,
    ) -> None:
        self.generator, self.name, self.limits = generator, name, limits or Limits()
        self.names = list(dict.fromkeys([name, *aliases]))
        self.tokenizer: PreTrainedTokenizerBase = generator.tokenizer
        self.template = ChatTemplate(self.tokenizer)
        self.sanitize_control_tokens = sanitize_control_tokens
        self._parsers = {"tools": tool_call_parser, "reasoning": reasoning_parser}
        self._formats: dict[str, AnswerFormats] = {}  # by template
        self._formats_of("")  # names are checked before the first request
        self._added: dict[str, int] = self.tokenizer.get_added_vocab()
        self._special = {token: text for text, token in special_tokens(self.tokenizer).items()}
        live = Live(lambda: self._with_row, lambda: self._running - self._with_row, lambda: generator.kv_usage)
        self.meters = Meters(self.limits.seconds, name, live)
        self.responses, self.created = ResponseStore(response_store), int(time.time())
        self.cut_off, self._ended = 0, False
        self._running = 0
        self._jobs: set[Job] = set()

    @property
    def running(self) -> int:
        """Number of answers that run or wait."""
        return self._running

    @property
    def _with_row(self) -> int:
        """Number of open answers that have a batch slot."""
        return sum(answer.waited is not None for job in list(self._jobs) for answer in job.answers if answer.open)

    def _admit(self, count: int) -> None:
        if self._running + count > self.limits.requests:
            raise Refusal(
                f"{self._running} answers are unfinished, and {self.limits.requests} are allowed at once; try again "
                "later",
                status=429,
                kind="rate_limit_error",
                code="too_many_requests",
            )
        self._running += count
        self.meters.running.set(self._running)

    def _release(self, count: int) -> None:
        self._running -= count
        self.meters.running.set(self._running)

    def end(self) -> None:
        """Cancels all answers, because the server ends. Call it in the event loop.

        Answers that are still being submitted are cancelled after their submission.
        """
        self._ended = True
        for job in self._jobs:
            self._cut(job)

    def _cut(self, job: Job) -> None:
        self.cut_off += 1
        job.stop(going_down())

    def check_model(self, name: str) -> None:
        """Raises Refusal if `name` is not a name of the model."""
        if name not in self.names:
            raise Refusal(
                f"the model {name!r} is not here; this server has {', '.join(map(repr, self.names))}",
                "model",
                status=404,
                code="model_not_found",
            )

    async def start(self, body: Body, api_key: str | None = None) -> Job:
        """Submits all answers of a request to the generator. Returns them as a job.

        Args:
            body: body of the request.
            api_key: API key of the request. None: the server needs no key.

        Raises:
            Refusal: a field is not supported, or a limit is exceeded.
        """
        prompts = len(body.prompts) if isinstance(body, Completion) else 1
        count = body.drawn * prompts
        if count > self.limits.requests:  # waiting would not help
            raise Refusal(
                f"the request asks for {count} answers, and {self.limits.requests} are allowed at once; ask for fewer, "
                "or raise --limit requests=",
                "n" if body.n > 1 else "prompt",
            )
        self._admit(count)
        try:  # prompts are tokenized in a thread, so that other requests do not wait
            answers, tokens = await asyncio.to_thread(self._submit, body, api_key)
        except BaseException:
            self._release(count)
            raise

        def release() -> None:
            self._jobs.discard(job)
            self._release(count)

        job = Job(answers, tokens, self.limits.seconds, self.meters, release)
        self._jobs.add(job)
        if self._ended:  # the server ended while the answers were submitted
            self._cut(job)
        return job

    def _submit(self, body: Body, api_key: str | None = None) -> tuple[list[Answer], int]:
        """Submits all answers of a request. Returns (answers, number of tokens of all prompts). Args: see `start`."""
        plan = self._chat_plan(body) if isinstance(body, Chat) else RequestPlan(self._prompts(body))
        answers: list[Answer] = []
        drafts_from = _session_of(self.generator, api_key) | _predicted(self.generator, body.prediction)
        for prompt in plan.prompts:
            structure = self._grammar(body, plan)
            options = self._options(body, len(prompt)) | structure | drafts_from
            for copy in range(body.drawn):
                if body.seed is not None:  # the rows of generate(num_return_sequences=n, seed=seed)
                    options["seed"] = [derive_seed(body.seed, 0, copy)]
                try:
                    handle = self.generator.submit(prompt, **options)
                except (ValueError, OutOfPages) as error:
                    if structure and isinstance(error, GrammarError):
                        raise Refusal(str(error), plan.field) from None
                    raise of_option(error, body.model_fields_set) from None
                except RuntimeError as error:
                    raise (failed(error) if self.generator.asleep is None else sleeping()) from error
                parser = plan.parser()
                read = parser.marks if parser else frozenset()
                answers.append(
                    Answer(
                        len(answers),
                        handle,
                        self.tokenizer,
                        body.stops,
                        skip_special_tokens=body.skip_special_tokens,
                        parser=parser,
                        marks={id: text for id, text in self._special.items() if text in read},
                        new_call_id=plan.new_call_id,
                    )
                )
        return answers, sum(map(len, plan.prompts))

    def prompt_tokens(self, body: Chat) -> int:
        """Returns the number of tokens of a chat's prompt. Raises Refusal, see `template_ids`."""
        return len(self._chat_plan(body).prompts[0])

    def _formats_of(self, template: str) -> AnswerFormats:
        if template not in self._formats:
            self._formats[template] = formats_of(template, **self._parsers)
        return self._formats[template]

    def _chat_plan(self, body: Chat) -> RequestPlan:
        tools = body.shown or None
        template = self.template.text(tools=tools) if self.template.exists else ""
        ids = self.template_ids(
            body.messages,
            tools=tools,
            sanitize=bool(body.sanitize_control_tokens),
            variables=_variables(body, template),
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
        formats = self._formats_of(template)
        end = str(self.tokenizer.decode(ids[-_PROMPT_END:], skip_special_tokens=False))
        rule = AnswerRule(body.offered, body.must_call, not body.one_call, body.schema_of_text)
        return RequestPlan([ids], formats, rule, formats.reasoning is not None and formats.reasoning.opens(end))

    def template_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: list[Message] | None = None,
        sanitize: bool = False,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Returns the token ids of a conversation. Args: see `ChatTemplate.ids`.

        Raises:
            Refusal: there is no chat template, or it refuses the messages.
        """
        if not self.template.exists:
            raise Refusal(
                f"{self.name} has no chat template, so it takes no messages; send a prompt to /v1/completions, or "
                "serve with --chat-template FILE",
                "messages",
            )
        try:
            return self.template.ids(
                messages,
                tools=tools,
                sanitize=sanitize or self.sanitize_control_tokens,
                variables=variables,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
        except ConversationError as error:
            raise Refusal(str(error), "messages") from error

    def _grammar(self, body: Body, plan: RequestPlan) -> dict[str, Any]:
        """Returns the options of `FastSpecGenerator.submit` that replace `json_schema` by a grammar.

        An answer with reasoning or tool calls may need a grammar. Returns an empty dict if none is needed.

        Raises:
            Refusal: there is no grammar for this request, or min_tokens is given.
        """
        if plan.formats is None or not plan.rule.demands or not (plan.rule.tools or plan.formats.reasoning):
            return {}
        if body.min_tokens:
            raise Refusal(
                "min_tokens cannot be used where a grammar decides when the answer ends (tools, reasoning); leave "
                "min_tokens out",
                "min_tokens",
            )
        try:
            return {
                "json_schema": None,
                "grammar": plan.rule.grammar(plan.formats, self._added, opened=plan.opened),
            }
        except NoGrammar as error:
            raise Refusal(str(error), plan.field) from None

    def _prompts(self, body: Body) -> list[list[int]]:
        assert isinstance(body, Completion), "there are two kinds"
        special = body.add_special_tokens
        ids = [
            self.tokenizer(one, add_special_tokens=special)["input_ids"] if isinstance(one, str) else one
            for one in body.prompts
        ]
        if not all(ids):
            raise Refusal("prompt has no tokens; give it at least one character", "prompt")
        return ids

    def _options(self, body: Body, prompt: int) -> dict[str, Any]:
        options = body.options()
        room = self.generator.max_length - prompt
        limit = room if self.limits.tokens is None else min(room, self.limits.tokens)
        if room < 1:
            raise Refusal(
                f"the prompt has {prompt} tokens; prompt and answer together may have {self.generator.max_length}; "
                "shorten the prompt",
                "messages" if isinstance(body, Chat) else "prompt",
                code="context_length_exceeded",
            )
        if body.stop_token_ids and not body.ignore_eos:
            stops = None if self.generator.generation_config is None else self.generator.generation_config.eos_token_id
            own = stops if isinstance(stops, list) else [] if stops is None else [stops]
            options["eos_token_id"] = list(dict.fromkeys([*own, *body.stop_token_ids]))
        if body.drawn > body.n:  # the best answers are chosen by log-probabilities
            options.setdefault("logprobs", True)
        field, asked = body.limit
        if asked is not None and asked > limit:
            raise Refusal(f"{field} must be at most {limit} after a prompt of {prompt} tokens, got {asked}", field)
        usual = limit if isinstance(body, Chat) else min(limit, COMPLETION_TOKENS)
        defaults = self.generator.generation_config
        if options.get("do_sample") and "top_k" not in options and (defaults is None or defaults.top_k is None):
            options["top_k"] = 0  # a temperature in this protocol means the whole distribution
        return options | {"max_new_tokens": asked or usual}


def _variables(body: Chat, template: str) -> dict[str, Any]:
    """Returns the chat template's variables that the fields reasoning_effort and chat_template_kwargs set.

    Args:
        body: body of the chat.
        template: Jinja text of the template.

    Raises:
        Refusal: reasoning_effort is given, but the template reads no variable for it.
    """
    variables: dict[str, Any] = {}
    effort = body.reasoning_effort
    if effort is not None:
        read = [name for name, pattern in _SWITCHES.items() if pattern.search(template)]
        if not read:
            raise Refusal(
                f"reasoning_effort: the chat template reads none of {', '.join(_SWITCHES)}; leave it out",
                "reasoning_effort",
            )
        variables = {name: effort if name == "reasoning_effort" else effort != "none" for name in read}
    return variables | (body.chat_template_kwargs or {})


def _session_of(generator: FastSpecGenerator, api_key: str | None) -> dict[str, str]:
    """Returns the keyword argument `session` of `FastSpecGenerator.submit` for requests with this API key.

    Returns an empty dict if `api_key` is None, or if the generator does not draft from a session's earlier answers.
    """
    if api_key is None or generator.remembers != "session":
        return {}
    return {"session": blake2b(api_key.encode(), digest_size=16).hexdigest()}


def _predicted(generator: FastSpecGenerator, prediction: Prediction | None) -> dict[str, str]:
    """Returns the keyword argument `predictions` of `FastSpecGenerator.submit`.

    Returns an empty dict if `prediction` has no text or is None, or if the generator cannot draft from predictions.
    Such a generator ignores them, because they change no answer.
    """
    if prediction is None or not prediction.text or not generator.prediction_tokens:
        return {}
    return {"predictions": prediction.text}
