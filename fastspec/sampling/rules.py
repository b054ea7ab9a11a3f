"""Names of the verification rules in `fastspec.sampling.verify`, and synthetic acceptance for benchmarks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

MODES = REJECTION, COUPLED, BLOCK = "rejection", "coupled", "block"


@dataclass(frozen=True, slots=True)
class SyntheticAcceptance:
    """Accepts draft tokens at a given rate. For benchmarks only: the text does not follow the model's distribution.

    Args:
        rate: probability that a draft token is accepted if all draft tokens before it are accepted. It does not depend
            on the token.
        pattern: 1 to 64 numbers, used instead of a rate. Each is the number of draft tokens to accept in one decode
            step. After the last number the pattern starts again.

    Raises:
        ValueError: both or neither are given, or a value is out of range.
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
            # a tuple is hashable, and does not change with the caller's list
            object.__setattr__(self, "pattern", counts)

    def __str__(self) -> str:
        """Describes the rule."""
        if self.pattern is None:
            return f"synthetic acceptance at a rate of {self.rate:g}"
        return f"synthetic acceptance of {', '.join(map(str, self.pattern))} drafts in turn"


Verification: TypeAlias = "str | SyntheticAcceptance"


def checked(verification: object) -> Verification:
    """Checks the argument `verification` of a generator, and returns it.

    Raises:
        ValueError: it is neither one of MODES nor a SyntheticAcceptance.
    """
    if isinstance(verification, SyntheticAcceptance) or (isinstance(verification, str) and verification in MODES):
        return verification
    raise ValueError(
        f"verification must be one of {', '.join(map(repr, MODES))}, or for benchmarks a SyntheticAcceptance; "
        f"got {verification!r}"
    )


def needs_draft_probs(verification: Verification) -> bool:
    """True if the rule needs the probability distributions from which draft tokens were drawn."""
    return verification in (REJECTION, BLOCK)


def synthetic_name(verification: Verification) -> str | None:
    """Returns a description of a synthetic rule. Returns None for a rule that keeps the model's distribution."""
    return str(verification) if isinstance(verification, SyntheticAcceptance) else None


def announce_synthetic(verification: Verification) -> None:
    """Warns that the text will not follow the model's distribution, if the rule is synthetic."""
    if name := synthetic_name(verification):
        warnings.warn(f"{name}: for benchmarks only; the text is not the model's", stacklevel=3)
