"""Small engines with another rule of verification or another proposer."""

from __future__ import annotations

from dataclasses import replace

from fastspec.engine.engine import Engine
from fastspec.proposers.combined import LookupThenModel
from fastspec.proposers.draft_model import DraftModel
from fastspec.proposers.interface import Proposer
from fastspec.proposers.ngram import NGram
from fastspec.sampling.rules import Verification


def judging(engine: Engine, verification: Verification) -> Engine:
    """The same engine under another rule."""
    return replace(engine, shapes=replace(engine.shapes, verification=verification))


def proposing(engine: Engine, proposer: Proposer) -> Engine:
    """The same engine with another proposer; NGram leaves the draft out."""
    return replace(engine, modules=replace(engine.modules, proposer=proposer))


def looking_up_first(engine: Engine, lookup: NGram) -> Engine:
    """The same engine with a lookup before its draft."""
    assert isinstance(engine.modules.proposer, DraftModel)
    return proposing(engine, LookupThenModel(lookup, engine.modules.proposer))
