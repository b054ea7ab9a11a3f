"""Shapes of steps and prefill passes. Captured graphs differ by shape."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fastspec.sampling.rules import REJECTION, Verification
from fastspec.shapes import EARLY_BLOCKS, KEY_BLOCK, StepShape, Tiling, blocks, step_kinds

_LEAST_ROOM = 1024  # positions per row in the smallest captured steps
_ROOM_GROWTH = 4  # factor between the positions of one captured step and the next larger one
_USUAL_LENGTH = 256  # assumed length of rows when a step is timed before any rows exist


@dataclass(frozen=True, slots=True)
class StepShapes:
    """Makes the shapes of the steps of one engine.

    Attributes:
        batch: rows of the engine.
        row_tokens: columns of `DecodeState.tokens`: length of the longest row, plus 1.
        max_drafts: largest k.
        tiling: tile shapes of the matrix products of a step.
        static: True if steps are captured. Then few shapes must serve all lengths.
        verification: rule that accepts or refuses drafts.
        reads_back: newest tokens of a row that a step may feed the draft, see `ProposerBase`.
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
        """Positions of a step over the longest rows."""
        return self.row_tokens + self.max_drafts

    @property
    def middle_length(self) -> int:
        """Tokens of a row whose step has more positions than the smallest, and only early ones (EARLY_BLOCKS)."""
        return _LEAST_ROOM * _ROOM_GROWTH - self.max_drafts

    def bucket(self, rows: int) -> int:
        """Returns the launch size of a step over the first `rows` rows: the next power of two, but at most `batch`."""
        return min(1 << (rows - 1).bit_length(), self.batch)

    def buckets(self, max_rows: int) -> list[int]:
        """Returns the buckets of steps of up to `max_rows` rows, ascending."""
        return sorted({self.bucket(rows) for rows in range(1, max_rows + 1)})

    def room(self, positions: int) -> int:
        """Returns the positions per row of the captured step that serves rows with `positions` positions.

        One captured step for the longest rows would be slow. It launches thousands of programs, most of them idle.
        Attention needs more launches per layer if there are positions after EARLY_BLOCKS.
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
        """Returns the shape of a step over rows of `shortest` to `longest` tokens."""
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
        """Returns the shape with which a step is timed. Without captured steps it has _USUAL_LENGTH tokens per row."""
        if not self.static:
            longest, shortest = min(_USUAL_LENGTH, self.row_tokens), 0
        return self.step(k, sampler, top_logprobs, longest, shortest, processed=processed)

    def chunk(self, upto: int, chunk: int, sampler: str) -> StepShape:
        """Returns the shape of a prefill pass over one chunk of a prompt that ends before position `upto`."""
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
        """Returns the shapes of all steps of a call over rows of `shortest` to `longest` tokens."""
        call = sampler, top_logprobs, longest, shortest
        return [
            replace(self.step(k, *call, processed=processed), grammars=kind) for k, kind in step_kinds(ks, grammars)
        ]
