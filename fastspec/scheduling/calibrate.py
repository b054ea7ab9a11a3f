"""Measures speculative decoding on given prompts with every k, the number of draft tokens per step.

Times the parts of a step, and names the part that limits the speedup.

A step with k draft tokens emits tokens(k) = 1 + S_1 + .. + S_k tokens per sequence on average. S_j is the measured
probability that the first j draft tokens are all accepted. (If every draft token is accepted with the same
probability a, tokens(k) is (1 - a^(k+1)) / (1 - a): Leviathan et al., arXiv 2211.17192, section 3.3.)
The speedup of a k is predicted by

    tokens(k) / (drafting(k) + scoring(k) + rest) * plain step,  rest = plain step - scoring(0)

drafting(k) and scoring(k) are the times of the draft model's passes and of the target's pass, measured separately.
"plain step" is the time of a step without draft tokens. S_j is measured at the largest k.
If the measured speedup is lower than the predicted one, another part of the step takes longer with larger k.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from fastspec.adaptive.controller import Observation, StepContext
from fastspec.adaptive.estimates import tokens_per_step
from fastspec.engine.engine import Engine
from fastspec.graphs.keys import PartKey, StepKey
from fastspec.sampling.distribution import PhiloxDraws
from fastspec.scheduling.draft_length import DraftChoice
from fastspec.scheduling.requests import CallPlan, Request, lengths_of
from fastspec.scheduling.scheduler import Scheduler
from fastspec.shapes import StepShape
from fastspec.step import propose, score

CALIBRATION_TOKENS = 64  # default number of new tokens per prompt
ROUNDS = 2  # number of runs of every k, in turn, so that a slower machine slows all ks equally
_REPEATS = 15  # runs of a part when it is timed alone
_LIVE_STEPS = 2  # steps before that, after which the caches contain the prompts
_COLUMNS = ("k", "step ms", "draft ms", "score ms", "rest ms", "tokens/step", "predicted", "measured")


@dataclass(frozen=True, slots=True)
class Trial:
    """Measurements of one k, the number of draft tokens per step.

    Attributes:
        k: number of draft tokens per step. 0: plain decoding without draft tokens.
        steps: number of timed steps.
        step_seconds: median time of a whole step of the scheduler.
        draft_seconds: time of drafting in a step: k passes of the draft model, or one lookup if there is no model.
        score_seconds: time of the target's pass over k + 1 tokens per sequence.
        tokens: measured mean number of tokens that a step emits per sequence.
        predicted_tokens: value predicted for `tokens` from the acceptance at the largest k.
        predicted: predicted speedup over k = 0, computed from predicted_tokens and the times of the parts.
        measured: measured speedup over k = 0: tokens / step_seconds, divided by the same ratio of k = 0.
    """

    k: int
    steps: int
    step_seconds: float
    draft_seconds: float
    score_seconds: float
    tokens: float
    predicted_tokens: float
    predicted: float
    measured: float

    @property
    def rest_seconds(self) -> float:
        """Seconds of a step without drafting and scoring: verification, commit of accepted tokens, and host time."""
        return max(self.step_seconds - self.draft_seconds - self.score_seconds, 0.0)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Result of `FastSpecGenerator.calibrate`. str() gives a table, the best k, and what limits the speedup.

    Attributes:
        device: name of the generator's device.
        rows: number of sequences that were decoded at once.
        trials: measurements of each k (number of draft tokens per step), ascending from k = 0.
        survival: element j - 1 is the probability that the first j draft tokens of a step are all accepted.
        draft_format: weight format that draft_quantization="auto" chose for the draft, with the reason. None: it chose
            no format.
    """

    device: str
    rows: int
    trials: tuple[Trial, ...]
    survival: tuple[float, ...]
    draft_format: str | None = None

    @property
    def best(self) -> int:
        """Number of draft tokens per step (k) with the largest measured speedup."""
        return max(self.trials, key=lambda trial: trial.measured).k

    @property
    def limit(self) -> str:
        """Cause that loses the most speed: "acceptance", "draft", "scoring" or "overhead"."""
        losses = self._losses()
        return max(losses, key=lambda cause: losses[cause])

    @property
    def draft_pass_seconds(self) -> float:
        """Mean seconds of one pass of the draft model, measured at the largest k."""
        return self.trials[-1].draft_seconds / self.trials[-1].k

    def __str__(self) -> str:
        """Formats the measurements as a table, followed by the best k and what limits its speedup."""
        cells = [list(_COLUMNS), *map(_cells, self.trials)]
        widths = [max(len(line[column]) for line in cells) for column in range(len(_COLUMNS))]
        table = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
        chances = ", ".join(f"{chance:.0%}" for chance in self.survival)
        head = f"{self.rows} rows at once on {self.device}; predicted and measured: speed-up over k = 0"
        return "\n".join(
            [head, *table, f"the first 1, 2, .. drafts are all accepted in {chances} of steps", *self.words()]
        )

    def words(self) -> list[str]:
        """Returns sentences that name the best k, what limits its speedup, and the draft format if "auto" chose one."""
        best = next(trial for trial in self.trials if trial.k == self.best)
        if best.k:
            first = f"best: k = {best.k}, {best.measured:.2f}x plain decoding"
        else:
            shown = self._shown()
            first = f"best: k = 0. Drafting does not pay here: at its best, k = {shown.k}, it is {shown.measured:.2f}x"
        form = [] if self.draft_format is None else [f"the draft's format: {self.draft_format}"]
        return [first, f"what limits it: {self._in_words(self.limit)}", *form]

    def _shown(self) -> Trial:
        """Returns the measurements of the k above 0 with the largest measured speedup."""
        return max(self.trials[1:], key=lambda trial: trial.measured)

    def _losses(self) -> dict[str, float]:
        """Returns {cause: lost speed} for the k above 0 with the largest measured speedup.

        The lost speed is the natural logarithm of a slowdown factor, 0 if nothing is lost. Without any loss, a step
        would emit k + 1 tokens per sequence in the time of a step without draft tokens.
        """
        plain, shown = self.trials[0], self._shown()
        costs = {
            "draft": shown.draft_seconds,
            "scoring": max(shown.score_seconds - plain.score_seconds, 0.0),
            "overhead": max(shown.rest_seconds - plain.rest_seconds, 0.0),
        }
        total = sum(costs.values())
        slower = math.log(max(shown.step_seconds / plain.step_seconds, 1.0))
        lost = {name: slower * cost / total if total else 0.0 for name, cost in costs.items()}
        return {"acceptance": math.log((shown.k + 1) / shown.tokens), **lost}

    def _in_words(self, limit: str) -> str:
        plain, shown = self.trials[0], self._shown()
        k, slower = shown.k, shown.step_seconds / plain.step_seconds
        if limit == "acceptance":
            return (
                f"acceptance. A step with {k} drafts gives {shown.tokens:.2f} tokens of {k + 1}, and must give "
                f"{slower:.2f} to break even; a draft that agrees more often with the target would help most"
            )
        if limit == "draft":
            share = self.draft_pass_seconds / plain.step_seconds
            return (
                f"the draft. One of its passes takes {share:.2f} plain steps, so even with every draft accepted "
                f"k = {k} would reach {(k + 1) / slower:.2f}x; a smaller draft would help most"
            )
        if limit == "scoring":
            more = shown.score_seconds / plain.score_seconds
            why = "a CPU" if self.device.startswith("cpu") else f"with {self.rows} rows the device"
            return (
                f"scoring. The target's pass over {k + 1} tokens a row takes {more:.2f}x its pass over one: "
                f"{why} is limited by arithmetic, not only by reading weights; fewer drafts, or rows, at once "
                "would help most"
            )
        return (
            f"the work around the models. Verification, commit and the host take {shown.rest_seconds * 1e3:.2f} "
            "ms of a "
            f"step, and {plain.rest_seconds * 1e3:.2f} ms of a plain one; with graphs=True, where "
            "that is supported, the host launches once per step"
        )


