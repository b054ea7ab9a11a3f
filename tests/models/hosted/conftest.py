"""Two families with decoders of their own are hosted here: of those with experts and with sinks that stay the same."""

from __future__ import annotations

import pytest

from fastspec.models.families import FAMILIES


@pytest.fixture(autouse=True)
def experts_and_sinks_are_hosted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("qwen3_moe", "gpt_oss"):
        monkeypatch.delitem(FAMILIES, name)
