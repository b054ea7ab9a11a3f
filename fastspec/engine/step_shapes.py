"""Shapes of steps and of passes over prompts: the facts by which captured graphs differ."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fastspec.sampling.rules import REJECTION, Verification
from fastspec.shapes import EARLY_BLOCKS, KEY_BLOCK, StepShape, Tiling, blocks, step_kinds

_LEAST_ROOM = 1024  # positions that the smallest captured steps have room for
_ROOM_GROWTH = 4  # the next larger kind of captured steps has room for so many times the positions
_USUAL_LENGTH = 256  # tokens of a row, where a step is timed before there are rows


@dataclass(frozen=True, slots=True)
class StepShapes:
    """Shapes of the steps of one engine.

    Attributes:
        batch: rows of the engine.
        row_tokens: columns of `DecodeState.tokens`: the longest row and one more.
        max_drafts: k, at most.
        tiling: shapes of a step's matrix products.
        static: steps are captured, so that few shapes must serve all lengths.
        verification: rule that accepts drafts.
    """

    batch: int
    row_tokens: int
    max_drafts: int
    tiling: Tiling
    static: bool
    verification: Verification = REJECTION

    @property
    def max_positions(self) -> int:
        """Positions of a step over the longest rows."""
        return self.row_tokens + self.max_drafts

    def bucket(self, rows: int) -> int:
        """Rows of the step that reaches the first `rows`: a power of two, or all rows of the engine."""
        return min(1 << (rows - 1).bit_length(), self.batch)

    def buckets(self, max_rows: int) -> list[int]:
        """The buckets of steps of up to `max_rows` rows, ascending."""
        return sorted({self.bucket(rows) for rows in range(1, max_rows + 1)})

    def room(self, positions: int) -> int:
        """Positions of a row that a captured step has room for, if at least `positions` are needed.

        The largest room for all steps would be slow. Such a step launches thousands of programs, most of them idle,
        and attention needs more launches a layer if there are positions after EARLY_BLOCKS.
        """
        room = _LEAST_ROOM
        while room < positions:
            room *= _ROOM_GROWTH
        return room if room + room // 8 < self.max_positions else self.max_positions  # not for a few less

    def step(self, k: int, sampler: str, top_logprobs: int | None, longest: int, shortest: int = 0) -> StepShape:
        """The shape of a step over rows of at most `longest` tokens and at least `shortest`."""
        positions = longest + k
        if self.static:
            positions = self.room(positions)  # so that few kinds of launches serve all lengths
        lowest = shortest - 2  # a draft model is fed a row's last two tokens, so no position is below this one
        first = EARLY_BLOCKS if lowest >= EARLY_BLOCKS * KEY_BLOCK else 0
        return StepShape(k, sampler, blocks(positions), self.tiling, top_logprobs, self.verification, first)

    def typical(self, k: int, sampler: str, top_logprobs: int | None, longest: int = 0, shortest: int = 0) -> StepShape:
        """The shape of a call's step over rows of `shortest` to `longest` tokens; uncaptured, of a usual length."""
        if not self.static:
            longest, shortest = min(_USUAL_LENGTH, self.row_tokens), 0
        return self.step(k, sampler, top_logprobs, longest, shortest)

    def chunk(self, upto: int, chunk: int, sampler: str) -> StepShape:
        """The shape of a pass over one chunk of a prompt that ends before position `upto`."""
        if self.static:
            upto = self.row_tokens
        return StepShape(0, sampler, blocks(upto), Tiling(chunk, chunk))

    def kinds(
        self,
        ks: Iterable[int],
        sampler: str,
        top_logprobs: int | None,
        longest: int,
        shortest: int,
        grammars: Iterable[str | None],
    ) -> list[StepShape]:
        """The shapes of a call's steps over rows of `shortest` to `longest` tokens."""
        call = sampler, top_logprobs, longest, shortest
        return [replace(self.step(k, *call), grammars=kind) for k, kind in step_kinds(ks, grammars)]
