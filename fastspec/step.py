"""One decoding step: propose, score, verify, commit, publish. Every running row advances by 1..k+1 tokens.

The step reads and writes one DecodeState and leaves its results in a ring that the host reads later. It never reads a
value back to the host, and no shape in it depends on data, so that it can be captured as it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastspec.kernels.ops import TORCH_OPS, Ops
from fastspec.kernels.reference.linear import PartKeys
from fastspec.kernels.reference.step import Record, record_logprobs
from fastspec.models.interface import CausalModel, InParts
from fastspec.proposers.features import hand_over_prompt, hand_over_step
from fastspec.proposers.interface import Proposer, features_of
from fastspec.sampling import distribution, masks, processors, verify
from fastspec.sampling.rules import SyntheticAcceptance
from fastspec.shapes import ALONE, FULL, LONG_PROMPT, NO_LIMIT, ForwardBatch, StepShape, keep_draft_probs
from fastspec.state import IDLE, PASSED, PAUSED, RUNNING, DecodeState, Outbox


@dataclass(frozen=True, slots=True)
class PromptEnd:
    """What the last pass over a long prompt leaves for `first_step`, for every row.

    Attributes:
        hidden: [B, hidden] of the target, in its dtype.
        features: [B, layers, hidden] that the proposer reads; None: it reads none.
        above: tokens; a prompt with more of them is long.
    """

    hidden: Tensor
    features: Tensor | None = None
    above: int = LONG_PROMPT

    @classmethod
    def zeros(cls, rows: int, width: int, layers: int, dtype: torch.dtype, device: torch.device) -> PromptEnd:
        """Zeros for `rows` rows, with hidden states of `width` elements."""
        hidden = torch.zeros(rows, width, dtype=dtype, device=device)
        return cls(hidden, hidden.new_zeros(rows, layers, width) if layers else None)

    def like(self, rows: int) -> PromptEnd:
        """The same for another number of rows."""
        features = None if self.features is None else self.features.new_zeros(rows, *self.features.shape[1:])
        return PromptEnd(self.hidden.new_zeros(rows, self.hidden.shape[1]), features, self.above)

    def copy(self, row: int, source: PromptEnd, place: int) -> None:
        """Row `row` takes what row `place` of another has."""
        self.hidden[row].copy_(source.hidden[place])
        if self.features is not None and source.features is not None:
            self.features[row].copy_(source.features[place])

    def keep(self, index: Tensor, hidden: Tensor, features: Tensor | None) -> None:
        """Keeps place `index` [B] of hidden [B, Q, hidden] and of features [B, Q, layers, hidden].

        Rows whose index is not in 0..Q-1 stay as they are.
        """
        inside = (index >= 0) & (index < hidden.shape[1])
        index = index.clamp(0, hidden.shape[1] - 1)[:, None, None]
        found = hidden.gather(1, index.expand(-1, 1, hidden.shape[2]))[:, 0]
        self.hidden.copy_(torch.where(inside[:, None], found, self.hidden))
        if features is not None and self.features is not None:
            found = features.gather(1, index[..., None].expand(-1, 1, *features.shape[2:]))[:, 0]
            self.features.copy_(torch.where(inside[:, None, None], found, self.features))


@dataclass(frozen=True, slots=True)
class StepModules:
    """What a step runs on besides its state.

    Attributes:
        target: the model whose distribution the output follows.
        proposer: writes the drafts; None allows k = 0 only.
        ops: implementations of everything that is not a model's.
        outbox: takes the results; None: they stay in the state.
        scratch: work area of the commit, from `ops.commit_scratch`.
        mark: names a phase of the step to a profiler while it is entered.
        work: work area of a sampled step's end, from `ops.sampled_work`.
        record_work: work area of log-probabilities, from `ops.record_work`.
        features: what is kept of each row for the proposer between steps, from `feature_buffer`; None: nothing.
        ends: what passes over long prompts leave for `first_step`; None: their first tokens come from steps.
    """

    target: CausalModel
    proposer: Proposer | None
    ops: Ops = TORCH_OPS
    outbox: Outbox | None = None
    scratch: Tensor | None = None
    mark: Callable[[str], AbstractContextManager[object]] = nullcontext
    work: Any = None
    record_work: Any = None
    features: Tensor | None = None
    ends: PromptEnd | None = None


def step(modules: StepModules, state: DecodeState, shape: StepShape, draws: verify.Draws) -> None:
    """Advances every running row of `state`; rows that are not running are left as they are."""
    if shape.first:
        first_step(modules, state, shape, draws)
        return
    if shape.num_drafts and modules.proposer is not None:
        with modules.mark("propose"):
            if shape.grammars != ALONE:
                propose(modules.proposer, modules, state, shape, draws)
                torch.minimum(state.draft_counts, state.draft_limits, out=state.draft_counts)
            if shape.grammars is not None:
                take_given(modules, state, shape)
    with modules.mark("score"):
        logits, features, rows = _scored(modules, state, shape)
    with modules.mark("verify and commit"):
        verify_and_commit(modules, state, shape, draws, logits)
    if features is not None:
        with modules.mark("take in"):
            hand_over_step(modules.proposer, state, shape, features, rows, modules.features)
    if shape.grammars is not None:
        pause(state)


def first_step(modules: StepModules, state: DecodeState, shape: StepShape, draws: verify.Draws) -> None:
    """The first token of each row that is PASSED; all other rows are left as they are.

    Its logits come from the hidden state that the last pass over the prompt left, so only the head's weights are read.
    Which prompts take this step depends on their length alone, so neighbours and drafts do not change the text.
    """
    ends = modules.ends
    assert ends is not None, "the passes left something"
    begins = state.finish == PASSED
    others = {name: getattr(state, name).clone() for name in ("finish", "emitted", "block", "accepted")}
    state.finish.copy_(torch.where(begins, RUNNING, IDLE))
    rows = _last_tokens(modules, state, shape)
    with modules.mark("score"):
        logits = modules.target.logits(ends.hidden[: state.batch, None], shape.tiling)
    with modules.mark("verify and commit"):
        verify_and_commit(modules, state, shape, draws, logits)
    if ends.features is not None:
        with modules.mark("take in"):
            features = ends.features[: state.batch, None]
            hand_over_step(modules.proposer, state, shape, features, rows, modules.features)
    if shape.grammars is not None:
        pause(state)
    for name, before in others.items():
        now, wide = getattr(state, name), [1] * (before.dim() - 1)
        now.copy_(torch.where(begins.view(-1, *wide), now, before))


def propose(
    proposer: Proposer, modules: StepModules, state: DecodeState, shape: StepShape, draws: verify.Draws
) -> None:
    """Lets the proposer write the drafts of a step."""
    features = {} if modules.features is None else {"features": modules.features[: state.batch]}
    proposer.propose(state, shape, draws, **features)


def score(modules: StepModules, state: DecodeState, shape: StepShape) -> Tensor:
    """Feeds the last token and the drafts to the target; logits [B, k+1, V] of what follows each."""
    return modules.target.logits(_fed(modules, _last_tokens(modules, state, shape))[0], shape.tiling)


def _scored(
    modules: StepModules, state: DecodeState, shape: StepShape
) -> tuple[Tensor | PartKeys, Tensor | None, ForwardBatch]:
    """As `score`; also the hidden states that the proposer reads, [B, k+1, layers, hidden], and the rows that were fed.

    Keys in place of logits where they do; None in place of hidden states where it reads none.
    """
    rows = _last_tokens(modules, state, shape)
    hidden, features = _fed(modules, rows)
    target = modules.target
    keys = target.best_keys(hidden, shape.tiling) if isinstance(target, InParts) and _picks_alone(shape) else None
    return target.logits(hidden, shape.tiling) if keys is None else keys, features, rows


def _picks_alone(shape: StepShape) -> bool:
    """Whether nothing but the largest logit of each place is asked for."""
    plain = shape.sampler != FULL and shape.top_logprobs is None and shape.grammars is None
    return plain and not isinstance(shape.verification, SyntheticAcceptance)


def _last_tokens(modules: StepModules, state: DecodeState, shape: StepShape) -> ForwardBatch:
    """The last token of each row, and its drafts."""
    ids, positions, write_mask = modules.ops.feed_rows(
        state.tokens,
        state.lengths,
        state.finish,
        state.draft_tokens,
        first=-1,
        queries=shape.num_drafts + 1,
        limit=NO_LIMIT,
        vocab=modules.target.vocab_size,
    )
    return shape.fed(ids, positions, write_mask, state.block_table, state.state_rows)


def _fed(modules: StepModules, rows: ForwardBatch) -> tuple[Tensor, Tensor | None]:
    """The target's hidden states of the fed rows, and those that the proposer reads."""
    layers = features_of(modules.proposer)
    if not layers:
        return modules.target.hidden(rows), None
    return modules.target.hidden_with_features(rows, layers)


