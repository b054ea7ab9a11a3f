"""One decode step: propose, score, verify, commit, publish. Every running row (batch slot) advances by 1..k+1 tokens.

The step reads and writes one `DecodeState`, and writes its results to a ring buffer that the host reads later. The host
never waits for a value of the device, and no shape depends on data. So the step can be captured in a CUDA graph.
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
from fastspec.kernels.reference.step import Record
from fastspec.models.interface import CausalModel, VocabParallel
from fastspec.proposers.features import hand_over_prompt, hand_over_step
from fastspec.proposers.interface import Proposer, features_of, feeds_drafts
from fastspec.sampling import distribution, processors, verify
from fastspec.sampling.distribution import PhiloxDraws
from fastspec.sampling.rules import SyntheticAcceptance
from fastspec.shapes import (
    FULL,
    GRAMMAR_ONLY,
    LONG_PROMPT,
    NO_LIMIT,
    ForwardBatch,
    StepShape,
    keep_draft_probs,
    logit_words,
    row_tiles,
)
from fastspec.state import IDLE, PAUSED, PREFILLED, RUNNING, DecodeState, Outbox


@dataclass(frozen=True, slots=True)
class PromptEnd:
    """Hidden states at the last token of each row's prompt, from which its first new token is computed.

    `prefill` writes them for long prompts, `first_token_step` reads them.

    Attributes:
        hidden: [B, hidden], the target's last hidden states, in the target's dtype.
        features: [B, layers, hidden], the hidden states of other layers that the proposer reads. None: it reads none.
        threshold: number of tokens. Longer prompts are long prompts.
    """

    hidden: Tensor
    features: Tensor | None = None
    threshold: int = LONG_PROMPT

    @classmethod
    def zeros(
        cls,
        rows: int,
        width: int,
        layers: int,
        dtype: torch.dtype,
        device: torch.device,
        threshold: int = LONG_PROMPT,
    ) -> PromptEnd:
        """Allocates zeros.

        Args:
            rows: number of rows.
            width: number of elements of a hidden state.
            layers: number of layers whose hidden states the proposer reads.
            dtype, device: dtype and device of the hidden states.
            threshold: see the attribute.
        """
        hidden = torch.zeros(rows, width, dtype=dtype, device=device)
        return cls(hidden, hidden.new_zeros(rows, layers, width) if layers else None, threshold)

    def like(self, rows: int) -> PromptEnd:
        """Allocates zeros for `rows` batch slots. The other sizes equal those of this object."""
        features = None if self.features is None else self.features.new_zeros(rows, *self.features.shape[1:])
        return PromptEnd(self.hidden.new_zeros(rows, self.hidden.shape[1]), features, self.threshold)

    def copy(self, row: int, source: PromptEnd, place: int) -> None:
        """Copies the hidden states of row `place` of `source` to row `row` of this object. Both are row indices."""
        self.hidden[row].copy_(source.hidden[place])
        if self.features is not None and source.features is not None:
            self.features[row].copy_(source.features[place])

    def copy_rows(self, rows: Tensor, source: PromptEnd, places: Tensor) -> None:
        """Copies `source.hidden` of rows `places` to `hidden` of rows `rows`. Features are not copied.

        Args:
            rows, places: int64 [n], indices of rows in this object and in `source`.
            source: object that is read.
        """
        self.hidden.index_copy_(0, rows, source.hidden[places])

    def first(self, rows: int) -> PromptEnd:
        """Returns an object with views of the first `rows` rows of this one."""
        return PromptEnd(self.hidden[:rows], None if self.features is None else self.features[:rows], self.threshold)

    def keep(self, index: Tensor, hidden: Tensor, features: Tensor | None) -> None:
        """Stores the hidden states of one token of each row of a prefill pass.

        Args:
            index: int64 [B], index of this token among the Q tokens of each row. A row whose index is not in 0..Q-1 is
                unchanged.
            hidden: [B, Q, hidden], the target's last hidden states.
            features: [B, Q, layers, hidden], the hidden states that the proposer reads. None: it reads none.
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
    """Models and work areas of a step, besides its `DecodeState`.

    Attributes:
        target: the model whose distribution the output follows.
        proposer: makes the draft tokens. None: only k = 0 is possible.
        ops: implementations of all operations outside the models.
        outbox: buffers to which results are published for the host. None: results are only in the `DecodeState`.
        scratch: work area of the commit, from `ops.commit_scratch`.
        mark: context that names a phase of the step in a profiler.
        work: work area of sampling and verification, from `ops.sampled_work`.
        record_work: work area of log-probabilities, from `ops.record_work`.
        features: hidden states stored for the proposer between steps, from `feature_buffer`. None: the proposer needs
            none.
        prompt_ends: hidden states after long prompts, for `first_token_step`. None: every first token comes from an
            ordinary step.
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
    prompt_ends: PromptEnd | None = None


def step(modules: StepModules, state: DecodeState, shape: StepShape, draws: verify.Draws) -> None:
    """Advances every running row of `state` by 1..k+1 tokens. Other rows are unchanged.

    Args:
        modules: models and work areas.
        state: views of the rows that the step covers; updated in place.
        shape: values that the host has fixed: k, sampler, limit of positions, tiling.
        draws: random numbers, a function of (row seed, position, purpose, token).
    """
    if shape.first_token:
        first_token_step(modules, state, shape, draws)
        return
    if shape.num_drafts and modules.proposer is not None:
        with modules.mark("propose"):
            if shape.grammars != GRAMMAR_ONLY:
                propose(modules.proposer, modules, state, shape, draws)
                torch.minimum(state.draft_counts, state.draft_limits, out=state.draft_counts)
            if shape.grammars is not None:
                take_grammar_drafts(modules, state, shape)
    tiles = row_tiles(state.batch, _row_bytes(modules, shape), modules.ops.logit_bytes)
    if len(tiles) == 1:
        with modules.mark("score"):
            logits, features, batch = _scored(modules, state, shape)
        with modules.mark("verify and commit"):
            verify_and_commit(modules, state, shape, draws, logits)
    else:
        features, batch = _commit_in_tiles(modules, state, shape, tiles)
    if shape.num_drafts and not feeds_drafts(modules.proposer):  # accepted drafts are not in its cache
        torch.minimum(state.draft_lengths, state.lengths - state.emitted, out=state.draft_lengths)
    if features is not None:
        with modules.mark("features"):
            hand_over_step(modules.proposer, state, shape, features, batch, modules.features)
    if shape.grammars is not None:
        pause(state)


def _row_bytes(modules: StepModules, shape: StepShape) -> int:
    """Returns the number of temporary bytes that the logits of one batch slot need in a step."""
    words = modules.ops.logit_words or logit_words(shape)
    return (shape.num_drafts + 1) * 4 * modules.target.vocab_size * words


def _commit_in_tiles(
    modules: StepModules, state: DecodeState, shape: StepShape, tiles: list[tuple[int, int]]
) -> tuple[Tensor | None, ForwardBatch]:
    """Runs the target over all rows. Then computes logits, verifies and commits for one part of the rows at a time.

    So only the logits of one part are in memory. At the end the results of all rows are published.

    Args:
        modules, state, shape: see `step`.
        tiles: (first row, row after the last) of each part.

    Returns:
        features: [B, k+1, layers, hidden], the hidden states that the proposer reads. None: it reads none.
        batch: the input of the target's pass.
    """
    batch = _scoring_batch(modules, state, shape)
    with modules.mark("score"):
        hidden, features = _hidden(modules, batch)
    with modules.mark("verify and commit"):
        for first, last in tiles:
            rows = state.rows(first, last)
            logits = modules.target.logits(hidden[first:last], shape.tiling)
            verify_and_commit(modules, rows, shape, PhiloxDraws(rows.seeds), logits, publish=False)
            del logits  # before those of the next rows
        if modules.outbox is not None:
            details = None if shape.top_logprobs is None else modules.outbox.details
            drafting = shape.num_drafts > 0
            modules.ops.publish(
                modules.outbox.entries, modules.outbox.counter, state, drafting=drafting, details=details
            )
    return features, batch


def first_token_step(modules: StepModules, state: DecodeState, shape: StepShape, draws: verify.Draws) -> None:
    """Emits the first token of each row whose `finish` is PREFILLED. Other rows are unchanged.

    The logits are computed from the hidden states that the last prefill pass stored. So the step reads only the weights
    of the LM head. The length of a row's prompt alone decides if the row needs this step. So other rows and draft
    tokens do not change its text.
    """
    prompt_ends = modules.prompt_ends
    assert prompt_ends is not None, "the passes over prompts left something"
    begins = state.finish == PREFILLED
    others = {name: getattr(state, name).clone() for name in ("finish", "emitted", "block", "accepted")}
    state.finish.copy_(torch.where(begins, RUNNING, IDLE))
    batch = _scoring_batch(modules, state, shape)
    with modules.mark("score"):
        logits = modules.target.logits(prompt_ends.hidden[: state.batch, None], shape.tiling)
    with modules.mark("verify and commit"):
        verify_and_commit(modules, state, shape, draws, logits)
    if prompt_ends.features is not None:
        with modules.mark("features"):
            features = prompt_ends.features[: state.batch, None]
            hand_over_step(modules.proposer, state, shape, features, batch, modules.features)
    if shape.grammars is not None:
        pause(state)
    for name, before in others.items():
        now, wide = getattr(state, name), [1] * (before.dim() - 1)
        now.copy_(torch.where(begins.view(-1, *wide), now, before))


def propose(
    proposer: Proposer, modules: StepModules, state: DecodeState, shape: StepShape, draws: verify.Draws
) -> None:
    """Calls the proposer, which writes the draft tokens of the step to the state."""
    features = {} if modules.features is None else {"features": modules.features[: state.batch]}
    proposer.propose(state, shape, draws, **features)


def score(modules: StepModules, state: DecodeState, shape: StepShape) -> Tensor:
    """Runs the target over each row's last token and draft tokens. Returns the next-token logits [B, k+1, V]."""
    return modules.target.logits(_hidden(modules, _scoring_batch(modules, state, shape))[0], shape.tiling)


