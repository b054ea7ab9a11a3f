"""Sizes of recurrent states, and where a row finds its own."""

from __future__ import annotations

import pytest
import torch

from fastspec.kv_cache.states import StateCache, row_bytes
from fastspec.shapes import DeltaRule
from fastspec.state import DecodeState

RULE = DeltaRule(key_heads=2, value_heads=6, key_dim=8, value_dim=12, width=4)


@pytest.mark.parametrize("drafts", [0, 1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_a_state_for_each_token_of_a_step(drafts: int, dtype: torch.dtype) -> None:
    cache = StateCache.allocate((RULE,) * 3, 5, drafts, dtype=dtype, device=torch.device("cpu"))
    assert cache.states.shape == (3, 5, drafts + 1, 6, 12, 8)
    assert cache.inputs.shape == (3, 5, drafts + 4, 2 * 16 + 72)
    assert cache.states.dtype is torch.float32
    assert cache.inputs.dtype is dtype
    assert cache.states.nbytes + cache.inputs.nbytes == 3 * 5 * row_bytes(RULE, drafts, dtype)
    assert not cache.states.any()


def test_rows_that_move_keep_their_states_and_no_two_have_one() -> None:
    state = DecodeState.allocate(
        batch=4, max_drafts=2, max_length=8, pages_per_row=1, vocab_size=5, device=torch.device("cpu")
    )
    assert state.state_rows.tolist() == [0, 1, 2, 3]
    state.move(3, 1)
    assert state.state_rows.tolist() == [0, 3, 2, 1]
    state.move(2, 0)
    state.move(1, 2)
    assert state.state_rows.tolist() == [2, 0, 3, 1]
    state.reset()
    assert sorted(state.state_rows.tolist()) == [0, 1, 2, 3]
