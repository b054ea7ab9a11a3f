"""Verification of draft tokens in torch. These functions define the rules. They also run where no kernel does.

p is the target's distribution, q the draft's. Drafts x_1..x_k were drawn from q. With each of three rules the emitted
tokens follow p exactly:

- `rejection`: draft j is accepted with probability min(1, p(x)/q(x)). The first rejected place gets a token from the
  residual norm(max(p - q, 0)). After k acceptances one more token comes from p (Leviathan et al. 2022, arXiv
  2211.17192, theorem 3.5; Chen et al. 2023, arXiv 2302.01318).
- `block`: accepts or refuses the drafts together. On average it accepts at least as many drafts as any other exact rule
  (Sun et al. 2024, arXiv 2403.10444, algorithm 2).
- `coupled`: the target samples with the random numbers that the draft used, and its sample is emitted. A draft is
  accepted if both are equal (Daliri, Musco and Suresh, arXiv 2408.07978).

A *place* is one of the k + 1 positions that a step scores in a row. All functions except `commit` are pure: random
numbers are arguments.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fastspec.sampling.rules import SyntheticAcceptance

RUNNING, STOPPED, AT_LIMIT = 0, 1, 2  # values of `finish` after a commit; fastspec.state has further values


class Draws(Protocol):
    """Source of random numbers: `PhiloxDraws`, or in tests an enumeration of all outcomes."""

    def accept(self, probability: Tensor, positions: Tensor) -> Tensor:
        """Returns bool [B, k]: element (b, j) is True with probability[b, j].

        The random number that decides is a function of positions[b, j], int64 [B, k].
        """

    def sample(self, probs: Tensor, positions: Tensor, purpose: int) -> Tensor:
        """Draws ids int64 [B] from probs [B, V], which need not sum to 1.

        The random numbers are a function of positions int64 [B] and of the purpose (DRAFT, ACCEPT or TARGET). With
        probs [B, R, V] and positions [B, R] the result is ids [B, R].
        """


def accept_probability(p: Tensor, q: Tensor) -> Tensor:
    """Returns the probability min(1, p/q) of accepting a draft token, elementwise.

    p is the token's probability in the target's distribution, q in the draft's. The result is 0 if p is 0. If only q is
    0, the result is 1, but such a token cannot have been drawn.
    """
    ratio = torch.where(q > 0, p / q.clamp_min(torch.finfo(q.dtype).tiny), 1.0)
    return torch.where(p > 0, ratio.clamp(max=1.0), 0.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Returns the residual distribution max(p - q, 0) along the last axis, not normalised.

    Where the residual is all zero (p = q up to rounding), returns p instead.
    """
    excess = (p - q).clamp_min(0.0)
    return torch.where(excess.sum(-1, keepdim=True) > 0, excess, p)


