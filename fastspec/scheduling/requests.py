"""Requests: one prompt while the scheduler has it. Calls become requests here, and requests become results.

The mask of a row that follows a grammar depends on its last token, which the host must read first. So such a row is in
one step at a time. It pauses until that step was read, while other rows step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fastspec.adaptive.controller import DraftLengthPolicy
from fastspec.errors import InvalidLogits, UnsupportedOption
from fastspec.grammar.library import Grammars
from fastspec.grammar.row import GrammarStep, RowGrammar
from fastspec.graphs.results import RowResult
from fastspec.inputs.options import Options, RowOptions
from fastspec.inputs.prompts import RawPrompts
from fastspec.kv_cache.prefix import Node
from fastspec.output import GenerateOutput, RowStats, Stats
from fastspec.proposers.suffix import Suffix
from fastspec.scheduling.admission import draft_limit
from fastspec.scheduling.draft_length import DraftChoice
from fastspec.shapes import FULL
from fastspec.state import RUNNING, STOPPED
from fastspec.text.stop_strings import StopWatch

_NAMED = 8  # rows that an error names


@dataclass(slots=True, eq=False)
class CallPlan:
    """Facts that all requests of one call share while they run.

    Attributes:
        stop_ids: token ids that end a row.
        sampler: kind of its steps, GREEDY or FULL.
        choose_k: maps the number of steps made to the drafts of the next one, at most engine.shapes.max_drafts.
        top_logprobs: as in StepShape.
        policy: chooses k in place of `choose_k`, and observes every step.
        lengths: tokens that the longest row may get, and tokens of the shortest prompt.
        steps: steps launched so far.
        joined: True if requests may join while it runs, so that a step may not be captured yet.
    """

    stop_ids: tuple[int, ...]
    sampler: str
    choose_k: Callable[[int], int]
    top_logprobs: int | None = None
    policy: DraftLengthPolicy | None = None
    lengths: tuple[int, int] = (0, 0)
    steps: int = 0
    joined: bool = False

    @property
    def full(self) -> bool:
        """True if its rows need the full sampler."""
        return self.sampler == FULL


@dataclass(slots=True, eq=False)
class Request:
    """One prompt while the scheduler has it.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: most new tokens.
        options: sampling options and seed.
        watch: takes the new tokens of each step. Returns how many of them belong to the row if the row ends there, or
            None if it goes on. Finds ends that the device does not see.
        grammar: state of the grammar that the text follows; None: any text.
        new_tokens: tokens emitted so far.
        finish_reason: "stop" or "length" once finished; "error" if no token could be chosen or a step was interrupted;
            "cancelled" if the request was cancelled.
        invalid_at: position for which no token could be chosen.
        logprobs: log-probabilities of new_tokens, if recorded.
        top_logprobs: most probable (id, log-probability) pairs at each new token, if recorded.
        steps, plain_steps, drafted, accepted, dropped, histogram, steps_at: counts, see `RowStats`.
        draft_length: the host's copy of DecodeState.draft_lengths.
        draft_lag: True if a step without drafts was launched since the draft last caught up.
        draft_limit: the host's copy of DecodeState.draft_limits.
        cached: prompt tokens whose K/V were found in the prefix cache.
        nodes: nodes of the prefix cache whose pages the row shares.
        has_tables: True if the row's biases and counts are filled; only steps of the full sampler read them.
        prefilled: True if the row's next token is its first, from the last pass over its prompt.
    """

    prompt: list[int]
    max_new_tokens: int
    options: RowOptions
    watch: Callable[[list[int]], int | None] | None = None
    grammar: RowGrammar | None = None
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
    prefilled: bool = False

    @property
    def length(self) -> int:
        """Tokens of prompt and output so far."""
        return len(self.prompt) + len(self.new_tokens)

    @property
    def limit(self) -> int:
        """Largest length of the row, in tokens."""
        return len(self.prompt) + self.max_new_tokens

    def begin(self, max_drafts: int) -> None:
        """Allocates the counts of steps with up to `max_drafts` drafts."""
        self.histogram = [0] * (max_drafts + 1)
        self.steps_at = [0] * (max_drafts + 1)

    def stats(self) -> RowStats:
        """Returns the counts of this row."""
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

    def record(self, result: RowResult, k: int) -> list[int]:
        """Adds the result of one step with k drafts; returns the step's new tokens."""
        if result.finish == RUNNING and result.accepted < 0:
            self.invalid_at = self.length - 1 - result.accepted
            self.finish_reason = "error"
            return []
        tokens = result.block[: result.emitted]
        whole = self.grammar.advance(tokens) if self.grammar is not None else None
        tokens = tokens[:whole]  # before the watch: tokens behind the end of the grammar's text are not the row's
        end = self.watch(tokens) if self.watch else None
        tokens = tokens[:end]
        if result.drafted and self.grammar is None:  # the draft model never reads drafts of a grammar
            self.draft_length = min(self.length + result.drafted - 1, self.length + len(tokens) - 1)
        self.new_tokens += tokens
        self.steps += 1
        self.plain_steps += not result.drafted
        self.drafted += result.drafted
        self.accepted += result.accepted
        self.dropped += result.accepted + 1 - len(tokens)
        self.histogram[result.accepted] += 1
        self.steps_at[k] += 1
        if result.finish != RUNNING:
            self.finish_reason = "stop" if result.finish == STOPPED else "length"
        if end is not None or whole is not None:
            self.finish_reason = "stop"
        return tokens


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A launched step whose results were not read yet.

    Attributes:
        sequence: its number in the result ring.
        requests: requests by the row that each had at the launch.
        k: drafts.
        bucket: rows that it covers.
        resumed: catch-up passes queued before it. None: there were none, and the step before it drafted.
        timed: True if only such passes came between it and the step before it, so that its time is usable.
        drafting: rows that could draft.
        first_token: True for the step for first tokens, whose k no policy chose.
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
    """Returns the tokens that the longest row may get, and the tokens of the shortest prompt."""
    longest = max((request.limit for request in requests), default=0)
    return longest, min((len(request.prompt) for request in requests), default=0)


