"""Learns the fastest k while decoding, for num_speculative_tokens="auto". k is the number of draft tokens of a step.

The controller observes the time of every step and the number of accepted draft tokens of each sequence. For the next
step it chooses the k with the most expected tokens per second and sequence:

    tokens(k) / seconds(k),  tokens(k) = 1 + S_1 + .. + S_k,

S_j is the measured probability that the first j draft tokens are all accepted. If every draft token is accepted with
the same probability a, tokens(k) is (1 - a^(k+1)) / (1 - a) (Leviathan et al., arXiv 2211.17192, section 3.3). k = 0 is
plain decoding.

A probe is a few steps with a k other than the chosen one. It measures a k that was not used lately. Probes may use a
small share of the decoding time. After a probe that does not change the choice, the controller waits longer before the
next one. So if drafting saves no time, "auto" costs little more than plain decoding.

This module uses no torch, no clock and no random numbers: the same observations give the same choices.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fastspec.adaptive.estimates import Acceptance, StepTimes, tokens_per_step

AUTO = "auto"
LADDER = (0, 1, 2, 4, 6, 8, 12, 16)
MAX_USEFUL = 8  # upper limit of k for num_speculative_tokens="auto" with a draft model
REPEATABLE = 4  # upper limit of k if repeated runs must give the same text

_BETTER = 1.03  # required ratio of the expected speeds with and without drafts, to start drafting
_FASTER = 1.01  # required ratio for any other change of k, which costs almost nothing
_HORIZON = 256  # upper limit of the tokens over which the cost of resuming drafts is spread
_SHARE = 0.015  # share of the decoding time that probes may use
_START = 0.03  # share of the expected time of the first call that its first probe may cost
_PATIENCE = 4.0  # upper limit of the factor on a probe's required budget, after probes that changed nothing
_PROBED_ROWS, _PROBED_STEPS = 8, 2  # a probe of drafting needs this many row results and steps
_FIRST_ROWS = 3  # row results that the first probe needs; if drafts are good, later steps give more
_TIMED_STEPS = 3  # steps of a probe that measures the time of a k
_NEAR = 0.88  # a k is timed again if its expected speed is at least this share of the present k's
_PLAIN_NEAR = 0.6  # the same limit for plain decoding; lower, so that plain decoding is never overlooked
_STALE = 2000  # a measured time is repeated after this many steps
# from this ratio of speeds on, a time is repeated after fewer steps, because its error decides
_TIE, _TIE_STALE = 0.9, 128
# weights, in row results, of the acceptance of earlier calls, and of that before a probe
_OLD_CALL, _OLD_PROBE = 32.0, 6.0
# after a change of k the ks are compared at each of _CLOSE observations, then at every _OFTEN-th
_CLOSE, _OFTEN = 32, 4


def ladder(max_drafts: int) -> tuple[int, ...]:
    """Returns the numbers of draft tokens per step among which "auto" chooses, ascending from 0 to `max_drafts`."""
    return tuple(sorted({k for k in LADDER if k <= max_drafts} | {max_drafts}))


@dataclass(frozen=True, slots=True)
class StepContext:
    """Facts about the next step that are known before its launch.

    Attributes:
        bucket: number of batch slots that the launch covers.
        remaining: largest number of tokens that one of the sequences may still generate.
        draft_lag: for each sequence, the number of passes in which the draft model must read missing tokens before it
            can draft. Ascending.
    """

    bucket: int
    remaining: int
    draft_lag: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Observation:
    """Result of one decode step.

    Attributes:
        k: number of draft tokens of the step.
        bucket: number of batch slots that the launch covered.
        accepted: number of accepted draft tokens, for each sequence that ran and could draft.
        seconds: time since the previous step. None if other work or a pause lay in between.
        caught_up: number of passes since the previous step in which the draft model read missing tokens. `seconds`
            includes them. None: there were none.
        rows: number of sequences that ran. 0: it is `len(accepted)`.
    """

    k: int
    bucket: int
    accepted: tuple[int, ...]
    seconds: float | None = None
    caught_up: float | None = None
    rows: int = 0

    @property
    def tokens(self) -> float:
        """Mean number of tokens that a sequence emitted in the step."""
        return 1 + sum(self.accepted) / max(self.rows or len(self.accepted), 1)


class DraftLengthPolicy(Protocol):
    """Chooses k, the number of draft tokens of each step, for a scheduler, and receives the result of every step.

    Attributes:
        few: number of sequences that draft in the next step, if k > 0. They are the sequences whose missing tokens the
            draft model reads in the fewest passes. None: all sequences.
    """

    @property
    def few(self) -> int | None:
        """Number of sequences that draft in the next step. None: all of them."""

    def choose(self, context: StepContext) -> int:
        """Returns the number of draft tokens of the next step. May be called several times before a launch."""

    def observe(self, step: Observation) -> None:
        """Records the result of a step. Called in the order of the steps."""


@dataclass(slots=True)
class _Probe:
    """A few steps with a k other than the chosen one, to measure that k.

    Attributes:
        k: number of draft tokens of these steps.
        rows: number of observed sequences that the probe still needs. Each step observes those that can draft.
        steps: number of steps that the probe still needs. It ends when `rows` and `steps` are both 0.
        few: only this many sequences draft in these steps. None: every sequence drafts.
        spent: seconds that the probe has cost so far, compared with steps of the chosen k. Includes the expected time
            of the step in which the draft model catches up, if drafting begins again after the probe.
    """

    k: int
    rows: int
    steps: int
    few: int | None = None
    spent: float = 0.0


@dataclass(slots=True)
class Controller:
    """Chooses k, the number of draft tokens, of each step for num_speculative_tokens="auto".

    One controller serves all calls with the same kind of steps, so a call uses the measurements of earlier calls.

    Args:
        ks: values that k may have, ascending from 0.

    Attributes:
        acceptance: estimated probabilities of acceptance, from all observations.
        times: estimated times of steps, from all observations.
        k: the chosen k, used in all steps except those of probes. None before the first choice.
        made: k -> number of steps that had it.
    """

    ks: tuple[int, ...]
    acceptance: Acceptance = field(init=False)
    times: StepTimes = field(default_factory=StepTimes)
    k: int | None = None
    made: dict[int, int] = field(default_factory=dict)
    _probe: _Probe | None = None
    _looked: bool = False  # a probe has ended, and no decision was made since
    _budget: float = 0.0  # seconds that probes may cost now
    _patience: float = 1.0
    _seen: int = 0  # number of observations
    _changed: int = 0  # value of _seen when k was changed last
    _weighed: int = -1  # value of _seen at the last decision; _bucket is that decision's bucket
    _bucket: int = 0
    # (bucket, k) -> value of _seen at its last timed step
    _timed: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.acceptance = Acceptance.unknown(self.ks[-1])

    def know(self, seconds: Mapping[tuple[int, int], float]) -> None:
        """Sets the times of steps that were measured separately, while no request was decoded.

        Args:
            seconds: (number of batch slots, k) -> seconds of a step.
        """
        self.times.know(seconds)

    def learn(self, steps: Sequence[Observation], bucket: int) -> None:
        """Adds observations of steps for which another policy chose k.

        Args:
            steps: the observations.
            bucket: number of batch slots. Only the times of steps that cover this number are used.
        """
        taken: dict[int, list[float]] = {}
        for step in steps:
            if step.seconds is not None and step.caught_up is None and step.bucket == bucket:
                taken.setdefault(step.k, []).append(step.seconds)
            if step.k and step.accepted:
                self.acceptance.observe(step.k, step.accepted)
        self.know({(bucket, k): statistics.median(seconds) for k, seconds in taken.items()})

    def forget(self) -> None:
        """Resets all estimates, because another draft model is used from now on. Keeps `made`."""
        fresh = Controller(self.ks)
        fresh.made = self.made
        for name in self.__slots__:
            setattr(self, name, getattr(fresh, name))

    def begin(self) -> None:
        """Begins a new call. Lowers the weight of earlier acceptance results, because the new prompts may differ."""
        self.acceptance.fade(_OLD_CALL)
        self._probe = None
        self._changed = self._seen

    def choose(self, context: StepContext) -> int:
        """Returns the number of draft tokens of the next step. It changes only after a new observation."""
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
        """Number of sequences that draft in the next step, if k > 0. None: all of them.

        A probe that measures acceptance needs only a few sequences. The draft model then need not read the missing
        tokens of the others.
        """
        return self._probe.few if self._probe else None

    def observe(self, step: Observation) -> None:
        """Records the result of a step. Called in the order of the steps."""
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
        """True if the values of k should be compared again, because of new observations or another batch size.

        Args:
            bucket: number of batch slots of the next step.
        """
        news = self._seen - self._weighed
        close = self._seen - self._changed < _CLOSE
        return bucket != self._bucket or news >= (1 if close else _OFTEN)

    def _decide(self, context: StepContext) -> None:
        self._weighed, self._bucket = self._seen, context.bucket
        values = {k: self._value(k, context) for k in self.ks}
        # before the first observation choose 0: drafting may begin with a long catch-up, and only a probe limits that
        # cost
        best = max(self.ks, key=lambda k: values[k]) if self.acceptance.seen else 0
        if self.k is None or values[best] > (_FASTER if self.k else _BETTER) * values[self.k]:
            self.k, self._changed = best, self._seen

    def _value(self, k: int, context: StepContext) -> float:
        """Returns the expected tokens per second and sequence with this k. Includes the time to resume drafting."""
        rate = self._rate(context.bucket, k)
        passes = sum(context.draft_lag)
        if not k or not passes:
            return rate
        tokens = max(1, min(context.remaining, _HORIZON))
        return tokens / (tokens / rate + self.times.resume(context.bucket, self.ks[-1], passes))

    def _rate(self, bucket: int, k: int) -> float:
        return tokens_per_step(self.acceptance.survival(), k) / self.times.seconds(bucket, k)

    def _wanted(self, context: StepContext) -> _Probe | None:
        """Returns the probe to begin now.

        Returns None if no probe is useful, or if it would cost more time than probes may use.
        """
        found = self._of_drafting(context) if self.k == 0 else self._of_a_time(context)
        if found is None:
            return None
        probe, cost = found
        if not self._seen:
            self._budget = _START * context.remaining * self.times.seconds(context.bucket, 0)
        if self._budget < self._patience * cost:
            return None
        self._budget = self._patience * cost  # a large unused budget must not allow many probes in a row
        if self.k == 0:
            self._budget = cost  # so with more patience, probes of a draft that never pays take a smaller share of time
            self.acceptance.fade(_OLD_PROBE)
        return probe

    def _of_drafting(self, context: StepContext) -> tuple[_Probe, float] | None:
        """Returns a probe that measures acceptance, and the seconds that it loses if no draft token is accepted.

        Returns None if drafting would save no time even with full acceptance, or if too few tokens remain.
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
        """Returns a probe that times another k, and the seconds that it is expected to lose.

        The k is the fastest one for which `_worth_timing` is true. Returns None if there is no such k, or if too few
        tokens remain.
        """
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
        """True if k was not timed lately and is expected to be about as fast as the chosen k, or faster.

        Args:
            bucket: number of batch slots.
            k: number of draft tokens of a step.
            share: expected speed with k, divided by the expected speed with the chosen k.
        """
        age = self._seen - self._timed.get((bucket, k), -_STALE)
        near = share > (_NEAR if k else _PLAIN_NEAR) or (k == 0 and age > _STALE)
        return near and age >= (_TIE_STALE if share > _TIE else _STALE)

    def _end_probe(self) -> None:
        """Ends the probe, and subtracts its cost from the budget. The next `choose` compares all values of k again."""
        assert self._probe is not None, "it was seen to its end"
        self._budget -= max(self._probe.spent, 0.0)
        self._probe, self._looked, self._weighed, self._changed = None, True, -1, self._seen

    def why(self) -> str:
        """Returns one line of text with the chosen k and the reason for it."""
        if self.k is None or not self.acceptance.seen:
            return "nothing was drafted yet"
        shown = self.k or self.ks[1]
        tokens = tokens_per_step(self.acceptance.survival(), shown)
        passes = self.times.seconds(self._bucket, shown) / self.times.seconds(self._bucket, 0)
        fact = f"a step with {shown} emits {tokens:.2f} tokens per row and takes {passes:.2f} plain steps"
        if self.k:
            return f"{self.k} drafts, {tokens / passes:.2f}x as fast as plain decoding by expectation: {fact}"
        return f"no drafts: {fact}"