def verify_and_commit(
    modules: StepModules, state: DecodeState, shape: StepShape, draws: verify.Draws, logits: Tensor | PartKeys
) -> None:
    """Decides what is emitted, commits it to the state and publishes it."""
    entry = (modules.outbox.entries, modules.outbox.counter) if modules.outbox else None
    record = None
    if shape.top_logprobs is not None:
        record = Record(shape.top_logprobs, modules.record_work, modules.outbox.details if modules.outbox else None)
    if isinstance(logits, PartKeys):
        modules.ops.verify_commit(logits, state, modules.scratch, entry)
        return
    if shape.grammars is None:
        _judge(modules, state, shape, draws, logits, entry, record)
        return
    # log-probabilities are those of the raw target, without masks, so they are recorded separately
    apart = record is not None
    _judge(modules, state, shape, draws, masks.allowed(logits, state.masks), None if apart else entry, None)
    if record is not None:
        _record(modules, state, shape, record, logits, entry)


def _judge(
    modules: StepModules,
    state: DecodeState,
    shape: StepShape,
    draws: verify.Draws,
    logits: Tensor,
    entry: tuple[Tensor, Tensor] | None,
    record: Record | None,
) -> None:
    """`verify_and_commit` with the logits [B, k+1, V] from which tokens are chosen, masked by grammars if any."""
    if isinstance(shape.verification, SyntheticAcceptance):
        accept_synthetic(modules, state, shape, shape.verification, draws, logits, entry, record)
    elif shape.sampler == FULL:
        rule = {"rule": shape.verification, "deterministic": not _drawn(modules, shape), "draws": draws}
        modules.ops.sampled_commit(logits, state, modules.scratch, modules.work, entry, **rule, record=record)
    else:
        modules.ops.verify_commit(logits, state, modules.scratch, entry, record)


