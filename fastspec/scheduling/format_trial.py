"""Compares a quantised draft model with its original weights, as a part of `calibrate`, and keeps the faster one.

A draft model with fewer bits per weight is faster, but fewer of its tokens are accepted. How many fewer depends on the
prompts. So the original weights are loaded from the checkpoint again. Both drafts then continue the prompts in turn.
The draft that gives more tokens per second is kept, and the other one is freed. The output text is the same with both.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import torch

from fastspec.engine.engine import Engine
from fastspec.engine.memory import free_bytes
from fastspec.kernels.common.codes import CodeFormat
from fastspec.models.checkpoints.checkpoint import Checkpoint
from fastspec.models.checkpoints.decoder_weights import load_weights
from fastspec.models.checkpoints.pair import AS_STORED
from fastspec.models.decoder import Decoder
from fastspec.models.layer_table import DecoderWeights
from fastspec.proposers.draft_model import DraftModel
from fastspec.proposers.interface import drafter_of
from fastspec.scheduling.calibrate import FixedPolicy, again
from fastspec.scheduling.draft_length import DraftChoice, DraftPlan
from fastspec.scheduling.requests import CallPlan, Request, lengths_of
from fastspec.scheduling.scheduler import Scheduler

NEW: Final = 256  # tokens per turn, in all rows together
_LEAST: Final = 32  # least number of tokens per row
_TURNS: Final = 2  # turns of each draft, alternating, so that a slower machine slows both equally
_DRAFTS: Final = 4  # drafts per step, if k is chosen while decoding


@dataclass(slots=True)
class DraftRate:
    """Measured decoding speed with one draft model.

    Attributes:
        tokens: mean number of tokens that a step emits per sequence.
        seconds: median time of a step.
    """

    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second and sequence."""
        return self.tokens / self.seconds


