"""Learned drafters where prompts begin like earlier ones: drafts and sampled texts are those of a fresh generator."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from fastspec import SyntheticAcceptance
from fastspec.engine.engine import Engine
from fastspec.scheduling.requests import Request
from fastspec.scheduling.scheduler import Scheduler
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.dflash import Head, write_z_lab
from tests.helpers.heads import HIDDEN, LAYERS, VOCAB, eagle3_tensors, engine_with, write_speculators
from tests.helpers.mtp import write_target
from tests.helpers.scheduling import nothing_leaked
from tests.proposers.test_eagle3 import BOUNDARIES, Seen, Truth, watched, wrong_drafts
from tests.scheduling.test_prefix import GREEDY_ROW, Turn, call_of, found, together

HEAD = tuple(random.Random(1).choices(range(VOCAB), k=140))
# equal up to the end of a piece, behind which one goes on otherwise; then deeper
TURNS = [Turn(HEAD[:80], 12, seed=1), Turn((*HEAD[:64], *HEAD[:9]), 12, seed=1), Turn(HEAD, 9, seed=2), Turn(HEAD, 9)]


@pytest.fixture(scope="module", params=["eagle3", "dflash", "mtp"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path | str]:
    path = tmp_path_factory.mktemp("pair")
    if request.param == "mtp":
        return write_target(path, "nextn")[0], "mtp"
    target = make_checkpoint(path / "target", "llama3", num_hidden_layers=LAYERS)
    if request.param == "dflash":
        return target, write_z_lab(path / "head", Head(HIDDEN, VOCAB, target_layers=LAYERS, mask_id=10))
    return target, write_speculators(path / "head", eagle3_tensors(std=0.5), boundaries=[2, 4, 5])


def drafted(engine: Engine, turns: list[Turn], cached: list[int]) -> list[tuple[object, list[int]]]:
    """What each turn came to, and how many drafts were accepted in its steps."""
    scheduler, results = Scheduler(engine), []
    for turn, wanted in zip(turns, cached, strict=True):
        (request,) = together(scheduler, [turn])
        assert request.cached == wanted
        results.append((found(request), request.histogram))
    nothing_leaked(engine)
    return results


def test_drafts_are_those_of_a_fresh_generator(pair: tuple[Path, Path | str]) -> None:
    engine = engine_with(*pair)
    assert engine.prefix is not None
    # the last token of a piece was told what followed it: another follower, another piece
    kept = drafted(engine, TURNS, [0, 0, 64, 128])
    assert kept == drafted(replace(engine, prefix=None), TURNS, [0, 0, 0, 0])


def test_a_reader_that_keeps_things_elsewhere_shares_no_prompt(
    pair: tuple[Path, Path | str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastspec.engine.build.kept_in_pages", lambda proposer: False)
    assert engine_with(*pair).prefix is None


def test_what_the_last_step_of_a_row_found_is_in_the_pages_that_are_kept(tmp_path: Path) -> None:
    """Without exact bits whole texts are kept, up to the last token but one: drafts behind one are the head's own."""
    target = make_checkpoint(tmp_path / "target", "llama3", num_hidden_layers=LAYERS)
    head = write_speculators(tmp_path / "head", eagle3_tensors(std=0.5), boundaries=BOUNDARIES)
    rule = SyntheticAcceptance(pattern=[15])  # so that a last step gives most of a piece
    engine = engine_with(target, head, k=15, exact=False, verification=rule)
    assert engine.prefix is not None
    assert engine.prefix.unit == 16
    seen: list[Seen] = []
    scheduler, text = Scheduler(watched(engine, seen)), list(HEAD[:20])
    for _ in range(4):
        request = Request(text, 29 if len(text) == 20 else 13, GREEDY_ROW)
        scheduler.add(request, call_of([request], 15))
        while not scheduler.idle:
            scheduler.step()
        assert request.cached == (0 if len(text) == 20 else (len(text) - 3) // 16 * 16)
        text = [*request.prompt, *request.new_tokens, *HEAD[:3]]
    assert len(seen) > 4
    assert wrong_drafts(Truth(target, head, BOUNDARIES), seen) == 0
