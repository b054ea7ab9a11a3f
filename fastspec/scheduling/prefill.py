"""Queue of waiting requests: gives them batch slots (rows) and KV cache pages, and prefills their prompts.

First come, first served: the first request of the queue gets a row when a row and enough pages are free. Pages that
only the prefix cache uses count as free. No request overtakes an earlier one. Prompts are prefilled one after the
other, so a prompt can share pages of the previous one.

A request starts to decode when its prompt is prefilled except the last token. The first decode step feeds that token.
A long prompt is prefilled completely, and its first output token comes from the last prefill pass
(`step.first_token_step`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise

from fastspec.engine.engine import Engine
from fastspec.engine.prompt_passes import PromptPart
from fastspec.kv_cache.prefix import Node, PrefixCache
from fastspec.proposers.interface import kept_in_pages, reads_back_of
from fastspec.scheduling.requests import Request
from fastspec.shapes import DELTA_CHUNK, chunks_of
from fastspec.state import PAUSED, PREFILLED, RUNNING

# prompt tokens up to which a pass takes hardly longer than one over a few tokens: it is limited by reading the weights
_PASS_ROWS = 128
# between two steps, min(_MAX_BUDGETS, _PATIENCE * waiting short prompts / running rows) prefill budgets are spent. With
# the default budget, _MAX_BUDGETS budgets are one pass of the largest size
_MAX_BUDGETS, _PATIENCE = 8, 4
_DRAFT_RATE = 4  # lower limit of the tokens that a draft model reads in the time in which the target reads one


@dataclass(slots=True)
class Passes:
    """Prefill passes of one prompt, of the target or of the draft model, that are not launched yet.

    Attributes:
        position: prompt position at which the next pass begins.
        stop: position after the last token of all passes.
        remaining: number of tokens of each pass, in order.
    """

    position: int
    stop: int
    remaining: deque[int] = field(default_factory=deque)

    def take(self, limit: int | None, *, at_least_one: bool) -> list[int]:
        """Removes the next passes, with at most `limit` tokens together, and returns their numbers of tokens.

        Args:
            limit: largest number of tokens. None: no limit.
            at_least_one: True to take the first pass even if it has more tokens than the limit.
        """
        taken: list[int] = []
        while self.remaining and (
            limit is None or (at_least_one and not taken) or sum(taken) + self.remaining[0] <= limit
        ):
            taken.append(self.remaining.popleft())
        return taken


@dataclass(frozen=True, slots=True)
class LastPart:
    """Last tokens of a prompt, few enough to be prefilled in one pass with the last tokens of other prompts.

    Attributes:
        request: request of the prompt.
        start: position of the first of these tokens.
        tokens: number of these tokens.
        chunks: number of tokens of each pass over them, if no other prompt shares the pass.
        draft: last tokens of the prompt that the draft model must read. None: the draft model reads nothing now.
    """

    request: Request
    start: int
    tokens: int
    chunks: list[int]
    draft: LastPart | None = None


@dataclass(slots=True)
class PrefillQueue:
    """Queue of waiting requests. Gives them batch slots, and prefills their prompts.

    Attributes:
        engine: engine with the models and KV caches.
        waiting: requests without a batch slot, in the order of arrival.
        request: request whose prompt is being prefilled. None: no prompt is being prefilled.
        row: index of the batch slot of `request`.
    """

    engine: Engine
    waiting: deque[Request] = field(default_factory=deque, init=False)
    request: Request | None = None
    row: int = 0
    _short: int = 0  # number of waiting requests with a short prompt
    # row -> last tokens of its prompt, which wait for those of other prompts
    _deferred: dict[int, LastPart] = field(default_factory=dict)
    _target: Passes = field(default_factory=lambda: Passes(0, 0))
    _draft: Passes | None = None  # passes of the draft; None: the draft catches up later, in steps
    _refused: tuple[Request, int] | None = None  # request that did not fit, and the number of free and idle pages then

    def add(self, request: Request) -> None:
        """Adds a request at the end of the queue."""
        self.waiting.append(request)
        self._short += self._is_short(request)

    def _is_short(self, request: Request) -> bool:
        """True if the whole prompt takes at most half of a shared pass."""
        return len(request.prompt) <= self.engine.sizes.batch_tokens // 2

    def begin(self, rows: Collection[int], positions: int) -> tuple[Request, tuple[int, ...]] | None:
        """Gives the first waiting request the lowest free batch slot, and pages of the KV cache.

        Args:
            rows: indices of the batch slots that are in use.
            positions: number of KV cache positions that the request may write.

        Returns:
            The request and the indices of its pages. None if the request must wait.
        """
        table, prefix, request = self.engine.pages, self.engine.prefix, self.waiting[0]
        row = next((row for row in range(self.engine.state.batch) if row not in rows), None)
        seen = request, table.num_free + table.num_idle
        if row is None or seen == self._refused:
            return None
        nodes = self._matching(request)
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
        self._short -= self._is_short(request)
        self.request, self.row, self._refused, request.nodes = request, row, None, nodes
        if prefix is not None:
            request.cached = known * prefix.unit
            if kept_in_pages(self.engine.modules.proposer):
                drafted = nodes[: drafted_upto(prefix, nodes) // prefix.unit]
                request.draft_length = self._resumable(drafted, draft=True) * prefix.unit
        return request, pages

    def _matching(self, request: Request) -> list[Node]:
        """Returns the prefix cache nodes that match the beginning of a prompt.

        First launches the deferred passes of other prompts (`flush`) if the prompt then matches more nodes.
        """
        prefix = self.engine.prefix
        if prefix is None:
            return []
        nodes = prefix.match(request.prompt, self._shareable(request))
        more = (len(nodes) + 1) * prefix.unit
        for part in self._deferred.values():
            both = min(self._shareable(request), self._shareable(part.request))
            if more <= both and request.prompt[:more] == part.request.prompt[:more]:
                self.flush()
                return prefix.match(request.prompt, self._shareable(request))
        return nodes

    def budgets(self, running: int) -> int:
        """Returns the number of prefill budgets (`prefill_budget` tokens each) to spend before the next decode step.

        It is above 1 if many short prompts wait and few requests decode. Requests that arrive together then soon
        decode together, and share prefill passes.

        Args:
            running: number of requests that are decoding.
        """
        return max(1, min(_MAX_BUDGETS, _PATIENCE * self._short // max(1, running)))

    def plan(self, *, drafting: bool, max_tokens: int | None) -> None:
        """Splits the prompt of `request` into prefill passes.

        Args:
            drafting: True to prefill the draft model together with the target. False: the draft model reads the prompt
                later, when the request first drafts.
            max_tokens: largest number of tokens of a target pass. A pass has more if a smaller one would change the
                bits of the result. None: no limit.
        """
        engine, request = self.engine, self.request
        assert request is not None, "it has begun"
        length, self._draft = len(request.prompt), None
        self._resume(request, self.row, request.cached, draft=False)
        self._resume(request, self.row, request.draft_length, draft=True)
        stop = length if self._whole(request) else length - 1
        self._target = self._passes(request, request.cached, stop, max_tokens, draft=False)
        if drafting and engine.modules.proposer is not None:
            stop, start = readable_by_draft(engine, request), request.draft_length
            self._draft = self._passes(request, start, stop, max_tokens and _DRAFT_RATE * max_tokens, draft=True)

    def feed(self, limit: int | None, *, at_least_one: bool) -> int:
        """Launches the next prefill passes of `request`, of target and draft model, within a time budget.

        The passes take about as long as target passes over `limit` tokens. After the last pass the request can decode.
        Passes of the draft model have many tokens, because every pass reads all its weights. One is launched when the
        draft model is that many tokens behind the target, and after the target's last pass. If the first output token
        comes from the target's last pass, the draft model reads the remaining tokens later, before it first drafts.

        Args:
            limit: time budget as a number of tokens of the target. None: no limit.
            at_least_one: True to launch a pass even if it has more tokens than the limit.

        Returns:
            Cost of the launched passes, as a number of tokens of the target.
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
            fed += sum(taken)
            alone = self._defer(request, taken, limit)
            if alone or len(request.prompt) == 1:
                self._enqueue(request, self.row, self._target.position, alone, draft=False, running=False)
            if len(alone) < len(taken):
                self.request = None
                if self._blocks() == self.engine.sizes.most_blocks:
                    self.flush()
                return fed
            self._target.position += sum(taken)
            if draft is not None and not self._target.remaining and not self._whole(request):
                # the draft reads a short prompt in the same turn, whatever part of the limit the target used
                left = None if limit is None else max(limit - fed, limit // _DRAFT_RATE)
                fed += self._feed_draft(request, draft, left, at_least_one=at_least_one and not fed)
        if not self._target.remaining and (self._whole(request) or not (draft and draft.remaining)):
            self._finish(request, self.row)
            self.request = None
        return fed

    def _defer(self, request: Request, taken: list[int], limit: int | None) -> list[int]:
        """Defers the last tokens of a prompt until `flush` if they can share a pass with tokens of other prompts.

        Args:
            request: request whose prompt is being prefilled.
            taken: number of tokens of each of the target's next passes.
            limit: see `feed`.

        Returns:
            The first elements of `taken`, whose passes are not deferred.
        """
        if self._target.remaining or request.scores is not None:
            return taken
        starts = list(accumulate(taken, initial=self._target.position))
        shares, stop = self.engine.sizes.shares, self._target.stop
        first = next((at for at in range(len(taken)) if shares(taken[at:], stop - starts[at])), None)
        draft, beside = self._draft, None
        if first is None:
            return taken
        if draft is not None and draft.remaining and not self._whole(request):
            beside = LastPart(request, draft.position, draft.stop - draft.position, list(draft.remaining))
            within = limit is None or sum(beside.chunks) <= _DRAFT_RATE * limit
            if not (within and shares(beside.chunks, beside.tokens, draft=True)):
                return taken
        part = LastPart(request, starts[first], stop - starts[first], taken[first:], beside)
        if self._blocks(part) > self.engine.sizes.most_blocks:
            self.flush()
        self._deferred[self.row] = part
        return taken[:first]

    def _blocks(self, *more: LastPart) -> int:
        """Returns the size of a shared pass over all deferred prompt parts and `more`, in blocks of `PassSizes.block`.

        Returns the larger number of the target's pass and the draft model's pass.
        """
        parts, blocks_of = (*self._deferred.values(), *more), self.engine.sizes.blocks_of
        of_draft = sum(blocks_of(part.draft.tokens) for part in parts if part.draft is not None)
        return max(sum(blocks_of(part.tokens) for part in parts), of_draft)

    def flush(self) -> None:
        """Launches one pass over the deferred last tokens of several prompts. Their requests can decode after it."""
        if not self._deferred:
            return
        parts, self._deferred = self._deferred, {}
        with self.engine.modules.mark("prefill"):
            self._feed_parts(parts, draft=False)
            drafts = {row: part.draft for row, part in parts.items() if part.draft is not None}
            if drafts:
                self._feed_parts(drafts, draft=True)
        for row, part in parts.items():
            if part.draft is not None:
                self._drafted(part.request, part.draft.start + part.draft.tokens)
            self._finish(part.request, row)

    def _feed_parts(self, parts: Mapping[int, LastPart], *, draft: bool) -> None:
        """Launches one shared pass over the last tokens of several prompts. A single prompt gets passes of its own.

        Args:
            parts: index of a batch slot -> last tokens of its prompt.
            draft: True for passes of the draft model, False for passes of the target.
        """
        if len(parts) > 1:
            passed = [PromptPart(row, part.start, part.tokens) for row, part in parts.items()]
            self.engine.prompts.feed_rows(passed, draft=draft, running=False)
            return
        for row, part in parts.items():
            self._enqueue(part.request, row, part.start, part.chunks, draft=draft, running=False)

    def _whole(self, request: Request) -> bool:
        """True if a request's first output token comes from its last prefill pass. Its prompt is then long."""
        return self.engine.prompts.takes_whole(len(request.prompt))

    @property
    def _back(self) -> int:
        """Number of newest tokens that a decode step may feed to the draft model, see `ProposerBase.reads_back`."""
        return reads_back_of(self.engine.modules.proposer)

    def _drafted(self, request: Request, upto: int) -> None:
        """Sets `draft_length` after the draft model has read a request's first `upto` tokens."""
        request.draft_length = min(upto, readable_by_draft(self.engine, request))

    def _feed_draft(self, request: Request, passes: Passes, limit: int | None, *, at_least_one: bool) -> int:
        """Launches the next prefill passes of the draft model. For the arguments and the result see `feed`."""
        chunks = passes.take(None if limit is None else _DRAFT_RATE * limit, at_least_one=at_least_one)
        if chunks:
            self._enqueue(request, self.row, passes.position, chunks, draft=True, running=False)
            passes.position += sum(chunks)
            self._drafted(request, passes.position)
        return -(-sum(chunks) // _DRAFT_RATE)

    def _finish(self, request: Request, row: int) -> None:
        """Makes a request decode after its prefill, and adds its pages to the prefix cache for later prompts."""
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
        request.prefilled = self._whole(request)
        ready = PREFILLED if request.prefilled else RUNNING
        state.finish[row].fill_(ready if request.grammar is None else PAUSED)

    def drop(self, request: Request) -> None:
        """Removes a cancelled request that waits or whose prompt is being prefilled."""
        if request is self.request:
            self.engine.pages.release(self.row)
            self.request = None
            if self.engine.prefix_states is not None:
                self.engine.prefix_states.forget(request)
        else:
            self.waiting.remove(request)
            self._short -= self._is_short(request)

    def reset(self) -> None:
        """Forgets the prompts that were being prefilled, and clears the prefix cache. Waiting requests stay."""
        self.request = self._refused = None
        self._deferred.clear()
        if self.engine.prefix is not None:
            self.engine.prefix.clear()
        if self.engine.prefix_states is not None:
            self.engine.prefix_states.clear()

    def catch_up(self, rows: Mapping[int, Request], ahead: Mapping[int, int | None]) -> float:
        """Feeds the draft model those tokens of these requests that it has not read. Returns the cost, see `passes_of`.

        Args:
            rows: index of a batch slot -> its request.
            ahead: index of a batch slot -> number of tokens that the device has emitted and the host has not read.
                None: the number is unknown, and the draft model lacks only tokens that a decode step feeds.
        """
        passes, parts, sizes = 0.0, list[PromptPart](), self.engine.sizes
        for row, request in sorted(rows.items()):
            self._adopt_draft_kv(request, row)
            chunks, start = lag_of(self.engine, request, ahead[row] or 0), request.draft_length
            passes += passes_of(chunks)
            request.draft_lag = False
            if not chunks:
                continue
            part = PromptPart(row, start, readable_by_draft(self.engine, request, ahead[row] or 0) - start)
            if sizes.shares(chunks, part.tokens, draft=True):
                if sum(sizes.blocks_of(each.tokens) for each in (*parts, part)) > sizes.most_blocks:
                    self.engine.prompts.feed_rows(parts, draft=True)
                    parts = []
                parts.append(part)
            else:
                self._enqueue(request, row, start, chunks, draft=True, running=True)
            request.draft_length = start + part.tokens
            if self.engine.prefix is not None and not request.drafted:
                mark_drafted(self.engine.prefix, request)
        if parts:
            self.engine.prompts.feed_rows(parts, draft=True)
        return passes

    def _adopt_draft_kv(self, request: Request, row: int) -> None:
        """Increases a request's `draft_length` if another request has filled the draft K/V of their shared pages."""
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
        """Adds the pages of a request that has ended to the prefix cache, including pages that decode steps wrote.

        Does nothing with exact=True, because decode steps and prefill passes may write different bits.
        """
        prefix = self.engine.prefix
        if prefix is not None and not self.engine.sizes.exact and request.finish_reason != "error":
            tokens, pages = request.prompt + request.new_tokens, self.engine.pages.pages_of(row)
            request.nodes = prefix.insert(request.nodes, tokens, pages, len(tokens) - 1)
            mark_drafted(prefix, request)

    def _enqueue(
        self, request: Request, row: int, start: int, chunks: list[int], *, draft: bool, running: bool
    ) -> None:
        """Launches prefill passes over a prompt, and saves recurrent states from which later prompts can continue.

        Args:
            request: request of the prompt.
            row: index of its batch slot.
            start: prompt position at which the first pass begins.
            chunks: number of tokens of each pass.
            draft: True for passes of the draft model, False for passes of the target.
            running: True if the request already decodes, False while its prompt is being prefilled.
        """
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
        """Returns which recurrent states to save during the prefill passes that begin at position `start`.

        Each element is (number of prompt tokens that the state covers, key under which to store it). The list is
        empty if the model has no recurrent states or none must be saved.
        """
        kept, prefix = self.engine.prefix_states, self.engine.prefix
        # a pass with as few tokens as a step saves no state, and one that begins inside a chunk gives other bits
        whole = self.engine.sizes.chunks[0] > self.engine.shapes.max_drafts + 1 and not start % DELTA_CHUNK
        if kept is None or prefix is None or not kept.recurrent(draft=draft) or not whole:
            return []
        shared, last = len(request.nodes) * prefix.unit, self._max_nodes(request) * prefix.unit
        points: list[tuple[int | None, Hashable]] = [(shared, request.nodes[-1])] if start < shared else []
        return points + ([(last, request)] if request is self.request and max(start, shared) < last else [])

    def _passes(self, request: Request, start: int, stop: int, max_tokens: int | None, *, draft: bool) -> Passes:
        """Splits the prompt positions start..stop-1 into passes.

        A pass ends at each position where a recurrent state is saved, except the last such position.
        """
        ends = [length for length, _ in self._state_points(request, start, draft=draft)[:-1] if length is not None]
        edges = [start, *(end for end in ends if end < stop), stop]
        passes = (self.engine.sizes.passes(end, begin, max_tokens, draft=draft) for begin, end in pairwise(edges))
        return Passes(start, stop, deque(chain.from_iterable(passes)))

    def _resume(self, request: Request, row: int, length: int, *, draft: bool) -> None:
        """Loads the stored recurrent states after the first `length` positions of a prompt, for a batch slot."""
        if self.engine.prefix_states is not None:
            place = self.engine.state.state_rows[row : row + 1]
            self.engine.prefix_states.load(request.nodes, length, place, draft=draft)

    def _resumable(self, nodes: list[Node], *, draft: bool) -> int:
        """Returns the number of first `nodes` whose prompt tokens a model need not compute again.

        It is the number of all nodes, unless the recurrent state that the model needs after them is not stored.
        """
        kept = self.engine.prefix_states
        return len(nodes) if kept is None else kept.resumable(nodes, draft=draft) // kept.unit

    def _max_nodes(self, request: Request) -> int:
        """Returns how many prefix cache nodes a prompt may share: whole nodes within its `_shareable` positions."""
        return self._shareable(request) // self.engine.prefix.unit if self.engine.prefix is not None else 0

    def _shareable(self, request: Request) -> int:
        """Returns the number of first prompt positions whose KV cache pages other requests may share.

        No decode step writes K/V at these positions. The first decode step feeds the last prompt token to the target,
        and at most the last `_back` prompt tokens to the draft model.
        """
        return len(request.prompt) - self._back


def mark_drafted(prefix: PrefixCache, request: Request) -> None:
    """Marks the prefix cache nodes of a request whose pages also contain K/V of the draft model."""
    for node in request.nodes[: request.draft_length // prefix.unit]:
        node.drafted = True


def drafted_upto(prefix: PrefixCache, nodes: list[Node]) -> int:
    """Returns the number of first positions of `nodes` whose pages also contain K/V of the draft model."""
    undrafted = next((place for place, node in enumerate(nodes) if not node.drafted), len(nodes))
    return undrafted * prefix.unit


def passes_of(chunks: list[int]) -> float:
    """Returns the estimated time of prefill passes with these numbers of tokens, in units of one short pass."""
    return sum(max(1.0, chunk / _PASS_ROWS) for chunk in chunks)


def readable_by_draft(engine: Engine, request: Request, ahead: int = 0) -> int:
    """Returns the number of a request's first tokens that prefill passes feed to the draft model.

    A decode step feeds the other tokens.

    Args:
        engine: engine with a proposer.
        request: the request.
        ahead: see `lag_of`.
    """
    proposer = engine.modules.proposer
    assert proposer is not None, "it is fed"
    return min(request.length + ahead - reads_back_of(proposer), proposer.max_length)


def lag_of(engine: Engine, request: Request, ahead: int = 0) -> list[int]:
    """Returns the numbers of tokens of the passes that feed the draft model the tokens that it has not read.

    Tokens that a decode step feeds are not counted. The result is empty if nothing is missing.

    Args:
        engine: engine of the models.
        request: the request.
        ahead: number of the request's tokens that the device has emitted and the host has not read.
    """
    if engine.modules.proposer is None:
        return []
    known, start = readable_by_draft(engine, request, ahead), request.draft_length
    if request.drafted or start % engine.sizes.grid_unit:  # steps have written tokens after the prefill
        return chunks_of(engine.sizes.chunks, known - start)
    return engine.sizes.passes(known, start, draft=True)
