"""Stand-ins for models and randomness, with which the law of a step can be computed instead of sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from fastspec.kernels import reference
from fastspec.kernels.ops import TORCH_OPS
from fastspec.proposers.draft_model import DraftModel, VocabMap
from fastspec.sampling.distribution import DRAFT, TARGET
from fastspec.shapes import ForwardBatch, StepShape, Tiling
from fastspec.state import RUNNING, DecodeState
from fastspec.step import StepModules

WHOLE = Tiling(rows=None, queries=None)


class TableModel:
    """A model whose next-token logits are a table of (position fed, token fed). Keeps no cache.

    Args:
        logits: float64 [positions, V, V].
    """

    def __init__(self, logits: Tensor) -> None:
        self.table = logits
        self.passes: list[int] = []  # rows per token of each pass

    @property
    def vocab_size(self) -> int:
        return self.table.shape[-1]

    def hidden(self, rows: ForwardBatch) -> Tensor:
        self.passes.append(rows.ids.shape[1])
        positions = rows.positions.clamp(0, self.table.shape[0] - 1)
        return torch.stack((positions, rows.ids), dim=-1)

    def logits(self, hidden: Tensor, tiling: Tiling) -> Tensor:
        return self.table[hidden[..., 0], hidden[..., 1]]

    def argmax(self, hidden: Tensor, limit: int, tiling: Tiling, out: Tensor, ids: Tensor | None = None) -> None:
        reference.pick(self.logits(hidden, tiling), limit, out, ids)


def random_table(seed: int, positions: int, vocab: int, zeros: float = 0.3) -> Tensor:
    """Logits of random laws, a share of whose entries is exactly impossible: float64 [positions, V, V]."""
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(positions, vocab, vocab, generator=generator, dtype=torch.float64) + 0.05
    holes = torch.rand(positions, vocab, vocab, generator=generator) < zeros
    holes &= torch.arange(vocab) != torch.randint(vocab, (positions, vocab, 1), generator=generator)
    probs = probs.masked_fill(holes, 0.0)
    return (probs / probs.sum(-1, keepdim=True)).log()


class ScriptedDraws:
    """Draws that follow a script, one outcome a row, and keep the probability of following it.

    Args:
        drafts: int64 [B, k] tokens to draft.
        accepted: int64 [B] drafts to accept.
        last: int64 [B] token to pick after them.
        count: how many drafts count; None: all.
    """

    def __init__(self, drafts: Tensor, accepted: Tensor, last: Tensor, count: int | None = None) -> None:
        self.count = drafts.shape[1] if count is None else count
        self.drafts, self.accepted, self.last = drafts, accepted, last
        self.weight = torch.ones(len(last), dtype=torch.float64)
        self._drafted = 0

    def accept(self, probability: Tensor, positions: Tensor) -> Tensor:
        places = torch.arange(probability.shape[1])
        coins = places < self.accepted[:, None]
        taken = torch.where(coins, probability, 1 - probability)
        # coins after the first rejection, or of drafts that do not count, are not part of the outcome
        matter = (places <= self.accepted[:, None]) & (places < self.count)
        self.weight *= torch.where(matter, taken, 1.0).prod(dim=1)
        return coins

    def sample(self, probs: Tensor, positions: Tensor, purpose: int) -> Tensor:
        if purpose == DRAFT:
            token = self.drafts[:, self._drafted]
            self._drafted += 1
        else:
            assert purpose == TARGET
            token = self.last
        known = token < probs.shape[1]  # an id outside the law on offer cannot be drawn
        chance = probs.gather(1, token.clamp(max=probs.shape[1] - 1)[:, None])[:, 0] / probs.sum(-1)
        self.weight *= torch.where(known, chance, 0.0)
        return token


def all_outcomes(vocab: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Every (drafts [N, k], accepted [N], last [N])."""
    choices = [torch.arange(vocab)] * k + [torch.arange(k + 1), torch.arange(vocab)]
    grid = torch.cartesian_prod(*choices)
    return grid[:, :k], grid[:, k], grid[:, k + 1]


def table_state(
    contexts: Tensor,
    *,
    k: int,
    vocab: int,
    limit: int,
    stop_ids: list[int],
    temperature: float = 1.0,
    device: str = "cpu",
) -> DecodeState:
    """Running rows that hold `contexts` int64 [B, T]."""
    batch, length = contexts.shape
    state = DecodeState.allocate(
        batch=batch,
        max_drafts=k,
        max_length=limit + k + 2,
        pages_per_row=limit + k + 2,
        vocab_size=vocab,
        device=torch.device(device),
        prob_dtype=torch.float64,
    )
    state.tokens[:, :length] = contexts
    state.lengths.fill_(length)
    state.limits.fill_(limit)
    state.draft_lengths.fill_(max(0, length - 2))
    state.finish.fill_(RUNNING)
    state.stop_ids[:, : len(stop_ids)] = torch.tensor(stop_ids, dtype=torch.int64)
    state.temperature.fill_(temperature)
    return state


def table_modules(
    target: Tensor,
    draft: Tensor | None,
    shared: int | None = None,
    context: int = 1000,
    vocab_map: VocabMap | None = None,
) -> StepModules:
    """Parts of two tables of logits."""
    proposer = None
    if draft is not None:
        proposer = DraftModel(TableModel(draft), TORCH_OPS, shared or target.shape[-1], context, vocab_map=vocab_map)
    return StepModules(TableModel(target), proposer)


def shape_of(k: int, sampler: str) -> StepShape:
    return StepShape(num_drafts=k, sampler=sampler, num_blocks=1, tiling=WHOLE)
