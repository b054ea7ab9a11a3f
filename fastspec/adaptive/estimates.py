"""Estimates learned while decoding: chances of acceptance, and seconds of each kind of step.

Plain arithmetic over observations; no torch, no clock, no randomness.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

# before anything was seen, a draft is taken to be accepted so often: an optimist tries, and a few refusals convince him
_FIRST_GUESS, _GUESS_WEIGHT = 0.7, 2.0
_DEEPER_WEIGHT = 4.0  # of the guess that a deeper draft is accepted as often as the one before it
_MEMORY_ROWS, _MEMORY_STEPS = 128, 16  # evidence fades over so many results of rows, and over so many steps at least
_SETTLED = 6  # samples of a time whose median counts at first: one late step must not decide
_SLOW = 0.1  # how far a later sample moves it,
_OUTLIER = 2.0  # taken as at most so many times longer or shorter than expected
_COST_OF_A_DRAFT = 0.2  # of a plain step, where no time was ever measured


@dataclass(slots=True)
class Acceptance:
    """Chances that draft 1, 2, .. is accepted if all before it are.

    A draft does not depend on how many follow it, so a step of any k tells about all positions that it drafted. A row
    that drafted fewer than k counts as a refusal, because tokens per step are what matters here.

    Attributes:
        trials, hits: by position, from the first draft; faded counts, of which a guess is the first.
        seen: True after the first observation.
    """

    trials: list[float]
    hits: list[float]
    seen: bool = False
    _survival: list[float] | None = None  # of the counts as they are

    @classmethod
    def unknown(cls, deepest: int) -> Acceptance:
        """Returns the estimate before any observation, for up to `deepest` drafts."""
        guess = [1.0] + [0.0] * (deepest - 1)
        return cls([_GUESS_WEIGHT * one for one in guess], [_GUESS_WEIGHT * _FIRST_GUESS * one for one in guess])

    @property
    def weight(self) -> float:
        """Number of row results that the counts represent."""
        return self.trials[0]

    def observe(self, k: int, accepted: Sequence[int]) -> None:
        """Adds one step of k > 0 drafts: the number that each of its rows accepted."""
        self.seen, self._survival = True, None
        kept = (1 - 1 / max(_MEMORY_ROWS, _MEMORY_STEPS * len(accepted))) ** len(accepted)
        for j in range(len(self.trials)):
            self.trials[j] *= kept
            self.hits[j] *= kept
        for count in accepted:
            for j in range(min(k, count + 1)):
                self.trials[j] += 1
                self.hits[j] += count > j

    def fade(self, weight: float) -> None:
        """Scales the counts down to represent at most `weight` results."""
        if self.weight > weight:
            kept, self._survival = weight / self.weight, None
            self.trials = [value * kept for value in self.trials]
            self.hits = [value * kept for value in self.hits]

    def survival(self) -> list[float]:
        """Returns the chances that draft 1, 2, .. and all before it are accepted."""
        if self._survival is None:
            self._survival = self._chances()
        return self._survival

    def _chances(self) -> list[float]:
        chances, rate, weight, product = [], 0.0, 0.0, 1.0
        for trials, hits in zip(self.trials, self.hits, strict=True):
            rate = (hits + weight * rate) / (trials + weight)
            weight = _DEEPER_WEIGHT
            product *= rate
            chances.append(product)
        return chances


def tokens_per_step(survival: Sequence[float], k: int) -> float:
    """Returns the expected tokens of a row in a step of k drafts: accepted drafts, and one chosen by the target."""
    return 1.0 + sum(survival[:k])


@dataclass(slots=True)
class StepTimes:
    """Seconds of a step of each (bucket, k).

    A time is a product of three: what the step took before any call (`measured`), how much slower this bucket's
    steps have become since (contexts grow, clocks change), and how far this k departs from the others in that. So one
    running k keeps the expectations of all others up to date.

    Attributes:
        measured: seconds by (bucket, k), of idle rows; may be empty.
        scale: by bucket.
        own: by (bucket, k).
        first: the first samples by (bucket, k), as what `scale` or `own` should be.
        coming_back: how much longer a catch-up pass takes than a draft pass.
    """

    measured: dict[tuple[int, int], float] = field(default_factory=dict)
    scale: dict[int, float] = field(default_factory=dict)
    own: dict[tuple[int, int], float] = field(default_factory=dict)
    first: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    coming_back: float = 1.0
    _latest_scale: float = 1.0

    def know(self, measured: Mapping[tuple[int, int], float]) -> None:
        """Sets measured times of steps; earlier estimates of these steps are dropped."""
        self.measured |= measured
        for bucket, k in measured:
            self.scale.pop(bucket, None)
            self.own.pop((bucket, k), None)
            self.first.pop((bucket, k), None)

    def seconds(self, bucket: int, k: int) -> float:
        """Returns the expected seconds of such a step."""
        return self._base(bucket, k) * self._scale(bucket) * self._own(bucket, k)

    def observe(self, bucket: int, k: int, seconds: float, usual: int) -> None:
        """Adds the time of one step.

        Args:
            bucket, k: of the step.
            seconds: that it took, with nothing else in between.
            usual: the k of most steps now. Its time moves all others'; the other ks' times move their own alone, as
                does the usual one's while it is new.
        """
        first = self.first.setdefault((bucket, k), [])
        new, alone = len(first) < _SETTLED, all(key == (bucket, k) for key in self.first if key[0] == bucket)
        ratio = seconds / self.seconds(bucket, k)
        before = self._scale(bucket) if alone or (k == usual and not new) else self._own(bucket, k)
        if new:
            first.append(before * ratio)
            after = statistics.median_low(first)  # of two the quicker: what goes wrong takes longer
        else:
            after = before * float(min(max(ratio, 1 / _OUTLIER), _OUTLIER) ** _SLOW)
        if alone or (k == usual and not new):
            self.scale[bucket] = self._latest_scale = after
        else:
            self.own[bucket, k] = after

    def samples(self, bucket: int, k: int) -> int:
        """Returns the number of first samples."""
        return len(self.first.get((bucket, k), ()))

    def draft_pass(self, bucket: int, deepest: int) -> float:
        """Returns the seconds of one draft pass, from the difference between steps with and without drafts."""
        return max(self.seconds(bucket, deepest) - self.seconds(bucket, 0), 0.0) / deepest

    def resume(self, bucket: int, deepest: int, passes: float) -> float:
        """Returns the seconds until the draft has caught up by `passes` passes, with a wait of about one more."""
        return (1 + passes) * self.draft_pass(bucket, deepest) * self.coming_back

    def observe_resume(self, bucket: int, deepest: int, passes: float, seconds: float) -> None:
        """Adds the time of one catch-up."""
        expected = self.resume(bucket, deepest, passes)
        if expected > 0:
            self.coming_back *= min(max(seconds / expected, 0.25), 4.0) ** 0.5
            self.coming_back = min(max(self.coming_back, 0.1), 100.0)

    def _scale(self, bucket: int) -> float:
        return self.scale.get(bucket, self._latest_scale)

    def _own(self, bucket: int, k: int) -> float:
        """Returns the factor of this bucket, or of another one: a k differs from others by much the same in all."""
        found = self.own.get((bucket, k))
        if found is not None:
            return found
        others = [value for (_, other), value in self.own.items() if other == k]
        return others[-1] if others else 1.0

    def _base(self, bucket: int, k: int) -> float:
        """Returns the measured seconds, or those of the nearest measured bucket."""
        found = self.measured.get((bucket, k))
        if found is not None:
            return found
        near = _nearest((b for b, other in self.measured if other == k), bucket)
        return 1.0 + _COST_OF_A_DRAFT * k if near is None else self.measured[near, k]


def _nearest(buckets: Iterable[int], bucket: int) -> int | None:
    return min(buckets, key=lambda other: (max(other, bucket) / min(other, bucket), other), default=None)
