"""What a proposer must do. A proposer sees views of the state, never the target model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fastspec.kernels.reference import Tiling
from fastspec.modes import COUPLED, REJECTION, Verification, needs_law
from fastspec.sampling import DRAFT, TARGET
from fastspec.state import DecodeState
from fastspec.verify import Draws

SAMPLERS = GREEDY, FULL = "greedy", "full"  # sampler kinds of a step


@dataclass(frozen=True, slots=True)
class StepShape:
    """What is fixed on the host before a step is launched; one captured graph per value later.

    Attributes:
        num_drafts: k, tokens drafted by every running row; 0 is plain decoding.
        sampler: GREEDY (every row picks the largest logit, as it is), FULL (everything the options can ask for).
        num_blocks: bound on attended positions in blocks of `kernels.reference.KEY_BLOCK`.
        tiling: shapes of the matrix products of the target and of the draft.
        top_logprobs: how many of the most probable ids are recorded at each place beside the emitted token's
            log-probability; None records nothing.
        verification: how drafts are judged where a row samples.
        first_block: no running row is fed a position in an earlier block of KEY_BLOCK.
    """

    num_drafts: int
    sampler: str
    num_blocks: int
    tiling: Tiling
    top_logprobs: int | None = None
    verification: Verification = REJECTION
    first_block: int = 0


class Proposer(Protocol):
    """Writes the drafts of a step.

    Attributes:
        max_length: tokens of a row, from the first, that the proposer wants to be fed by `catch_up`; 0 for one that
            keeps nothing of its own.
        certain: drafts are a function of the row's tokens, with nothing drawn: their law is one on them, and
            draft_probs is neither written nor read.
    """

    max_length: int
    certain: bool

    def propose(self, state: DecodeState, shape: StepShape, draws: Draws) -> None:
        """Fills state.draft_tokens[:, :k] and draft_counts, and draft_probs[:, :k] where `keeps_law` says so.

        Runs inside the step: no host read, no data-dependent shape. Rows that are not running may be filled
        with anything. Drafts must be ids the target knows; the law written must be the one drawn from. A row's
        drafts from draft_counts on are ignored. What is drawn at a position is drawn with `purpose_of(shape)`.
        """

    def catch_up(self, state: DecodeState, shape: StepShape, chunk: int) -> None:
        """Takes in up to `chunk` committed tokens per row that were not seen yet, advancing draft_lengths."""


def keeps_law(shape: StepShape) -> bool:
    """Whether a proposer that draws must leave the laws it drew from in draft_probs."""
    return shape.sampler != GREEDY and needs_law(shape.verification)


def purpose_of(shape: StepShape) -> int:
    """Which numbers a draft is drawn with: numbers of its own, or the ones that the target will pick with."""
    return TARGET if shape.verification == COUPLED else DRAFT
