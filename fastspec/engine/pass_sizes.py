"""Sizes of prefill passes: how many tokens a pass feeds, and how many prompts share one."""

from __future__ import annotations

from dataclasses import dataclass

from fastspec.shapes import chunks_of


@dataclass(frozen=True, slots=True)
class PassSizes:
    """Sizes of prefill passes, and the positions at which they may begin.

    Attributes:
        batch: rows of the engine.
        exact: True if the bits of a row depend on that row alone.
        chunks: prompt tokens that one pass may feed, ascending.
        same_bits: sizes of passes that write the same bits to the KV cache, ascending. None: only the largest of
            `chunks`.
        draft_chunks: the same for passes of a draft model. None: the target's sizes.
        batch_tokens: tokens of one pass over several short prompts. 0: every prompt has its own passes.
        budget: prompt tokens that each step may prefill while other rows wait. None: whole prompts.
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
        """Passes may begin only at positions that are a multiple of this."""
        return (self.same_bits or self.chunks[-1:])[0] if self.exact else 1

    def prompts_per_pass(self, chunk: int) -> int:
        """Returns the number of prompts that share a pass with `chunk` tokens of each.

        1: prompts do not share passes.
        """
        rows = self.batch_tokens // chunk
        return rows if 1 < rows <= self.batch else 1

    def passes(self, stop: int, start: int = 0, max_tokens: int | None = None, *, draft: bool = False) -> list[int]:
        """Returns the sizes of the passes over the tokens at positions start..stop-1; see `chunks_of`.

        Args:
            draft: True for the passes of the draft model.
        """
        own, same = self.draft_chunks if draft else None, self.same_bits or self.chunks[-1:]
        sizes, same = (own or self.chunks, own or same) if self.exact else (self.chunks, self.chunks)
        return chunks_of(sizes, stop, start, same, self.grid_unit, max_tokens)
