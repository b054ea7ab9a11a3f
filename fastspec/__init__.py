"""fastspec: exact speculative decoding of a target model with a draft model."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fastspec.errors import (
    CheckpointError,
    InvalidLogits,
    OutOfPages,
    RankFailed,
    UnsupportedModel,
    UnsupportedOption,
)

if TYPE_CHECKING:
    from fastspec.demo import demo_pair
    from fastspec.engine.memory import MemoryPlan
    from fastspec.generator import FastSpecGenerator
    from fastspec.inputs.table import GenerateOptions
    from fastspec.models.vocab import frequent_ids
    from fastspec.output import GenerateOutput, RowStats, ScoreOutput, Stats
    from fastspec.proposers.deterministic import DeterministicProposer
    from fastspec.proposers.interface import FeatureReader, Proposer
    from fastspec.proposers.ngram import NGram
    from fastspec.proposers.suffix import Suffix
    from fastspec.sampling.rules import SyntheticAcceptance
    from fastspec.scheduling.calibrate import Calibration, Trial
    from fastspec.scheduling.handle import Handle

__version__ = "0.1.0"
__all__ = [
    "Calibration",
    "CheckpointError",
    "DeterministicProposer",
    "FastSpecGenerator",
    "FeatureReader",
    "GenerateOptions",
    "GenerateOutput",
    "Handle",
    "InvalidLogits",
    "MemoryPlan",
    "NGram",
    "OutOfPages",
    "Proposer",
    "RankFailed",
    "RowStats",
    "ScoreOutput",
    "Stats",
    "Suffix",
    "SyntheticAcceptance",
    "Trial",
    "UnsupportedModel",
    "UnsupportedOption",
    "demo_pair",
    "frequent_ids",
]

_LAZY = {
    "Calibration": "fastspec.scheduling.calibrate",
    "DeterministicProposer": "fastspec.proposers.deterministic",
    "FastSpecGenerator": "fastspec.generator",
    "FeatureReader": "fastspec.proposers.interface",
    "GenerateOptions": "fastspec.inputs.table",
    "GenerateOutput": "fastspec.output",
    "Handle": "fastspec.scheduling.handle",
    "MemoryPlan": "fastspec.engine.memory",
    "NGram": "fastspec.proposers.ngram",
    "Proposer": "fastspec.proposers.interface",
    "RowStats": "fastspec.output",
    "ScoreOutput": "fastspec.output",
    "Stats": "fastspec.output",
    "Suffix": "fastspec.proposers.suffix",
    "SyntheticAcceptance": "fastspec.sampling.rules",
    "Trial": "fastspec.scheduling.calibrate",
    "demo_pair": "fastspec.demo",
    "frequent_ids": "fastspec.models.vocab",
}

_RENAMED = {"CertainProposer": "DeterministicProposer"}  # deprecated names, kept for one release


if not TYPE_CHECKING:  # a type checker that sees it takes any misspelt name for an export

    def __getattr__(name: str) -> Any:
        """Imports an exported name when it is first used, so that `import fastspec` does not import torch."""
        if name in _RENAMED:
            import warnings

            warnings.warn(f"fastspec.{name} is now fastspec.{_RENAMED[name]}", DeprecationWarning, stacklevel=2)
            name = _RENAMED[name]
        if name not in _LAZY:
            raise AttributeError(f"module 'fastspec' has no attribute {name!r}")
        from importlib import import_module

        with collection_off():
            return getattr(import_module(_LAZY[name]), name)


@contextmanager
def collection_off() -> Iterator[None]:
    """Context in which Python's cycle collection is off. Imports create many objects, and none of them is garbage."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
