"""State of one row in its grammar: allowed tokens, forced tokens, and the end of the text.

A mask depends on the draft tokens before it, and only the host knows the grammar. So the host makes the draft tokens of
such a row: tokens that the grammar forces, else tokens that followed the row's last tokens earlier (lookup), if the
grammar allows them. They depend only on the row's text. So the row's text follows the target's masked distribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_LONGEST, _SHORTEST = 4, 2  # number of last tokens that a lookup compares: at most, and at least
_BITS = 32
ALL = -1  # a mask word with all bits set: its 32 ids are allowed


class Matcher(Protocol):
    """Methods of llguidance's `LLMatcher` that a row uses."""

    def is_accepting(self) -> bool:
        """True if the text may end here."""

    def is_stopped(self) -> bool:
        """True if the text must end here, or the matcher has failed."""

    def is_error(self) -> bool:
        """True if the matcher has failed."""

    def get_error(self) -> str:
        """Returns why the matcher has failed, or an empty text."""

    def deep_copy(self) -> Matcher:
        """Returns a matcher in the same state, which can be advanced separately to look ahead."""

    def compute_ff_tokens(self) -> list[int]:
        """Returns the next tokens that the grammar forces (fast-forward tokens)."""

    def validate_tokens(self, tokens: list[int]) -> int:
        """Returns how many tokens at the beginning of the list are allowed next."""

    def consume_tokens(self, sampled_tokens: list[int]) -> bool:
        """Advances the matcher by these tokens."""

    def compute_bitmask(self) -> bytes:
        """Returns a mask with one bit for each token id, which is 1 if the id is allowed next."""


@dataclass(frozen=True, slots=True)
class GrammarStep:
    """Draft tokens and token masks of one request for one decode step.

    Attributes:
        drafts: draft tokens, all allowed by the grammar.
        masks: int32 [len(drafts) + 1, W], the ids allowed at each position. Id i is allowed if bit i % 32 of element
            i // 32 is set.
    """

    drafts: list[int]
    masks: NDArray[np.int32]

    def cut(self, max_drafts: int) -> GrammarStep:
        """Returns this step with at most `max_drafts` draft tokens."""
        return GrammarStep(self.drafts[:max_drafts], self.masks[: max_drafts + 1])


class Guide(Protocol):
    """Source of the draft tokens and masks of one row, on the host: `RowGrammar`, or `GivenTokens`.

    Attributes:
        fault: why no token is allowed any more, such as a grammar that is too ambiguous. Empty if there is no fault.
    """

    fault: str

    def advance(self, tokens: Sequence[int]) -> int | None:
        """Advances the row by the emitted tokens of a step.

        Returns:
            The number of these tokens that the row keeps, if it ends within them. None: it keeps all of them.
        """

    def next_step(self, max_drafts: int) -> GrammarStep:
        """Returns at most `max_drafts` draft tokens for the next step, and their masks. Does not change the row."""


class GivenTokens:
    """State of one row whose tokens are given, to record their log-probabilities.

    Each step drafts the next given tokens, and the masks allow no others. So all these drafts are accepted.

    Args:
        tokens: the tokens that the row must have, in order; at least one.
        vocab_size: width of the target's logits.
    """

    def __init__(self, tokens: Sequence[int], vocab_size: int) -> None:
        self._tokens, self._words, self._next = tokens, words_of(vocab_size), 0
        self.fault = ""

    def advance(self, tokens: Sequence[int]) -> int | None:
        """Advances the row by the emitted tokens of a step. Returns None, because the row ends at its limit."""
        self._next += len(tokens)
        return None

    def next_step(self, max_drafts: int) -> GrammarStep:
        """Returns a step for the next given tokens, at most `max_drafts` + 1.

        All of them except the last are draft tokens. Each mask allows one of them alone.
        """
        tokens = self._tokens[self._next : self._next + max_drafts + 1]
        return GrammarStep(list(tokens[:-1]), np.stack([_bits([token], self._words) for token in tokens]))


