"""Takes prompts in: the line of requests that wait, and the one whose prompt is on its way into the caches.

First come first served: the first of the line gets a row as soon as one is free and its pages fit, idle pages of the
prefix cache counted as free; nobody overtakes it. Prompts go in one after the other, so one that begins like the one
before it finds that one's pages. A row runs when its prompt is in, all but the last token, which the first step feeds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from fastspec.kv_cache.prefix import Node, PrefixCache
from fastspec.proposers.interface import kept_in_pages
from fastspec.runtime.engine import Engine
from fastspec.runtime.request import Request
from fastspec.shapes import chunks_of
from fastspec.state import PAUSED, RUNNING


@dataclass(slots=True)
class Passes:
    """What is still to be fed of a prompt, to the target or to the draft: sizes of passes from a position on."""

    at: int
    left: deque[int] = field(default_factory=deque)

    def take(self, limit: int | None, *, some: bool) -> list[int]:
        """Sizes of the next passes, of at most `limit` tokens together; `some`: one pass at least."""
        taken: list[int] = []
        while self.left and (limit is None or (some and not taken) or sum(taken) + self.left[0] <= limit):
            taken.append(self.left.popleft())
        return taken


@dataclass(slots=True)
class Intake:
    """The way from the line into a row.

    Attributes:
        engine: whose caches prompts go into.
        waiting: requests that have no row yet, first come first.
        request: whose prompt is going in; None: nobody's.
        row: that it will get.
    """

    engine: Engine
    waiting: deque[Request] = field(default_factory=deque)
    request: Request | None = None
    row: int = 0
    _target: Passes = field(default_factory=lambda: Passes(0))
    _draft: Passes | None = None  # fed beside the target, where a step should not have to
    _refused: tuple[Request, int] | None = None  # who has waited, with how many pages to be had

    def begin(self, rows: Collection[int], positions: int) -> tuple[Request, tuple[int, ...]] | None:
        """Gives the first of the line the lowest free row, and its pages; None where it must wait for them.

        Args:
            rows: that are taken.
            positions: that it may write.
        """
        table, prefix, request = self.engine.pages, self.engine.prefix, self.waiting[0]
        row = next((row for row in range(self.engine.state.batch) if row not in rows), None)
        seen = request, table.num_free + table.num_idle
        if row is None or seen == self._refused:
            return None
        nodes = prefix.match(request.prompt, self._shareable(request)) if prefix is not None else []
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
            request.cached = len(nodes) * prefix.unit
            if kept_in_pages(self.engine.parts.proposer):
                request.draft_length = drafted_upto(prefix, nodes)
        return request, pages

    def plan(self, *, drafting: bool, most: int | None) -> None:
        """Decides how the prompt is cut.

        Args:
            drafting: the draft takes it in beside the target, not before the row's first draft.
            most: tokens of a pass, where bits allow it.
        """
        engine, request = self.engine, self.request
        assert request is not None, "it has begun"
        length = len(request.prompt)
        self._target = Passes(request.cached, deque(engine.passes(length - 1, request.cached, most)))
        self._draft = None
        if drafting and engine.parts.proposer is not None:
            stop, start = min(length - 2, engine.parts.proposer.max_length), request.draft_length
            self._draft = Passes(start, deque(engine.passes(stop, start, most)))

    def feed(self, limit: int | None, *, some: bool) -> int:
        """Queues passes over at most `limit` tokens; returns how many of the target. The last ones let the row run.

        Args:
            limit: None: all that is left.
            some: one pass at least, however long it is.
        """
        request = self.request
        assert request is not None, "it has begun"
        taken = self._target.take(limit, some=some)
        with self.engine.parts.mark("prefill"):
            if taken or len(request.prompt) == 1:
                first = self._target.at == request.cached
                self.engine.prefill_row(self.row, self._target.at, taken, draft=False, running=False, first=first)
            self._target.at += sum(taken)
            if self._draft is not None:
                self._feed_draft(request, self._draft)
        if not self._target.left:
            self._finish(request)
        return sum(taken)

    def _feed_draft(self, request: Request, passes: Passes) -> None:
        """The draft follows the target, and is done with it."""
        chunks = passes.take(self._target.at - passes.at if self._target.left else None, some=False)
        if chunks:
            self.engine.prefill_row(self.row, passes.at, chunks, draft=True, running=False)
            passes.at += sum(chunks)
            proposer = self.engine.parts.proposer
            assert proposer is not None, "it is fed"
            request.draft_length = min(passes.at, len(request.prompt) - 2, proposer.max_length)

    def _finish(self, request: Request) -> None:
        """The prompt is in: the row runs, and others may share its pages."""
        prefix = self.engine.prefix
        if prefix is not None:
            pages = self.engine.pages.pages_of(self.row)
            request.nodes = prefix.insert(request.nodes, request.prompt, pages, self._shareable(request))
            mark_drafted(prefix, request)
        state = self.engine.state
        state.emitted[self.row].fill_(min(1, len(request.prompt) - 1))  # steps over the row meanwhile left 0
        state.finish[self.row].fill_(RUNNING if request.grammar is None else PAUSED)
        self.request = None

    def drop(self, request: Request) -> None:
        """A request that waits, or whose prompt is going in, has ended."""
        if request is self.request:
            self.engine.pages.release(self.row)
            self.request = None
        else:
            self.waiting.remove(request)

    def reset(self) -> None:
        """Forgets the prompt that was going in, and the prefix cache; what waits goes on waiting."""
        self.request = self._refused = None
        if self.engine.prefix is not None:
            self.engine.prefix.clear()

    def adopt(self, request: Request, row: int) -> None:
        """What another row has let the draft take in meanwhile, of the pages that both have, counts for this one."""
        prefix, proposer = self.engine.prefix, self.engine.parts.proposer
        if prefix is None or request.drafted or not kept_in_pages(proposer):
            return
        known = drafted_upto(prefix, request.nodes)
        if known > request.draft_length:
            request.draft_length = known
            self.engine.state.draft_lengths[row].fill_(known)

    def keep(self, request: Request, row: int) -> None:
        """Keeps what steps wrote for a row that has ended, where bits are not promised."""
        prefix = self.engine.prefix
        if prefix is not None and not self.engine.exact and request.finish_reason != "error":
            tokens, pages = request.prompt + request.new_tokens, self.engine.pages.pages_of(row)
            request.nodes = prefix.insert(request.nodes, tokens, pages, len(tokens) - 1)
            mark_drafted(prefix, request)

    def _shareable(self, request: Request) -> int:
        """Positions of a prompt that may be shared: none that a step writes to.

        A step feeds the target the last token, and a draft the last two.
        """
        return len(request.prompt) - 2


def mark_drafted(prefix: PrefixCache, request: Request) -> None:
    """Notes that the draft's K/V of a row lie in its pages up to `draft_length`, as passes over prompts leave them."""
    for node in request.nodes[: request.draft_length // prefix.unit]:
        node.drafted = True


def drafted_upto(prefix: PrefixCache, nodes: list[Node]) -> int:
    """Positions from 0 on whose pages hold the draft's K/V as well."""
    undrafted = next((place for place, node in enumerate(nodes) if not node.drafted), len(nodes))
    return undrafted * prefix.unit


def lag_of(engine: Engine, request: Request) -> list[int]:
    """Sizes of the passes in which the draft takes in what it has not seen of a row, all but the last two tokens."""
    proposer = engine.parts.proposer
    if proposer is None:
        return []
    known, start = min(request.length - 2, proposer.max_length), request.draft_length
    if request.drafted or start % engine.cell:  # steps have written behind what passes over prompts left
        return chunks_of(engine.chunks, known - start)
    return engine.passes(known, start)