@dataclass(slots=True)
class FixedPolicy:
    """Draft length policy that always chooses the same k and records every step.

    Attributes:
        k: number of draft tokens per step.
        steps: recorded steps.
        few: number of sequences that draft. None: all of them.
    """

    k: int
    steps: list[Observation] = field(default_factory=list)
    few: int | None = None

    def choose(self, context: StepContext) -> int:
        """Returns the fixed number of draft tokens per step."""
        return self.k

    def observe(self, step: Observation) -> None:
        """Records a finished decode step."""
        self.steps.append(step)

    def seconds(self, bucket: int) -> list[float]:
        """Returns the times of the steps that cover `bucket` batch slots, without steps whose time was disturbed."""
        timed = [step for step in self.steps if step.bucket == bucket and step.caught_up is None]
        return [step.seconds for step in timed if step.seconds is not None]

    @property
    def accepted(self) -> list[int]:
        """Number of accepted draft tokens of every sequence that could draft, in every step, as one list."""
        return [count for step in self.steps for count in step.accepted]


def calibrate(
    scheduler: Scheduler, requests: list[Request], stop_ids: tuple[int, ...], choice: DraftChoice
) -> Calibration:
    """Decodes the requests with every k of `choice`, and times drafting and scoring separately.

    Args:
        scheduler: scheduler whose engine has captured the steps of `choice`.
        requests: requests of a call. Copies of them are decoded.
        stop_ids: token ids that end a request.
        choice: numbers of draft tokens per step (k) to try. Its controller, if there is one, gets the measurements.

    Raises:
        ValueError: the outputs end too early to time a step.
    """
    engine = scheduler.engine
    runs = {k: FixedPolicy(k) for k in choice.ks}
    for turn in range(ROUNDS):
        for k in choice.ks if turn % 2 == 0 else reversed(choice.ks):
            trial = again(requests)
            call = CallPlan(stop_ids, choice.sampler, lambda made: 0, policy=runs[k], lengths=lengths_of(trial))
            for _ in scheduler.run(trial, call):
                pass
    bucket = engine.shapes.bucket(min(len(requests), engine.state.batch))
    for k, run in runs.items():
        if not run.seconds(bucket):
            raise ValueError(
                f"the texts end before a step of k = {k} over all rows could be timed; give prompts whose "
                "continuations are longer, or eos_token_id=None and more max_new_tokens"
            )
    if choice.controller is not None:
        choice.controller.learn([step for run in runs.values() for step in run.steps], bucket)
    parts = _parts(scheduler, requests, choice, bucket)
    return _summary(runs, parts, bucket, str(engine.state.lengths.device))