@dataclass(slots=True, eq=False)
class FormatTrial:
    """Compares a draft model that "auto" has quantised with its original weights, and keeps the faster one.

    Args:
        draft: checkpoint of the loaded draft. Its `rounded` is the format to which "auto" quantised the weights.
        dtype: dtype of the draft's activations.
        released: True if the draft was given as a loaded model and its tensors were freed. Its original weights cannot
            be loaded again then.

    Attributes:
        draft: checkpoint of the draft as it is loaded now. Its `stored` describes the result in words.
        found: short description of the result. Empty before the first comparison.
        decided: True if the format is final, so that no comparison follows.
    """

    draft: Checkpoint
    dtype: torch.dtype
    released: bool = False
    found: str = ""
    decided: bool = False
    _form: CodeFormat | None = field(init=False)
    _chosen: str = field(init=False)

    def __post_init__(self) -> None:
        self._form, self._chosen = self.draft.rounded, self.draft.stored
        self._say("not compared yet with the stored draft: calibrate() does that")

    def __str__(self) -> str:
        """Returns the weight format of the draft and the reason for it, as one line."""
        return f"{self.draft.rounded or AS_STORED}: {self.found or 'not tried yet'}"

    def forgo(self, why: str) -> None:
        """Keeps the present weight format of the draft without a comparison.

        Args:
            why: the reason, in a few words.
        """
        self._decide(why)

    def run(
        self,
        scheduler: Scheduler,
        requests: list[Request],
        choice: DraftChoice,
        stop_ids: tuple[int, ...],
        make_ready: Callable[[list[Request], DraftChoice], None],
        drafting: DraftPlan,
    ) -> None:
        """Measures the quantised and the original draft on these requests, and keeps the faster one.

        Does nothing if the format is already final. Nothing else may use the scheduler meanwhile.

        Args:
            scheduler: scheduler without requests.
            requests: requests of a call. Copies of them are decoded.
            choice: the measurement uses its sampler. Steps have its largest number of draft tokens that is at most 4.
            stop_ids: token ids that end a request.
            make_ready: captures the steps that the given requests and draft choice need.
            drafting: plan whose controllers are reset if the weights of the draft change.
        """
        if self.decided:
            return
        engine, drafter = scheduler.engine, _drafter(scheduler.engine)
        device = engine.state.lengths.device
        as_stored = replace(self.draft, rounded=None, stored="")
        need = as_stored.bytes_loaded(self.dtype, device, engine.modules.ops)
        if self.draft.module is not None and self.released:
            self._say_found("not tried: release_source has released the stored draft")
            return
        if drafter is None or free_bytes(device) < 1.1 * need:
            self._say_found(f"not tried: the stored draft needs {need / 2**20:.0f} MiB more during the trial")
            return
        k = max(each for each in choice.ks if each <= _DRAFTS)
        plain = replace(choice, k=k, ks=(k,), controller=None, note=None)
        try:
            with engine.runner.on_stream():  # not in inference mode, because threads fill these tensors
                stored = load_weights(
                    as_stored, dtype=self.dtype, device=drafter.weights.norm.device, progress=False, ops=drafter.ops
                )
            self._try(scheduler, requests[: engine.state.batch], plain, stop_ids, make_ready, drafter, stored)
        except (RuntimeError, ValueError, OSError) as error:  # the present draft still works
            self._say_found(f"not tried: {error}")
            warnings.warn(f"the draft stays in {self._form}, not compared with the stored draft: {error}", stacklevel=3)
        if self.draft.rounded is None:
            for controller in drafting.controllers.values():
                controller.forget()

    def _try(
        self,
        scheduler: Scheduler,
        rows: list[Request],
        choice: DraftChoice,
        stop_ids: tuple[int, ...],
        make_ready: Callable[[list[Request], DraftChoice], None],
        drafter: Decoder,
        stored: DecoderWeights,
    ) -> None:
        engine, chosen = scheduler.engine, drafter.weights
        new = max(_LEAST, NEW // len(rows))
        texts = [Request(each.prompt, min(new, each.max_new_tokens), each.options) for each in rows]
        bucket = engine.shapes.bucket(len(rows))
        both: dict[CodeFormat | None, DecoderWeights] = {self._form: chosen, None: stored}
        runs = {form: FixedPolicy(choice.k) for form in both}
        winner: CodeFormat | None = self._form
        try:
            for turn in range(_TURNS):
                for form in both if turn % 2 == 0 else reversed(both):
                    with self._drafting(engine, drafter, form, both[form]):
                        make_ready(texts, choice)
                        _run(scheduler, texts, choice, stop_ids, runs[form])
            rates = {form: _rate_of(run, bucket) for form, run in runs.items()}
            one, other = rates[self._form], rates[None]
            if one is not None and other is not None:
                winner = self._judge(one, other)
            else:
                self._say_found("not tried: texts end before steps could be timed")
        finally:  # after an error the rounded draft is kept
            self._use(engine, drafter, winner, both[winner])
            engine.finish()
            engine.runner.forget_variant(None if winner is None else AS_STORED)

    @contextmanager
    def _drafting(
        self, engine: Engine, drafter: Decoder, form: CodeFormat | None, weights: DecoderWeights
    ) -> Iterator[None]:
        """Context in which steps draft with these weights, see `_use`. Waits for all steps at its end."""
        self._use(engine, drafter, form, weights)
        try:
            yield
        finally:
            engine.finish()

    def _use(self, engine: Engine, drafter: Decoder, form: CodeFormat | None, weights: DecoderWeights) -> None:
        """Makes later steps draft with these weights. Each format has its own CUDA graphs and prefix cache.

        Args:
            engine: the engine.
            drafter: the draft model.
            form: format to which the weights are quantised. None: original weights.
            weights: weights for the draft model.
        """
        variant = None if form == self._form else AS_STORED  # graphs captured before the trial have no variant
        drafter.weights = weights
        engine.runner.use_variant(variant)
        if engine.prefix is not None:
            engine.prefix.use_variant(variant)

    def _judge(self, one: DraftRate, other: DraftRate) -> CodeFormat | None:
        """Chooses the weight format to keep, and records the reason. Returns None for the original weights.

        Args:
            one: speed with the quantised draft.
            other: speed with the original weights.
        """
        ratio = one.rate / other.rate
        facts = (
            f"{one.tokens:.2f} tokens a step in {self._form} and {other.tokens:.2f} as stored, steps of "
            f"{one.seconds * 1e3:.2f} and {other.seconds * 1e3:.2f} ms"
        )
        if ratio < 1.0:
            self.draft = replace(self.draft, rounded=None)
            self._chosen = f'{AS_STORED}: "auto" went back from {self._form}'
            self._decide(f"{self._form} undone, {ratio:.2f}x the tokens a second: {facts}")
            return None
        self._decide(f"{self._form} kept, {ratio:.2f}x the tokens a second: {facts}")
        return self._form

    def _decide(self, found: str) -> None:
        self.decided = True
        self._say_found(found)

    def _say_found(self, found: str) -> None:
        self.found = found
        self._say(found)

    def _say(self, more: str) -> None:
        self.draft = replace(self.draft, stored=f"{self._chosen}; {more}")


def trial_of(draft: object, dtype: torch.dtype, *, released: bool, ranks: int = 1) -> FormatTrial | None:
    """Returns a `FormatTrial` for a draft model that "auto" has quantised. Returns None for any other draft.

    With several ranks the result is also None: ranks measure different times, but must make the same decision.

    Args:
        draft: checkpoint of the draft model. Other values: there is no draft model to compare.
        dtype, released: see `FormatTrial`.
        ranks: number of ranks.
    """
    if not isinstance(draft, Checkpoint) or not draft.chosen or ranks > 1:
        return None
    return FormatTrial(draft, dtype, released)


def _drafter(engine: Engine) -> Decoder | None:
    """Returns the draft model of an engine, also if lookup is combined with it. None if it has no draft model."""
    proposer = drafter_of(engine.modules.proposer)
    model = proposer.model if isinstance(proposer, DraftModel) else None
    return model if isinstance(model, Decoder) else None


def _run(
    scheduler: Scheduler, texts: list[Request], choice: DraftChoice, stop_ids: tuple[int, ...], policy: FixedPolicy
) -> None:  # fmt: skip
    """Decodes copies of the requests `texts` to their end. `policy` chooses k and records the steps."""
    requests = again(texts)
    call = CallPlan(stop_ids, choice.sampler, lambda made: choice.k, policy=policy, lengths=lengths_of(requests))
    for _ in scheduler.run(requests, call):
        pass


def _rate_of(run: FixedPolicy, bucket: int) -> DraftRate | None:
    """Returns the speed of the recorded steps that cover `bucket` batch slots. None if no step could be timed."""
    seconds, accepted = run.seconds(bucket), run.accepted
    return DraftRate(1 + statistics.mean(accepted), statistics.median(seconds)) if seconds and accepted else None
