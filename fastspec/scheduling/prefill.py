"""Prefills prompts: the queue of waiting requests, and the request whose prompt is being prefilled.

First come, first served: the first request of the queue gets a row when a row is free and its pages fit. Idle pages of
the prefix cache count as free. No request overtakes an earlier one. Prompts are prefilled one after the other, so a
prompt can share pages of the previous one. A row runs when its prompt, except the last token, is prefilled. The first
step feeds that last token. A long prompt is prefilled completely, and its first token comes from the last pass
(`step.first_token_step`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from itertools import chain, pairwise

from fastspec.engine.engine import Engine
from fastspec.kv_cache.prefix import Node, PrefixCache
from fastspec.proposers.interface import kept_in_pages, reads_back_of
from fastspec.scheduling.requests import Request
from fastspec.shapes import DELTA_CHUNK, chunks_of
from fastspec.state import PAUSED, PREFILLED, RUNNING

# prompt tokens up to which a pass takes hardly longer than one over a few tokens: it is limited by reading the weights
_PASS_ROWS = 128
_MAX_BUDGETS = 4  # largest number of budgets that one step spends, if many short prompts wait
_DRAFT_RATE = 4  # lower limit of the tokens that a draft model reads in the time in which the target reads one


@dataclass(slots=True)
class Passes:
    """Prefill passes of the target or of the draft that are not queued yet.

    Attributes:
        position: first position of the next pass.
        remaining: sizes of the passes.
    """

    position: int
    remaining: deque[int] = field(default_factory=deque)

    def take(self, limit: int | None, *, at_least_one: bool) -> list[int]:
        """Removes and returns the next passes with at most `limit` tokens together.

        If `at_least_one`, one may be longer.
        """
        taken: list[int] = []
        while self.remaining and (
            limit is None or (at_least_one and not taken) or sum(taken) + self.remaining[0] <= limit
        ):
            taken.append(self.remaining.popleft())
        return taken


@dataclass(slots=True)
class ShortPass:
    """Last pass of a prompt, short enough to share a launch with those of other prompts.

    Attributes:
        request: request of the prompt.
        start, chunk: first position and tokens of the pass.
        draft: first position of the draft's pass, which has `chunk` tokens, too. None: the draft has no pass now.
    """

    request: Request
    start: int
    chunk: int
    draft: int | None = None


@dataclass(slots=True)
class PrefillQueue:
    """Waiting requests, and their prefill into a row.

    Attributes:
        engine: engine with the KV caches.
        waiting: requests without a row, in the order in which they came.
        request: the request whose prompt is being prefilled. None: no prompt is.
        row: row of this request.
    """

    engine: Engine
    waiting: deque[Request] = field(default_factory=deque)
    request: Request | None = None
    row: int = 0
    _deferred: dict[int, ShortPass] = field(
        default_factory=dict
    )  # row -> last pass of its prompt, which waits for those of other prompts
    _target: Passes = field(default_factory=lambda: Passes(0))
    _draft: Passes | None = None  # passes of the draft; None: the draft catches up later, in steps
    _refused: tuple[Request, int] | None = None  # request that did not fit, and the number of free and idle pages then

    def begin(self, rows: Collection[int], positions: int) -> tuple[Request, tuple[int, ...]] | None:
        """Gives the first waiting request the lowest free row and its pages. Returns None if it must wait.

        Args:
            rows: rows that are in use.
            positions: number of positions that the request may write.
        """
        table, prefix, request = self.engine.pages, self.engine.prefix, self.waiting[0]
        row = next((row for row in range(self.engine.state.batch) if row not in rows), None)
        seen = request, table.num_free + table.num_idle
        if row is None or seen == self._refused:
            return None
        nodes = prefix.match(request.prompt, self._shareable(request)) if prefix is not None else []
        # the hidden states of all tokens are wanted for their scores: passes write the same bits to shared pages again
        known = 0 if request.scores is not None else self._resumable(nodes, draft=False)
        if not self.engine.sizes.exact:
            # positions that are computed again may get other bits, so they must not be in shared pages
            nodes = nodes[:known]
        shared = tuple(page for node in nodes for page in node.pages)
        if not table.can_fit(positions, shared):
            self._refused = seen
            return None
        if prefix is not None:
            prefix.make_room(table.pages_for(positions) - len(shared), nodes)
        pages = table.reserve(row, positions, shared)
        self.waiting.popleft()
        self.request, self.row, self._refused, request.nodes = request, row, None, nodes
        if prefix is not None:
            request.cached = known * prefix.unit
            if kept_in_pages(self.engine.modules.proposer):
                drafted = nodes[: drafted_upto(prefix, nodes) // prefix.unit]
                request.draft_length = self._resumable(drafted, draft=True) * prefix.unit
        return request, pages

    def budgets(self, running: int) -> int:
        """Returns how many times the prefill budget may be used before the next step.

        More than once if more short prompts wait than rows run. So requests that arrive together soon run together.
        """
        short = sum(2 * len(request.prompt) <= self.engine.sizes.batch_tokens for request in self.waiting)
        return max(1, min(_MAX_BUDGETS, short // max(1, running)))

    def plan(self, *, drafting: bool, max_tokens: int | None) -> None:
        """Splits the prompt into passes.

        Args:
            drafting: True to prefill the draft together with the target. False: it catches up when the row first
                drafts.
            max_tokens: upper limit of tokens per pass, as far as that keeps the same bits. None: no limit.
        """
        engine, request = self.engine, self.request
        assert request is not None, "it has begun"
        length, self._draft = len(request.prompt), None
        self._resume(request, self.row, request.cached, draft=False)
        self._resume(request, self.row, request.draft_length, draft=True)
        stop = length if engine.prompts.takes_whole(length) else length - 1
        self._target = self._passes(request, request.cached, stop, max_tokens, draft=False)
        if drafting and engine.modules.proposer is not None:
            stop, start = min(length - self._back, engine.modules.proposer.max_length), request.draft_length
            self._draft = self._passes(request, start, stop, max_tokens and _DRAFT_RATE * max_tokens, draft=True)

    def feed(self, limit: int | None, *, at_least_one: bool) -> int:
        """Queues passes that together take about as long as the target's passes over `limit` tokens.

        After the last pass the row runs. The draft's passes have many tokens, because every pass reads all weights. A
        draft pass is queued when the draft lacks that many tokens, and after the target's last pass.

        Args:
            limit: number of tokens. None: all that remain.
            at_least_one: True to queue a pass even if it is longer than the limit.

        Returns:
            Cost of the passes, in tokens of the target.
        """
        request, draft, fed = self.request, self._draft, 0
        assert request is not None, "it has begun"
        with self.engine.modules.mark("prefill"):
            if (
                draft is not None
                and limit is not None
                and self._target.position - draft.position >= _DRAFT_RATE * limit
            ):
                fed += self._feed_draft(request, draft, limit, at_least_one=at_least_one)
            taken = self._target.take(None if limit is None else limit - fed, at_least_one=at_least_one and not fed)
            if self._defer(request, taken):
                return fed + sum(taken)
            if taken or len(request.prompt) == 1:
                self._enqueue(request, self.row, self._target.position, taken, draft=False, running=False)
            self._target.position += sum(taken)
            fed += sum(taken)
            if draft is not None and not self._target.remaining:
                # the draft reads a short prompt in the same turn, whatever part of the limit the target used
                left = None if limit is None else max(limit - fed, limit // _DRAFT_RATE)
                fed += self._feed_draft(request, draft, left, at_least_one=at_least_one and not fed)
        if not self._target.remaining and not (draft and draft.remaining):
            self._finish(request, self.row)
            self.request = None
        return fed

    def _defer(self, request: Request, taken: list[int]) -> bool:
        """Defers a pass to `flush` if it is short and the last one of its prompt.

        Returns True if the pass was deferred.
        """
        draft, rows = self._draft, self.engine.sizes.prompts_per_pass(taken[0]) if len(taken) == 1 else 1
        if (
            rows == 1
            or request.scores is not None
            or self._target.remaining
            or (draft is not None and list(draft.remaining) not in ([], taken))
        ):
            return False
        if any(each.chunk != taken[0] for each in self._deferred.values()):
            self.flush()
        start = draft.position if draft is not None and draft.remaining else None
        self._deferred[self.row] = ShortPass(request, self._target.position, taken[0], start)
        self.request = None
        if len(self._deferred) == rows:
            self.flush()
        return True

    def flush(self) -> None:
        """Queues the deferred passes of short prompts as one pass. Their rows run after it."""
        if not self._deferred:
            return
        short, self._deferred = self._deferred, {}
        chunk = next(iter(short.values())).chunk
        with self.engine.modules.mark("prefill"):
            starts = {row: each.start for row, each in short.items()}
            self.engine.prompts.feed_rows(starts, chunk, draft=False, running=False)
            drafts = {row: each.draft for row, each in short.items() if each.draft is not None}
            if drafts:
                self.engine.prompts.feed_rows(drafts, chunk, draft=True, running=False)
        for row, each in short.items():
            if each.draft is not None:
                self._drafted(each.request, each.draft + chunk)
            self._finish(each.request, row)

    @property
    def _back(self) -> int:
        """Newest tokens of a row that a step may feed the draft, see `ProposerBase.reads_back`."""
        return reads_back_of(self.engine.modules.proposer)

    def _drafted(self, request: Request, upto: int) -> None:
        """Records that the draft has read a request's tokens up to `upto`, except those that a step feeds."""
        proposer = self.engine.modules.proposer
        assert proposer is not None, "it is fed"
        request.draft_length = min(upto, request.length - self._back, proposer.max_length)

    def _feed_draft(self, request: Request, passes: Passes, limit: int | None, *, at_least_one: bool) -> int:
        """Queues the draft's next passes. For arguments and result see `feed`."""
        chunks = passes.take(None if limit is None else _DRAFT_RATE * limit, at_least_one=at_least_one)
        if chunks:
            self._enqueue(request, self.row, passes.position, chunks, draft=True, running=False)
            passes.position += sum(chunks)
            self._drafted(request, passes.position)
        return -(-sum(chunks) // _DRAFT_RATE)

    def _finish(self, request: Request, row: int) -> None:
        """Lets the row run after its prompt is prefilled. Later prompts may share its pages."""
        prefix = self.engine.prefix
        if prefix is not None:
            pages = self.engine.pages.pages_of(row)
            request.nodes = prefix.insert(request.nodes, request.prompt, pages, self._shareable(request))
            mark_drafted(prefix, request)
            if self.engine.prefix_states is not None:
                last = self._max_nodes(request)
                # False: the prefix cache keeps another row's pages for these tokens
                whole = 0 < last <= len(request.nodes)
                self.engine.prefix_states.rename(request, request.nodes[last - 1] if whole else None)
        state = self.engine.state
        state.emitted[row].fill_(min(1, len(request.prompt) - 1))  # steps that ran while the row idled wrote 0
        request.prefilled = self.engine.prompts.takes_whole(len(request.prompt))
        ready = PREFILLED if request.prefilled else RUNNING
        state.finish[row].fill_(ready if request.grammar is None else PAUSED)

    def drop(self, request: Request) -> None:
        """Removes a request that has ended while it waited or while its prompt was being prefilled."""
        if request is self.request:
            self.engine.pages.release(self.row)
            self.request = None
            if self.engine.prefix_states is not None:
                self.engine.prefix_states.forget(request)
        else:
            self.waiting.remove(request)

    def reset(self) -> None:
        """Removes prompts that were being prefilled, and clears the prefix cache. Waiting requests stay."""
        self.request = self._refused = None
        self._deferred.clear()
        if self.engine.prefix is not None:
            self.engine.prefix.clear()
        if self.engine.prefix_states is not None:
            self.engine.prefix_states.clear()

    def catch_up(self, rows: Mapping[int, Request]) -> float:
        """Feeds the draft the tokens of these rows that it has not read. Returns the number of passes."""
        passes, short = 0.0, dict[int, dict[int, int]]()  # chunk -> row -> start
        for row, request in sorted(rows.items()):
            self._adopt_draft_kv(request, row)
            chunks, start = lag_of(self.engine, request), request.draft_length
            passes += passes_of(chunks)
            request.draft_lag = False
            if len(chunks) == 1 and self.engine.sizes.prompts_per_pass(chunks[0]) > 1:
                batch = short.setdefault(chunks[0], {})
                batch[row] = start
                if len(batch) == self.engine.sizes.prompts_per_pass(chunks[0]):
                    self.engine.prompts.feed_rows(short.pop(chunks[0]), chunks[0], draft=True)
            elif chunks:
                self._enqueue(request, row, start, chunks, draft=True, running=True)
            if chunks:
                self._drafted(request, start + sum(chunks))
                if self.engine.prefix is not None and not request.drafted:
                    mark_drafted(self.engine.prefix, request)
        for chunk, starts in short.items():
            self.engine.prompts.feed_rows(starts, chunk, draft=True)
        return passes

    def _adopt_draft_kv(self, request: Request, row: int) -> None:
        """Increases a row's draft length if another row has meanwhile written the draft's K/V to their shared pages."""
        prefix, proposer = self.engine.prefix, self.engine.modules.proposer
        if prefix is None or request.drafted or not kept_in_pages(proposer):
            return
        drafted = request.nodes[: drafted_upto(prefix, request.nodes) // prefix.unit]
        known = self._resumable(drafted, draft=True) * prefix.unit
        if known > request.draft_length:
            self._resume(request, row, known, draft=True)
            request.draft_length = known
            self.engine.state.draft_lengths[row].fill_(known)

    def keep(self, request: Request, row: int) -> None:
        """Adds a row's pages to the prefix cache when the row ends, including pages that steps wrote.

        Done only with exact=False: steps and prefill passes may write different bits.
        """
        prefix = self.engine.prefix
        if prefix is not None and not self.engine.sizes.exact and request.finish_reason != "error":
            tokens, pages = request.prompt + request.new_tokens, self.engine.pages.pages_of(row)
            request.nodes = prefix.insert(request.nodes, tokens, pages, len(tokens) - 1)
            mark_drafted(prefix, request)

    def _enqueue(
        self, request: Request, row: int, start: int, chunks: list[int], *, draft: bool, running: bool
    ) -> None:
        """Queues passes, and saves the recurrent states after them from which later prompts may begin."""
        kept, left, first = self.engine.prefix_states, deque(chunks), start == request.cached
        for length, key in [*self._state_points(request, start, draft=draft), (None, None)]:
            part: list[int] = []
            while left and (length is None or start + sum(part) < length):
                part.append(left.popleft())
            if not part and chunks:
                continue
            if kept is not None:
                kept.capture_after(length or 0, draft=draft)
            scores = request.scores
            self.engine.prompts.feed_row(row, start, part, draft=draft, running=running, first=first, scores=scores)
            start, first = start + sum(part), False
            if kept is not None and length is not None and start >= length:
                kept.save(key, draft=draft)

    def _state_points(self, request: Request, start: int, *, draft: bool) -> list[tuple[int | None, Hashable]]:
        """Returns the lengths after which passes from `start` on save recurrent states, each with its key."""
        kept, prefix = self.engine.prefix_states, self.engine.prefix
        # a pass with as few tokens as a step saves no state, and one that begins inside a chunk gives other bits
        whole = self.engine.sizes.chunks[0] > self.engine.shapes.max_drafts + 1 and not start % DELTA_CHUNK
        if kept is None or prefix is None or not kept.recurrent(draft=draft) or not whole:
            return []
        shared, last = len(request.nodes) * prefix.unit, self._max_nodes(request) * prefix.unit
        points: list[tuple[int | None, Hashable]] = [(shared, request.nodes[-1])] if start < shared else []
        return points + ([(last, request)] if request is self.request and max(start, shared) < last else [])

    def _passes(self, request: Request, start: int, stop: int, max_tokens: int | None, *, draft: bool) -> Passes:
        """Returns passes over the positions start..stop-1.

        A pass ends at every position where states are saved, except the last one.
        """
        ends = [length for length, _ in self._state_points(request, start, draft=draft)[:-1] if length is not None]
        edges = [start, *(end for end in ends if end < stop), stop]
        passes = (self.engine.sizes.passes(end, begin, max_tokens, draft=draft) for begin, end in pairwise(edges))
        return Passes(start, deque(chain.from_iterable(passes)))

    def _resume(self, request: Request, row: int, length: int, *, draft: bool) -> None:
        """Loads the recurrent states after the positions that a row shares."""
        if self.engine.prefix_states is not None:
            place = self.engine.state.state_rows[row : row + 1]
            self.engine.prefix_states.load(request.nodes, length, place, draft=draft)

    def _resumable(self, nodes: list[Node], *, draft: bool) -> int:
        """Returns the number of nodes after which a model can continue.

        These are all nodes, except if the model needs a recurrent state that is not stored.
        """
        kept = self.engine.prefix_states
        return len(nodes) if kept is None else kept.resumable(nodes, draft=draft) // kept.unit

    def _max_nodes(self, request: Request) -> int:
        """Returns how many prefix-cache nodes a prompt may share: whole nodes within `_shareable` positions."""
        return self._shareable(request) // self.engine.prefix.unit if self.engine.prefix is not None else 0

    def _shareable(self, request: Request) -> int:
        """Returns how many of a prompt's first positions may be shared: those to which no step writes.

        The first step feeds the target the last token, and the draft at least the last two.
        """
        return len(request.prompt) - self._back


def mark_drafted(prefix: PrefixCache, request: Request) -> None:
    """Sets `drafted` of a row's nodes up to its `draft_length`: their pages now also have the draft's K/V."""
    for node in request.nodes[: request.draft_length // prefix.unit]:
        node.drafted = True


def drafted_upto(prefix: PrefixCache, nodes: list[Node]) -> int:
    """Returns the number of first positions whose pages also have the draft's K/V."""
    undrafted = next((place for place, node in enumerate(nodes) if not node.drafted), len(nodes))
    return undrafted * prefix.unit


def passes_of(chunks: list[int]) -> float:
    """Returns the cost of feeding these chunks, in passes over a few rows."""
    return sum(max(1.0, chunk / _PASS_ROWS) for chunk in chunks)


def lag_of(engine: Engine, request: Request) -> list[int]:
    """Returns the sizes of the passes that feed the draft a row's missing tokens, up to those that a step feeds."""
    proposer = engine.modules.proposer
    if proposer is None:
        return []
    known, start = min(request.length - reads_back_of(proposer), proposer.max_length), request.draft_length
    if request.drafted or start % engine.sizes.grid_unit:  # steps have written tokens after the prefill
        return chunks_of(engine.sizes.chunks, known - start)
    return engine.sizes.passes(known, start, draft=True)