def _drawn(modules: StepModules, shape: StepShape) -> bool:
    """Whether draft tokens of this step were sampled, so that `draft_probs` holds their distributions."""
    return modules.proposer is not None and not modules.proposer.deterministic and shape.grammars != ALONE


def _record(
    modules: StepModules,
    state: DecodeState,
    shape: StepShape,
    record: Record,
    raw: Tensor,
    entry: tuple[Tensor, Tensor] | None,
) -> None:
    """Records log-probabilities of the raw logits after a commit without them, then publishes both."""
    record_logprobs(state, record.top, raw)
    if entry:
        modules.ops.publish(*entry, state, drafting=shape.num_drafts > 0, details=record.details)


def take_given(modules: StepModules, state: DecodeState, shape: StepShape) -> None:
    """Rows with a grammar take the draft tokens that the host sent; with ALONE all other rows have no drafts."""
    k, rows = shape.num_drafts, state.constrained
    drafts = state.draft_tokens[:, :k]
    drafts.copy_(torch.where(rows[:, None], state.given_tokens[:, :k], drafts))
    others = torch.zeros_like(state.draft_counts) if shape.grammars == ALONE else state.draft_counts
    state.draft_counts.copy_(torch.where(rows, state.given_counts, others))
    if _drawn(modules, shape) and keep_draft_probs(shape):
        one_hot = torch.zeros_like(state.draft_probs[:, :k]).scatter_(2, drafts[:, :, None], 1.0)
        state.draft_probs[:, :k].copy_(torch.where(rows[:, None, None], one_hot, state.draft_probs[:, :k]))


