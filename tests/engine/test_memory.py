"""What the plan says before anything is allocated is what is allocated."""

from __future__ import annotations

from dataclasses import asdict, fields

import pytest
import torch

from fastspec.engine.prefill_slot import PrefillSlot
from fastspec.state import BUFFERS, IDLE, DecodeState, StateSizes

CPU = torch.device("cpu")
SIZES = [
    StateSizes(batch=1, max_drafts=0, max_length=1, pages_per_row=1, vocab_size=1),
    StateSizes(batch=1, max_drafts=3, max_length=40, pages_per_row=2, vocab_size=7),
    StateSizes(batch=5, max_drafts=8, max_length=100, pages_per_row=7, vocab_size=300),
    StateSizes(batch=5, max_drafts=8, max_length=100, pages_per_row=7, vocab_size=300, keep_draft_probs=False),
]


def allocated(sizes: StateSizes) -> DecodeState:
    return DecodeState.allocate(device=CPU, **asdict(sizes))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_planned_bytes_are_allocated_bytes(sizes: StateSizes) -> None:
    state = allocated(sizes)
    assert state.nbytes == sizes.nbytes
    slot = PrefillSlot.allocate(state)
    assert slot.state.nbytes * sizes.batch == sizes.nbytes


def test_reset_gives_back_what_was_allocated() -> None:
    fresh, used = allocated(SIZES[2]), allocated(SIZES[2])
    for name in BUFFERS:
        getattr(used, name).fill_(1)
    used.reset()
    again = {name for name in BUFFERS if torch.equal(getattr(used, name), getattr(fresh, name))}
    assert {"finish", "lengths", "limits", "draft_lengths", "block_table", "stop_ids", "temperature"} <= again
    assert bool((used.finish == IDLE).all())


def test_a_prefill_slot_takes_what_a_prompts_pass_reads() -> None:
    state = allocated(SIZES[2])
    for name in BUFFERS:
        getattr(state, name)[3].fill_(1)
    slot = PrefillSlot.allocate(state)
    before = {name: getattr(slot.state, name).clone() for name in BUFFERS}
    slot.enter(state, 3, start=4)
    changed = {name for name in BUFFERS if not torch.equal(getattr(slot.state, name), before[name])}
    assert changed == {"tokens", "finish", "block_table", "draft_lengths", "state_rows"}  # its length was 1 already
    assert slot.start.tolist() == [4]


def test_every_field_is_described() -> None:
    assert list(BUFFERS) == [field.name for field in fields(DecodeState)]
    for name, buffer in BUFFERS.items():
        assert buffer.shape.startswith("B"), name
        assert buffer.written_by, name
        assert buffer.meaning, name
