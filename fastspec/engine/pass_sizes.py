"""Sizes of prefill passes: how many tokens a pass feeds, and how many prompts share one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastspec.shapes import chunks_of

# blocks of the smallest shared pass; larger ones have a multiple of it. With blocks of 64 tokens a smaller pass would
# take the same time, that of reading the weights
_LEAST_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class PassSizes:
    """Sizes of prefill passes, and the positions at which they may begin.

    Attributes:
        batch: number of rows that decode at once.
        exact: True if the bits of a row depend on that row alone.
        chunks: numbers of prompt tokens that one pass may feed, ascending.
        same_bits: numbers of tokens of passes that write the same bits to the KV cache, ascending. None: only the
            largest of `chunks`.
        draft_chunks: the same for passes of a draft model. None: the target's numbers.
        batch_tokens: number of tokens of the largest pass over several prompts. 0: every prompt has its own passes.
        budget: number of prompt tokens that may be prefilled before each step while other rows wait. None: whole
            prompts.
    """

    batch: int
    exact: bool
    chunks: tuple[int, ...]
    same_bits: tuple[int, ...] | None = None
    draft_chunks: tuple[int, ...] | None = None
    batch_tokens: int = 0
    budget: int | None = None

    @property
    def grid_unit(self) -> int:
        """Number of positions between the positions at which passes may begin."""
        return (self.same_bits or self.chunks[-1:])[0] if self.exact else 1

    @property
    def block(self) -> int:
        """Number of tokens of a block of a shared pass. A block has consecutive tokens of one prompt."""
        return self.chunks[0]

    @property
    def most_blocks(self) -> int:
        """Largest number of blocks of a shared pass. 0: prompts do not share passes."""
        blocks = self.batch_tokens // self.block
        return blocks if blocks > 1 and self.batch > 1 else 0

    @property
    def shared(self) -> tuple[int, ...]:
        """Numbers of blocks that a shared pass may have, ascending. A pass with fewer blocks is padded."""
        return (*range(_LEAST_BLOCKS, self.most_blocks, _LEAST_BLOCKS), self.most_blocks) if self.most_blocks else ()

    def blocks_of(self, tokens: int) -> int:
        """Returns the number of blocks for consecutive tokens of one prompt."""
        return -(-tokens // self.block)

    def shared_blocks(self, blocks: int, *, draft: bool = False) -> int:
        """Returns the number of blocks of the smallest shared pass for `blocks` blocks, including padding.

        It has at least as many tokens as the smallest pass in `same_bits`.

        Args:
            blocks: number of blocks with prompt tokens.
            draft: True for a pass of the draft model.
        """
        least = self._same_bits(draft=draft)[0]
        return next(each for each in self.shared if each >= blocks and each * self.block >= least)

    def shares(self, chunks: Sequence[int], tokens: int, *, draft: bool = False) -> bool:
        """True if `tokens` tokens of a prompt can be part of a shared pass, with the same bits as in their own passes.

        Args:
            chunks: sizes of their own passes.
            tokens: number of tokens.
            draft: True for passes of the draft model.
        """
        if not 0 < self.blocks_of(tokens) < self.most_blocks:
            return False
        return not self.exact or set(chunks) <= set(self._same_bits(draft=draft))

    def _same_bits(self, *, draft: bool) -> tuple[int, ...]:
        """Returns the sizes of the passes that write the same bits."""
        same = self.same_bits or self.chunks[-1:]
        return (self.draft_chunks or same) if draft else same

    def passes(self, stop: int, start: int = 0, max_tokens: int | None = None, *, draft: bool = False) -> list[int]:
        """Returns the sizes of the passes over the tokens at positions start..stop-1; see `chunks_of`.

        Args:
            stop, start: range of positions.
            max_tokens: upper limit of tokens per pass, where it keeps the bits. None: no limit.
            draft: True for the passes of the draft model.
        """
        own, same = self.draft_chunks if draft else None, self.same_bits or self.chunks[-1:]
        sizes, same = (own or self.chunks, own or same) if self.exact else (self.chunks, self.chunks)
        return chunks_of(sizes, stop, start, same, self.grid_unit, max_tokens)
