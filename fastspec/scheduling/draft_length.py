"""Chooses the number of drafts of a call's steps: a fixed number, or a controller that chooses in each step."""

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
    """Numbers of drafts that the steps of one call may have.

    Attributes:
        k: number of drafts per row in every step; with a controller: upper limit.
        ks: numbers of drafts that a step may have; contains 0 if a row has opted out of drafting.
        sampler: sampler kind of the steps.
        top_logprobs: see StepShape.
        controller: chooses among `ks`. None: every step has k.
        note: value of `Stats.auto`; None without "auto".
        grammars: values of `StepShape.grammars` that its steps may have.
        processed: see StepShape.
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
    """Numbers of drafts that a generator supports, and the controllers that choose k for its calls.

    Attributes:
        auto: True if calls without num_speculative_tokens are "auto".
        max_drafts: largest number of drafts of a step.
        verification: rule that accepts or refuses drafts.
        controllers: controllers by (sampler kind, top_logprobs, processed). Steps that differ in these differ in time
            and acceptance.
    """

    auto: bool
    max_drafts: int
    verification: Verification
    controllers: dict[tuple[str, int | None, bool], Controller] = field(default_factory=dict)

    @property
    def default(self) -> int | str:
        """num_speculative_tokens of calls that do not set it."""
        return AUTO if self.auto else self.max_drafts

    def check(self, asked: int | None) -> int:
        """Returns the number of drafts per step for a call's num_speculative_tokens.

        Args:
            asked: the value that the call sets. None: the largest.

        Raises:
            ValueError: more than `max_drafts`.
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
        """Chooses the numbers of drafts of a call.

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
        """Chooses the numbers of drafts of a call as if no row had a grammar."""
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
        """Numbers of drafts from which "auto" chooses."""
        return ladder(self.max_drafts)

    def controller(self, sampler: str, top_logprobs: int | None, *, processed: bool = False) -> Controller:
        """Returns the controller for calls with this sampler kind and these log-probabilities.

        It is created on first use, and exists as long as the generator.
        """
        key = (sampler, top_logprobs, processed)
        # setdefault, because any thread may call this
        return self.controllers.get(key) or self.controllers.setdefault(key, Controller(self.ks))

    def for_warmup(self, asked: int | str | None, sampler: str) -> DraftChoice:
        """Chooses the steps that `warmup` captures: those of a call without further options, and steps without drafts.

        Args:
            asked: num_speculative_tokens of such calls. None: the generator's default.
            sampler: sampler kind of such calls.

        Raises:
            ValueError: `asked` is not a number of drafts or is above `max_drafts`, or the sampler is unknown.
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
        """Chooses every k, to be measured. The controller of such calls gets the measurements.

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
        """Returns a line for every kind of call for which "auto" has chosen k."""
        lines = []
        for (sampler, recorded, _), controller in self.controllers.items():
            if not controller.made and not self.auto:
                continue  # only a trial used this controller
            made = ", ".join(f"{count} with {k}" for k, count in sorted(controller.made.items())) or "none"
            kind = f"{sampler} sampler" + ("" if recorded is None else ", log-probabilities recorded")
            lines.append(f"{kind}: {controller.why()}; steps: {made}")
        return lines
