"""Requests: one prompt each with its output so far. Converts calls to requests, and ended requests to results.

A request with a grammar needs a new token mask after every step, and the host computes it from the last token. So such
a request is in at most one launched step. It pauses until the host has read that step. Other requests continue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fastspec.adaptive.controller import DraftLengthPolicy
from fastspec.engine.scores import PromptScores
from fastspec.errors import InvalidLogits, UnsupportedOption
from fastspec.grammar.library import Grammars
from fastspec.grammar.row import GivenTokens, GrammarStep, Guide
from fastspec.graphs.results import RowResult
from fastspec.inputs.options import Options, RowOptions
from fastspec.inputs.prompts import RawPrompts
from fastspec.inputs.scored import ScoredRow
from fastspec.kv_cache.prefix import Node
from fastspec.output import GenerateOutput, RowStats, ScoreOutput, Stats
from fastspec.proposers.suffix import Suffix
from fastspec.scheduling.admission import draft_limit
from fastspec.scheduling.draft_length import DraftChoice
from fastspec.shapes import FULL
from fastspec.state import RUNNING, STOPPED
from fastspec.text.stop_strings import StopWatch

_NAMED = 8  # largest number of rows that an error names
_TOLD = 200  # characters of a grammar's own message that an error repeats


@dataclass(slots=True, eq=False)
class CallPlan:
    """Settings that all requests of one call share while they run.

    Attributes:
        stop_ids: token ids that end a request.
        sampler: sampler of the steps, GREEDY or FULL.
        choose_k: returns the number of draft tokens of the next step, at most engine.shapes.max_drafts. Its argument
            is the number of steps that were launched before.
        top_logprobs: see `StepShape`.
        policy: chooses the number of draft tokens instead of `choose_k`, and observes every step. None: `choose_k`
            chooses.
        lengths: (token limit of the longest sequence, number of tokens of the shortest prompt).
        steps: number of steps launched so far.
        joined: True if other requests may join while the call runs. It may then need a step that is not captured yet.
        processed: see `StepShape`.
    """

    stop_ids: tuple[int, ...]
    sampler: str
    choose_k: Callable[[int], int]
    top_logprobs: int | None = None
    policy: DraftLengthPolicy | None = None
    lengths: tuple[int, int] = (0, 0)
    steps: int = 0
    joined: bool = False
    processed: bool = False

    @property
    def full(self) -> bool:
        """True if the steps of the call need the full sampler (FULL)."""
        return self.sampler == FULL


@dataclass(slots=True, eq=False)
class Request:
    """One prompt with its options, its output so far, and its statistics.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: largest number of new tokens.
        options: sampling options and seed.
        watch: called with the new tokens of each step, to find ends that the device does not detect, such as stop
            strings. Returns the number of these tokens up to the end of the output, or None if it continues. None: no
            such check.
        grammar: state of the grammar, or of the given tokens, that the output must follow. None: any output.
        scores: collects the log-probabilities of the prompt's tokens. None: they are not recorded.
        new_tokens: tokens emitted so far.
        finish_reason: "stop" or "length" once finished; "error" if no token could be chosen or a step was interrupted;
            "cancelled" if the request was cancelled.
        invalid_at: position for which no token could be chosen. None: there is no such position.
        logprobs: log-probabilities of new_tokens, if recorded.
        top_logprobs: most probable (id, log-probability) pairs for each new token, if recorded.
        steps, plain_steps, drafted, accepted, dropped, histogram, steps_at: statistics, see `RowStats`.
        draft_length: the host's copy of DecodeState.draft_lengths.
        draft_lag: True if the request did not draft in a step since the draft model last read all its tokens.
        draft_limit: the host's copy of DecodeState.draft_limits.
        cached: number of prompt tokens whose K/V were found in the prefix cache.
        nodes: nodes of the prefix cache whose pages the request shares.
        has_tables: True if its logit biases and token counts are on the device. Only steps with sampler FULL read them.
        admitted: `time.perf_counter` when the request got a batch slot. None: it waits.
        prefilled: True if the first token is not emitted yet and will come from the last prefill pass.
        weight_version: version of the target's weights with which the request runs.
    """

    prompt: list[int]
    max_new_tokens: int
    options: RowOptions
    watch: Callable[[list[int]], int | None] | None = None
    grammar: Guide | None = None
    scores: PromptScores | None = None
    new_tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    invalid_at: int | None = None
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    steps: int = 0
    plain_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    dropped: int = 0
    histogram: list[int] = field(default_factory=list)
    steps_at: list[int] = field(default_factory=list)
    draft_length: int = 0
    draft_lag: bool = False
    draft_limit: int = 0
    cached: int = 0
    nodes: list[Node] = field(default_factory=list)
    has_tables: bool = False
    admitted: float | None = None
    prefilled: bool = False
    weight_version: int | str = 0

    @property
    def length(self) -> int:
        """Number of tokens of the prompt and of the output so far."""
        return len(self.prompt) + len(self.new_tokens)

    @property
    def limit(self) -> int:
        """Largest number of tokens of prompt and output together."""
        return len(self.prompt) + self.max_new_tokens

    def begin(self, max_drafts: int) -> None:
        """Resets `histogram` and `steps_at` to zeros, for steps with up to `max_drafts` draft tokens."""
        self.histogram = [0] * (max_drafts + 1)
        self.steps_at = [0] * (max_drafts + 1)

    def stats(self) -> RowStats:
        """Returns the statistics of this request."""
        return RowStats(
            self.steps,
            self.plain_steps,
            self.drafted,
            self.accepted,
            len(self.new_tokens),
            self.dropped,
            tuple(self.histogram),
            tuple(self.steps_at),
            self.cached,
        )

    def record(self, result: RowResult, k: int, *, feeds_drafts: bool = True) -> list[int]:
        """Adds the result of one decode step to the request. Returns the new tokens.

        Args:
            result: the step's result for this request.
            k: number of draft tokens of the step.
            feeds_drafts: see `ProposerBase`.
        """
        if result.finish == RUNNING and result.accepted < 0:
            self.invalid_at = self.length - 1 - result.accepted
            self.finish_reason = "error"
            return []
        tokens = result.block[: result.emitted]
        whole = self.grammar.advance(tokens) if self.grammar is not None else None
        # before `watch` is called: tokens after the end of the grammar's text do not belong to the row
        tokens = tokens[:whole]
        end = self.watch(tokens) if self.watch else None
        tokens = tokens[:end]
        if result.drafted and self.grammar is None:  # the draft model never reads drafts of a grammar
            fed = result.drafted if feeds_drafts else 1
            self.draft_length = min(self.length + fed - 1, self.length + len(tokens) - 1)
        self.new_tokens += tokens
        # drafts behind the end of a row say nothing of the drafter
        accepted = min(result.accepted, len(tokens))
        self.steps += 1
        self.plain_steps += not result.drafted
        self.drafted += result.drafted if len(tokens) > result.accepted else accepted
        self.accepted += accepted
        self.dropped += accepted + 1 - len(tokens)
        self.histogram[accepted] += 1
        self.steps_at[k] += 1
        if result.finish != RUNNING:
            self.finish_reason = "stop" if result.finish == STOPPED else "length"
        if end is not None or whole is not None:
            self.finish_reason = "stop"
        return tokens


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A launched step whose results the host has not read yet.

    Attributes:
        sequence: sequence number of the step in the ring buffer of results.
        requests: index of a batch slot -> its request at the launch.
        k: number of draft tokens per request.
        bucket: number of batch slots that the launch covers.
        resumed: cost of the passes that let the draft model read missing tokens before this step, see `passes_of`.
            None: there were none, and the previous step drafted or this one does not.
        timed: True if only such passes ran between the previous step and this one. Only then is the measured time of
            the step used.
        drafting: indices of the batch slots that may have draft tokens.
        first_token: True if the step only emits the first tokens of long prompts (`step.first_token_step`). No policy
            chose its k.
    """

    sequence: int
    requests: dict[int, Request]
    k: int
    bucket: int
    resumed: float | None
    timed: bool
    drafting: frozenset[int]
    first_token: bool = False


