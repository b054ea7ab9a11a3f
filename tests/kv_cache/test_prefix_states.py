"""States behind prefixes: copied whole, found by their node, the longest unused gone first."""

from __future__ import annotations

import pytest
import torch

from fastspec.kv_cache.prefix_states import PrefixStates
from fastspec.kv_cache.states import StateCache
from fastspec.shapes import DeltaRule

RULE = DeltaRule(key_heads=1, value_heads=2, key_dim=4, value_dim=6, width=4)
UNIT, DRAFTS = 64, 2


def a_cache(kept: int = 4) -> StateCache:
    """Three rows of two layers with states drawn at random, and room for `kept` more."""
    cache = StateCache.allocate((RULE,) * 2, 3, DRAFTS, dtype=torch.float32, device=torch.device("cpu"), kept=kept)
    generator = torch.Generator().manual_seed(0)
    for each in (cache.states, cache.inputs):
        each.normal_(generator=generator)
    return cache


def left_by_a_pass(cache: StateCache, mark: float) -> None:
    """What a pass leaves in row 0 of the pool."""
    assert cache.kept is not None
    for each in (cache.kept.rows.states, cache.kept.rows.inputs):
        each[:, 0] = mark + torch.arange(each[:, 0].numel()).view(each[:, 0].shape)


@pytest.mark.parametrize("length", [64, 128, 192])
def test_a_row_begins_from_the_state_that_was_kept(length: int) -> None:
    cache = a_cache()
    kept, before = PrefixStates(cache, None, UNIT), a_cache()
    nodes = ["first", "second", "third"][: length // UNIT]
    left_by_a_pass(cache, 100.0)
    kept.save(nodes[-1], draft=False)
    left_by_a_pass(cache, 0.0)
    kept.load(nodes, length, torch.tensor([2]), draft=False)
    wanted = a_cache()
    left_by_a_pass(wanted, 100.0)
    assert wanted.kept is not None
    assert torch.equal(cache.states[:, 2, (length - 1) % 3], wanted.kept.rows.states[:, 0, 0])
    places = cache.inputs.shape[2]
    for position in range(length - RULE.tail, length):
        assert torch.equal(cache.inputs[:, 2, position % places], wanted.kept.rows.inputs[:, 0, position % RULE.width])
    touched = {position % places for position in range(length - RULE.tail, length)}
    for place in set(range(places)) - touched:
        assert torch.equal(cache.inputs[:, 2, place], before.inputs[:, 2, place])
    assert torch.equal(cache.states[:, :2], before.states[:, :2]), "other rows"
    assert torch.equal(cache.inputs[:, :2], before.inputs[:, :2])


def test_a_model_goes_on_behind_the_last_node_that_has_its_state() -> None:
    kept = PrefixStates(a_cache(), a_cache(), UNIT)
    assert kept.resumable("abc", draft=False) == 0
    kept.save("b", draft=False)
    kept.save("a", draft=True)
    kept.save("c", draft=True)
    assert kept.resumable("abc", draft=False) == 2 * UNIT
    assert kept.resumable("abc", draft=True) == 3 * UNIT
    assert kept.resumable("ab", draft=True) == UNIT
    alone = PrefixStates(None, a_cache(), UNIT)
    assert alone.resumable("abc", draft=False) == 3 * UNIT, "keys are enough for a model without states"
    assert alone.resumable("abc", draft=True) == 0


def test_the_longest_unused_goes_first() -> None:
    cache = a_cache(kept=4)
    kept = PrefixStates(cache, None, UNIT)
    for node in "abc":
        kept.save(node, draft=False)
    kept.load("a", UNIT, torch.tensor([0]), draft=False)
    kept.save("d", draft=False)
    assert [kept.resumable(node, draft=False) for node in "abcd"] == [UNIT, 0, UNIT, UNIT]
    assert len(kept) == 3
    kept.forget("c")
    kept.save("e", draft=False)
    assert [kept.resumable(node, draft=False) for node in "acde"] == [UNIT, 0, UNIT, UNIT]
    kept.clear()
    assert not len(kept)


def test_what_a_request_has_kept_becomes_its_nodes() -> None:
    kept = PrefixStates(a_cache(kept=4), None, UNIT)
    for request, node in (("request", "node"), ("again", "node"), ("lost", None)):
        kept.save(request, draft=False)
        kept.rename(request, node)
        assert kept.resumable([request], draft=False) == 0
        assert kept.resumable(["node"], draft=False) == UNIT
        assert len(kept) == 1
    kept.rename("nobody", "other")
    assert len(kept) == 1