def again(requests: list[Request]) -> list[Request]:
    """Returns new requests with the prompts, length limits and options of `requests`, and without output tokens."""
    return [Request(request.prompt, request.max_new_tokens, request.options) for request in requests]


def _parts(
    scheduler: Scheduler, requests: list[Request], choice: DraftChoice, bucket: int
) -> dict[int, tuple[float, float]]:
    """Times drafting and scoring for every k of `choice`, while the requests are being decoded.

    Args:
        scheduler: scheduler that decodes copies of the requests.
        requests: requests of a call.
        choice: numbers of draft tokens per step (k) to time.
        bucket: number of batch slots that a step covers.

    Returns:
        {k: (seconds of drafting, seconds of scoring)}.
    """
    engine = scheduler.engine
    rows = again(requests)[: engine.state.batch]
    call = CallPlan((), choice.sampler, lambda made: choice.ks[-1], lengths=lengths_of(rows))
    running = scheduler.run(rows, call)
    for _ in range(_LIVE_STEPS):
        next(running, None)
    found, lengths = {}, lengths_of(requests)
    with engine.on_device():
        for k in reversed(choice.ks):  # largest first, because their graphs share one memory pool
            shape = engine.shapes.typical(k, choice.sampler, choice.top_logprobs, *lengths)
            draft, score = map(engine.share_seconds, _part_seconds(engine, bucket, shape))
            assert draft is not None, "both were measured"
            assert score is not None, "both were measured"
            found[k] = draft, score
    return found


def _part_seconds(engine: Engine, rows: int, shape: StepShape) -> tuple[float, float]:
    """Returns (seconds of drafting, seconds of scoring) of a step of this shape over the first `rows` batch slots.

    Each part runs alone, several times, and no sequence advances. With CUDA graphs, each part is captured as one graph.
    """
    modules, view = engine.modules, engine.state.rows(0, rows)
    bodies: dict[str, Callable[[], object]] = {"score": lambda: score(modules, view, shape)}
    if (proposer := modules.proposer) is not None and shape.num_drafts:
        bodies["draft"] = lambda: propose(proposer, modules, view, shape, PhiloxDraws(view.seeds))
    taken = {}
    for name, part in bodies.items():
        key, body = PartKey(name, StepKey(rows, shape)), partial(_forget, part)
        engine.runner.capture(key, body, lambda: engine.idle(rows))
        taken[name] = statistics.median(engine.timed(key, body, _REPEATS))
    return taken.get("draft", 0.0), taken["score"]


def _forget(part: Callable[[], object]) -> None:
    """Calls `part` and drops its result."""
    part()


def _summary(
    runs: dict[int, FixedPolicy], parts: dict[int, tuple[float, float]], bucket: int, device: str
) -> Calibration:
    deepest = max(runs)
    counts = runs[deepest].accepted
    survival = tuple(sum(count >= j for count in counts) / len(counts) for j in range(1, deepest + 1))
    steps = {k: statistics.median(run.seconds(bucket)) for k, run in runs.items()}
    rest = max(steps[0] - parts[0][1], 0.0)

    def trial(k: int) -> Trial:
        draft, score = parts[k]
        tokens = 1 + statistics.mean(runs[k].accepted)
        predicted = tokens_per_step(survival, k)
        ahead = predicted * ((parts[0][1] + rest) / (draft + score + rest))
        timed = len(runs[k].seconds(bucket))
        measured = tokens * (steps[0] / steps[k])
        return Trial(k, timed, steps[k], draft, score, tokens, predicted, ahead, measured)

    rows = max(len(step.accepted) for step in runs[0].steps)
    return Calibration(device, rows, tuple(trial(k) for k in sorted(runs)), survival)


def _cells(trial: Trial) -> list[str]:
    times = (trial.step_seconds, trial.draft_seconds, trial.score_seconds, trial.rest_seconds)
    ratios = (trial.predicted, trial.measured)
    return [
        str(trial.k),
        *(f"{time * 1e3:.3f}" for time in times),
        f"{trial.tokens:.2f}",
        *(f"{x:.2f}x" for x in ratios),
    ]
