"""Rows that sample with options drawn at random, logits for them, and how two states that a step left are compared."""

from __future__ import annotations

import torch
from torch import Tensor

from fastspec.kernels import reference
from fastspec.sampling.distribution import PhiloxDraws
from fastspec.state import IDLE, RUNNING, DecodeState

INF = float("inf")
MAX_LENGTH = 60
# what a running row's step leaves, beside the tokens of its block that were emitted
EXACT = ("lengths", "finish", "emitted", "accepted", "draft_lengths", "output_counts", "draft_counts", "draft_tokens")


def plain_state(batch: int, k: int, vocab: int, device: str, before: int = 0, after: int = 0) -> DecodeState:
    """Running rows with every option at its neutral value, at temperature one."""
    total = before + batch + after
    state = DecodeState.allocate(
        batch=total,
        max_drafts=k,
        max_length=MAX_LENGTH,
        pages_per_row=1,
        vocab_size=vocab,
        device=torch.device(device),
    )
    state.finish.fill_(RUNNING)
    state.lengths.fill_(7)
    state.limits.fill_(MAX_LENGTH)
    state.draft_counts.fill_(k)
    state.temperature.fill_(1.0)
    state.seeds.copy_(torch.arange(total) * 1_000_003 - 5)
    return state


def mixed_state(
    seed: int, *, batch: int, k: int, vocab: int, device: str, before: int = 0, after: int = 0
) -> tuple[DecodeState, DecodeState]:
    """(a state, its rows before..before+batch-1): every option of every row drawn at random, some rows not running."""
    state = plain_state(batch, k, vocab, device, before, after)
    generator = torch.Generator().manual_seed(seed)
    total = before + batch + after

    def one_of(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (total,), generator=generator)]

    def some(share: float, width: int = vocab) -> Tensor:
        return torch.rand(total, width, generator=generator) < share

    state.tokens.copy_(torch.randint(0, vocab, state.tokens.shape, generator=generator))
    state.lengths.copy_(torch.randint(3, 30, (total,), generator=generator))
    state.limits.copy_(state.lengths.cpu() + torch.randint(1, 2 * k + 4, (total,), generator=generator))
    state.seeds.copy_(torch.randint(-(2**62), 2**62, (total,), generator=generator))
    state.draft_tokens.copy_(torch.randint(0, vocab, (total, k), generator=generator))
    state.draft_counts.copy_(torch.randint(0, k + 1, (total,), generator=generator))
    state.temperature.copy_(one_of(0.0, 0.4, 1.0, 1.0, 1.6))
    state.top_k.copy_(one_of(0, 0, 1, 5, 40))
    state.top_p.copy_(one_of(1.0, 1.0, 0.95, 0.7, 0.2))
    state.min_p.copy_(one_of(0.0, 0.0, 0.04, 0.3))
    state.repetition.copy_(one_of(1.0, 1.0, 1.3, 0.8))
    state.presence.copy_(one_of(0.0, 0.0, 0.5, -0.4))
    state.frequency.copy_(one_of(0.0, 0.0, 0.3))
    state.bias.copy_(torch.randn(total, vocab, generator=generator) * some(0.2) * one_of(0.0, 1.0)[:, None])
    state.bias.masked_fill_((some(0.2) & (one_of(0.0, 1.0) > 0)[:, None]).to(device), -INF)
    state.unbiased.copy_((state.bias == 0).all(dim=1))
    state.in_prompt.copy_(some(0.2))
    state.output_counts.copy_(torch.randint(0, 4, (total, vocab), generator=generator) * some(0.2))
    state.stop_ids[:, 0] = torch.randint(0, vocab, (total,), generator=generator).to(device)
    state.stop_ids[:, 1] = state.tokens[:, 0]
    state.min_lengths.copy_(state.lengths.cpu() + torch.randint(-4, 3, (total,), generator=generator))
    idle = torch.rand(total, generator=generator) < 0.15
    state.finish.masked_fill_(idle.to(device), IDLE)
    state.finish[before] = RUNNING
    return state, state.rows(before, before + batch)


def logits_for(
    seed: int, batch: int, k: int, vocab: int, device: str, spread: float = 2.0, apart: float = 0.6
) -> tuple[Tensor, Tensor]:
    """(target logits [B, k+1, V], draft logits [B, k, V] that resemble them)."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(batch, k + 1, vocab, generator=generator) * spread
    draft = target[:, :k] + torch.randn(batch, k, vocab, generator=generator) * apart
    return target.to(device), draft.to(device)


def drafted(rows: DecodeState, draft_logits: Tensor, rule: str) -> None:
    """Drafts by the torch definition, as a draft model does."""
    coupled = rule == "coupled"
    for j in range(draft_logits.shape[1]):
        reference.sampled_draw(
            draft_logits[:, j : j + 1],
            rows,
            j,
            None,
            purpose=2 if coupled else 0,
            keep_draft_probs=not coupled,
            draws=PhiloxDraws(rows.seeds),
        )


def assert_same_step(ours: DecodeState, theirs: DecodeState) -> None:
    """What a step leaves of the rows that ran, to the bit; and nothing of the others has changed."""
    for name in EXACT:
        a, b = getattr(ours, name).cpu(), getattr(theirs, name).cpu()
        assert torch.equal(a, b), (name, (a != b).nonzero()[:8].tolist(), a[a != b][:8], b[a != b][:8])
    assert torch.equal(ours.tokens[:, :-1].cpu(), theirs.tokens[:, :-1].cpu())
    places = torch.arange(ours.block.shape[1])
    emitted = places < ours.emitted.cpu()[:, None]
    assert torch.equal(ours.block.cpu()[emitted], theirs.block.cpu()[emitted])
