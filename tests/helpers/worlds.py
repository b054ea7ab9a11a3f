"""Synthetic pairs for the controller of k: step times and acceptance by formula, noise by seed, no model anywhere."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from fastspec.adaptive.controller import Controller, Observation, StepContext, ladder

PLAIN = 5e-3  # seconds of a plain step
PROMPT = 128
LATE, LATE_BY = 0.002, 0.02  # chance that the machine does something else, and for how many seconds on average
KS = ladder(8)


@dataclass
class World:
    """A pair, and how its steps run.

    Attributes:
        acceptance: of a draft once those before it were.
        cost: a draft pass in plain steps.
        batch: rows at once.
        scoring: what each further scored row adds, in plain steps; more rows add more.
        noise: of a step's time, as the spread of its logarithm.
        error: times taken before a call are wrong by so much at most, each k's by its own.
        growth: a plain step takes so much longer for every token of context.
        later: acceptance from token `at` of each row on; None: it stays.
        ahead: steps launched ahead.
    """

    acceptance: float
    cost: float
    batch: int = 1
    scoring: float = 0.02
    noise: float = 0.03
    error: float = 0.05
    growth: float = 0.0
    later: float | None = None
    at: int = 0
    ahead: int = 2
    seed: int = 0
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def seconds(self, k: int, context: float = 0.0) -> float:
        """Mean time of a step."""
        score = self.scoring * k + 0.002 * self.batch * (k + 1)
        return PLAIN * (1 + score + self.growth * context + k * self.cost * (1 + 0.3 * self.growth * context))

    def taken_before(self) -> dict[tuple[int, int], float]:
        """What a controller is told before the first call."""
        wrong = random.Random(self.seed + 1)
        return {(self.batch, k): self.seconds(k) * math.exp(wrong.uniform(-self.error, self.error)) for k in KS}

    def passes(self, tokens: float) -> float:
        """Passes until the draft has taken in so many tokens of a row."""
        return max(1.0, tokens / 128) if tokens > 0 else 0.0

    def coming_back(self, passes: float) -> float:
        """Seconds of that, and of the wait before."""
        return passes * self.cost * 1.3 * PLAIN + 0.3e-3

    def fixed(self, k: int, tokens: int) -> float:
        """Mean tokens per second of a row in a call with this k throughout."""
        chance, survival = 1.0, 0.0
        for _ in range(k):
            chance *= self.acceptance
            survival += chance
        steps = tokens / (1 + survival)
        start = self.coming_back(self.batch * self.passes(PROMPT)) if k else 0.0
        return tokens / (steps * (self.seconds(k, PROMPT + tokens / 2) + LATE * LATE_BY) + start)

    def best(self, tokens: int) -> tuple[int, float]:
        """The fastest fixed k, and its rate."""
        return max(((k, self.fixed(k, tokens)) for k in KS), key=lambda pair: pair[1])

    def call(self, controller: Controller, tokens: int) -> float:
        """Decodes so many tokens a row; returns tokens per second of a row."""
        return self.trace(controller, tokens)[-1]

    def trace(self, controller: Controller, tokens: int, every: int = 10**9) -> list[float]:
        """The same in pieces of `every` tokens, and at last the whole call's."""
        controller.begin()
        call = _Call(self, controller, tokens)
        rates, start, mark = [], 0.0, 0.0
        while call.least < tokens:
            call.step()
            if call.mean - mark >= every:
                rates.append((call.mean - mark) / (call.time - start))
                start, mark = call.time, call.mean
        call.finish()
        return [*rates, call.mean / call.time]

    def life(self, controller: Controller, calls: int, tokens: int) -> list[float]:
        """The rates of calls one after the other, by a controller that knows nothing but times."""
        controller.know(self.taken_before())
        return [self.call(controller, tokens) for _ in range(calls)]


class _Call:
    """One call in a world: rows, the draft's lag, and steps that were launched and not read."""

    def __init__(self, world: World, controller: Controller, tokens: int) -> None:
        self.world, self.controller, self.tokens = world, controller, tokens
        self.got = [0] * world.batch
        self.time = 0.0
        self.draft_lag = [float(PROMPT)] * world.batch
        self.plain_before = [False] * world.batch
        self.unread: list[Observation] = []

    @property
    def least(self) -> int:
        return min(self.got)

    @property
    def mean(self) -> float:
        return sum(self.got) / len(self.got)

    def step(self) -> None:
        """Launches a step as the loop does: coming back waits for what is under way."""
        world = self.world
        while True:
            nearest = sorted(range(world.batch), key=lambda row: self.draft_lag[row])
            draft_lag = tuple(world.passes(self.draft_lag[row]) for row in nearest)
            k = self.controller.choose(StepContext(world.batch, self.tokens - self.least, draft_lag))
            drafting = set(nearest[: self.controller.few]) if k else set()
            lagging = any(self.plain_before[row] for row in drafting)
            if not (lagging and self.unread):
                break
            self.read()
        seconds = world.seconds(k, PROMPT + self.mean) * math.exp(world.rng.gauss(0, world.noise))
        if world.rng.random() < LATE:
            seconds += world.rng.expovariate(1 / LATE_BY)
        passes = sum(world.passes(self.draft_lag[row]) for row in drafting)
        resumed = passes if lagging or passes else None
        if resumed is not None:
            seconds += world.coming_back(passes)
        for row in range(world.batch):
            self.draft_lag[row] = 0.0 if row in drafting else self.draft_lag[row] + 1
            self.plain_before[row] = row not in drafting
        self.time += seconds
        accepted = [self.accept(row, k if row in drafting else 0) for row in range(world.batch)]
        told = tuple(accepted[row] for row in sorted(drafting)) if k else tuple(accepted)
        self.unread.append(Observation(k, world.batch, told, seconds, resumed, world.batch))
        while len(self.unread) >= world.ahead:
            self.read()

    def accept(self, row: int, k: int) -> int:
        world = self.world
        changed = world.later is not None and self.got[row] >= world.at
        chance = world.later if changed and world.later is not None else world.acceptance
        accepted = 0
        while accepted < k and world.rng.random() < chance:
            accepted += 1
        self.got[row] += accepted + 1
        return accepted

    def read(self) -> None:
        self.controller.observe(self.unread.pop(0))

    def finish(self) -> None:
        while self.unread:
            self.read()
