"""The bookkeeping of a step: the kernel against `fastspec.sampling.verify.commit`, field by field."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fastspec import state as states
from fastspec.kernels import reference
from fastspec.sampling import verify
from fastspec.state import IDLE, MAX_STOP_IDS, RUNNING, DecodeState
from tests.helpers.devices import devices
from tests.helpers.layouts import spread
from tests.helpers.states import MAX_LENGTH, assert_same, copy_of, random_state

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels.sampling.commit import COLUMNS, commit, scratch_of


def compare(whole: DecodeState, first: int, accepted: torch.Tensor, block: torch.Tensor, ring: bool = False) -> None:
    """One launch over rows first.. of `whole` against the definition; other rows must not change."""
    batch, k = len(accepted), whole.draft_tokens.shape[1]
    theirs = copy_of(whole)
    scratch = scratch_of(batch, k, block.device)
    entries = torch.zeros(3, 1 + batch * (5 + k), dtype=torch.int64, device=block.device)
    counter = torch.zeros(1, dtype=torch.int64, device=block.device)
    twin_entries, twin_counter = entries.clone(), counter.clone()
    commit(accepted, block, whole.rows(first, first + batch), scratch, (entries, counter) if ring else None)
    to = (twin_entries, twin_counter) if ring else None
    reference.commit(accepted, block, theirs.rows(first, first + batch), None, to)
    assert_same(whole, theirs)
    assert torch.equal(entries, twin_entries)
    assert torch.equal(counter, twin_counter)
    assert not scratch.any()


def test_both_name_the_ways_to_finish_alike() -> None:
    assert (verify.RUNNING, verify.STOPPED, verify.AT_LIMIT) == (states.RUNNING, states.STOPPED, states.AT_LIMIT)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("k", [0, 1, 2])
def test_all_combinations_of_small_cases_equal_the_definition(k: int, device: str) -> None:
    """Accepted drafts, the place of a stop id, room, drafts that counted and running or not: all combinations."""
    cases = list(itertools.product(range(k + 1), range(k + 2), range(k + 3), range(k + 1), (RUNNING, IDLE)))
    whole, _ = random_state(k, batch=len(cases), k=k, vocab=50, device="cpu")
    whole.stop_ids[:, 0] = 60
    block = torch.arange(k + 1).repeat(len(cases), 1)
    for row, (_, stop, room, counts, finish) in enumerate(cases):
        block[row, stop : stop + 1] = 60
        whole.limits[row] = whole.lengths[row] + room
        whole.draft_counts[row] = counts
        whole.finish[row] = finish
    accepted = torch.tensor([case[0] for case in cases])
    whole = DecodeState(**{name: getattr(whole, name).to(device) for name in DecodeState.__dataclass_fields__})
    compare(whole, 0, accepted.to(device), block.to(device))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("k", [0, 3, 16])
def test_random_states_in_slices_of_longer_tables(k: int, device: str) -> None:
    for seed in range(6):
        whole, rows = random_state(seed, batch=11, k=k, vocab=12, device=device, before=3, after=2)
        generator = torch.Generator().manual_seed(seed)
        rows.stop_ids[:, : 1 + seed % 3] = torch.randint(12, (11, 1 + seed % 3), generator=generator).to(device)
        rows.stop_ids[5, MAX_STOP_IDS - 1] = 7
        wide = torch.randint(12, (11, k + 5), generator=generator).to(device)
        accepted = torch.randint(k + 1, (11,), generator=generator).to(device)
        compare(whole, 3, accepted, wide[:, : k + 1], ring=seed % 2 == 0)


@pytest.mark.parametrize("device", devices())
def test_fewer_drafts_than_the_state_holds(device: str) -> None:
    whole, _ = random_state(0, batch=4, k=5, vocab=12, device=device)
    block = torch.arange(12, device=device).view(4, 3)
    compare(whole, 0, torch.tensor([0, 1, 2, 2], device=device), block, ring=True)
    # a step without drafts: the counts are those of an earlier one and mean nothing
    whole.finish.fill_(RUNNING)
    whole.limits.fill_(MAX_LENGTH)
    whole.draft_counts.fill_(3)
    compare(whole, 0, torch.zeros(4, dtype=torch.int64, device=device), block[:, :1], ring=True)


@pytest.mark.parametrize("device", devices())
def test_a_length_beyond_the_table_writes_nothing_outside(device: str) -> None:
    whole, rows = random_state(0, batch=1, k=2, vocab=12, device=device, after=1)
    rows.lengths.fill_(2 * MAX_LENGTH)
    rows.limits.fill_(3 * MAX_LENGTH)
    below = whole.tokens[1].clone()
    commit(
        torch.tensor([2], device=device),
        torch.ones(1, 3, dtype=torch.int64, device=device),
        rows,
        scratch_of(1, 2, rows.tokens.device),
    )
    assert torch.equal(whole.tokens[1], below)


def test_wrong_layouts_are_refused_by_name() -> None:
    _, rows = random_state(0, batch=2, k=2, vocab=12, device="cpu")
    block, accepted = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"scratch is int64 \[5\]; wanted .*\[9\] or longer: make it with scratch_of"):
        commit(accepted, block, rows, scratch_of(1, 2, block.device))
    with pytest.raises(ValueError, match=r"block is int64 \[2, 3\]; wanted int64 \[2, 4 or more\]"):
        commit(accepted, torch.zeros(2, 4, dtype=torch.int64), rows, scratch_of(2, 4, block.device))
    with pytest.raises(ValueError, match=r"lengths is int64 \[2\]; wanted contiguous int64 \[1\]"):
        commit(accepted[:1], block[:1], rows, scratch_of(2, 2, block.device))
    with pytest.raises(ValueError, match=r"accepted is int64 \[1\]; wanted contiguous int64 \[2\]"):
        commit(accepted[:1], block, rows, scratch_of(2, 2, block.device))
    with pytest.raises(ValueError, match=r"entries is int64 \[2, 8\]; wanted .*B >= 2: make the ring"):
        commit(accepted, block, rows, scratch_of(2, 2, block.device), (torch.zeros(2, 8).long(), accepted[:1]))


@pytest.mark.parametrize("change", [spread, Tensor.int, lambda x: x[:1]])
@pytest.mark.parametrize("name", [*COLUMNS, "tokens", "stop_ids", "block", "draft_tokens"])
def test_a_state_that_would_be_misread_is_refused(name: str, change: Callable[[Tensor], Tensor]) -> None:
    _, rows = random_state(0, batch=2, k=2, vocab=12, device="cpu")
    rows = replace(rows, **{name: change(getattr(rows, name))})
    with pytest.raises(ValueError, match=f"^{name} is .*; wanted "):
        commit(torch.zeros(2).long(), torch.zeros(2, 3).long(), rows, scratch_of(2, 2, rows.tokens.device))


@pytest.mark.parametrize("change", [spread, Tensor.int])
@pytest.mark.parametrize("name", ["accepted", "block", "scratch"])
def test_arguments_that_would_be_misread_are_refused(name: str, change: Callable[[Tensor], Tensor]) -> None:
    _, rows = random_state(0, batch=2, k=2, vocab=12, device="cpu")
    given = {"accepted": torch.zeros(2).long(), "block": torch.zeros(2, 3).long(), "scratch": torch.zeros(9).long()}
    given[name] = change(given[name])
    with pytest.raises(ValueError, match=f"^{name} is .*; wanted "):
        commit(**given, rows=rows)