def greedy(logits: Tensor, drafts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Accepts draft tokens before the first that differs from the target's argmax. Ties go to the lowest id.

    Args:
        logits: [B, k+1, V], logits of the target at each place.
        drafts: int64 [B, k].
        counts: int64 [B], number of valid drafts in a row; the others are never accepted.

    Returns:
        (accepted int64 [B], block int64 [B, k+1]): block[:, :accepted+1] are the tokens to emit.
    """
    picks = logits.argmax(dim=-1)
    return agreeing(picks, drafts, counts), picks


def agreeing(picks: Tensor, drafts: Tensor, counts: Tensor) -> Tensor:
    """Returns the number of valid draft tokens before the first that differs from the target's token.

    Args:
        picks: int64 [B, k+1], the target's token at each place.
        drafts, counts: see `greedy`.

    Returns:
        int64 [B].
    """
    return _leading(picks[:, :-1] == drafts, counts)


def rejection(
    p: Tensor, q: Tensor | None, drafts: Tensor, counts: Tensor, positions: Tensor, draws: Draws, purpose: int
) -> tuple[Tensor, Tensor]:
    """Verifies k drafts per row by rejection sampling, which keeps the target's distribution.

    Args:
        p: [B, k+1, V], the target's distribution at each place.
        q: [B, k, V], the distribution from which each draft was drawn; None: drafts are deterministic.
        drafts: int64 [B, k].
        counts: int64 [B], number of valid drafts in a row; the token after them comes from the target's distribution.
        positions: int64 [B, k+1], absolute positions of the places.
        draws: source of random numbers.
        purpose: purpose of the random numbers that draw the last token. It must differ from the purpose with which the
            drafts were drawn.

    Returns:
        (accepted int64 [B], block int64 [B, k+1]), see `greedy`.
    """
    k = drafts.shape[1]
    q = _deterministic(drafts, p) if q is None else q
    at = drafts[:, :, None]
    chance = accept_probability(p[:, :k].gather(2, at)[:, :, 0], q.gather(2, at)[:, :, 0])
    accepted = _leading(draws.accept(chance, positions[:, :k]), counts)
    return accepted, _ended(p, p, q, drafts, counts, accepted, positions, draws, purpose)


def block(
    p: Tensor, q: Tensor | None, drafts: Tensor, counts: Tensor, positions: Tensor, draws: Draws, purpose: int
) -> tuple[Tensor, Tensor]:
    """Verifies k draft tokens per row together, so that emitted tokens follow the target's distribution.

    For arguments and results see `rejection`.

    Sun et al. 2024, arXiv 2403.10444, algorithm 2, with c_0 = 1 and c_i = min(c_{i-1} p(x_i)/q(x_i), 1):

        accepted  the largest i whose uniform number is below s_i / (s_i + 1 - c_i); at the last draft, below c_k
        s_i       the sum of max(c_i p - q, 0) at the place after draft i
        next      a token from norm(max(c_i p - q, 0)), or from p after all drafts
    """
    k = drafts.shape[1]
    q = _deterministic(drafts, p) if q is None else q
    carried = _carried(p, q, drafts)
    scaled = carried[:, :, None] * p
    places = torch.arange(1, k + 1, device=p.device)
    # s_i after draft i is summed at place i; after the last draft it is not needed
    excess = (scaled[:, 1:k] - q[:, 1:]).clamp_min(0.0).sum(-1)
    excess = torch.cat((excess, excess.new_zeros(len(p), min(k, 1))), dim=1)
    chance = block_probability(excess, carried[:, 1:], places == counts[:, None])
    below = draws.accept(chance, positions[:, :k]) & (places <= counts[:, None])
    accepted = (places * below).amax(dim=1) if k else counts.clamp(max=0)
    return accepted, _ended(p, scaled, q, drafts, counts, accepted, positions, draws, purpose)


def block_probability(excess: Tensor, carried: Tensor, last: Tensor) -> Tensor:
    """Computes the probabilities [B, k] below which the rule `block` accepts a uniform random number.

    Args:
        excess: [B, k], s_i for draft i = 1..k. The docstring of `block` defines s_i and c_i.
        carried: [B, k], c_i.
        last: bool [B, k], True at the last valid draft.
    """
    missing = 1.0 - carried
    inner = excess / (excess + missing).clamp_min(torch.finfo(excess.dtype).tiny)
    return torch.where(last, carried, inner)


def _carried(p: Tensor, q: Tensor, drafts: Tensor) -> Tensor:
    """Computes the factors c_0 .. c_k of the rule `block` (see its docstring), [B, k+1]."""
    at = drafts[:, :, None]
    over, under = p[:, : drafts.shape[1]].gather(2, at)[:, :, 0], q.gather(2, at)[:, :, 0]
    # a token with q = 0 cannot have been drawn, so its ratio does not matter
    ratio = torch.where(under > 0, over / under.clamp_min(torch.finfo(q.dtype).tiny), 1.0)
    carried = [torch.ones_like(p[:, 0, 0])]
    for j in range(drafts.shape[1]):
        carried.append((carried[-1] * ratio[:, j]).clamp(max=1.0))
    return torch.stack(carried, dim=1)


def _deterministic(drafts: Tensor, p: Tensor) -> Tensor:
    """Builds the distribution [B, k, V] of deterministic drafts: probability 1 on each draft."""
    return torch.zeros_like(p[:, : drafts.shape[1]]).scatter_(2, drafts[:, :, None], 1.0)


def _ended(
    p: Tensor,
    scaled: Tensor,
    q: Tensor,
    drafts: Tensor,
    counts: Tensor,
    accepted: Tensor,
    positions: Tensor,
    draws: Draws,
    purpose: int,
) -> Tensor:
    """Returns the tokens to emit, int64 [B, k+1]: the accepted drafts, then a last token.

    After a rejection the last token is drawn from the residual max(scaled - q, 0), else from p.

    Args:
        p, q, drafts, counts, positions, draws, purpose: see `rejection`.
        scaled: [B, k+1, V], c_i p of the rule `block`, or p for `rejection`.
        accepted: int64 [B], number of accepted drafts.
    """
    k = drafts.shape[1]
    row = torch.arange(len(p), device=p.device)
    last = p[row, accepted]
    if k:
        beyond = residual(scaled[row, accepted], q[row, accepted.clamp(max=k - 1)])
        last = torch.where((accepted < counts)[:, None], beyond, last)
    return closed(drafts, accepted, draws.sample(last, positions[row, accepted], purpose))


def closed(drafts: Tensor, accepted: Tensor, last: Tensor) -> Tensor:
    """Returns the tokens of a step, int64 [B, k+1]: the drafts [B, k], with token last[b] at place accepted[b]."""
    places = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    padded = torch.cat((drafts, drafts.new_zeros(len(drafts), 1)), dim=1)
    return torch.where(places == accepted[:, None], last[:, None], padded)


def coupled(
    p: Tensor, drafts: Tensor, counts: Tensor, positions: Tensor, draws: Draws, purpose: int
) -> tuple[Tensor, Tensor]:
    """Accepts draft tokens before the first that differs from the target's own samples. Emits these samples.

    This is the rule of arXiv 2408.07978.

    Draft j must have been drawn with the random numbers of positions[:, j] and `purpose`. The emitted token depends
    only on the text before it and on these numbers, never on drafts.

    Args:
        p: [B, k+1, V], the target's distribution at each place; the rows need not sum to 1.
        drafts: int64 [B, k].
        counts: int64 [B], number of valid drafts in a row.
        positions: int64 [B, k+1], absolute positions of the places.
        draws: random numbers that are a function of position, purpose and token.
        purpose: purpose of the random numbers with which the drafts were drawn.

    Returns:
        (accepted int64 [B], block int64 [B, k+1]), see `greedy`.
    """
    picks = draws.sample(p, positions, purpose)
    return _leading(picks[:, :-1] == drafts, counts), picks


def synthetic(
    rule: SyntheticAcceptance,
    picks: Tensor,
    drafts: Tensor,
    counts: Tensor,
    positions: Tensor,
    draws: Draws,
    number: Tensor,
) -> tuple[Tensor, Tensor]:
    """Accepts as many drafts as `rule` says, at most `counts`, then emits a token of the target.

    Args:
        rule: a rate or a pattern.
        picks: int64 [B, k+1], the target's token at each place.
        drafts, counts, positions, draws: see `rejection`.
        number: int64 [1], number of this step.

    Returns:
        (accepted, block), see `greedy`.
    """
    if rule.pattern is None:
        rate = torch.full(drafts.shape, rule.rate or 0.0, dtype=torch.float32, device=drafts.device)
        accepted = _leading(draws.accept(rate, positions[:, :-1]), counts)
    else:
        turn = number % len(rule.pattern)
        asked = torch.zeros_like(counts)
        # not a table, because a captured step cannot copy one to the device
        for index, count in enumerate(rule.pattern):
            asked = torch.where(turn == index, count, asked)
        accepted = torch.minimum(asked, counts.clamp(max=drafts.shape[1]))
    return accepted, closed(drafts, accepted, picks.gather(1, accepted[:, None])[:, 0])


def _leading(flags: Tensor, counts: Tensor) -> Tensor:
    """Returns int64 [B], the number of True values before the first False in each row of `flags` bool [B, k].

    Only the first counts[b] values of row b are considered.
    """
    counted = torch.arange(flags.shape[1], device=flags.device) < counts[:, None]
    return (flags & counted).long().cumprod(dim=1).sum(dim=1)


class CommitRows(Protocol):
    """Tensors of B rows that a commit reads and writes. `fastspec.state.DecodeState` explains them."""

    @property
    def tokens(self) -> Tensor:
        """Tokens of prompt and output, int64 [B, T]."""

    @property
    def lengths(self) -> Tensor:
        """Number of committed tokens, int64 [B]."""

    @property
    def limits(self) -> Tensor:
        """Upper limit of `lengths`, int64 [B]."""

    @property
    def draft_lengths(self) -> Tensor:
        """Number of a row's first positions whose K/V are in the draft model's cache, int64 [B]."""

    @property
    def finish(self) -> Tensor:
        """State of a row, such as RUNNING or STOPPED, int64 [B]."""

    @property
    def stop_ids(self) -> Tensor:
        """Token ids that end the row, int64 [B, S], padded with -1."""

    @property
    def draft_tokens(self) -> Tensor:
        """Drafts of this step, int64 [B, K]."""

    @property
    def draft_counts(self) -> Tensor:
        """Number of valid drafts of this step, int64 [B]."""

    @property
    def block(self) -> Tensor:
        """Accepted drafts and one more token, int64 [B, K+1]."""

    @property
    def emitted(self) -> Tensor:
        """Number of tokens of `block` that were emitted, int64 [B]."""

    @property
    def accepted(self) -> Tensor:
        """Number of accepted draft tokens, int64 [B]. `DecodeState` explains negative values."""

    @property
    def logprobs(self) -> Tensor:
        """Log-probability of each token of `block`, fp32 [B, K+1]."""

    @property
    def top_ids(self) -> Tensor:
        """The N most probable ids at each place of `block`, int64 [B, K+1, N]."""

    @property
    def top_logprobs(self) -> Tensor:
        """Log-probabilities of `top_ids`, fp32 [B, K+1, N]."""


def commit(rows: CommitRows, accepted: Tensor, block: Tensor) -> None:
    """Appends block[:, :accepted+1] to the tokens of each running row.

    A row ends after its first stop id, or when its length reaches its limit.

    Args:
        rows: changed in place. Rows that do not run keep their tokens and lengths.
        accepted: int64 [B], number of accepted draft tokens. If negative, nothing is emitted and the row is unchanged.
        block: int64 [B, k+1], the accepted draft tokens and one more token.
    """
    k = block.shape[1] - 1
    running = rows.finish == RUNNING
    places = torch.arange(k + 1, device=block.device)
    is_stop = (block[:, :, None] == rows.stop_ids[:, None, :]).any(-1) & (places <= accepted[:, None])
    # number of tokens up to the first stop id, including it; k + 2 if there is none
    upto_stop = torch.where(is_stop, places + 1, k + 2).amin(dim=1)
    room = rows.limits - rows.lengths
    count = torch.minimum(torch.minimum(accepted + 1, upto_stop), room).clamp_min(0)
    count = torch.where(running, count, 0)
    finish = torch.where(upto_stop <= room, torch.where(upto_stop <= k + 1, STOPPED, RUNNING), RUNNING)
    finish = torch.where((finish == RUNNING) & (count == room), AT_LIMIT, finish)

    junk = rows.tokens.shape[1] - 1
    at = (rows.lengths[:, None] + places).clamp(max=junk)
    rows.tokens.scatter_(1, torch.where(places < count[:, None], at, junk), block)
    if k:
        # the draft was fed positions up to lengths + drafts - 2; its next pass starts two positions before the new
        # length
        fed = torch.minimum(rows.lengths + rows.draft_counts - 1, rows.lengths + count - 1)
        rows.draft_lengths.copy_(torch.where(running & (rows.draft_counts > 0), fed, rows.draft_lengths))
    rows.lengths.add_(count)
    rows.finish.copy_(torch.where(running, finish, rows.finish))
    rows.block[:, : k + 1].copy_(block)
    rows.emitted.copy_(count)
    rows.accepted.copy_(torch.where(running, accepted, -1))
