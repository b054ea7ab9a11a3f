"""Shapes of steps and prefill passes. Captured graphs differ by shape."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fastspec.sampling.rules import REJECTION, Verification
from fastspec.shapes import EARLY_BLOCKS, KEY_BLOCK, StepShape, Tiling, blocks, step_kinds

_LEAST_ROOM = 1024  # largest position limit of a row in the smallest captured steps
_ROOM_GROWTH = 4  # factor between this limit and that of the next larger captured steps
_USUAL_LENGTH = 256  # assumed length of rows when a step is timed before any rows exist


@dataclass(frozen=True, slots=True)
class StepShapes:
    """Makes the shapes of the steps of one engine.

    Attributes:
        batch: largest number of rows.
        row_tokens: number of columns of `DecodeState.tokens`: tokens of the longest row, plus 1.
        max_drafts: largest k.
        tiling: tile shapes of the matrix products of a step.
        static: True if steps are captured. Then few shapes must serve all lengths.
        verification: rule that accepts or refuses drafts.
        reads_back: number of newest tokens of a row that a step may feed the draft, see `ProposerBase`.
    """

    batch: int
    row_tokens: int
    max_drafts: int
    tiling: Tiling
    static: bool
    verification: Verification = REJECTION
    reads_back: int = 2

    @property
    def max_positions(self) -> int:
        """Number of positions per row in a step over the longest rows."""
        return self.row_tokens + self.max_drafts

    @property
    def middle_length(self) -> int:
        """Length of a row whose captured step is the second smallest. Its positions are in the first EARLY_BLOCKS."""
        return _LEAST_ROOM * _ROOM_GROWTH - self.max_drafts

    def bucket(self, rows: int) -> int:
        """Returns the launch size of a step over the first `rows` rows: the next power of two, but at most `batch`."""
        return min(1 << (rows - 1).bit_length(), self.batch)

    def buckets(self, max_rows: int) -> list[int]:
        """Returns the buckets of steps of up to `max_rows` rows, ascending."""
        return sorted({self.bucket(rows) for rows in range(1, max_rows + 1)})

    def room(self, positions: int) -> int:
        """Returns `positions` rounded up to the number of positions per row for which a step is captured.

        A captured step launches programs for all its positions. With one captured step for the longest rows, most of
        thousands of programs would be idle. Attention needs more launches per layer for positions after EARLY_BLOCKS.
        """
        room = _LEAST_ROOM
        while room < positions:
            room *= _ROOM_GROWTH
        # use the largest size if that is at most 1/8 larger
        return room if room + room // 8 < self.max_positions else self.max_positions

    def step(
        self,
        k: int,
        sampler: str,
        top_logprobs: int | None,
        longest: int,
        shortest: int = 0,
        *,
        processed: bool = False,
    ) -> StepShape:
        """Returns the shape of a step over rows of `shortest` to `longest` tokens. For other arguments see `kinds`."""
        positions = longest + k
        if self.static:
            positions = self.room(positions)  # round up, so that few captured steps serve all lengths
        lowest = shortest - self.reads_back
        first = EARLY_BLOCKS if lowest >= EARLY_BLOCKS * KEY_BLOCK else 0
        return StepShape(
            k,
            sampler,
            blocks(positions),
            self.tiling,
            top_logprobs,
            self.verification,
            first_block=first,
            processed=processed,
        )

    def typical(
        self,
        k: int,
        sampler: str,
        top_logprobs: int | None,
        longest: int = 0,
        shortest: int = 0,
        *,
        processed: bool = False,
    ) -> StepShape:
        """Returns the shape of a step that is run only to time it. For the arguments see `step`.

        If steps are not captured, rows are assumed to have _USUAL_LENGTH tokens.
        """
        if not self.static:
            longest, shortest = min(_USUAL_LENGTH, self.row_tokens), 0
        return self.step(k, sampler, top_logprobs, longest, shortest, processed=processed)

    def chunk(self, upto: int, chunk: int, sampler: str) -> StepShape:
        """Returns the shape of a prefill pass over `chunk` prompt tokens per row, all of them below position `upto`."""
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
        *,
        processed: bool = False,
    ) -> list[StepShape]:
        """Returns the shapes of all steps that a call may need, over rows of `shortest` to `longest` tokens.

        Args:
            ks: numbers of drafts that a step may have.
            sampler, top_logprobs, processed: see StepShape.
            longest, shortest: largest and smallest number of tokens of a row.
            grammars: values of `StepShape.grammars` that a step may have.
        """
        call = sampler, top_logprobs, longest, shortest
        return [
            replace(self.step(k, *call, processed=processed), grammars=kind) for k, kind in step_kinds(ks, grammars)
        ]