def due(rows: Mapping[int, Request], in_flight: Iterable[InFlightStep]) -> dict[int, Request]:
    """Selects the rows that may run in the next step. A row with a grammar waits until its last step was read."""
    waiting = {request for step in in_flight for request in step.requests.values() if request.grammar is not None}
    return {row: request for row, request in rows.items() if request not in waiting}


def may_draft(rows: Mapping[int, Request]) -> list[int]:
    """Selects the rows that have not opted out of drafting."""
    return [row for row, request in rows.items() if request.options.draft_limit != 0]


def constrained(rows: Mapping[int, Request]) -> bool:
    """True if one of these rows follows a grammar."""
    return any(request.grammar is not None for request in rows.values())


def grammar_steps(
    requests: Mapping[int, Request], calls: Mapping[Request, CallPlan], k: int
) -> tuple[int, dict[int, GrammarStep]]:
    """Returns the drafts of the next step, and draft tokens and masks of each row with a grammar.

    Args:
        requests: row -> request.
        calls: request -> its plan.
        k: drafts of the other rows; if 0, the plans of rows with a grammar say how many the step has.
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
        requests: one for every row.
        options: of the call.
        prompts: as the caller passed them.
        choice: drafts of its steps.
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
    """Makes a request for every row: `chosen.copies` of the first prompt, then of the second, and so on.

    Args:
        prompts: checked token ids.
        chosen: options of the call.
        tokenizer: reads stop strings and grammars.
        max_length: tokens of prompt and output that a row may have.
        grammars: of the target's vocabulary; None: no row follows one.

    Raises:
        ValueError: a row would be too long, stop strings or a grammar lack a tokenizer, or a grammar cannot be used.
    """
    for index, prompt in enumerate(prompts):
        if len(prompt) + chosen.max_new_tokens > max_length:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; with {chosen.max_new_tokens} new ones that is more than "
                f"max_length={max_length}. Shorten one of them, or make the generator with a larger max_length"
            )
    if chosen.stop_strings and tokenizer is None:
        raise ValueError(
            "stop_strings need a tokenizer, and the target's checkpoint brings none; pass tokenizer=..., or stop at "
            "token ids with eos_token_id"
        )
    requests = []
    for index, row in enumerate(chosen.rows):
        prompt = prompts[index // chosen.copies]
        watch = None
        if chosen.stop_strings and tokenizer:
            watch = StopWatch(tokenizer, chosen.stop_strings, prompt, across_prompt=chosen.across_prompt)
        grammar = None
        if row.grammar is not None and grammars is not None:
            grammar = grammars.row(row.grammar, tokenizer, prompt, chosen.stop_ids)
        requests.append(Request(prompt, chosen.max_new_tokens, row, watch, grammar))
    return requests


def check_texts(rows: Iterable[RowOptions], texts: Suffix | None) -> None:
    """Checks that the generator can use predictions and sessions of these rows.

    Raises:
        UnsupportedOption: its proposer does not.
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
    """Returns the lookup if it has room for corpora; else raises UnsupportedOption."""
    if texts is None or not texts.corpus_tokens:
        raise UnsupportedOption("corpora need a generator with proposer=Suffix(corpus_tokens=...), with their tokens")
    return texts


def check_valid(requests: list[Request], copies: int) -> None:
    """Raises InvalidLogits if a row has failed."""
    failed = [(index, request.invalid_at) for index, request in enumerate(requests) if request.invalid_at is not None]
    if not failed:
        return
    named = [_place(index, position, copies) for index, position in failed[:_NAMED]]
    more = f" and {len(failed) - _NAMED} more" if len(failed) > _NAMED else ""
    raise InvalidLogits(
        f"no token could be chosen for {'; '.join(named)}{more}: the target's logits there are NaN or infinite, or "
        "leave no token that the options allow. The other rows are whole (this error's `output`). Check the weights, "
        "take a wider dtype (float16 overflows early), or loosen allowed_token_ids, biases, min_new_tokens and the "
        "grammar"
    )


def _place(index: int, position: int, copies: int) -> str:
    row = f"prompt {index // copies}" + (f", sequence {index % copies}" if copies > 1 else "")
    return f"{row}, position {position}"


def output_of(call: PreparedCall, stats: Stats) -> GenerateOutput:
    """Builds the output of a call; fields that the caller did not ask for are None."""
    requests, chosen = call.requests, call.options
    recorded = chosen.top_logprobs is not None
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
    )


def _sequences(requests: list[Request], chosen: Options, raw: RawPrompts) -> Tensor:
    """Joins left-padded prompts and new tokens: LongTensor [B, T + new] on the device of the caller's prompts."""
    width, longest = raw.width, max(len(request.new_tokens) for request in requests)
    rows = []
    for index, request in enumerate(requests):
        row = raw.rows[index // chosen.copies]  # the caller's own padding ids are kept
        tail = [chosen.pad_token_id] * (longest - len(request.new_tokens))
        rows.append([chosen.pad_token_id] * (width - len(row)) + row + request.new_tokens + tail)
    return torch.tensor(rows, dtype=torch.int64, device=raw.device)