def lengths_of(requests: list[Request]) -> tuple[int, int]:
    """Returns (token limit of the longest sequence, number of tokens of the shortest prompt). (0, 0) if empty."""
    longest = max((request.limit for request in requests), default=0)
    return longest, min((len(request.prompt) for request in requests), default=0)


def due(rows: Mapping[int, Request], in_flight: Iterable[InFlightStep]) -> dict[int, Request]:
    """Returns the batch slots, with their requests, that may run in the next step.

    A request with a grammar may run only after the host has read its last step.

    Args:
        rows: index of a batch slot -> its request.
        in_flight: launched steps that the host has not read.
    """
    waiting = {request for step in in_flight for request in step.requests.values() if request.grammar is not None}
    return {row: request for row, request in rows.items() if request not in waiting}


def may_draft(rows: Mapping[int, Request]) -> list[int]:
    """Returns the indices of those batch slots whose requests have not opted out of drafting."""
    return [row for row, request in rows.items() if request.options.draft_limit != 0]


def constrained(rows: Mapping[int, Request]) -> bool:
    """True if one of these requests has a grammar."""
    return any(request.grammar is not None for request in rows.values())


def grammar_steps(
    requests: Mapping[int, Request], calls: Mapping[Request, CallPlan], k: int
) -> tuple[int, dict[int, GrammarStep]]:
    """Returns the number of draft tokens of the next step, and the draft tokens and masks of requests with a grammar.

    Draft tokens and masks are returned as {index of a batch slot: its `GrammarStep`}.

    Args:
        requests: index of a batch slot -> its request.
        calls: request -> plan of its call.
        k: number of draft tokens of the requests without a grammar. 0: they have none, and the plans of requests with a
            grammar determine the result.
    """
    steps, largest = {}, 0
    for row, request in requests.items():
        if request.grammar is not None:
            asked = k or calls[request].choose_k(calls[request].steps)
            steps[row] = request.grammar.next_step(draft_limit(request.options, asked))
            largest = max(largest, asked if steps[row].drafts else 0)
    return k or largest, steps


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A checked call, ready to be scheduled.

    Attributes:
        requests: one request for every sequence of the call.
        options: options of the call.
        prompts: the prompts as the user passed them.
        choice: numbers of draft tokens that the call's steps may have.
    """

    requests: list[Request]
    options: Options
    prompts: RawPrompts
    choice: DraftChoice


def requests_of(
    prompts: list[list[int]],
    chosen: Options,
    tokenizer: PreTrainedTokenizerBase | None,
    max_length: int,
    grammars: Grammars | None = None,
) -> list[Request]:
    """Makes a request for every sequence: `chosen.copies` of the first prompt, then of the second, and so on.

    Args:
        prompts: checked token ids.
        chosen: options of the call.
        tokenizer: reads stop strings and grammars.
        max_length: largest number of tokens of prompt and output together.
        grammars: grammars over the target's vocabulary. None: no request has a grammar.

    Raises:
        ValueError: a sequence would be too long, stop strings or a grammar need a missing tokenizer, or a grammar is
            invalid.
    """
    for index, (prompt, first) in enumerate(zip(prompts, chosen.rows[:: chosen.copies], strict=True)):
        new_tokens = _new_tokens(chosen, first)
        if len(prompt) + new_tokens > max_length:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; with {new_tokens} new ones that is more than "
                f"max_length={max_length}. Shorten one of them, or make the generator with a larger max_length"
            )
    if chosen.stop_strings and tokenizer is None:
        raise ValueError(
            "stop_strings need a tokenizer, and the target's checkpoint has none; pass tokenizer=..., or stop at "
            "token ids with eos_token_id"
        )
    requests = []
    for index, row in enumerate(chosen.rows):
        prompt, scores = prompts[index // chosen.copies], None
        watch = None
        if chosen.stop_strings and tokenizer:
            watch = StopWatch(tokenizer, chosen.stop_strings, prompt, across_prompt=chosen.across_prompt)
        grammar: Guide | None = None
        if row.grammar is not None and grammars is not None:
            grammar = grammars.row(row.grammar, tokenizer, prompt, chosen.stop_ids)
        if row.given is not None and grammars is not None:
            grammar = GivenTokens(row.given, grammars.vocab_size)
        if chosen.prompt_top_logprobs is not None and index % chosen.copies == 0:
            scores = PromptScores(prompt, chosen.prompt_top_logprobs)
        requests.append(Request(prompt, _new_tokens(chosen, row), row, watch, grammar, scores))
    return requests


def check_texts(rows: Iterable[RowOptions], texts: Suffix | None) -> None:
    """Checks that the generator can use the predictions and sessions of these requests.

    Args:
        rows: options of the requests.
        texts: the generator's lookup proposer. None: it has no lookup proposer.

    Raises:
        UnsupportedOption: the generator's proposer cannot use them.
        ValueError: a prediction is too long.
    """
    for row in rows:
        longest = texts.prediction_tokens if texts else 0
        if row.prediction and not longest:
            raise UnsupportedOption(
                "predictions need a generator with proposer=Suffix(), and this one has none; leave predictions out"
            )
        if len(row.prediction) > longest:
            raise ValueError(
                f"predictions: one has {len(row.prediction)} tokens, and there is room for {longest}; shorten it, or "
                "make the generator with a larger Suffix(prediction_tokens=...)"
            )
        if row.session is not None and (texts is None or texts.remember != "session"):
            raise UnsupportedOption(
                'session needs a generator with proposer=Suffix(remember="session"), and this one has none; leave '
                "session out"
            )


def corpora_of(texts: Suffix | None) -> Suffix:
    """Returns the lookup proposer if it has memory for corpora. Raises UnsupportedOption if not."""
    if texts is None or not texts.corpus_tokens:
        raise UnsupportedOption("corpora need a generator with proposer=Suffix(corpus_tokens=...), with their tokens")
    return texts


def _new_tokens(chosen: Options, row: RowOptions) -> int:
    """Returns the largest number of new tokens of a request."""
    return chosen.max_new_tokens if row.given is None else len(row.given)


def check_valid(requests: list[Request], copies: int) -> None:
    """Raises InvalidLogits if no token could be chosen for one of the requests.

    Args:
        requests: requests of a call.
        copies: number of sequences per prompt. Only the error message uses it.
    """
    failed = [(index, request.invalid_at) for index, request in enumerate(requests) if request.invalid_at is not None]
    if not failed:
        return
    grammar = requests[failed[0][0]].grammar
    if grammar is not None and grammar.fault:
        raise InvalidLogits(
            f"the grammar of {_place(*failed[0], copies)} has failed: {grammar.fault[:_TOLD]}. The other rows are "
            "complete (this error's `output`). Write the grammar with fewer ways to read the same text"
        )
    named = [_place(index, position, copies) for index, position in failed[:_NAMED]]
    more = f" and {len(failed) - _NAMED} more" if len(failed) > _NAMED else ""
    raise InvalidLogits(
        f"no token could be chosen for {'; '.join(named)}{more}: the target's logits there are NaN or infinite, or "
        "leave no token that the options allow. The other rows are complete (this error's `output`). Check the "
        "weights, "
        "use a dtype with a larger range than float16, or loosen allowed_token_ids, biases, min_new_tokens and the "
        "grammar"
    )


def _place(index: int, position: int, copies: int) -> str:
    row = f"prompt {index // copies}" + (f", sequence {index % copies}" if copies > 1 else "")
    return f"{row}, position {position}"


def output_of(call: PreparedCall, stats: Stats) -> GenerateOutput:
    """Makes the output of a call from its ended requests. Fields that the user did not ask for are None."""
    requests, chosen = call.requests, call.options
    recorded = chosen.top_logprobs is not None
    scores = [request.scores for request in requests[:: chosen.copies] if request.scores is not None]
    return GenerateOutput(
        _sequences(requests, chosen, call.prompts),
        [request.new_tokens for request in requests],
        [cast("str", request.finish_reason) for request in requests],
        stats,
        [request.logprobs for request in requests] if recorded else None,
        [request.top_logprobs for request in requests] if recorded else None,
        [request.watch.text for request in requests if isinstance(request.watch, StopWatch)]
        if chosen.stop_strings
        else None,
        [each.logprobs for each in scores] if scores else None,
        [each.top_logprobs for each in scores] if scores else None,
    )


def score_output_of(rows: list[ScoredRow], call: PreparedCall, stats: Stats) -> ScoreOutput:
    """Makes the output of a call of `score`.

    Args:
        rows: all rows of the call, each a prompt and its answer.
        call: the call, with one request for each row that has tokens to score.
        stats: statistics of the call.

    Raises:
        InvalidLogits: a log-probability is NaN.
    """
    requests, prompts = iter(call.requests), call.options.prompt_top_logprobs is not None
    values, tops = [], []
    for row in rows:
        request = next(requests) if row.given else None
        scores = None if request is None else request.scores
        values.append(row.parts(scores.logprobs if scores else [], request.logprobs if request else []))
        tops.append(row.parts(scores.top_logprobs if scores else [], request.top_logprobs if request else []))
    for index, (row, (prompt, answer)) in enumerate(zip(rows, values, strict=True)):
        first = 1 if prompts else row.length
        for position, value in enumerate(prompt + answer, first):
            if math.isnan(value):
                raise InvalidLogits(
                    f"row {index}, position {position}: the target's logits for this token are NaN or infinite. Check "
                    "the weights, or take a wider dtype (float16 overflows early)"
                )
    return ScoreOutput(
        [answer for _, answer in values],
        [answer for _, answer in tops],
        [prompt for prompt, _ in values] if prompts else None,
        [prompt for prompt, _ in tops] if prompts else None,
        stats,
    )


def _sequences(requests: list[Request], chosen: Options, raw: RawPrompts) -> Tensor:
    """Joins prompts, padded on the left, and new tokens, padded on the right.

    Returns:
        LongTensor [number of sequences, prompt length + new tokens] on the device of the user's prompts.
    """
    width, longest = raw.width, max(len(request.new_tokens) for request in requests)
    rows = []
    for index, request in enumerate(requests):
        row = raw.rows[index // chosen.copies]  # keeps the user's own padding ids
        tail = [chosen.pad_token_id] * (longest - len(request.new_tokens))
        rows.append([chosen.pad_token_id] * (width - len(row)) + row + request.new_tokens + tail)
    return torch.tensor(rows, dtype=torch.int64, device=raw.device)
