"""One row's place in its grammar: what may come next, what must, and where the text ends.

The host knows a row's text only once a step was read, and what may come at a step's later places depends on the drafts
before them. So the drafts of such a row are made here: what the grammar forces, and behind that what followed the
row's last tokens before, as far as the grammar allows it. They are a function of the row's text alone, so the row's
law is the target's masked one whatever they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_LONGEST, _SHORTEST = 4, 2  # tokens that a lookup compares
_BITS = 32
ALL = -1  # a word of a mask that allows all its ids


class Matcher(Protocol):
    """What a row asks of llguidance's `LLMatcher`."""

    def is_accepting(self) -> bool:
        """Whether the text may end here."""

    def is_stopped(self) -> bool:
        """Whether it must, or the matcher has failed."""

    def is_error(self) -> bool:
        """Whether the matcher has failed."""

    def rollback(self, num_tokens: int) -> bool:
        """Takes back the last tokens."""

    def compute_ff_tokens(self) -> list[int]:
        """Tokens that must come next."""

    def validate_tokens(self, tokens: list[int]) -> int:
        """How many of these could come next."""

    def consume_tokens(self, sampled_tokens: list[int]) -> bool:
        """Goes on by these."""

    def compute_bitmask(self) -> bytes:
        """A bit for every id, whether it may come next."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a row needs for one step.

    Attributes:
        drafts: of the row, which all may come.
        masks: int32 [len(drafts) + 1, W]: the ids that may come at each place, bit i % 32 of word i // 32 for id i.
    """

    drafts: list[int]
    masks: NDArray[np.int32]

    def cut(self, most: int) -> Turn:
        """With at most so many drafts."""
        return Turn(self.drafts[:most], self.masks[: most + 1])


class RowGrammar:
    """A row's place in its grammar.

    Args:
        matcher: at its beginning.
        vocab_size: width of the target's logits; W is a 32nd of it, rounded up.
        stop_ids: end the row; they may come where the text is whole.
        ends: ids that end a text for the matcher, which knows nothing of `stop_ids`.
        prompt: of the row.
    """

    def __init__(
        self,
        matcher: Matcher,
        vocab_size: int,
        stop_ids: Sequence[int],
        ends: Sequence[int] = (),
        prompt: Sequence[int] = (),
    ) -> None:
        self._matcher, self._stop_ids, self._vocab_size = matcher, tuple(stop_ids), vocab_size
        self._words = words_of(vocab_size)
        self._not_known = ~_bits(range(vocab_size), self._words)
        self._ends, self._stops = _bits(ends, self._words), _bits(stop_ids, self._words)
        self._lookup = _Lookup(prompt)
        self._turn: tuple[int, Turn] | None = None  # the one that was asked for last, for so many drafts

    @property
    def possible(self) -> bool:
        """Whether anything may come next."""
        return bool(self._mask().any())

    def advance(self, tokens: Sequence[int]) -> int | None:
        """Takes in what a step emitted.

        Returns:
            How many of these tokens there are up to the end of the text, where it must end and no stop id can say so;
            None where the row goes on, or ends by itself.
        """
        self._turn = None
        for index, token in enumerate(tokens):
            if token in self._stop_ids:
                return None
            self._matcher.consume_tokens([token])
            self._lookup.push(token)
            if self._whole and not self._stop_ids:
                return index + 1
        return None

    def turn(self, most: int) -> Turn:
        """What the next step needs, with at most `most` drafts; asking changes nothing."""
        if self._turn is None or self._turn[0] != most:
            self._turn = most, self._made(most)
        return self._turn[1]

    @property
    def _whole(self) -> bool:
        """Whether the text must end here."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _made(self, most: int) -> Turn:
        drafts: list[int] = []
        masks: list[NDArray[np.int32]] = []
        consumed = 0
        while run := self._run(drafts, most - len(drafts)):
            for token in run:
                masks.append(self._mask())
                if self._whole:
                    return self._ended([*drafts, token], masks, consumed)
                self._matcher.consume_tokens([token])
                drafts.append(token)
                consumed += 1
        masks.append(self._mask())
        if consumed:
            self._matcher.rollback(consumed)
        return Turn(drafts, np.stack(masks))

    def _ended(self, drafts: list[int], masks: list[NDArray[np.int32]], consumed: int) -> Turn:
        """The last draft ends the row: what may come behind it is never asked."""
        if consumed:
            self._matcher.rollback(consumed)
        return Turn(drafts, np.stack([*masks, np.full(self._words, ALL, dtype=np.int32)]))

    def _run(self, drafts: list[int], room: int) -> list[int]:
        """The next drafts: what must come, or what came before."""
        if room <= 0 or self._matcher.is_error():
            return []
        if self._whole:
            return list(self._stop_ids[:1])
        run = [token for token in self._matcher.compute_ff_tokens()[:room] if token < self._vocab_size]
        if not run:
            run = self._lookup.after(drafts, room)
        return run[: self._matcher.validate_tokens(run)] if run else []

    def _mask(self) -> NDArray[np.int32]:
        """The ids that may come next, int32 [W]; any, where the host will cut the row."""
        if self._whole and not self._stop_ids:
            return ~self._not_known
        allowed = np.zeros(self._words, dtype=np.int32)
        if not self._matcher.is_error():
            data = self._matcher.compute_bitmask()
            found = np.frombuffer(data + bytes(-len(data) % 4), dtype=np.int32)[: self._words]
            allowed[: len(found)] = found
            allowed &= ~(self._not_known | self._ends)
            if self._matcher.is_accepting():
                allowed |= self._stops
        return allowed


def words_of(vocab_size: int) -> int:
    """W, int32 words of a mask."""
    return -(-vocab_size // _BITS)


def _bits(ids: Iterable[int], words: int) -> NDArray[np.int32]:
    """The mask int32 [W] of some ids."""
    bits = np.zeros(words * _BITS, dtype=bool)
    bits[list(ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


class _Lookup:
    """Finds what followed a row's last tokens when they stood there before.

    Args:
        prompt: the row's first tokens.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}  # tokens in a row -> the place behind them, the last there is
        for token in prompt:
            self.push(token)

    def push(self, token: int) -> None:
        """The row has one token more."""
        self._tokens.append(token)
        end = len(self._tokens) - 1  # what ends before the newest token has something behind it
        for size in range(_SHORTEST, min(_LONGEST, end) + 1):
            self._behind[tuple(self._tokens[end - size : end])] = end

    def after(self, more: list[int], room: int) -> list[int]:
        """What may follow the row and `more`, at most `room` tokens."""
        last = (self._tokens[-_LONGEST:] + more)[-_LONGEST:]
        for size in range(len(last), _SHORTEST - 1, -1):
            if (at := self._behind.get(tuple(last[-size:]))) is not None:
                return self._tokens[at : at + room]
        return []
