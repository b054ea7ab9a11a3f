"""Estimates learned while decoding: probabilities of acceptance, and seconds of a step by (bucket, k).

Plain arithmetic over observations; no torch, no clock, no randomness.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

# initial probability of acceptance and its weight in row results: high enough that drafting is tried, with a weight so
# low that a few refused drafts change it
_FIRST_GUESS, _GUESS_WEIGHT = 0.7, 2.0
_DEEPER_WEIGHT = 4.0  # weight, in row results, of the initial guess that draft j+1 is accepted as often as draft j
_MEMORY_ROWS, _MEMORY_STEPS = 128, 16  # older evidence fades to the weight of 128 row results, but at least of 16 steps
_SETTLED = 6  # number of first samples of a time; their median is the estimate, so that one late step does not decide
_SLOW = 0.1  # exponent with which the ratio of a later sample to the estimate changes it,
_OUTLIER = 2.0  # after that ratio is limited to 1/2..2
_COST_OF_A_DRAFT = 0.2  # assumed time of a draft, in plain steps, where no time was measured


@dataclass(slots=True)
class Acceptance:
    """Probabilities that draft 1, 2, .. is accepted if all drafts before it are.

    A draft does not depend on the number of drafts after it. So a step with any k gives evidence for all its k
    positions. In a row that drafted fewer than k the missing drafts count as refused, because tokens per step are
    compared.

    Attributes:
        trials, hits: evidence by draft position. Old evidence fades; the initial guess is included.
        seen: True after the first observation.
    """

    trials: list[float]
    hits: list[float]
    seen: bool = False
    _survival: list[float] | None = None  # result of `survival` for the present counts; None: not computed

    @classmethod
    def unknown(cls, deepest: int) -> Acceptance:
        """Returns the estimate before any observation, for up to `deepest` drafts."""
        guess = [1.0] + [0.0] * (deepest - 1)
        return cls([_GUESS_WEIGHT * one for one in guess], [_GUESS_WEIGHT * _FIRST_GUESS * one for one in guess])

    @property
    def weight(self) -> float:
        """Weight of all evidence. The result of one row in one step adds 1."""
        return self.trials[0]

    def observe(self, k: int, accepted: Sequence[int]) -> None:
        """Adds a step of k > 0 drafts. `accepted` has the number of accepted drafts of each row."""
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
        """Scales the counts down to a weight of at most `weight` row results."""
        if self.weight > weight:
            kept, self._survival = weight / self.weight, None
            self.trials = [value * kept for value in self.trials]
            self.hits = [value * kept for value in self.hits]

    def survival(self) -> list[float]:
        """Returns for j = 1, 2, .. the probability that the first j drafts are all accepted."""
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
    """Returns the expected tokens of a row in a step of k drafts: the accepted drafts and one token of the target."""
    return 1.0 + sum(survival[:k])


@dataclass(slots=True)
class StepTimes:
    """Seconds of a step by (bucket, k).

    seconds(bucket, k) = measured[bucket, k] * scale[bucket] * own[bucket, k]. `measured` is the time before any call.
    `scale` is the change of all steps of a bucket since then, for example by longer contexts or other clocks. `own` is
    how much one k differs from that change. So the steps of one k keep the estimates of all other ks up to date.

    Attributes:
        measured: seconds by (bucket, k), measured with rows that do not run; may be empty.
        scale: factor by bucket.
        own: factor by (bucket, k).
        first: by (bucket, k), the first samples of the factor that is being estimated.
        coming_back: seconds of a catch-up pass divided by those of a draft pass.
    """

    measured: dict[tuple[int, int], float] = field(default_factory=dict)
    scale: dict[int, float] = field(default_factory=dict)
    own: dict[tuple[int, int], float] = field(default_factory=dict)
    first: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    coming_back: float = 1.0
    _latest_scale: float = 1.0

    def know(self, measured: Mapping[tuple[int, int], float]) -> None:
        """Sets measured times of steps. Drops earlier estimates of these steps."""
        self.measured |= measured
        for bucket, k in measured:
            self.scale.pop(bucket, None)
            self.own.pop((bucket, k), None)
            self.first.pop((bucket, k), None)

    def seconds(self, bucket: int, k: int) -> float:
        """Returns the expected seconds of a step of `bucket` rows and k drafts."""
        return self._base(bucket, k) * self._scale(bucket) * self._own(bucket, k)

    def observe(self, bucket: int, k: int, seconds: float, usual: int) -> None:
        """Adds the time of one step.

        Args:
            bucket, k: rows and drafts of the step.
            seconds: its time, with no other work in between.
            usual: the k of most steps now. A time of this k changes `scale`, and so the estimates of all ks. A time of
                another k changes only its `own`. The first samples of the usual k change only its `own`, too.
        """
        first = self.first.setdefault((bucket, k), [])
        new, alone = len(first) < _SETTLED, all(key == (bucket, k) for key in self.first if key[0] == bucket)
        ratio = seconds / self.seconds(bucket, k)
        before = self._scale(bucket) if alone or (k == usual and not new) else self._own(bucket, k)
        if new:
            first.append(before * ratio)
            # the lower of two middle samples: disturbances make a step longer, not shorter
            after = statistics.median_low(first)
        else:
            after = before * float(min(max(ratio, 1 / _OUTLIER), _OUTLIER) ** _SLOW)
        if alone or (k == usual and not new):
            self.scale[bucket] = self._latest_scale = after
        else:
            self.own[bucket, k] = after

    def samples(self, bucket: int, k: int) -> int:
        """Returns the number of samples in `first`."""
        return len(self.first.get((bucket, k), ()))

    def draft_pass(self, bucket: int, deepest: int) -> float:
        """Returns the seconds of one draft pass, from the difference between steps with and without drafts."""
        return max(self.seconds(bucket, deepest) - self.seconds(bucket, 0), 0.0) / deepest

    def resume(self, bucket: int, deepest: int, passes: float) -> float:
        """Returns the seconds until the draft has caught up by `passes` passes. Waiting adds about one pass."""
        return (1 + passes) * self.draft_pass(bucket, deepest) * self.coming_back

    def observe_resume(self, bucket: int, deepest: int, passes: float, seconds: float) -> None:
        """Adds the time of one catch-up of `passes` passes."""
        expected = self.resume(bucket, deepest, passes)
        if expected > 0:
            self.coming_back *= min(max(seconds / expected, 0.25), 4.0) ** 0.5
            self.coming_back = min(max(self.coming_back, 0.1), 100.0)

    def _scale(self, bucket: int) -> float:
        return self.scale.get(bucket, self._latest_scale)

    def _own(self, bucket: int, k: int) -> float:
        """Returns the factor of (bucket, k). Without one, that of k in another bucket, which is about the same."""
        found = self.own.get((bucket, k))
        if found is not None:
            return found
        others = [value for (_, other), value in self.own.items() if other == k]
        return others[-1] if others else 1.0

    def _base(self, bucket: int, k: int) -> float:
        """Returns the measured seconds of (bucket, k) or of the nearest measured bucket.

        Without any measured bucket the result is in relative units.
        """
        found = self.measured.get((bucket, k))
        if found is not None:
            return found
        near = _nearest((b for b, other in self.measured if other == k), bucket)
        return 1.0 + _COST_OF_A_DRAFT * k if near is None else self.measured[near, k]


def _nearest(buckets: Iterable[int], bucket: int) -> int | None:
    return min(buckets, key=lambda other: (max(other, bucket) / min(other, bucket), other), default=None)
