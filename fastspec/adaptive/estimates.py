"""Estimates learned while decoding: probabilities of acceptance, and the time of a step.

The time is estimated for each (bucket, k): number of batch slots that the step covers, and number of draft tokens. This
module uses no torch, no clock and no random numbers.
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
    """Estimated probability that draft token j of a step is accepted if all draft tokens before it are accepted.

    A draft token does not depend on the number of draft tokens after it. So a step with k draft tokens gives evidence
    for positions 1..k. If a sequence had fewer than k draft tokens, the missing ones count as rejected, because the
    estimate is used to compare tokens per step.

    Attributes:
        trials: for each position, the number of results in which all earlier draft tokens were accepted. A step gives
            one result for each sequence. The weight of old results decreases. The initial guess is included.
        hits: for each position, the number of these results in which its draft token was accepted, too.
        seen: True after the first observation.
    """

    trials: list[float]
    hits: list[float]
    seen: bool = False
    _survival: list[float] | None = None  # result of `survival` for the present counts; None: not computed

    @classmethod
    def unknown(cls, deepest: int) -> Acceptance:
        """Returns the estimate before any observation, for steps with up to `deepest` draft tokens."""
        guess = [1.0] + [0.0] * (deepest - 1)
        return cls([_GUESS_WEIGHT * one for one in guess], [_GUESS_WEIGHT * _FIRST_GUESS * one for one in guess])

    @property
    def weight(self) -> float:
        """Total weight of all results. The result of one sequence in one step adds 1."""
        return self.trials[0]

    def observe(self, k: int, accepted: Sequence[int]) -> None:
        """Adds the results of one step.

        Args:
            k: number of draft tokens of the step, above 0.
            accepted: number of accepted draft tokens of each sequence.
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
        """Lowers the weight of all earlier results together to at most `weight`, in results of one sequence."""
        if self.weight > weight:
            kept, self._survival = weight / self.weight, None
            self.trials = [value * kept for value in self.trials]
            self.hits = [value * kept for value in self.hits]

    def survival(self) -> list[float]:
        """Returns for each j = 1, 2, .. the probability that the first j draft tokens are all accepted."""
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
    """Returns the expected number of tokens that a sequence emits in a step with k draft tokens.

    They are the accepted draft tokens and one token of the target.

    Args:
        survival: result of `Acceptance.survival`.
        k: number of draft tokens of the step.
    """
    return 1.0 + sum(survival[:k])


@dataclass(slots=True)
class StepTimes:
    """Estimated seconds of a step for each (bucket, k).

    bucket is the number of batch slots that the step covers, and k is its number of draft tokens. The estimate is

        seconds(bucket, k) = measured[bucket, k] * scale[bucket] * own[bucket, k]

    `measured` is the time measured while no request was decoded. `scale` is the factor by which all steps of a bucket
    have become slower since then. The reason may be longer contexts or lower clocks. `scale` is shared by all k, so
    that steps with one k also update the estimates for other k. `own` is a further factor for one k.

    Attributes:
        measured: (bucket, k) -> seconds. May be empty.
        scale: bucket -> factor.
        own: (bucket, k) -> factor.
        first: (bucket, k) -> first samples of `scale` or `own`, at most `_SETTLED`. The factor is their median, until
            later samples adjust it.
        coming_back: correction factor of `resume`. A pass in which the draft model reads missing tokens takes
            `draft_pass` seconds times this factor.
    """

    measured: dict[tuple[int, int], float] = field(default_factory=dict)
    scale: dict[int, float] = field(default_factory=dict)
    own: dict[tuple[int, int], float] = field(default_factory=dict)
    first: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    coming_back: float = 1.0
    _latest_scale: float = 1.0

    def know(self, measured: Mapping[tuple[int, int], float]) -> None:
        """Sets measured times of steps, and drops earlier estimates of these steps.

        Args:
            measured: (bucket, k) -> seconds.
        """
        self.measured |= measured
        for bucket, k in measured:
            self.scale.pop(bucket, None)
            self.own.pop((bucket, k), None)
            self.first.pop((bucket, k), None)

    def seconds(self, bucket: int, k: int) -> float:
        """Returns the expected seconds of a step with k draft tokens that covers `bucket` batch slots."""
        return self._base(bucket, k) * self._scale(bucket) * self._own(bucket, k)

    def observe(self, bucket: int, k: int, seconds: float, usual: int) -> None:
        """Updates the estimates with the measured time of one step.

        A step with `usual` draft tokens changes `scale`, and so the estimates for all values of k. A step with another
        k changes only the factor `own` of that k. The first few steps with `usual` draft tokens also change only `own`,
        unless no other k was observed.

        Args:
            bucket: number of batch slots that the step covers.
            k: number of draft tokens of the step.
            seconds: time of the step alone, without other work.
            usual: number of draft tokens of most steps at present.
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
        """Returns the number of measured steps with this bucket and k, but at most `_SETTLED`."""
        return len(self.first.get((bucket, k), ()))

    def draft_pass(self, bucket: int, deepest: int) -> float:
        """Returns the seconds of one pass of the draft model over `bucket` batch slots.

        It is computed from the times of steps with `deepest` draft tokens and of steps without draft tokens.
        """
        return max(self.seconds(bucket, deepest) - self.seconds(bucket, 0), 0.0) / deepest

    def resume(self, bucket: int, deepest: int, passes: float) -> float:
        """Returns the expected seconds in which the draft model reads missing tokens before it drafts again.

        The time is that of `passes` passes and of about one more, because other work waits meanwhile.

        Args:
            bucket, deepest: see `draft_pass`.
            passes: number of passes of the draft model.
        """
        return (1 + passes) * self.draft_pass(bucket, deepest) * self.coming_back

    def observe_resume(self, bucket: int, deepest: int, passes: float, seconds: float) -> None:
        """Updates the estimate of `resume` with measured seconds. For the other arguments see `resume`."""
        expected = self.resume(bucket, deepest, passes)
        if expected > 0:
            self.coming_back *= min(max(seconds / expected, 0.25), 4.0) ** 0.5
            self.coming_back = min(max(self.coming_back, 0.1), 100.0)

    def _scale(self, bucket: int) -> float:
        return self.scale.get(bucket, self._latest_scale)

    def _own(self, bucket: int, k: int) -> float:
        """Returns the factor `own` of (bucket, k). If there is none, returns that of k in another bucket, or 1."""
        found = self.own.get((bucket, k))
        if found is not None:
            return found
        others = [value for (_, other), value in self.own.items() if other == k]
        return others[-1] if others else 1.0

    def _base(self, bucket: int, k: int) -> float:
        """Returns the measured seconds of (bucket, k), or of k in the nearest bucket that was measured.

        If k was measured in no bucket, the unit is the time of a step without draft tokens, not seconds.
        """
        found = self.measured.get((bucket, k))
        if found is not None:
            return found
        near = _nearest((b for b, other in self.measured if other == k), bucket)
        return 1.0 + _COST_OF_A_DRAFT * k if near is None else self.measured[near, k]


def _nearest(buckets: Iterable[int], bucket: int) -> int | None:
    return min(buckets, key=lambda other: (max(other, bucket) / min(other, bucket), other), default=None)
