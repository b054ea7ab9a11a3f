"""Chooses k, the number of draft tokens per step, for a call: a fixed k, or a controller that adapts it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fastspec.adaptive.controller import AUTO, REPEATABLE, Controller, ladder
from fastspec.inputs.options import Options
from fastspec.inputs.values import whole
from fastspec.sampling.rules import Verification, needs_draft_probs
from fastspec.shapes import FULL, GRAMMAR_ONLY, GRAMMARS, GREEDY, SAMPLERS

_FIXED_K_NOTE = (
    "k held at {k}, because under {rule!r} verification a seed repeats its text only with one k; "
    "verification='coupled' lets k adapt"
)


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """Numbers of draft tokens that the decode steps of one call may have.

    Attributes:
        k: number of draft tokens per sequence in every step. With a controller: the largest number.
        ks: all numbers of draft tokens that a step may have. Contains 0 if a request has opted out of drafting.
        sampler: sampler of the steps, see `StepShape`.
        top_logprobs: see `StepShape`.
        controller: chooses one of `ks` in each step. None: every step has k draft tokens.
        note: text for `Stats.auto`. None: the call does not use "auto".
        grammars: values of `StepShape.grammars` that the steps may have.
        processed: see `StepShape`.
    """

    k: int
    ks: tuple[int, ...]
    sampler: str
    top_logprobs: int | None
    controller: Controller | None = None
    note: str | None = None
    grammars: tuple[str | None, ...] = (None,)
    processed: bool = False


@dataclass(slots=True)
class DraftPlan:
    """Numbers of draft tokens that a generator supports, and the controllers that choose k for its calls.

    Attributes:
        auto: True if calls that do not set num_speculative_tokens use "auto".
        max_drafts: largest number of draft tokens per step.
        verification: rule by which draft tokens are accepted or rejected.
        controllers: (sampler, top_logprobs, processed) -> controller of such steps. These three change the time of a
            step and the acceptance of draft tokens.
    """

    auto: bool
    max_drafts: int
    verification: Verification
    controllers: dict[tuple[str, int | None, bool], Controller] = field(default_factory=dict)

    @property
    def default(self) -> int | str:
        """Value of num_speculative_tokens for calls that do not set it: "auto", or else `max_drafts`."""
        return AUTO if self.auto else self.max_drafts

    def check(self, asked: int | None) -> int:
        """Returns the number of draft tokens per step that a call asks for.

        Args:
            asked: num_speculative_tokens of the call. None: it is not set, so the largest number is returned.

        Raises:
            ValueError: `asked` is more than `max_drafts`.
        """
        if asked is None:
            return self.max_drafts
        if asked > self.max_drafts:
            made = f"for at most {self.max_drafts}" if self.max_drafts else "without drafts"
            raise ValueError(
                f"num_speculative_tokens={asked}, but the generator was made {made}; "
                "make it with a draft and a larger num_speculative_tokens"
            )
        return asked

    def for_call(self, chosen: Options) -> DraftChoice:
        """Chooses the numbers of draft tokens that the steps of a call may have.

        Args:
            chosen: options of the call.

        Raises:
            ValueError: the call asks for more than `max_drafts`.
        """
        if all(row.given is not None for row in chosen.rows):
            k = self.max_drafts  # the given tokens are drafts, and all of them are accepted
            sampler = FULL if chosen.processed_logprobs else GREEDY
            recorded = chosen.top_logprobs
            return DraftChoice(k, (k,), sampler, recorded, None, None, (GRAMMAR_ONLY,), chosen.processed_logprobs)
        choice = replace(self._without_grammars(chosen), processed=chosen.processed_logprobs)
        follow = [row.guided for row in chosen.rows]
        if not any(follow):
            return choice
        # a controller times steps without grammars, even if every row has one
        alone = all(follow) and choice.controller is None
        return replace(choice, grammars=(GRAMMAR_ONLY,) if alone else (None, *GRAMMARS))

    def _without_grammars(self, chosen: Options) -> DraftChoice:
        """Chooses the numbers of draft tokens of a call as if none of its requests had a grammar."""
        sampler = GREEDY if chosen.plain else FULL
        k = self.check(chosen.num_speculative_tokens)
        for row in chosen.rows:
            self.check(row.draft_limit)
        opted_out = {0} if any(row.draft_limit == 0 for row in chosen.rows) else set()
        if not self.max_drafts or not (chosen.auto or (self.auto and chosen.num_speculative_tokens is None)):
            return DraftChoice(k, tuple(sorted({k, *opted_out})), sampler, chosen.top_logprobs)
        if chosen.seeded and needs_draft_probs(self.verification) and any(row.temperature for row in chosen.rows):
            k = max(one for one in self.ks if one <= REPEATABLE)
            note = _FIXED_K_NOTE.format(k=k, rule=self.verification)
            return DraftChoice(k, tuple(sorted({k, *opted_out})), sampler, chosen.top_logprobs, note=note)
        controller = self.controller(sampler, chosen.top_logprobs, processed=chosen.processed_logprobs)
        return DraftChoice(self.max_drafts, self.ks, sampler, chosen.top_logprobs, controller, AUTO)

    @property
    def ks(self) -> tuple[int, ...]:
        """Numbers of draft tokens per step among which "auto" chooses, ascending."""
        return ladder(self.max_drafts)

    def controller(self, sampler: str, top_logprobs: int | None, *, processed: bool = False) -> Controller:
        """Returns the controller for calls with this sampler and these log-probabilities, see `controllers`.

        A controller is created on first use, and exists as long as the generator.
        """
        key = (sampler, top_logprobs, processed)
        # setdefault, because any thread may call this
        return self.controllers.get(key) or self.controllers.setdefault(key, Controller(self.ks))

    def for_warmup(self, asked: int | str | None, sampler: str) -> DraftChoice:
        """Chooses the steps that `warmup` captures, with and without draft tokens, for calls with default options.

        Args:
            asked: num_speculative_tokens of these calls. None: the generator's default.
            sampler: sampler of these calls, one of `SAMPLERS`.

        Raises:
            ValueError: `asked` is not a number of draft tokens or is above `max_drafts`, or the sampler is unknown.
        """
        if sampler not in SAMPLERS:
            raise ValueError(f"sampler must be one of {', '.join(SAMPLERS)}, got {sampler!r}")
        auto = isinstance(asked, str) and asked == AUTO
        asked = None if auto or asked is None else whole("num_speculative_tokens", asked, low=0)
        if (auto or (self.auto and asked is None)) and self.max_drafts:
            return DraftChoice(self.max_drafts, self.ks, sampler, None, self.controller(sampler, None), AUTO)
        k = self.check(asked)
        return DraftChoice(k, tuple(sorted({0, k})), sampler, None)

    def for_calibration(self, chosen: Options) -> DraftChoice:
        """Chooses all numbers of draft tokens, for `calibrate` to measure.

        The result has the controller that gets the measurements.

        Args:
            chosen: options of the call.

        Raises:
            ValueError: the generator has no proposer, or the call sets an option that does not fit a measurement.
        """
        if not self.max_drafts:
            raise ValueError("there is nothing to calibrate: the generator was made without a draft or proposer")
        if chosen.auto or any(row.draft_limit is not None for row in chosen.rows):
            raise ValueError("calibrate tries every k; leave out num_speculative_tokens")
        if chosen.top_logprobs is not None:
            raise ValueError("calibrate records no log-probabilities; leave out logprobs")
        if chosen.prompt_top_logprobs is not None:
            raise ValueError("calibrate records no log-probabilities; leave out prompt_logprobs")
        if grammar := next((row.grammar for row in chosen.rows if row.grammar), None):
            raise ValueError(
                f"calibrate measures the proposer, and rows with a grammar do not use it; leave out {grammar.kind}"
            )
        sampler = GREEDY if chosen.plain else FULL
        return DraftChoice(self.max_drafts, self.ks, sampler, None, self.controller(sampler, None), AUTO)

    def describe(self) -> list[str]:
        """Returns a line for each controller in use: its choice of k, the reason, and its number of steps by k."""
        lines = []
        for (sampler, recorded, _), controller in self.controllers.items():
            if not controller.made and not self.auto:
                continue  # only a trial used this controller
            made = ", ".join(f"{count} with {k}" for k, count in sorted(controller.made.items())) or "none"
            kind = f"{sampler} sampler" + ("" if recorded is None else ", log-probabilities recorded")
            lines.append(f"{kind}: {controller.why()}; steps: {made}")
        return lines
