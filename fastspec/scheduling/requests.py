"""One prompt while the scheduler has it, and what the requests of one call have in common.

The mask of a row that follows a grammar depends on its last token, which the host must read first. So such a row is in
one step at a time: it is paused until that step was read, and runs again in a later one. Other rows step meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from fastspec.grammar.row import GrammarStep, RowGrammar
from fastspec.graphs.results import RowResult
from fastspec.inputs.options import RowOptions
from fastspec.kv_cache.prefix import Node
from fastspec.output import RowStats
from fastspec.scheduling.admission import draft_limit
from fastspec.scheduling.step_timer import DraftLengthPolicy
from fastspec.shapes import FULL
from fastspec.state import RUNNING, STOPPED


@dataclass(slots=True, eq=False)
class Call:
    """What the requests of one call have in common.

    Attributes:
        stop_ids: end a row.
        sampler: kind of the steps that its rows need: GREEDY or FULL.
        choose_k: drafts for the next step, given the number of steps made; at most engine.max_drafts.
        top_logprobs: as in StepShape.
        policy: chooses instead of choose_k, and is told what every step did.
        lengths: tokens that the longest of its rows may get, and those of its shortest prompt.
        steps: launched so far with rows of it.
        joined: requests join it while it runs, so that steps may come that were not captured before.
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
        """Whether its rows need everything that options can ask for."""
        return self.sampler == FULL


@dataclass(slots=True, eq=False)
class Request:
    """One prompt while the scheduler has it.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: cap on new tokens.
        options: sampling options and seed.
        watch: called with the new tokens of each step; returns how many of them belong to the row if it ends there,
            or None if it goes on. For ends that the device does not see.
        new_tokens: emitted so far.
        finish_reason: "stop" or "length" once finished, "error" when no token could be chosen or the device's work was
            interrupted, "cancelled" when the request was cancelled.
        invalid_at: the position that no token could be chosen for.
        logprobs: of new_tokens, when recorded.
        top_logprobs: the most probable (id, log-probability) pairs at each new token, when recorded.
        draft_length: the host's copy of DecodeState.draft_lengths.
        draft_lag: a step without drafts was launched since the draft last caught up.
        draft_limit: the host's copy of DecodeState.draft_limits.
        cached: tokens of the prompt whose K/V were found in the prefix cache.
        nodes: nodes of the prefix cache whose pages the row shares.
        grammar: the state of the grammar that its text follows; None: there is none.
        has_tables: the row's biases and counts are filled, which steps of the full sampler read.
        prefilled: the row's first token comes next, from what the last pass over its prompt left.
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
        """Tokens of prompt and output."""
        return len(self.prompt) + len(self.new_tokens)

    @property
    def limit(self) -> int:
        """Largest length of the row, in tokens."""
        return len(self.prompt) + self.max_new_tokens

    def begin(self, max_drafts: int) -> None:
        """Makes room for the counts of steps of up to `max_drafts` drafts."""
        self.histogram = [0] * (max_drafts + 1)
        self.steps_at = [0] * (max_drafts + 1)

    def stats(self) -> RowStats:
        """What happened to this row."""
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
        """Adds the result of one step of k drafts to the request; returns the step's new tokens."""
        if result.finish == RUNNING and result.accepted < 0:
            self.invalid_at = self.length - 1 - result.accepted
            self.finish_reason = "error"
            return []
        tokens = result.block[: result.emitted]
        whole = self.grammar.advance(tokens) if self.grammar is not None else None
        tokens = tokens[:whole]  # first: what comes behind the end of a grammar's text is no text of the row
        end = self.watch(tokens) if self.watch else None
        tokens = tokens[:end]
        if result.drafted and self.grammar is None:  # the draft model was not fed a grammar's drafts
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
    """A step whose results were not read yet.

    Attributes:
        sequence: its number in the result ring.
        requests: by the row each had when it was launched.
        k: drafts.
        bucket: rows it covers.
        resumed: catch-up passes that were queued before it, if there were any or the step before it was a plain one;
            else None.
        timed: nothing but such passes came between it and the step before it, so its time can be used.
        drafting: rows that could draft.
        first_token: the step for first tokens, which no policy chose.
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
    """Tokens that the longest of their rows may get, and those of the shortest prompt."""
    longest = max((request.limit for request in requests), default=0)
    return longest, min((len(request.prompt) for request in requests), default=0)


def due(rows: Mapping[int, Request], in_flight: Iterable[InFlightStep]) -> dict[int, Request]:
    """The rows that may run in the next step: all but those with a grammar whose last step was not read yet."""
    waiting = {request for step in in_flight for request in step.requests.values() if request.grammar is not None}
    return {row: request for row, request in rows.items() if request not in waiting}


def may_draft(rows: Mapping[int, Request]) -> list[int]:
    """The rows, of those that the next step is for, that may draft in it: those that have not opted out."""
    return [row for row, request in rows.items() if request.options.draft_limit != 0]


def constrained(rows: Mapping[int, Request]) -> bool:
    """Whether one of these rows follows a grammar."""
    return any(request.grammar is not None for request in rows.values())


def grammar_steps(
    requests: Mapping[int, Request], calls: Mapping[Request, Call], k: int
) -> tuple[int, dict[int, GrammarStep]]:
    """The number of drafts of the next step, and draft tokens and masks of each row with a grammar.

    Args:
        requests: row -> request.
        calls: request -> its call.
        k: drafts of the other rows; if 0, the step has as many as the calls of rows with a grammar ask for.
    """
    steps, largest = {}, 0
    for row, request in requests.items():
        if request.grammar is not None:
            asked = k or calls[request].choose_k(calls[request].steps)
            steps[row] = request.grammar.next_step(draft_limit(request.options, asked))
            largest = max(largest, asked if steps[row].drafts else 0)
    return k or largest, steps