def _scored(
    modules: StepModules, state: DecodeState, shape: StepShape
) -> tuple[Tensor | PartKeys, Tensor | None, ForwardBatch]:
    """Runs the target over each row's last token and draft tokens.

    Returns:
        logits: [B, k+1, V], or keys of the largest logits (`PartKeys`) if the step needs only the argmax.
        features: [B, k+1, layers, hidden], the hidden states that the proposer reads. None: it reads none.
        batch: the input of the target's pass.
    """
    batch = _scoring_batch(modules, state, shape)
    hidden, features = _hidden(modules, batch)
    target, keys = modules.target, None
    if isinstance(target, VocabParallel) and _needs_argmax_only(shape):
        keys = target.best_keys(hidden, shape.tiling)
    return target.logits(hidden, shape.tiling) if keys is None else keys, features, batch


def _needs_argmax_only(shape: StepShape) -> bool:
    """True if the step needs only the token id with the largest logit at each position."""
    plain = shape.sampler != FULL and shape.top_logprobs is None and shape.grammars is None
    return plain and not isinstance(shape.verification, SyntheticAcceptance)


def _scoring_batch(modules: StepModules, state: DecodeState, shape: StepShape) -> ForwardBatch:
    """Returns the input of the target's pass over each row's last token and draft tokens, with ids [B, k+1]."""
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
    return shape.forward_batch(ids, positions, write_mask, state.block_table, state.state_rows)


