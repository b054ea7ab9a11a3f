"""Sizes of prefill passes: numbers of tokens in a pass, and numbers of prompts that share a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastspec.shapes import chunks_of

# blocks of the smallest shared pass; larger ones have a multiple of it. With blocks of 64 tokens a smaller pass would
# take the same time, that of reading the weights
_LEAST_BLOCKS = 4
# largest captured pass, in tokens: launching a larger one takes less time than the device works on it
_LARGEST_CAPTURED = 1024


@dataclass(frozen=True, slots=True)
class PassSizes:
    """Sizes of prefill passes, and the positions at which they may begin.

    Attributes:
        batch: number of batch slots: sequences that decode at once.
        exact: True if the bits of a sequence's results do not depend on other sequences in the batch.
        chunks: numbers of tokens that a pass over one prompt may have, ascending.
        same_bits: those of `chunks` with which the KV cache gets the same bits, ascending. None: only the largest.
        draft_chunks: those of `chunks` with which a draft model's KV cache gets the same bits. None: see `same_bits`.
        batch_tokens: number of tokens of the largest pass over several prompts. 0: every prompt has its own passes.
        budget: number of prompt tokens that may be prefilled before each decode step while other requests decode.
            None: whole prompts.
        all_captured: True to capture passes of every size as CUDA graphs. Passes with quantised weights have several
            times as many launches, because weights are dequantised in slices.
    """

    batch: int
    exact: bool
    chunks: tuple[int, ...]
    same_bits: tuple[int, ...] | None = None
    draft_chunks: tuple[int, ...] | None = None
    batch_tokens: int = 0
    budget: int | None = None
    all_captured: bool = False

    @property
    def grid_unit(self) -> int:
        """Positions at which passes may begin are multiples of this number."""
        return (self.same_bits or self.chunks[-1:])[0] if self.exact else 1

    def captured(self, tokens: int) -> bool:
        """True if a pass over `tokens` tokens, of all its rows together, is captured as a CUDA graph."""
        return self.all_captured or tokens <= _LARGEST_CAPTURED

    @property
    def block(self) -> int:
        """Number of tokens of a block: consecutive tokens of one prompt that are one row of a shared pass."""
        return self.chunks[0]

    @property
    def most_blocks(self) -> int:
        """Largest number of blocks of tokens in a pass over several prompts. 0: prompts do not share passes."""
        blocks = self.batch_tokens // self.block
        return blocks if blocks > 1 and self.batch > 1 else 0

    @property
    def shared(self) -> tuple[int, ...]:
        """Numbers of blocks that a pass over several prompts may have, ascending. Empty: prompts do not share passes.

        A pass with another number of blocks is padded to the next of these numbers.
        """
        return (*range(_LEAST_BLOCKS, self.most_blocks, _LEAST_BLOCKS), self.most_blocks) if self.most_blocks else ()

    def blocks_of(self, tokens: int) -> int:
        """Returns the number of blocks that `tokens` consecutive tokens of one prompt need."""
        return -(-tokens // self.block)

    def shared_blocks(self, blocks: int, *, draft: bool = False) -> int:
        """Returns the number of blocks of the smallest shared pass that has room for `blocks` blocks.

        The result includes padding. The pass has at least as many tokens as the smallest pass in `same_bits`.

        Args:
            blocks: number of blocks with prompt tokens.
            draft: True for a pass of the draft model.
        """
        least = self._same_bits(draft=draft)[0]
        return next(each for each in self.shared if each >= blocks and each * self.block >= least)

    def shares(self, chunks: Sequence[int], tokens: int, *, draft: bool = False) -> bool:
        """True if tokens of a prompt may be part of a pass over several prompts.

        With `exact` the tokens must get the same bits as in passes over this prompt alone.

        Args:
            chunks: sizes of the passes that these tokens would need without other prompts.
            tokens: number of these tokens.
            draft: True for passes of the draft model.
        """
        if not 0 < self.blocks_of(tokens) < self.most_blocks:
            return False
        return not self.exact or set(chunks) <= set(self._same_bits(draft=draft))

    def _same_bits(self, *, draft: bool) -> tuple[int, ...]:
        """Returns the numbers of tokens of a pass with which the KV cache of target or draft gets the same bits."""
        same = self.same_bits or self.chunks[-1:]
        return (self.draft_chunks or same) if draft else same

    def passes(self, stop: int, start: int = 0, max_tokens: int | None = None, *, draft: bool = False) -> list[int]:
        """Returns the sizes of the passes over the tokens at positions start..stop-1; see `chunks_of`.

        Args:
            stop, start: range of positions.
            max_tokens: upper limit of tokens per pass. It is exceeded where smaller passes would give other bits.
                None: no limit.
            draft: True for the passes of the draft model.
        """
        own, same = self.draft_chunks if draft else None, self.same_bits or self.chunks[-1:]
        sizes, same = (own or self.chunks, own or same) if self.exact else (self.chunks, self.chunks)
        return chunks_of(sizes, stop, start, same, self.grid_unit, max_tokens)
