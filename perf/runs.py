"""What one call of any engine gave, and how many such calls become a row."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from perf.records import Row
from perf.stats import rate, rate_interval
from perf.timing import summarise


@dataclass(frozen=True, slots=True)
class Call:
    """One `generate` of one engine.

    Attributes:
        tokens: new tokens, all rows.
        steps: passes of the target over the batch; None where the engine does not tell. The pass over the prompt
            counts when it gives a token (transformers), else not (ours).
        row_steps: passes that a row took part in, summed over rows.
        seconds: of the whole call. first: until the first token was there.
        text: the new tokens.
        drafted, accepted: tokens, all rows; None where the engine does not tell.
    """

    tokens: int
    steps: int | None
    row_steps: int | None
    seconds: float
    first: float | None
    text: list[list[int]]
    drafted: int | None = None
    accepted: int | None = None

    @property
    def step_seconds(self) -> float | None:
        """Mean time of a step after the first; None where there is only one."""
        if self.steps is None or self.first is None or self.steps < 2 or self.seconds <= self.first:
            return None
        return (self.seconds - self.first) / (self.steps - 1)


def summary(engine: str, k: int, calls: Sequence[Call]) -> Row:
    """The columns every engine has; docs/performance.md says what they mean.

    Raises:
        ValueError: there are no calls.
    """
    tokens, seconds = [float(call.tokens) for call in calls], [call.seconds for call in calls]
    low, high = rate_interval(tokens, seconds)
    steps = [call.step_seconds for call in calls if call.step_seconds is not None]
    firsts = [call.first for call in calls if call.first is not None]
    counted = [call.row_steps for call in calls if call.row_steps is not None]
    per_pass = rate(tokens, [float(count) for count in counted]) if len(counted) == len(calls) else None
    return {
        "engine": engine,
        "k": k,
        "status": "ok",
        "calls": len(calls),
        "new_tokens": sum(call.tokens for call in calls),
        "ms_step": round(statistics.median(steps) * 1e3, 4) if steps else None,
        "ms_step_iqr": round(summarise(steps, "wall", "").spread * 1e3, 4) if steps else None,
        "tok_s": round(rate(tokens, seconds), 2),
        "tok_s_95": [round(low, 2), round(high, 2)],
        "ms_token": round(sum(call.seconds * len(call.text) for call in calls) / sum(tokens) * 1e3, 4),
        "tokens_per_pass": round(per_pass, 3) if per_pass is not None else None,
        "acceptance": _acceptance(calls),
        "first_ms": round(statistics.median(firsts) * 1e3, 3) if firsts else None,
        "samples": {"tokens": [call.tokens for call in calls], "seconds": [round(value, 5) for value in seconds]},
    }


def _acceptance(calls: Sequence[Call]) -> float | None:
    drafted, accepted = (sum(getattr(call, name) or 0 for call in calls) for name in ("drafted", "accepted"))
    return round(accepted / drafted, 4) if drafted else None


def same_text(calls: Sequence[Call], others: Sequence[Call]) -> tuple[int, int]:
    """Rows whose new tokens are equal in both, and rows compared."""
    pairs = [
        (mine, theirs)
        for call, other in zip(calls, others, strict=True)
        for mine, theirs in zip(call.text, other.text, strict=True)
    ]
    return sum(mine == theirs for mine, theirs in pairs), len(pairs)