class RowGrammar:
    """State of one request in its grammar.

    Args:
        matcher: matcher of the compiled grammar, in its start state.
        vocab_size: number of logits of the target. A mask has W = ceil(vocab_size / 32) 32-bit words.
        stop_ids: token ids that end the row. They are allowed only where the text is complete.
        ends: ids that the matcher treats as the end of the text. Except for stop ids they are never allowed.
        prompt: token ids of the row's prompt, for lookup.
        dropped: ids whose leading blank the tokenizer's `decode` drops at the start of a text. They are not allowed as
            the first token if other ids are. So the decoded text equals the text that the grammar has checked.

    Attributes:
        fault: see `Guide`.
    """

    def __init__(
        self,
        matcher: Matcher,
        vocab_size: int,
        stop_ids: Sequence[int],
        ends: Sequence[int] = (),
        prompt: Sequence[int] = (),
        dropped: Sequence[int] = (),
    ) -> None:
        self._matcher, self._stop_ids, self._vocab_size = matcher, tuple(stop_ids), vocab_size
        self._words = words_of(vocab_size)
        self._not_known = ~_bits(range(vocab_size), self._words)
        self._ends, self._stops = _bits(ends, self._words), _bits(stop_ids, self._words)
        self._dropped = _bits([token for token in dropped if token < vocab_size], self._words)
        self._begun = False  # True after the first emitted token
        self.fault = ""
        self._lookup = _Lookup(prompt)
        self._next: tuple[int, GrammarStep] | None = None  # (max_drafts, result) of the last call of `next_step`

    @property
    def possible(self) -> bool:
        """True if at least one token is allowed next."""
        return bool(self._mask(first=not self._begun).any())

    def advance(self, tokens: Sequence[int]) -> int | None:
        """Advances the row by the emitted tokens of a step.

        Returns:
            The number of tokens up to the end of the text, if it must end within these tokens and there are no stop
            ids. None: the row continues, or a stop id has ended it.
        """
        self._next = None
        self._begun = self._begun or bool(tokens)
        for index, token in enumerate(tokens):
            if token in self._stop_ids:
                return None
            self._matcher.consume_tokens([token])
            self._lookup.push(token)
            if self._must_end and not self._stop_ids:
                return index + 1
        return None

    def next_step(self, max_drafts: int) -> GrammarStep:
        """Returns at most `max_drafts` draft tokens for the next step, and their masks. Does not change the row."""
        if self._next is None or self._next[0] != max_drafts:
            self._next = max_drafts, self._make_step(max_drafts)
        return self._next[1]

    @property
    def _must_end(self) -> bool:
        """True if the text must end here."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _make_step(self, max_drafts: int) -> GrammarStep:
        drafts: list[int] = []
        masks: list[NDArray[np.int32]] = []
        # a copy, because llguidance's rollback over a token that the grammar writes by its id leaves an error
        own, self._matcher = self._matcher, self._matcher.deep_copy()
        try:
            while run := self._run(drafts, max_drafts - len(drafts)):
                for token in run:
                    mask = self._mask(first=not self._begun and not drafts)
                    masks.append(mask)
                    if not _holds(mask, token):
                        return GrammarStep(drafts, np.stack(masks))
                    drafts.append(token)
                    if self._must_end:  # the token is a stop id, and the mask after it is never used
                        return GrammarStep(drafts, np.stack([*masks, np.full(self._words, ALL, dtype=np.int32)]))
                    self._matcher.consume_tokens([token])
            masks.append(self._mask(first=not self._begun and not drafts))
            return GrammarStep(drafts, np.stack(masks))
        finally:
            self._matcher = own

    def _run(self, drafts: list[int], room: int) -> list[int]:
        """Returns at most `room` next draft tokens after `drafts`: forced tokens, else tokens of the lookup."""
        if room <= 0 or self._matcher.is_error():
            return []
        if self._must_end:
            return list(self._stop_ids[:1])
        run = [token for token in self._matcher.compute_ff_tokens()[:room] if token < self._vocab_size]
        if not run:
            run = self._lookup.after(drafts, room)
        # a stop id ends the row, so no draft may follow it
        run = list(takewhile(lambda token: token not in self._stop_ids, run))
        return run[: self._matcher.validate_tokens(run)] if run else []

    def _mask(self, *, first: bool) -> NDArray[np.int32]:
        """Returns the mask of the ids that are allowed next, int32 [W].

        If the text must end and there are no stop ids, all ids are allowed, because the host then cuts the row.

        Args:
            first: True for the first token of the row's text.
        """
        if self._must_end and not self._stop_ids:
            return ~self._not_known
        allowed = np.zeros(self._words, dtype=np.int32)
        if not self._matcher.is_error():
            data = self._matcher.compute_bitmask()
            found = np.frombuffer(data + bytes(-len(data) % 4), dtype=np.int32)[: self._words]
            allowed[: len(found)] = found
            # a stop id may also be a token of the grammar; since it ends the row, it is allowed only where the text is
            # complete
            allowed &= ~(self._not_known | self._ends | self._stops)
            if first and (others := allowed & ~self._dropped).any():
                allowed = others
            if self._matcher.is_accepting():
                allowed |= self._stops
        if self._matcher.is_error():
            self.fault = self._matcher.get_error().strip().partition("\n")[0]  # the next lines describe the parser
        return allowed


def words_of(vocab_size: int) -> int:
    """Returns W, the number of int32 words of a mask: ceil(vocab_size / 32)."""
    return -(-vocab_size // _BITS)


def _holds(mask: NDArray[np.int32], token: int) -> bool:
    """True if the mask allows the token."""
    return bool(int(mask[token // _BITS]) >> token % _BITS & 1)


def _bits(ids: Iterable[int], words: int) -> NDArray[np.int32]:
    """Returns the mask int32 [words] that allows these ids. words: number of 32-bit words of the mask."""
    bits = np.zeros(words * _BITS, dtype=bool)
    bits[list(ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


class _Lookup:
    """Table that finds the tokens which followed an earlier occurrence of a request's last tokens.

    Args:
        prompt: token ids of the request's prompt, with which the table begins.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after its last occurrence
        for token in prompt:
            self.push(token)

    def push(self, token: int) -> None:
        """Appends a token of the row."""
        self._tokens.append(token)
        end = len(self._tokens) - 1  # n-grams that end before the newest token: that token follows them
        for size in range(_SHORTEST, min(_LONGEST, end) + 1):
            self._places[tuple(self._tokens[end - size : end])] = end

    def after(self, more: list[int], room: int) -> list[int]:
        """Returns at most `room` tokens that followed an earlier occurrence of the last tokens.

        Args:
            more: tokens that are assumed to follow the row.
            room: largest number of returned tokens.
        """
        last = (self._tokens[-_LONGEST:] + more)[-_LONGEST:]
        for size in range(len(last), _SHORTEST - 1, -1):
            if (at := self._places.get(tuple(last[-size:]))) is not None:
                return self._tokens[at : at + room]
        return []
