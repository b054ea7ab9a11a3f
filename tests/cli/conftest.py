"""No lines of progress in these tests, however slow the machine; tests/cli/test_progress.py makes its own."""

from __future__ import annotations

import pytest

from fastspec.cli import progress


@pytest.fixture(autouse=True)
def _silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST", 1e6)
