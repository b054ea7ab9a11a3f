"""Drafts of a head far into a text: as good as at its start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastspec import SyntheticAcceptance
from fastspec.proposers.heads import Eagle3Drafts
from fastspec.shapes import ForwardBatch
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.heads import LAYERS, eagle3_tensors, engine_with, write_speculators
from tests.proposers.test_eagle3 import BOUNDARIES, Seen, Truth, watched
from tests.scheduling.test_scheduler import run

K, PARTS = 4, 4
LONG = pytest.param(2000, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    path = tmp_path_factory.mktemp("long")
    target = make_checkpoint(path / "target", "llama3", num_hidden_layers=LAYERS, max_position_embeddings=2200)
    return target, write_speculators(path / "head", eagle3_tensors(std=0.5), boundaries=BOUNDARIES)


def right_by_place(pair: tuple[Path, Path], new: int, every: int, upto: int | None = None) -> list[list[float]]:
    """For each part of a text of `new` tokens, the share of drafts at each place that are those of the whole text.

    Args:
        every: steps, of which one is looked at.
        upto: what is planted: taking in stops there. None: nothing is.
    """
    seen: list[Seen] = []
    rule = SyntheticAcceptance(pattern=[4, 0, 2, 3, 1])
    engine = engine_with(*pair, k=K, batch=1, max_length=new + 40, verification=rule)
    drafts = engine.modules.proposer
    assert isinstance(drafts, Eagle3Drafts)
    if upto is not None:
        absorb = drafts.model.absorb
        drafts.model.absorb = lambda g, rows: absorb(g, _masked(rows, upto))  # type: ignore[method-assign]
    run(watched(engine, seen), [list(range(20))], new, k=K)
    truth, found = Truth(*pair, BOUNDARIES), [[(0, 0)] * K for _ in range(PARTS)]
    for each in seen[::every]:
        part = min(PARTS - 1, len(each.text) * PARTS // new)
        wanted, margins = truth.drafts(each.text, K)
        for place, (got, want, margin) in enumerate(zip(each.drafts, wanted, margins, strict=True)):
            right, of = found[part][place]
            found[part][place] = right + (got == want or margin < 1e-3), of + 1
            if got != want:
                break  # later drafts go on from another
    return [[right / of for right, of in places if of] for places in found]


def _masked(rows: ForwardBatch, upto: int) -> ForwardBatch:
    return replace(rows, write_mask=rows.write_mask & (rows.positions < upto))


@torch.inference_mode()
@pytest.mark.parametrize("new", [300, LONG])
def test_acceptance_by_place_has_no_slope(new: int, pair: tuple[Path, Path]) -> None:
    """At the end of a text all drafts are those of the whole text, at every place, as at its start."""
    assert right_by_place(pair, new, every=max(3, new // 100)) == [[1.0] * K] * PARTS


def test_a_cache_that_stops_being_taken_in_is_seen_as_a_slope(pair: tuple[Path, Path]) -> None:
    found = right_by_place(pair, 300, every=3, upto=80)
    assert found[0] == [1.0] * K
    assert min(found[-1]) < 0.8
