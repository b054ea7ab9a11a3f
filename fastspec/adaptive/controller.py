"""num_speculative_tokens="auto": learns the fastest k while decoding.

The controller observes the time of every step and the accepted drafts of its rows, and chooses the drafts of the next
step. It compares the ks by expected tokens per second of a row,

    tokens(k) / seconds(k),  tokens(k) = 1 + S_1 + .. + S_k,

S_j being the measured chance that the first j drafts are accepted. (With one chance a for every draft that is
(1 - a^(k+1)) / (1 - a), as in Leviathan et al., arXiv 2211.17192, section 3.3.) k = 0, plain decoding, is one of them.

A k that was not used lately is probed now and then: a probe is a few steps at another k, and a small share of the time
is the budget for all probes. A probe that changes nothing makes the next one wait longer. So a pair that does not pay
costs little more than plain decoding, and a pair that begins to pay is noticed.

No torch, no clock, no randomness: the same observations give the same choices.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fastspec.adaptive.estimates import Acceptance, StepTimes, tokens_per_step

AUTO = "auto"
LADDER = (0, 1, 2, 4, 6, 8, 12, 16)
MAX_USEFUL = 8  # drafts of a step at most, where "auto" is all that was said and a draft model makes them
REPEATABLE = 4  # drafts of a step whose text must be the same every time

_BETTER = 1.03  # starting to draft must promise so much
_FASTER = 1.01  # and any other change so much: it costs next to nothing
_HORIZON = 256  # tokens of a row over which the cost of resuming drafts is spread, at most
_SHARE = 0.015  # of the time that may go to probes
_START = 0.03  # of the first call's time that a first look may cost
_PATIENCE = 4.0  # times as long the next probe waits at most, after some that changed nothing
_PROBED_ROWS, _PROBED_STEPS = 8, 2  # results of rows, and steps, that a probe of drafting looks at
_FIRST_ROWS = 3  # results that the first look takes: more come by themselves where they are good
_TIMED_STEPS = 3  # steps that a probe of a time takes
_NEAR = 0.88  # a k that should be so fast, as a share of the best, is worth timing
_PLAIN_NEAR = 0.6  # plain decoding is timed from a lower share on, so that it is never overlooked
_STALE = 2000  # steps after which a time is taken again
_TIE, _TIE_STALE = 0.9, 128  # sooner, where the two would be so close that an error of the time decides
_OLD_CALL, _OLD_PROBE = 32.0, 6.0  # results that earlier calls, and steps before a probe, count as
_CLOSE, _OFTEN = 32, 4  # the first observations after a change are all weighed, later ones a few at a time


def ladder(max_drafts: int) -> tuple[int, ...]:
    """Returns the ks that "auto" chooses from, up to `max_drafts`."""
    return tuple(sorted({k for k in LADDER if k <= max_drafts} | {max_drafts}))


@dataclass(frozen=True, slots=True)
class StepContext:
    """Facts known before a step is launched.

    Attributes:
        bucket: rows that the launch covers.
        remaining: tokens that the row with the most left may still get.
        draft_lag: for each row, passes until the draft has seen all tokens of the row; ascending.
    """

    bucket: int
    remaining: int
    draft_lag: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Observation:
    """Result of one step.

    Attributes:
        k: drafts of the step.
        bucket: as in StepContext.
        accepted: drafts accepted, of every row that stepped and could draft.
        seconds: since the step before it; None where other work or a pause lay in between.
        caught_up: catch-up passes of the draft since the step before it, if there was nothing else in between;
            `seconds` includes them. None: there were none.
        rows: that stepped; 0: as many as `accepted` has.
    """

    k: int
    bucket: int
    accepted: tuple[int, ...]
    seconds: float | None = None
    caught_up: float | None = None
    rows: int = 0

    @property
    def tokens(self) -> float:
        """Mean of the tokens that a row emitted."""
        return 1 + sum(self.accepted) / max(self.rows or len(self.accepted), 1)


class DraftLengthPolicy(Protocol):
    """Chooses k for a scheduler, and is told what every step did.

    Attributes:
        few: how many rows the next step drafts in, when it drafts: those that take the least to catch up. None: all.
    """

    @property
    def few(self) -> int | None:
        """Rows that draft in the next step; None: all."""

    def choose(self, context: StepContext) -> int:
        """Drafts for the next step; may be asked again before it is launched."""

    def observe(self, step: Observation) -> None:
        """Takes in what a step did, in the order of the steps."""


@dataclass(slots=True)
class _Probe:
    """A few steps at another k.

    Attributes:
        k: of the steps.
        rows, steps: results of rows, and steps, that it still needs.
        few: rows that draft in it; None: all.
        spent: seconds lost on it so far, with those that catching up afterwards will take.
    """

    k: int
    rows: int
    steps: int
    few: int | None = None
    spent: float = 0.0


@dataclass(slots=True)
class Controller:
    """Chooses k; lives as long as the generator, so that calls learn from one another.

    Args:
        ks: what there is to choose from, 0 among them, ascending.

    Attributes:
        acceptance, times: learned so far.
        k: drafts of most steps now; None before the first.
        made: steps by k.
    """

    ks: tuple[int, ...]
    acceptance: Acceptance = field(init=False)
    times: StepTimes = field(default_factory=StepTimes)
    k: int | None = None
    made: dict[int, int] = field(default_factory=dict)
    _probe: _Probe | None = None
    _looked: bool = False  # a probe has ended, and nothing was decided since
    _budget: float = 0.0  # seconds that probes may lose
    _patience: float = 1.0
    _seen: int = 0  # observations
    _changed: int = 0  # the observation after which k was changed last
    _weighed: int = -1  # the observation, and the bucket, at the last decision
    _bucket: int = 0
    _timed: dict[tuple[int, int], int] = field(default_factory=dict)  # (bucket, k) -> the last observation of its time

    def __post_init__(self) -> None:
        self.acceptance = Acceptance.unknown(self.ks[-1])

    def know(self, seconds: Mapping[tuple[int, int], float]) -> None:
        """Sets times of steps by (bucket, k), measured before any call."""
        self.times.know(seconds)

    def learn(self, steps: Sequence[Observation], bucket: int) -> None:
        """Learns from the steps over `bucket` rows of a trial, whose ks it did not choose."""
        taken: dict[int, list[float]] = {}
        for step in steps:
            if step.seconds is not None and step.caught_up is None and step.bucket == bucket:
                taken.setdefault(step.k, []).append(step.seconds)
            if step.k and step.accepted:
                self.acceptance.observe(step.k, step.accepted)
        self.know({(bucket, k): statistics.median(seconds) for k, seconds in taken.items()})

    def forget(self) -> None:
        """Forgets everything but the counts of steps, because another draft is used from now on."""
        fresh = Controller(self.ks)
        fresh.made = self.made
        for name in self.__slots__:
            setattr(self, name, getattr(fresh, name))

    def begin(self) -> None:
        """Begins a new call, whose prompts may be of another kind."""
        self.acceptance.fade(_OLD_CALL)
        self._probe = None
        self._changed = self._seen

    def choose(self, context: StepContext) -> int:
        """Drafts for the next step. Asking twice gives the same answer."""
        if self._probe:
            return self._probe.k
        if self.k is None or self._due(context.bucket):
            before = self.k
            self._decide(context)
            if self._looked:
                self._patience = 1.0 if self.k != before else min(2 * self._patience, _PATIENCE)
                self._looked = False
            self._probe = self._wanted(context)
            if self._probe:
                return self._probe.k
        assert self.k is not None, "a decision was made"
        return self.k

    @property
    def few(self) -> int | None:
        """Number of rows that draft in the next step, if it drafts; None: all.

        To see whether drafts are accepted a few rows are enough, and the draft need not take in all the others.
        """
        return self._probe.few if self._probe else None

    def observe(self, step: Observation) -> None:
        """Takes in what a step did, in the order of the steps."""
        self._seen += 1
        self.made[step.k] = self.made.get(step.k, 0) + 1
        if step.seconds is not None:
            self._time(step)
        if step.k and step.accepted:
            self.acceptance.observe(step.k, step.accepted)
        if self._probe and step.k == self._probe.k:
            self._probe.rows -= len(step.accepted)
            self._probe.steps -= 1
            if self._probe.steps <= 0 and self._probe.rows <= 0:
                self._end_probe()

    def _time(self, step: Observation) -> None:
        assert step.seconds is not None, "the caller saw to it"
        usual = step.k if self.k is None else self.k
        if step.caught_up is not None:
            extra = step.seconds - self.times.seconds(step.bucket, step.k)
            self.times.observe_resume(step.bucket, self.ks[-1], step.caught_up, extra)
        else:
            self.times.observe(step.bucket, step.k, step.seconds, usual)
            if self.times.samples(step.bucket, step.k) >= _TIMED_STEPS:
                self._timed[step.bucket, step.k] = self._seen
        self._budget += _SHARE * step.seconds
        if self._probe and step.k == self._probe.k:
            self._probe.spent += step.seconds - step.tokens / self._rate(step.bucket, usual)

    def _due(self, bucket: int) -> bool:
        """True if the ks should be compared again."""
        news = self._seen - self._weighed
        close = self._seen - self._changed < _CLOSE
        return bucket != self._bucket or news >= (1 if close else _OFTEN)

    def _decide(self, context: StepContext) -> None:
        self._weighed, self._bucket = self._seen, context.bucket
        values = {k: self._value(k, context) for k in self.ks}
        # a guess is no reason to draft, which may begin with a long catching up: a probe is, as far as it may cost
        best = max(self.ks, key=lambda k: values[k]) if self.acceptance.seen else 0
        if self.k is None or values[best] > (_FASTER if self.k else _BETTER) * values[self.k]:
            self.k, self._changed = best, self._seen

    def _value(self, k: int, context: StepContext) -> float:
        """Returns tokens per second of a row at this k from now on, with the cost of coming back to drafting."""
        rate = self._rate(context.bucket, k)
        passes = sum(context.draft_lag)
        if not k or not passes:
            return rate
        tokens = max(1, min(context.remaining, _HORIZON))
        return tokens / (tokens / rate + self.times.resume(context.bucket, self.ks[-1], passes))

    def _rate(self, bucket: int, k: int) -> float:
        return tokens_per_step(self.acceptance.survival(), k) / self.times.seconds(bucket, k)

    def _wanted(self, context: StepContext) -> _Probe | None:
        """Returns the probe that is worth its cost, once the budget covers it."""
        found = self._of_drafting(context) if self.k == 0 else self._of_a_time(context)
        if found is None:
            return None
        probe, cost = found
        if not self._seen:
            self._budget = _START * context.remaining * self.times.seconds(context.bucket, 0)
        if self._budget < self._patience * cost:
            return None
        self._budget = self._patience * cost  # a long time without any probe must not end in many
        if probe.k and self.k == 0:
            self.acceptance.fade(_OLD_PROBE)
        return probe

    def _of_drafting(self, context: StepContext) -> tuple[_Probe, float] | None:
        """Returns a probe of whether drafts are accepted by now, and its cost if none is.

        None if full acceptance would not pay, or if too few tokens are left.
        """
        plain = self.times.seconds(context.bucket, 0)
        paying = [k for k in self.ks[1:] if (k + 1) * plain > _BETTER * self.times.seconds(context.bucket, k)]
        if not paying:
            return None
        k = paying[0]
        rows = _PROBED_ROWS if self.acceptance.seen else _FIRST_ROWS
        few = min(-(-rows // _PROBED_STEPS), context.bucket)
        steps = max(_PROBED_STEPS, -(-rows // few))
        coming_back = self.times.resume(context.bucket, self.ks[-1], sum(context.draft_lag[:few]))
        cost = steps * (self.times.seconds(context.bucket, k) - plain) + coming_back
        if context.remaining < 2 * steps or context.remaining * plain < 2 * cost:
            return None
        return _Probe(k, rows, _PROBED_STEPS, few), max(cost, 0.0)

    def _of_a_time(self, context: StepContext) -> tuple[_Probe, float] | None:
        """Returns a probe of the time of the fastest k not timed lately, if it may be the fastest of all."""
        assert self.k is not None, "a decision was made"
        bucket, ours = context.bucket, self._rate(context.bucket, self.k)
        rates = {k: self._rate(bucket, k) for k in self.ks if k != self.k}
        rates = {k: rate for k, rate in rates.items() if self._worth_timing(bucket, k, rate / ours)}
        k = max(rates, key=lambda other: rates[other], default=None)
        if k is None or context.remaining < 8 * _TIMED_STEPS:
            return None
        lost = _TIMED_STEPS * self.times.seconds(bucket, k) * (1 - rates[k] / ours)
        coming_back = self.times.resume(bucket, self.ks[-1], context.bucket) if k == 0 else 0.0
        return _Probe(k, 0, _TIMED_STEPS, spent=coming_back), max(lost, 0.0) + coming_back

    def _worth_timing(self, bucket: int, k: int, share: float) -> bool:
        """True if a k whose expected speed is `share` of the present one was not timed for too long."""
        age = self._seen - self._timed.get((bucket, k), -_STALE)
        near = share > (_NEAR if k else _PLAIN_NEAR) or (k == 0 and age > _STALE)
        return near and age >= (_TIE_STALE if share > _TIE else _STALE)

    def _end_probe(self) -> None:
        """Pays for the probe; the next choice uses its result."""
        assert self._probe is not None, "it was seen to its end"
        self._budget -= max(self._probe.spent, 0.0)
        self._probe, self._looked, self._weighed, self._changed = None, True, -1, self._seen

    def why(self) -> str:
        """Says the present choice and its reason."""
        if self.k is None or not self.acceptance.seen:
            return "nothing was drafted yet"
        shown = self.k or self.ks[1]
        tokens = tokens_per_step(self.acceptance.survival(), shown)
        passes = self.times.seconds(self._bucket, shown) / self.times.seconds(self._bucket, 0)
        fact = f"a step with {shown} gives {tokens:.2f} tokens a row and takes {passes:.2f} plain steps"
        if self.k:
            return f"{self.k} drafts, {tokens / passes:.2f}x as fast as plain decoding by expectation: {fact}"
        return f"no drafts: {fact}"
