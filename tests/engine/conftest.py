"""The generator of the scheduler's tests."""

from __future__ import annotations

from tests.scheduling.conftest import directory, gen

__all__ = ["directory", "gen"]
