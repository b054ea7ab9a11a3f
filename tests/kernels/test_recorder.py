"""Calls whose launches are compiled ahead of time: they reach every kernel that a wrapper launches."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton ships for Linux only")

from tests.helpers.modules import module_output

KERNELS = Path(__file__).parents[2] / "fastspec" / "kernels"


def test_calls_reach_every_kernel() -> None:
    sources = [path.read_text(encoding="utf-8") for path in KERNELS.rglob("*.py")]
    launched = {name for text in sources for name in re.findall(r"\b(?:launch|start)\(\s*(\w+_kernel)\b", text)}
    assert len(launched) > 20
    seen = [set(each["kernels"]) for each in module_output("tests.helpers.launches", "80", "90", "100")]
    assert launched <= set().union(*seen)