def pause(state: DecodeState) -> None:
    """Pauses rows with a grammar until the host has read this step's tokens and sent the next masks."""
    state.finish.copy_(torch.where(state.constrained & state.running, PAUSED, state.finish))


def accept_synthetic(
    modules: StepModules,
    state: DecodeState,
    shape: StepShape,
    rule: SyntheticAcceptance,
    draws: verify.Draws,
    logits: Tensor,
    entry: tuple[Tensor, Tensor] | None,
    record: Record | None,
) -> None:
    """Accepts as many drafts as a rule for benchmarks says, and then what the target picks."""
    raw = logits
    drafts, counts = state.draft_tokens[:, : shape.num_drafts], state.draft_counts
    places = state.lengths[:, None] + torch.arange(shape.num_drafts + 1, device=logits.device)
    picks = logits.argmax(dim=-1)
    if shape.sampler == FULL:
        logits = processors.process(logits, state.processors, state.lengths, drafts)
        picks = draws.sample(distribution.compute_probs(logits, state.sampler), places, distribution.TARGET)
    number = modules.outbox.counter if modules.outbox else torch.zeros_like(counts[:1])
    accepted, block = verify.synthetic(rule, picks, drafts, counts, places, draws, number)
    accepted = processors.flag_invalid(accepted, processors.invalid(logits))
    modules.ops.commit(accepted, block, state, modules.scratch, None if record else entry)
    if record:
        _record(modules, state, shape, record, raw, entry)
    if shape.sampler == FULL:
        processors.count(state.output_counts, state.block, state.emitted)


def prefill(
    modules: StepModules,
    state: DecodeState,
    shape: StepShape,
    start: int | Tensor,
    chunk: int,
    kept: Tensor | None = None,
    ends: PromptEnd | None = None,
) -> None:
    """Feeds the target the prompt tokens of positions start..start+chunk-1 of a row.

    The last token is left to the first step, but for a long prompt's where `ends`, of as many rows as the state, takes
    what comes of it. `start` is a number, or int64 [B] where it is read on the device; `kept` [1, ..] is the row's part
    of what `StepModules.features` holds.

    The caller passes a state of one row, chunks that follow from the prompt's length alone and a tiling of exactly one
    chunk, so that a prompt's K/V bits depend on that prompt alone. Where they do not depend on what else a pass feeds,
    it may be a state of several rows.
    """
    positions = torch.arange(chunk, device=state.lengths.device)[None]
    positions = positions + (start[:, None] if isinstance(start, Tensor) else start)
    last = state.lengths[:, None] - 1
    write_mask = told = state.running[:, None] & (positions < last)
    if ends is not None:
        write_mask = write_mask | (state.running[:, None] & (positions == last) & (last >= ends.above))
    index = last[:, 0] - positions[:, 0]
    ids = state.tokens.gather(1, positions.clamp(max=state.tokens.shape[1] - 1))
    positions = torch.where(write_mask, positions, 0)
    rows = shape.fed(ids, positions, write_mask, state.block_table, state.state_rows)
    hidden, features = _fed(modules, rows)
    if ends is not None:
        ends.keep(index, hidden, features)
    if features is not None:  # what follows the last token is not known yet
        hand_over_prompt(modules.proposer, state, shape, features, replace(rows, write_mask=told), kept)
