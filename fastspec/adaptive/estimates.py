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
# a later sample multiplies the estimate by (sample / estimate) ** _SLOW. This ratio is first limited to
# 1 / _OUTLIER .. _OUTLIER
_SLOW = 0.1
_OUTLIER = 2.0
_COST_OF_A_DRAFT = 0.2  # assumed time of a draft, in steps without drafts, if no time was measured


@dataclass(slots=True)
class Acceptance:
    """Probabilities that draft 1, 2, .. is accepted if all drafts before it are accepted.

    A draft does not depend on the number of drafts after it. So a step with any k gives evidence for all its k
    positions. In a row that drafted fewer than k the missing drafts count as refused, because tokens per step are
    compared.

    Attributes:
        trials, hits: for each draft, the number of steps in which all drafts before it were accepted, and the number of
            these in which it was accepted, too. Counts of old steps fade. The initial guess is included.
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
        """Total weight of the counts. The result of one row in one step adds 1."""
        return self.trials[0]

    def observe(self, k: int, accepted: Sequence[int]) -> None:
        """Adds a step of k > 0 drafts.

        Args:
            k: number of drafts.
            accepted: number of accepted drafts of each row.
        """
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
    """Returns the expected number of tokens that a row emits in a step of k drafts.

    These are the accepted drafts and one token of the target.

    Args:
        survival: result of `Acceptance.survival`.
        k: number of drafts.
    """
    return 1.0 + sum(survival[:k])


@dataclass(slots=True)
class StepTimes:
    """Seconds of a step by (bucket, k).

    seconds(bucket, k) = measured[bucket, k] * scale[bucket] * own[bucket, k]. `measured` is the time before any call.
    `scale` is the factor by which all steps of a bucket have changed since then, for example by longer contexts or
    other clocks. `own` is the factor by which one k differs from that. So steps with one k keep the estimates of all ks
    up to date.

    Attributes:
        measured: seconds by (bucket, k), measured with no running rows; may be empty.
        scale: factor by bucket.
        own: factor by (bucket, k).
        first: by (bucket, k), the first samples of the factor that is being estimated.
        coming_back: ratio of the seconds of a catch-up pass to those of a draft pass.
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
            bucket, k: numbers of rows and drafts of the step.
            seconds: time of the step, with no other work in between.
            usual: the k of most steps now. A time of this k changes `scale`, and so the estimates of all ks. A time of
                another k changes only `own` of that k. So do the first samples of the usual k.
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
        """Returns the number of first samples of (bucket, k) that were taken, at most _SETTLED."""
        return len(self.first.get((bucket, k), ()))

    def draft_pass(self, bucket: int, deepest: int) -> float:
        """Returns the seconds of one draft pass over `bucket` rows.

        It is computed from the times of steps with `deepest` drafts and without drafts.
        """
        return max(self.seconds(bucket, deepest) - self.seconds(bucket, 0), 0.0) / deepest

    def resume(self, bucket: int, deepest: int, passes: float) -> float:
        """Returns the expected seconds in which the draft catches up. Waiting adds about one pass.

        Args:
            bucket, deepest: see `draft_pass`.
            passes: number of catch-up passes.
        """
        return (1 + passes) * self.draft_pass(bucket, deepest) * self.coming_back

    def observe_resume(self, bucket: int, deepest: int, passes: float, seconds: float) -> None:
        """Adds the measured seconds of one catch-up. For other arguments see `resume`."""
        expected = self.resume(bucket, deepest, passes)
        if expected > 0:
            self.coming_back *= min(max(seconds / expected, 0.25), 4.0) ** 0.5
            self.coming_back = min(max(self.coming_back, 0.1), 100.0)

    def _scale(self, bucket: int) -> float:
        return self.scale.get(bucket, self._latest_scale)

    def _own(self, bucket: int, k: int) -> float:
        """Returns `own` of (bucket, k). If there is none, returns that of k in another bucket, which is similar."""
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
