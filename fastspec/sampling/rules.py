"""How drafts are judged: the names of the rules in `fastspec.sampling.verify`, and synthetic acceptance for
benchmarks.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

MODES = REJECTION, COUPLED, BLOCK = "rejection", "coupled", "block"


@dataclass(frozen=True, slots=True)
class SyntheticAcceptance:
    """Accepts drafts at a given rate, for benchmarks only: the text does not follow the model's distribution.

    Args:
        rate: each draft, until the first that is refused, is accepted with this probability, whatever it is.
        pattern: instead of a rate, drafts to accept in one step after the other, over and over (1 to 64 of them).

    Raises:
        ValueError: not exactly one of the two, or a value out of range.
    """

    rate: float | None = None
    pattern: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.pattern is None):
            raise ValueError("SyntheticAcceptance takes either a rate or a pattern: SyntheticAcceptance(rate=0.8)")
        if self.rate is not None and not (type(self.rate) in (int, float) and 0 <= self.rate <= 1):
            raise ValueError(f"SyntheticAcceptance's rate is a probability from 0 to 1, got {self.rate!r}")
        if self.pattern is not None:
            counts = tuple(self.pattern)
            if not 1 <= len(counts) <= 64 or not all(type(count) is int and count >= 0 for count in counts):
                raise ValueError(f"SyntheticAcceptance's pattern is 1 to 64 counts of drafts, got {self.pattern!r}")
            object.__setattr__(self, "pattern", counts)  # hashable, and the caller's list stays the caller's

    def __str__(self) -> str:
        """The rule in words."""
        if self.pattern is None:
            return f"synthetic acceptance at a rate of {self.rate:g}"
        return f"synthetic acceptance of {', '.join(map(str, self.pattern))} drafts in turn"


Verification: TypeAlias = "str | SyntheticAcceptance"


def checked(verification: object) -> Verification:
    """The same, once it is one of MODES or a SyntheticAcceptance.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(verification, SyntheticAcceptance) or (isinstance(verification, str) and verification in MODES):
        return verification
    raise ValueError(
        f"verification must be one of {', '.join(map(repr, MODES))}, or for benchmarks a SyntheticAcceptance; "
        f"got {verification!r}"
    )


def needs_draft_probs(verification: Verification) -> bool:
    """Whether the rule judges a draft by the distribution that it was drawn from."""
    return verification in (REJECTION, BLOCK)


def synthetic_name(verification: Verification) -> str | None:
    """What drafts are accepted by, when the text is not the model's; None for a rule that keeps the distribution."""
    return str(verification) if isinstance(verification, SyntheticAcceptance) else None


def announce_synthetic(verification: Verification) -> None:
    """Warns the caller of a constructor when the text will not be the model's."""
    if name := synthetic_name(verification):
        warnings.warn(f"{name}: for benchmarks only, the text is not the model's", stacklevel=3)
