"""Random decoding states for the kernels that read and write them, and their comparison field by field."""

from __future__ import annotations

from dataclasses import fields

import torch

from fastspec.state import AT_LIMIT, IDLE, RUNNING, STOPPED, DecodeState

MAX_LENGTH = 40
CANARY = -77


def random_state(
    seed: int, *, batch: int, k: int, vocab: int, device: str, before: int = 0, after: int = 0
) -> tuple[DecodeState, DecodeState]:
    """(a state, its rows before..before+batch-1): lengths, room, stop ids, counts and finish drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    total = before + batch + after
    state = DecodeState.allocate(
        batch=total,
        max_drafts=k,
        max_length=MAX_LENGTH,
        pages_per_row=2,
        vocab_size=min(vocab, 64),  # only draft_probs and the recorded top ids have this width
        device=torch.device(device),
    )

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).to(device)

    state.tokens.copy_(ints(0, vocab, total, MAX_LENGTH + 1))
    state.lengths.copy_(ints(1, MAX_LENGTH - k - 1, total))
    state.limits.copy_((state.lengths + ints(0, k + 3, total)).clamp(max=MAX_LENGTH))
    state.draft_lengths.copy_(ints(0, MAX_LENGTH, total))
    state.draft_tokens.copy_(ints(0, vocab, total, k))
    state.draft_counts.copy_(ints(0, k + 1, total))
    state.block.fill_(CANARY)
    state.emitted.fill_(CANARY)
    kinds = torch.tensor([RUNNING] * 5 + [STOPPED, AT_LIMIT, IDLE])
    state.finish.copy_(kinds[torch.randint(len(kinds), (total,), generator=generator)].to(device))
    state.finish[before] = RUNNING
    state.logprobs.copy_(torch.randn(total, k + 1, generator=generator))
    state.top_ids.copy_(ints(0, vocab, *state.top_ids.shape))
    state.top_logprobs.copy_(torch.randn(state.top_logprobs.shape, generator=generator))
    return state, state.rows(before, before + batch)


def copy_of(state: DecodeState) -> DecodeState:
    return DecodeState(**{field.name: getattr(state, field.name).clone() for field in fields(state)})


def assert_same(ours: DecodeState, theirs: DecodeState) -> None:
    """Every field to the bit; the last column of tokens takes junk and is left out."""
    for field in fields(ours):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name == "tokens":
            a, b = a[:, :-1], b[:, :-1]
        assert torch.equal(a.cpu(), b.cpu()), field.name
