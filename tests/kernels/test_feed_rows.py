"""The rows of a pass: the kernel against its twin, and a draft's passes against a definition token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastspec.kernels import reference
from fastspec.state import DecodeState
from tests.helpers.devices import devices
from tests.helpers.states import MAX_LENGTH, assert_same, copy_of, random_state

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels import feed_rows as feeding
from fastspec.kernels.common import launch as launching
from fastspec.kernels.feed_rows import feed_rows

VOCAB = 50
PASSES = [
    {"first": -2, "queries": 2},
    {"first": -1, "queries": 1},
    {"first": -1, "queries": 4},
    {"first": 0, "queries": 1},
    {"first": 2, "queries": 1},
    {"first": -3, "queries": 5},
]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("shape", PASSES, ids=str)
def test_the_kernel_equals_its_torch_definition(shape: dict[str, int], counted: bool, device: str) -> None:
    for seed, (limit, vocab, before) in enumerate(((20, VOCAB, 0), (9, 30, 2), (2**31 - 1, VOCAB, 1), (1, 7, 0))):
        whole, rows = random_state(seed, batch=9, k=3, vocab=VOCAB, device=device, before=before, after=1)
        rows.lengths[1] = 1  # a one-token prompt has no token before its last
        rows.lengths[2] = limit + 1 if limit < MAX_LENGTH else 3
        rows.tokens[3, :] = 2**40  # no id at all
        rows.draft_tokens[4, :] = -1
        twin = copy_of(whole)
        view = twin.rows(before, before + 9)
        id_map = torch.randperm(vocab, device=device) if seed % 2 else None
        for num_drafts in (3, 0) if counted else (0,):
            ours = feed_rows(
                rows.tokens,
                rows.lengths,
                rows.finish,
                rows.draft_tokens,
                limit=limit,
                vocab=vocab,
                draft_counts=rows.draft_counts if counted else None,
                num_drafts=num_drafts,
                id_map=id_map,
                **shape,
            )
            theirs = reference.feed_rows(
                view.tokens,
                view.lengths,
                view.finish,
                view.draft_tokens,
                limit=limit,
                vocab=vocab,
                draft_counts=view.draft_counts if counted else None,
                num_drafts=num_drafts,
                id_map=id_map,
                **shape,
            )
            for a, b in zip(ours, theirs, strict=True):
                assert a.dtype == b.dtype
                assert torch.equal(a, b)
            assert_same(whole, twin)


def definition(rows: DecodeState, first: int, limit: int, counts: Tensor) -> list[tuple[int, int, bool]]:
    """(id, position, writes) of one token after another."""
    fed = []
    for row, length in enumerate(rows.lengths.tolist()):
        for at in range(length + first, length + max(first + 1, 0)):
            token = int(rows.draft_tokens[row, at - length] if at >= length else rows.tokens[row, max(at, 0)])
            write_mask = bool(rows.running[row]) and 0 <= at < limit and int(counts[row]) > 0
            fed.append((token if token < VOCAB else 0, max(at, 0), write_mask))
    return fed


@pytest.mark.parametrize("limit", [5, 12, 100])
def test_all_passes_of_a_draft_equal_a_definition_for_one_token(limit: int) -> None:
    """All passes of three drafts, against a definition written out for one token."""
    whole, rows = random_state(limit, batch=8, k=3, vocab=2 * VOCAB, device="cpu")
    rows.lengths[0], rows.lengths[1], rows.lengths[2] = 1, min(limit, 30), min(limit + 1, 31)
    whole.draft_counts.fill_(-5)
    counts = (limit + 1 - rows.lengths).clamp(0, 3)
    for first in (-2, 0, 1):
        given = {"draft_counts": rows.draft_counts, "num_drafts": 3} if first == -2 else {}
        ids, positions, write_mask = feed_rows(
            rows.tokens,
            rows.lengths,
            rows.finish,
            rows.draft_tokens,
            first=first,
            queries=2 if first == -2 else 1,
            limit=limit,
            vocab=VOCAB,
            **given,  # type: ignore[arg-type]
        )
        assert torch.equal(rows.draft_counts, counts)
        expected = definition(rows, first, limit, counts)
        found = zip(ids.flatten().tolist(), positions.flatten().tolist(), write_mask.flatten().tolist(), strict=True)
        assert list(found) == expected


def test_wrong_layouts_are_refused_by_name() -> None:
    _, rows = random_state(0, batch=2, k=3, vocab=9, device="cpu")
    with pytest.raises(ValueError, match="contiguous"):
        feed_rows(rows.tokens.T, rows.lengths, rows.finish, rows.draft_tokens, first=-1, queries=1, limit=9, vocab=9)
    with pytest.raises(ValueError, match="at least 4 drafts"):
        feed_rows(rows.tokens, rows.lengths, rows.finish, rows.draft_tokens, first=3, queries=1, limit=9, vocab=9)


@pytest.mark.parametrize("compiled_only", [False, True])
def test_tables_can_be_read_by_what_it_gives_while_kernels_compile(
    compiled_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel runs then, and torch looks up embeddings, angles and factors by ids and positions: both are 0."""
    monkeypatch.setattr(feeding, "launch", lambda *arguments, **options: None)
    _, rows = random_state(0, batch=3, k=3, vocab=VOCAB, device="cpu")
    token = launching._compiling.set(set() if compiled_only else None)
    torch.use_deterministic_algorithms(True)  # fills new memory, with the largest number for integers
    try:
        given = rows.tokens, rows.lengths, rows.finish, rows.draft_tokens
        ids, positions, _ = feed_rows(*given, limit=20, vocab=VOCAB, first=-1, queries=2)
    finally:
        torch.use_deterministic_algorithms(False)
        launching._compiling.reset(token)
    for each in (ids, positions):
        assert each.shape == (3, 2)
        assert bool((each == 0).all()) == compiled_only