def _hidden(modules: StepModules, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
    """Runs the target over a batch.

    Returns:
        hidden: [B, Q, hidden], the target's last hidden states.
        features: [B, Q, layers, hidden], the hidden states that the proposer reads. None: it reads none.
    """
    layers = features_of(modules.proposer)
    if not layers:
        return modules.target.hidden(batch), None
    return modules.target.hidden_with_features(batch, layers)


def verify_and_commit(
    modules: StepModules,
    state: DecodeState,
    shape: StepShape,
    draws: verify.Draws,
    logits: Tensor | PartKeys,
    *,
    publish: bool = True,
) -> None:
    """Accepts or rejects the draft tokens, and commits the emitted tokens to the state.

    Args:
        modules, state, shape, draws: see `step`.
        logits: [B, k+1, V], or keys of the largest logits (`PartKeys`) if the step needs only the argmax.
        publish: True to write the results to the outbox as well, if there is one.
    """
    outbox = modules.outbox if publish else None
    entry = (outbox.entries, outbox.counter) if outbox else None
    record = None
    if shape.top_logprobs is not None:
        record = Record(shape.top_logprobs, modules.record_work, outbox.details if outbox else None)
    if isinstance(logits, PartKeys):
        modules.ops.verify_commit(logits, state, modules.scratch, entry)
        return
    if shape.grammars is None and not shape.processed:
        _judge(modules, state, shape, draws, logits, entry, record)
        return
    # log-probabilities are of logits without the grammars' masks, so they are recorded separately
    apart, recorded = record is not None, logits
    if apart and shape.processed:  # before the commit, which counts tokens for penalties
        recorded = modules.ops.processed_logits(logits, state, modules.work)
    judged = logits if shape.grammars is None else processors.allowed(logits, state.masks)
    _judge(modules, state, shape, draws, judged, None if apart else entry, None)
    if record is not None:
        _record(modules, state, shape, record, recorded, entry)


def _judge(
    modules: StepModules,
    state: DecodeState,
    shape: StepShape,
    draws: verify.Draws,
    logits: Tensor,
    entry: tuple[Tensor, Tensor] | None,
    record: Record | None,
) -> None:
    """Verifies the draft tokens and commits the emitted tokens, by the rule and the sampler of the step.

    Args:
        modules, state, shape, draws: see `step`.
        logits: [B, k+1, V], already masked by grammars.
        entry: (entries, counter) of the outbox, to publish the results. None: they are not published.
        record: number of ids to record, and buffers for the log-probabilities of `logits`. None: nothing is recorded.
    """
    if isinstance(shape.verification, SyntheticAcceptance):
        accept_synthetic(modules, state, shape, shape.verification, draws, logits, entry, record)
    elif shape.sampler == FULL:
        modules.ops.sampled_commit(
            logits, state, modules.scratch, modules.work, entry,
            rule=shape.verification, deterministic=not _drawn(modules, shape), draws=draws, record=record,
        )  # fmt: skip
    else:
        modules.ops.verify_commit(logits, state, modules.scratch, entry, record)


def _drawn(modules: StepModules, shape: StepShape) -> bool:
    """True if the proposer sampled draft tokens of this step, so that `draft_probs` has their distributions."""
    return modules.proposer is not None and not modules.proposer.deterministic and shape.grammars != GRAMMAR_ONLY


def _record(
    modules: StepModules,
    state: DecodeState,
    shape: StepShape,
    record: Record,
    logits: Tensor,
    entry: tuple[Tensor, Tensor] | None,
) -> None:
    """Records log-probabilities of the emitted tokens in a separate op after the commit, then publishes the results.

    Used if the log-probabilities are computed from other logits than the commit reads.

    Args:
        modules, state, shape: see `step`.
        record: number of ids to record, and the buffers for them.
        logits: [B, k+1, V], from which log-probabilities are computed.
        entry: see `_judge`.
    """
    modules.ops.record_logprobs(logits, state, modules.scratch, record)
    if entry:
        modules.ops.publish(*entry, state, drafting=shape.num_drafts > 0, details=record.details)


def take_grammar_drafts(modules: StepModules, state: DecodeState, shape: StepShape) -> None:
    """Makes the host's draft tokens those of this step, for rows with a grammar.

    Other rows keep the proposer's draft tokens. With `shape.grammars` GRAMMAR_ONLY other rows have no draft tokens.
    """
    k, rows = shape.num_drafts, state.constrained
    drafts = state.draft_tokens[:, :k]
    drafts.copy_(torch.where(rows[:, None], state.grammar_drafts[:, :k], drafts))
    others = torch.zeros_like(state.draft_counts) if shape.grammars == GRAMMAR_ONLY else state.draft_counts
    state.draft_counts.copy_(torch.where(rows, state.grammar_counts, others))
    if _drawn(modules, shape) and keep_draft_probs(shape):
        # in place: a copy would be as large as the logits
        probs, at, taken = state.draft_probs[:, :k], drafts[:, :, None], rows[:, None, None]
        drawn = probs.gather(2, at)
        probs.masked_fill_(taken, 0.0).scatter_(2, at, torch.where(taken, 1.0, drawn))


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
    """Accepts as many draft tokens as `rule` says, for benchmarks. Commits them and one token of the target.

    Args:
        modules, state, shape, draws: see `step`.
        rule: the rule, whose acceptance does not depend on the models.
        logits, entry, record: see `_judge`.
    """
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
    prompt_ends: PromptEnd | None = None,
) -> Tensor:
    """Runs one prefill pass of the target: the prompt tokens at positions start..start+chunk-1 of each row.

    The pass does not cover a prompt's last token: the row's first decode step does. With `prompt_ends` the pass also
    covers the last token of a long prompt, and stores its hidden state for `first_token_step`.

    Args:
        modules, shape: see `step`; both sizes of `shape.tiling` are `chunk`.
        state: one row, so that a prompt's K/V bits depend on that prompt alone. Several rows are possible if the bits
            do not depend on other rows of the pass.
        start: the first position of all rows; or int64 [B] on the device, the first position of each row.
        chunk: number of tokens per row. Chunk sizes follow from the prompt's length alone.
        kept: [1, ..], the row's entry of `StepModules.features`. None: the proposer stores nothing.
        prompt_ends: receives the hidden states at the last tokens of long prompts. It has as many rows as `state`.
            None: the pass covers no last token.

    Returns:
        The target's last hidden states [B, chunk, hidden]. At positions that the pass does not cover they have no
        meaning.
    """
    positions = torch.arange(chunk, device=state.lengths.device)[None]
    positions = positions + (start[:, None] if isinstance(start, Tensor) else start)
    last = state.lengths[:, None] - 1
    write_mask = known_next = state.running[:, None] & (positions < last)
    if prompt_ends is not None:
        write_mask = write_mask | (state.running[:, None] & (positions == last) & (last >= prompt_ends.threshold))
    index = last[:, 0] - positions[:, 0]
    ids = state.tokens.gather(1, positions.clamp(max=state.tokens.shape[1] - 1))
    positions = torch.where(write_mask, positions, 0)
    batch = shape.forward_batch(ids, positions, write_mask, state.block_table, state.state_rows)
    hidden, features = _hidden(modules, batch)
    if prompt_ends is not None:
        prompt_ends.keep(index, hidden, features)
    if features is not None:  # the token after the last one is not known yet
        hand_over_prompt(modules.proposer, state, shape, features, replace(batch, write_mask=known_next), kept)
    return hidden
