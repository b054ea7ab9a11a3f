"""Shapes of decode steps and prefill passes. Each shape has its own CUDA graph."""

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
    """Makes the shapes of one engine's decode steps and prefill passes.

    Attributes:
        batch: number of batch slots.
        row_tokens: number of columns of `DecodeState.tokens`: tokens of the longest possible sequence, plus 1.
        max_drafts: largest number of draft tokens per step and sequence.
        tiling: tile shapes of the matrix products of a step.
        static: True if steps are captured as CUDA graphs. Then few shapes must serve all sequence lengths.
        verification: rule that accepts or rejects draft tokens.
        reads_back: number of a sequence's newest tokens that a step may feed to the draft model, see `ProposerBase`.
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
        """Largest number of positions per sequence: those of the longest sequence, and of its draft tokens."""
        return self.row_tokens + self.max_drafts

    @property
    def middle_length(self) -> int:
        """Largest number of tokens of a sequence for which the second smallest captured step is enough.

        All positions of such a sequence lie in the first EARLY_BLOCKS blocks of keys.
        """
        return _LEAST_ROOM * _ROOM_GROWTH - self.max_drafts

    def bucket(self, rows: int) -> int:
        """Returns the number of batch slots that a step for `rows` requests covers.

        It is `rows` rounded up to a power of two, but at most `batch`.
        """
        return min(1 << (rows - 1).bit_length(), self.batch)

    def buckets(self, max_rows: int) -> list[int]:
        """Returns all values of `bucket` for 1 to `max_rows` requests, ascending."""
        return sorted({self.bucket(rows) for rows in range(1, max_rows + 1)})

    def room(self, positions: int) -> int:
        """Returns `positions` rounded up to a number of positions per sequence for which a step is captured.

        The CUDA graph of a step launches CTAs for all its positions. If one graph served sequences of every length,
        most of thousands of CTAs would be idle for short ones. Attention needs more launches per layer for positions
        after the first EARLY_BLOCKS blocks of keys.
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
        """Returns the shape of a decode step over sequences of `shortest` to `longest` tokens.

        Args:
            k: number of draft tokens per sequence.
            sampler, top_logprobs, processed: see StepShape.
            longest, shortest: largest and smallest number of tokens of a sequence.
        """
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
        """Returns the shape of a decode step that is run only to time it. For the arguments see `step`.

        If steps are not captured, `longest` and `shortest` are ignored. A usual sequence length is assumed instead.
        """
        if not self.static:
            longest, shortest = min(_USUAL_LENGTH, self.row_tokens), 0
        return self.step(k, sampler, top_logprobs, longest, shortest, processed=processed)

    def chunk(self, upto: int, chunk: int, sampler: str) -> StepShape:
        """Returns the shape of a prefill pass.

        Args:
            upto: upper limit (exclusive) of the positions of the pass.
            chunk: number of prompt tokens of each row in the pass.
            sampler: see StepShape.
        """
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
        """Returns the shapes of all decode steps that a call may need.

        Args:
            ks: numbers of draft tokens per sequence that a step may have.
            sampler, top_logprobs, processed: see StepShape.
            longest, shortest: largest and smallest number of tokens of a sequence.
            grammars: values of `StepShape.grammars` that a step may have.
        """
        call = sampler, top_logprobs, longest, shortest
        return [
            replace(self.step(k, *call, processed=processed), grammars=kind) for k, kind in step_kinds(ks, grammars)
        ]
