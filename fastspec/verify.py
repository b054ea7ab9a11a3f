"""Acceptance of drafted tokens: the definition of correct, and the op the step runs where no kernel does.

p is the target's law, q the draft's. Drafts x_1..x_k were drawn from q. Draft j is accepted with probability
min(1, p(x)/q(x)); the first rejected place is filled from the residual norm(max(p - q, 0)); after k acceptances
one more token comes from p. The emitted tokens then follow p exactly (Leviathan et al., arXiv 2211.17192,
theorem 3.5; Chen et al., arXiv 2302.01318). Every function but `commit` is pure; coins and draws are
arguments.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

RUNNING, STOPPED, AT_LIMIT = 0, 1, 2  # what a commit leaves in `finish`; fastspec.state adds one for idle rows


class Draws(Protocol):
    """Where randomness enters. `fastspec.sampling.PhiloxDraws` in use, an enumerator of all outcomes in tests."""

    def accept(self, probability: Tensor, positions: Tensor) -> Tensor:
        """Coins: bool [B, k], True with `probability` [B, k]; positions int64 [B, k] key the randomness."""

    def pick(self, probs: Tensor, positions: Tensor, purpose: int) -> Tensor:
        """Ids int64 [B] drawn from probs [B, V] (rows need not sum to one); positions int64 [B]."""


def accept_probability(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p/q) elementwise; 0 where p is 0, 1 where only q is 0 (such a token cannot have been drawn)."""
    ratio = torch.where(q > 0, p / q.clamp_min(torch.finfo(q.dtype).tiny), 1.0)
    return torch.where(p > 0, ratio.clamp(max=1.0), 0.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """max(p - q, 0) over the last axis, unnormalised; p itself where that vanishes (p = q up to rounding)."""
    excess = (p - q).clamp_min(0.0)
    return torch.where(excess.sum(-1, keepdim=True) > 0, excess, p)


def greedy(logits: Tensor, drafts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Accepts drafts that equal the target's pick, the lowest id among equals.

    Args:
        logits: [B, k+1, V] of the target at the drafted places and after them.
        drafts: int64 [B, k].
        counts: int64 [B], how many of a row's drafts count; the others are never accepted.

    Returns:
        (accepted int64 [B], block int64 [B, k+1]): block[:, :accepted+1] are the tokens to emit.
    """
    picks = logits.argmax(dim=-1)
    return _leading(picks[:, :-1] == drafts, counts), picks


def rejection(
    p: Tensor, q: Tensor, drafts: Tensor, counts: Tensor, positions: Tensor, draws: Draws, purpose: int
) -> tuple[Tensor, Tensor]:
    """Lossless rejection sampling of k drafts a row.

    Args:
        p: [B, k+1, V], the target's law at each place.
        q: [B, k, V], the law each draft was drawn from.
        drafts: int64 [B, k].
        counts: int64 [B], how many of a row's drafts count; after them the target's law decides.
        positions: int64 [B, k+1], absolute positions of the places.
        draws: coins and draws.
        purpose: keys the draw of the last token apart from the draft's own draws.

    Returns:
        (accepted int64 [B], block int64 [B, k+1]) as `greedy`.
    """
    batch, k = drafts.shape
    at = drafts[:, :, None]
    chance = accept_probability(p[:, :k].gather(2, at)[:, :, 0], q.gather(2, at)[:, :, 0])
    accepted = _leading(draws.accept(chance, positions[:, :k]), counts)
    row = torch.arange(batch, device=p.device)
    law = p[row, accepted]
    if k:
        rejected = (accepted < counts)[:, None]
        law = torch.where(rejected, residual(law, q[row, accepted.clamp(max=k - 1)]), law)
    last = draws.pick(law, positions[row, accepted], purpose)
    places = torch.arange(k + 1, device=p.device)
    block = torch.cat((drafts, drafts.new_zeros(batch, 1)), dim=1)
    return accepted, torch.where(places == accepted[:, None], last[:, None], block)


def _leading(flags: Tensor, counts: Tensor) -> Tensor:
    """Number of leading True among the first `counts` [B] of each row of bool [B, k]: int64 [B]."""
    counted = torch.arange(flags.shape[1], device=flags.device) < counts[:, None]
    return (flags & counted).long().cumprod(dim=1).sum(dim=1)


class CommitRows(Protocol):
    """The tensors of B rows that a commit reads and writes; `fastspec.state.DecodeState` has and explains them."""

    @property
    def tokens(self) -> Tensor:
        """int64 [B, T]."""

    @property
    def lengths(self) -> Tensor:
        """int64 [B]."""

    @property
    def limits(self) -> Tensor:
        """int64 [B]."""

    @property
    def draft_lengths(self) -> Tensor:
        """int64 [B]."""

    @property
    def finish(self) -> Tensor:
        """int64 [B]."""

    @property
    def stop_ids(self) -> Tensor:
        """int64 [B, S], padded with -1."""

    @property
    def draft_tokens(self) -> Tensor:
        """int64 [B, K]."""

    @property
    def draft_counts(self) -> Tensor:
        """int64 [B]."""

    @property
    def block(self) -> Tensor:
        """int64 [B, K+1]."""

    @property
    def emitted(self) -> Tensor:
        """int64 [B]."""

    @property
    def accepted(self) -> Tensor:
        """int64 [B]."""

    @property
    def logprobs(self) -> Tensor:
        """fp32 [B, K+1]."""

    @property
    def top_ids(self) -> Tensor:
        """int64 [B, K+1, N]."""

    @property
    def top_logprobs(self) -> Tensor:
        """fp32 [B, K+1, N]."""


def commit(rows: CommitRows, accepted: Tensor, block: Tensor) -> None:
    """Appends block[:, :accepted+1], cut at the first stop id or at the row's limit, whichever is first.

    Args:
        rows: changed in place; rows that are not running keep what counts.
        accepted: int64 [B], drafts accepted.
        block: int64 [B, k+1], the accepted drafts and one more token.
    """
    k = block.shape[1] - 1
    running = rows.finish == RUNNING
    places = torch.arange(k + 1, device=block.device)
    is_stop = (block[:, :, None] == rows.stop_ids[:, None, :]).any(-1) & (places <= accepted[:, None])
    # one more than the place of the first stop id; k + 2 where there is none
    upto_stop = torch.where(is_stop, places + 1, k + 2).amin(dim=1)
    room = rows.limits - rows.lengths
    count = torch.minimum(torch.minimum(accepted + 1, upto_stop), room)
    count = torch.where(running, count, 0)
    finish = torch.where(upto_stop <= room, torch.where(upto_stop <= k + 1, STOPPED, RUNNING), RUNNING)
    finish = torch.where((finish == RUNNING) & (count == room), AT_LIMIT, finish)

    junk = rows.tokens.shape[1] - 1
    at = (rows.lengths[:, None] + places).clamp(max=junk)
    rows.tokens.scatter_(1, torch.where(places < count[:, None], at, junk), block)
    if k:
        # the draft fed positions up to lengths + drafts - 2; its next pass starts two before the new length
        fed = torch.minimum(rows.lengths + rows.draft_counts - 1, rows.lengths + count - 1)
        rows.draft_lengths.copy_(torch.where(running & (rows.draft_counts > 0), fed, rows.draft_lengths))
    rows.lengths.add_(count)
    rows.finish.copy_(torch.where(running, finish, rows.finish))
    rows.block[:, : k + 1].copy_(block)
    rows.emitted.copy_(count)
    rows.accepted.copy_(torch.where(running, accepted, -1))
